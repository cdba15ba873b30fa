import base64
import copy
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from fd_interp.config import InputError
from fd_interp.models.config import LearnedQuery, OneLayer
from fd_interp.report.attention import plotly_script
from fd_interp.report.sandbox import notes_of, picture, recorded, sandbox_page
from fd_interp.report.sandbox_panels import MOST_LOSSES, Panel, Sandbox, arrays_of, filled, gauge_text, groups_of
from fd_interp.sources import from_checkpoints
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.loop import train
from fd_interp.training.run import AdamW, Every, Keep, Run, Training
from fd_interp.training.series import Series, open_series

STEPS = (0, 10, 20, 30, 40)


def a_run(**changes: Any) -> Run:
    task = SparseModularAddition(p=2, length=6, k=3)
    model = LearnedQuery(d_model=2, d_mlp=8)
    training = Training(optimizer=AdamW(lr=0.03), steps=40, batch_size=32, loss_on="last")
    run = Run(task=task, model=model, training=training, keep=Keep(at=Every(stride=10), held_out=64))
    return run.model_copy(update=changes)


def a_trace(steps: tuple[int, ...] = STEPS) -> xr.Dataset:
    share = np.linspace(0.1, 0.9, len(steps))
    by_form = np.stack([share, share / 2], 1)[:, None, None]
    return xr.Dataset(
        {
            "loss": ("step", 0.7 - 0.6 * share),
            "accuracy": ("step", share),
            "f_type_gauge": (("step", "layer", "head", "form"), by_form),
            "influence_share": (("step", "layer", "head"), share[:, None, None] / 3),
            "gauge": ("step", share),
        },
        coords={"step": list(steps), "form_name": ("form", ["xi", "normalized"])},
    )


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    return train(a_run(), tmp_path_factory.mktemp("runs") / "tiny", show_progress=False)


@pytest.fixture(scope="module")
def shown(series: Series) -> Sandbox:
    losses = tuple(np.linspace(0.9, 0.2, 40).tolist())
    return recorded(series)._replace(trace=a_trace(), losses=losses)


@pytest.fixture(scope="module")
def page(shown: Sandbox) -> str:
    return sandbox_page(shown)


def panels_of(shown: Sandbox) -> dict[str, Panel]:
    return {panel.key: panel for group in groups_of(shown) for panel in group.panels}


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def decoded(packed: dict[str, Any]) -> np.ndarray:
    """Frame by frame."""
    values = np.frombuffer(base64.b64decode(packed["data"]), np.uint8 if packed["bytes"] else np.float32)
    return values.reshape(-1, *packed["shape"])


def test_there_are_sixteen_panels_in_rows_of_four(shown: Sandbox) -> None:
    assert [len(group.panels) for group in groups_of(shown)] == [4] * 4
    assert len(panels_of(shown)) == 16


def test_the_page_holds_plotly_once_and_loads_nothing(page: str) -> None:
    assert page.count(plotly_script()) == 1
    rest = page.replace(plotly_script(), "")
    assert not re.search(r"""(src|href)\s*=|@import|url\(|\bimport\s*\(|fetch\(|https?://""", rest)


def test_every_array_has_an_entry_for_each_thing_that_is_named_in_the_panel(shown: Sandbox) -> None:
    arrays = arrays_of(shown.frames[0], 0, shown.task.k)
    for panel in panels_of(shown).values():
        assert len(panel.traces) == len(panel.swapped)
        for trace in filled(panel, arrays):
            if trace["type"] == "heatmap":
                assert trace["z"].shape == (len(trace.get("y", shown.view.tokens)), len(trace["x"]))
                continue
            lengths = {len(trace["x"]), len(trace["y"])}
            lengths |= {len(trace[name]) for name in ("text", "customdata") if name in trace}
            lengths |= {len(value) for value in trace.get("marker", {}).values() if isinstance(value, list)}
            assert len(lengths) == 1, (panel.key, lengths)


def test_what_is_drawn_is_what_the_frame_says(shown: Sandbox) -> None:
    frame, task = shown.frames[2], shown.task
    arrays, panels = arrays_of(frame, 20, task.k), panels_of(shown)
    (xi,) = filled(panels["xi"], arrays)
    np.testing.assert_array_equal(np.stack([xi["x"], xi["y"]], 1), frame.xi)
    assert xi["marker"]["symbol"] == [["circle", "diamond"][label] for label in shown.view.labels]
    colours: dict[str, set[int]] = {}
    for colour, number in zip(xi["marker"]["color"], shown.view.classes, strict=True):
        colours.setdefault(colour, set()).add(number)
    assert sorted(map(list, colours.values())) == [[0], [1], [2], [3]]
    text = "".join(map(str, shown.view.tokens[0].tolist()))
    assert f"<b>{text[:3]}</b> {text[3:]}" in xi["customdata"][0]

    spurious, informative, points = filled(panels["values"], arrays)
    for line, first, count in ((informative, 0, 3), (spurious, 3, 3)):
        ends = np.stack([line["x"], line["y"]], 1).reshape(count, 3, 2)
        np.testing.assert_array_equal(ends[:, :2], frame.values.reshape(6, 2, 2)[first : first + count])
        assert np.isnan(ends[:, 2]).all()
    assert points["marker"]["symbol"] == ["circle"] * 6 + ["square"] * 6
    assert points["customdata"][7] == "symbol 1 at position 4, which does not matter"

    _, arrows = filled(panels["receptors"], arrays)
    ends = np.stack([arrows["x"], arrows["y"]], 1).reshape(8, 3, 2)
    np.testing.assert_array_equal(ends[:, 0], np.zeros((8, 2)))
    np.testing.assert_array_equal(ends[:, 1], frame.receptors)
    assert arrows["customdata"][3:6] == ["origin", "neuron 1", ""]

    bars = filled(panels["probabilities"], arrays)
    np.testing.assert_array_equal(np.stack([bar["y"] for bar in bars], 1), frame.probabilities)
    (heat,) = filled(panels["attention"], arrays)
    np.testing.assert_array_equal(heat["z"], frame.attention)
    assert panels["attention"].layout["shapes"][0]["x0"] == 3.5
    for name in ("loss", "measures"):
        np.testing.assert_array_equal(filled(panels[name], arrays)[-1]["x"], [20, 20])


def test_shades_of_level_sets_have_the_colours_of_their_answers(shown: Sandbox) -> None:
    heat = panels_of(shown)["xi_levels"].traces[0]
    stops = np.array([stop for stop, _ in heat["colorscale"]])
    assert (heat["zmin"], heat["zmax"], stops[0], stops[-1]) == (0, 254, 0, 1)
    np.testing.assert_allclose(stops * 254, [0, 84, 85, 169, 170, 254])
    sure = [colour for _, colour in heat["colorscale"][1::2]]
    red, green, blue = ([int(colour[at : at + 2], 16) for colour in sure] for at in (1, 3, 5))
    assert blue[0] == max(blue)
    assert red[1] == max(red)
    assert green[2] > max(red[2], blue[2])


def test_curves_are_drawn_of_what_the_trace_has(shown: Sandbox) -> None:
    panels = panels_of(shown)
    batches, loss, accuracy, _ = panels["loss"].traces
    np.testing.assert_allclose(loss["y"], a_trace()["loss"])
    np.testing.assert_allclose(accuracy["y"], a_trace()["accuracy"])
    assert accuracy["yaxis"] == "y2"
    assert (min(batches["y"]), max(batches["y"])) == (min(shown.losses), max(shown.losses))
    curves = panels["measures"].traces[:-1]
    np.testing.assert_allclose([curve["y"][-1] for curve in curves], [0.9, 0.45, 0.3])

    without = panels_of(shown._replace(trace=a_trace().drop_vars(["accuracy", "f_type_gauge"]), losses=()))
    assert [len(without[name].traces) for name in ("loss", "measures")] == [2, 2]
    nothing = panels_of(shown._replace(trace=None, losses=()))
    assert [len(nothing[name].traces) for name in ("loss", "measures")] == [1, 1]
    assert "Nothing was measured" in nothing["measures"].hint
    assert "Nothing was measured" not in panels["measures"].hint


def test_a_spike_of_one_step_is_seen_among_many_and_zero_does_not_break_the_axis(shown: Sandbox) -> None:
    losses = np.full(20 * MOST_LOSSES, 1e-3)
    losses[4321], losses[7] = 5.0, 0.0
    panel = panels_of(shown._replace(losses=tuple(losses.tolist())))["loss"]
    batches = panel.traces[0]
    assert len(batches["y"]) == 2 * MOST_LOSSES
    place = batches["y"].index(5.0)
    assert 4300 <= batches["x"][place] <= 4322
    assert np.isfinite(panel.layout["yaxis"]["range"]).all()


def test_axes_stay_the_same_and_hold_every_point_but_a_few(shown: Sandbox) -> None:
    for panel in panels_of(shown).values():
        for trace, swapped in zip(panel.traces, panel.swapped, strict=True):
            if trace["type"] != "scatter" or trace["mode"] == "lines" or "x" not in swapped:
                continue
            for axis in ("x", "y"):
                arrays = [arrays_of(frame, 0, shown.task.k)[swapped[axis]] for frame in shown.frames]
                values = np.stack(arrays)[:, : 6 if panel.key == "tokens" and "rays" in swapped["x"] else None]
                if panel.key == "tokens":
                    values = values[:, : 6 if "rays" in swapped["x"] else 2]  # the unused symbol may leave
                low, high = panel.layout[f"{axis}axis"]["range"]
                inside = (values >= low) & (values <= high) | np.isnan(values)
                assert inside.mean() >= 0.97, (panel.key, axis)


def test_a_position_that_has_run_away_leaves_the_others_large_and_is_named(shown: Sandbox) -> None:
    def with_last(factor: float) -> Panel:
        frames = []
        for frame in shown.frames:
            positions = np.tile(np.float32([[1, 0], [0, 1]]), (3, 1))
            positions[5] *= factor
            frames.append(frame._replace(positions=positions))
        return panels_of(shown._replace(frames=tuple(frames)))["positions"]

    near, away = with_last(1.0), with_last(1000.0)
    assert "Out of the picture" not in near.hint
    assert away.hint.endswith("Out of the picture at the last step: 6.")
    assert away.layout["yaxis"]["range"][1] < 6


def test_the_page_carries_the_arrays_of_all_frames(shown: Sandbox, page: str) -> None:
    data = data_of(page)
    assert data["steps"] == list(STEPS)
    assert [panel["key"] for panel in data["panels"]] == list(panels_of(shown))
    used = {name for panel in data["panels"] for swapped in panel["swapped"] for name in swapped.values()}
    assert data["arrays"].keys() == used
    for number, (step, frame) in enumerate(zip(STEPS, shown.frames, strict=True)):
        for name, array in arrays_of(frame, step, shown.task.k).items():
            if name in used:
                np.testing.assert_array_equal(decoded(data["arrays"][name])[number], array, err_msg=name)


def test_the_picture_of_a_frame_has_the_traces_of_the_page(shown: Sandbox) -> None:
    panels = list(panels_of(shown).values())
    before = copy.deepcopy(panels)
    figure = picture(shown, 3, panels)
    arrays = arrays_of(shown.frames[3], 30, shown.task.k)
    expected = [trace for panel in panels for trace in filled(panel, arrays)]
    assert len(figure["data"]) == len(expected)
    for drawn, trace in zip(figure["data"], expected, strict=True):
        assert {name: value for name, value in drawn.items() if name not in ("xaxis", "yaxis")}.keys() <= trace.keys()
        for where in {"x", "y", "z"} & trace.keys():
            np.testing.assert_array_equal(drawn[where], trace[where])
    layout = figure["layout"]
    for trace in figure["data"]:
        x, y = (layout[f"{trace[name][0]}axis{trace[name][1:]}"] for name in ("xaxis", "yaxis"))
        assert (x["anchor"][0], y["anchor"]) == ("y", trace["xaxis"])
    boxes = {
        (*layout[f"xaxis{t['xaxis'][1:]}"]["domain"], *layout[f"yaxis{t['yaxis'][1:]}"]["domain"])
        for t in figure["data"]
    }
    assert len(boxes) == 16
    assert all(0 <= edge <= 1 for box in boxes for edge in box)
    texts = [annotation["text"] for annotation in layout["annotations"]]
    assert texts[0].startswith("<b>step 30</b>")
    assert texts[1:] == [panel.title for panel in panels]
    assert len(layout["shapes"]) == sum(len(panel.layout.get("shapes", [])) for panel in panels)
    assert str(before) == str(panels)


def test_many_snapshots_are_thinned_and_it_is_said(series: Series) -> None:
    thinned = recorded(series, most=3)
    assert (thinned.steps, thinned.kept, len(thinned.frames)) == ((0, 20, 40), 5, 3)
    said = "3 of 5 snapshots are shown, evenly spread among them."
    assert said in notes_of(thinned)
    assert said in sandbox_page(thinned)
    assert not any("snapshots are shown" in note for note in notes_of(recorded(series)))


def test_one_snapshot_needs_no_slider(series: Series, page: str) -> None:
    single = sandbox_page(recorded(series, most=1))
    assert all(f'id="{control}"' in page for control in ("slider", "play", "speed"))
    assert not any(f'id="{control}"' in single for control in ("slider", "play", "speed"))
    assert data_of(single)["steps"] == [0]


def test_a_wide_model_says_what_is_projected(tmp_path: Path) -> None:
    run = a_run(model=LearnedQuery(d_model=3, d_mlp=70), task=SparseModularAddition(p=3, length=4, k=2))
    wide = recorded(train(run, tmp_path / "wide", show_progress=False))
    notes = " ".join(notes_of(wide))
    assert "The model has 3 coordinates, and what is drawn are projections on two planes" in notes
    assert "64 of 70 neurons are shown" in notes
    panels = panels_of(wide)
    assert "shapes" not in panels["normalized_xi"].layout
    assert len(panels["probabilities"].traces) == 3
    assert "projections" in sandbox_page(wide)


def test_the_gauge_is_put_in_words(shown: Sandbox) -> None:
    def words(p: int, *shifts: int) -> str:
        task = shown.task.model_copy(update={"p": p})
        return gauge_text(shown._replace(task=task, view=shown.view._replace(shifts=np.array(shifts))))

    assert words(2, 0, 0, 0) == "Sequences of one class have the same first 3 symbols up to their order."
    assert "after 0 and 1 have changed places at position 2, 3" in words(2, 0, 1, 1)
    assert "after adding 2 at position 3:" in words(3, 0, 0, 2)


def test_a_series_of_another_model_or_task_is_refused(small_directory: Path, tmp_path: Path, series: Series) -> None:
    with pytest.raises(InputError, match="is a one_layer model on the task markov"):
        recorded(open_series(small_directory))
    other = a_run(model=OneLayer(d_model=4, d_head=4))
    with pytest.raises(InputError, match="is a one_layer model on the task modular"):
        recorded(train(other, tmp_path / "other", show_progress=False))
    weights = series[0].weights()
    foreign = from_checkpoints(series.build, {0: lambda: weights}, series.inputs.held_out.tokens)
    with pytest.raises(InputError, match="checkpoints is a checkpoint without a run"):
        recorded(foreign)
    with pytest.raises(InputError, match="at least one frame, not 0"):
        recorded(series, most=0)


DRIVER = """<script>
const seen = { errors: [] };
addEventListener("error", (event) => seen.errors.push(event.message));
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const label = () => document.getElementById("step").textContent;
const points = (id, index) => [...document.getElementById(id).data[index].x].map((x) => (Number.isNaN(x) ? null : x));
const rows = (id) => document.getElementById(id).data[0].z.map((row) => [...row]);
const looks = () => ({ label: label(), xi: points("xi", 0), levels: rows("xi_levels"), attention: rows("attention"),
                       receptors: points("receptors", 1), marker: points("loss", 3),
                       bars: document.querySelectorAll("#probabilities .bars path").length });
const picture = () => document.querySelector("#xi .scatterlayer").innerHTML;
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
addEventListener("load", async () => {
  await wait(1500);
  seen.drawn = [...document.querySelectorAll(".plot")].filter((plot) => plot.querySelector(".main-svg")).length;
  seen.opened = looks();
  const last = picture(), slider = document.getElementById("slider");
  slider.value = 1;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  await wait(1000);
  seen.moved = looks();
  seen.redrawn = picture() !== last;
  press("ArrowRight"); await wait(500);
  seen.right = label();
  press("ArrowLeft"); press("ArrowLeft"); press("ArrowLeft"); await wait(500);
  seen.left = label();
  press("End"); await wait(500);
  seen.end = label();
  document.getElementById("speed").value = 40;
  document.getElementById("play").click();
  seen.playing = [label(), document.getElementById("play").textContent];
  await wait(3000);
  seen.played = [looks(), document.getElementById("play").textContent, picture() === last];
  press(" ");
  seen.space = label();
  press(" ");
  location.hash = "#step=22"; await wait(500);
  seen.addressed = label();
  seen.loads = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.body.dataset.seen = JSON.stringify(seen);
});
</script>"""


def dump_dom(page: Path, profile: Path) -> tuple[str, str]:
    browser = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
    if browser is None:
        pytest.skip("no chromium")
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    more = "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --window-size=1600,2400"
    command = [browser, *quiet.split(), *more.split(), "--virtual-time-budget=40000", f"--user-data-dir={profile}"]
    command += ["--dump-dom", page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True, encoding="utf-8")
    return result.stdout, result.stderr


def test_in_a_browser_the_panels_follow_the_slider_the_keys_and_play(shown: Sandbox, page: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page.replace("<body>", f"<body>{DRIVER}"), encoding="utf-8")
    dom, log = dump_dom(file, tmp_path / "profile")
    report = re.search(r'data-seen="([^"]*)"', dom)
    assert report, log
    seen = json.loads(html.unescape(report[1]))

    assert seen["errors"] == []
    assert "CONSOLE" not in log
    assert [load for load in seen["loads"] if load.startswith("http")] == []
    assert seen["drawn"] == 16
    for looks, number in ((seen["opened"], 4), (seen["moved"], 1), (seen["played"][0], 4)):
        frame = shown.frames[number]
        assert looks["label"] == f"step {STEPS[number]}"
        np.testing.assert_array_equal(np.float32(looks["xi"]), frame.xi[:, 0])
        np.testing.assert_array_equal(looks["levels"], frame.xi_levels)
        np.testing.assert_array_equal(np.float32(looks["attention"]), frame.attention)
        np.testing.assert_array_equal(np.float32(looks["receptors"][1::3]), frame.receptors[:, 0])
        assert looks["marker"] == [STEPS[number]] * 2
        assert looks["bars"] == 4 * 3
    assert not np.array_equal(shown.frames[1].xi, shown.frames[4].xi)
    assert seen["redrawn"]
    assert (seen["right"], seen["left"], seen["end"]) == ("step 20", "step 0", "step 40")
    assert seen["playing"] == ["step 0", "Pause"]
    assert seen["played"][1:] == ["Play", True]
    assert seen["space"] == "step 0"
    assert seen["addressed"] == "step 20"
