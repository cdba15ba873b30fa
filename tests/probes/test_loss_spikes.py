"""Loss spikes: the snapshots around them, their table, and the script in probes/."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from fd_interp.config import InputError
from fd_interp.models.config import LearnedQuery
from fd_interp.observation import Probe, Variable, observe
from fd_interp.probes.curvature import SECOND_MOMENT, halving, loss_curvature, movement
from fd_interp.probes.spikes import (
    LossSpike,
    highest,
    loss_spikes,
    observe_spikes,
    quiet_windows,
    spike_table,
    training_losses,
    window_means,
)
from fd_interp.sources import from_checkpoints
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.loop import train
from fd_interp.training.run import AdamW, Every, Keep, Run, Training
from fd_interp.training.series import open_series, read_tensors, write_tensors
from tests.test_sources import checkpoint as checkpoint

W_V = "blocks.0.attn.W_V"
RUN = Run(
    task=SparseModularAddition(length=4, k=2, sequences=64),
    model=LearnedQuery(d_model=2, d_mlp=6, eps=1e-12),
    training=Training(optimizer=AdamW(lr=1e-3), steps=64, batch_size=8, loss_on="last"),
    keep=Keep(at=Every(stride=4), moments=(SECOND_MOMENT,), held_out=16),
)
PLANTED = slice(50, 54)
"""The steps whose training loss is raised: the windows of four from step 48 and from step 52."""
AT_IT = 52
"""The snapshot that is made short before its norm."""
WINDOWS = ("--window-steps", "4")


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose loss hardly moves, with a snapshot every four steps."""
    folder = tmp_path_factory.mktemp("runs") / "flat"
    train(RUN, folder, show_progress=False)
    return folder


@pytest.fixture
def spiked(flat: Path, tmp_path: Path) -> Path:
    """A copy with one spike, at the height of which W_V is a thousandth."""
    folder = Path(shutil.copytree(flat, tmp_path / "spiked"))
    table = pd.read_parquet(folder / "losses.parquet")
    table.loc[PLANTED, "loss"] = 20.0
    table.to_parquet(folder / "losses.parquet", index=False)
    file = folder / "weights" / f"step_{AT_IT:08d}.safetensors"
    weights = read_tensors(file)
    write_tensors(file, weights | {W_V: weights[W_V] / 1000})
    return folder


def spike_at(*losses: float, kept: Sequence[int], window: int = 4) -> LossSpike:
    """Of eight quiet windows and then these."""
    (spike,) = loss_spikes(np.repeat([*[0.01] * 8, *losses], window), kept, window)
    return spike


def test_windows_are_averaged_and_what_is_left_over_is_not():
    assert window_means(np.arange(11.0), 4).tolist() == [1.5, 5.5]
    assert window_means(np.arange(3.0), 4).tolist() == []
    assert window_means(np.arange(3.0), 1).tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="a window must have at least one step, not 0"):
        window_means(np.arange(3.0), 0)


def test_a_spike_is_told_in_steps():
    spike = spike_at(0.1, 0.3, 0.2, 0.01, kept=range(0, 49, 4))
    assert (spike.start, spike.end) == (32, 44)
    assert spike.height == pytest.approx(0.3)
    assert spike.ratio == pytest.approx(30)


def test_the_snapshots_are_one_window_before_it_at_its_height_and_at_its_end():
    spike = spike_at(0.1, 0.3, 0.2, 0.01, kept=range(49))
    assert spike[4:] == (28, 37, 44)  # the first of those whose neighbours are all in the highest window
    assert spike_at(0.1, 0.3, 0.2, 0.01, kept=range(0, 49, 4))[4:] == (28, 40, 44)
    assert spike_at(0.3, 0.2, 0.1, 0.01, kept=range(0, 49, 4))[4:] == (28, 36, 44)


def test_the_snapshot_at_its_height_is_where_single_losses_are_high():
    losses = np.full(48, 0.01)
    losses[33:41] = [0.2, 0.2, 1.0, 1.0, 0.2, 0.2, 0.2, 0.2]
    (spike,) = loss_spikes(losses, range(0, 49, 4), 4)
    assert (spike.start, spike.end, spike.at) == (32, 44, 36)
    losses[33:41] = [0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 1.0, 1.0]
    assert loss_spikes(losses, range(0, 49, 4), 4)[0].at == 40


def test_where_no_snapshot_was_kept_there_is_none():
    assert spike_at(0.3, 0.01, kept=[0, 24, 32, 48])[4:] == (24, None, 48)
    assert spike_at(0.3, 0.01, kept=[32, 36])[4:] == (None, 36, 36)
    assert spike_at(0.01, 0.3, kept=[0, 38])[4:] == (0, 38, None)


def test_a_quiet_loss_has_no_spike():
    assert loss_spikes(np.full(200, 0.01), range(200), 4) == []
    assert loss_spikes(np.full(10, 0.01), range(10), 4) == []


def test_quiet_windows_are_far_from_spikes_and_below_the_floor():
    losses = np.repeat(np.full(100, 1e-3), 4)
    losses[:80], losses[160:164] = 0.7, 0.5  # windows 0 to 19 have not learned, and window 40 spikes
    found = quiet_windows(losses, range(401), most=1000, window_steps=4)
    assert [window.start // 4 for window in found] == [*range(20, 30), *range(51, 100)]
    assert all(window.before == window.start - 4 and window.after == window.end for window in found)
    assert all(window.start < window.at <= window.end for window in found)
    few, again, others = (quiet_windows(losses, range(401), 5, seed, window_steps=4) for seed in (0, 0, 1))
    assert len(few) == 5
    assert few == again != others
    assert few == sorted(few)
    assert quiet_windows(np.full(400, 0.7), range(401), 5, window_steps=4) == []


def test_the_highest_spikes_are_told_in_order():
    found = [LossSpike(start, start + 4, height, 9.0, 0, None, None) for start, height in ((8, 1), (20, 3), (40, 2))]
    assert [spike.start for spike in highest(found, 2)] == [20, 40]
    assert highest(found, 5) == found
    with pytest.raises(InputError, match="at least one spike must be looked at, not 0"):
        highest(found, 0)


def test_a_row_says_what_was_measured_before_at_and_after(spiked: Path):
    series = open_series(spiked)
    (spike,) = loss_spikes(training_losses(series), series.steps, 4)
    assert spike[:2] == (48, 56)
    assert spike[4:] == (44, AT_IT, 56)
    probes = [loss_curvature(RUN), halving(RUN), movement()]
    trace = observe_spikes(series, probes, [spike])
    assert trace.step.values.tolist() == [44, 52, 56]
    (row,) = (row for _, row in spike_table(trace, W_V).iterrows())
    assert row[["start", "end", "before", "at", "after"]].tolist() == [48, 56, 44, 52, 56]

    every = observe(series, probes)
    place = list(every.weight_name.values).index(W_V)
    for when, step in (("before", 44), ("at", 52), ("after", 56)):
        here = every.sel(step=step)
        for name in ("sharpness", "gradient_norm", "halved_sharpness_ratio", "preconditioned_sharpness"):
            assert row[f"{name}_{when}"] == pytest.approx(here[name].item()), name
        assert row[f"sharpness_mass_{when}"] == pytest.approx(here.sharpness_mass[place].item())
        assert row[f"smallest_norm_{when}"] == pytest.approx(here.smallest_norm.item())
    assert row.sharpness_ratio == pytest.approx(row.sharpness_at / row.sharpness_before)


def test_short_vectors_before_a_norm_show_as_sharpness_in_the_weight_that_writes_them(spiked: Path):
    series = open_series(spiked)
    found = loss_spikes(training_losses(series), series.steps, 4)
    (row,) = spike_table(observe_spikes(series, [loss_curvature(RUN), halving(RUN), movement()], found), W_V).to_dict(
        "records"
    )
    assert row["sharpness_ratio"] > 100
    assert row["sharpness_mass_at"] > 0.99
    assert row["halved_sharpness_ratio_at"] == pytest.approx(4, rel=0.01)
    assert row["smallest_norm_at"] < 0.01 * row["smallest_norm_before"]
    assert row["sharpness_after"] < 2 * row["sharpness_before"]


def test_a_planted_loss_alone_is_no_sharpness(spiked: Path, flat: Path):
    """The control: the same spike in the losses, and weights that do not move."""
    shutil.copytree(flat / "weights", spiked / "weights", dirs_exist_ok=True)
    series = open_series(spiked)
    found = loss_spikes(training_losses(series), series.steps, 4)
    table = spike_table(observe_spikes(series, [loss_curvature(RUN)], found), W_V)
    assert table.sharpness_ratio.item() == pytest.approx(1, abs=0.2)


def test_what_has_no_snapshot_is_missing_and_the_most_telling_layer_counts(flat: Path):
    values = iter([[3.0, 5.0], [2.0, 7.0]])
    meaning = Variable(("layer",), "by hand", "")

    def measure(seen) -> dict[str, torch.Tensor]:
        of_layers = torch.tensor(next(values))
        return {"smallest_norm": of_layers, "angle_change": of_layers, "per_head": of_layers[:, None]}

    probe = Probe("by hand", {"smallest_norm": meaning, "angle_change": meaning,
                              "per_head": Variable(("layer", "head"), "by hand", "")}, measure)  # fmt: skip
    spike = LossSpike(16, 20, 1.0, 9.0, 12, None, 20)
    (row,) = spike_table(observe_spikes(open_series(flat), [probe], [spike]), W_V).to_dict("records")
    assert (row["smallest_norm_before"], row["smallest_norm_after"]) == (3, 2)
    assert (row["angle_change_before"], row["angle_change_after"]) == (5, 7)
    assert np.isnan([row["at"], row["smallest_norm_at"]]).all()
    assert not any(name.startswith("per_head") for name in row)


def test_without_spikes_the_table_is_empty(flat: Path):
    trace = observe_spikes(open_series(flat), [loss_curvature(RUN)], [])
    assert trace.sizes["spike"] == 0
    assert spike_table(trace, W_V).empty


def test_a_weight_that_is_not_trained_has_no_mass(spiked: Path):
    series = open_series(spiked)
    found = loss_spikes(training_losses(series), series.steps, 4)
    table = spike_table(observe_spikes(series, [loss_curvature(RUN)], found), "blocks.0.attn.W_O")
    assert "sharpness_mass_at" not in table
    assert "sharpness_at" in table


def test_somebodys_checkpoints_have_no_losses(flat: Path):
    series = open_series(flat)
    own = from_checkpoints(series.build, {0: series[0].read}, torch.zeros(1, 5, dtype=torch.long), name="own")
    with pytest.raises(InputError, match="own is a checkpoint: only a run directory has the losses"):
        training_losses(own)


class Answer(NamedTuple):
    """What the script leaves."""

    returncode: int
    stdout: str
    stderr: str


Ask = Callable[..., Answer]


@pytest.fixture
def ask(
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Ask:
    from fd_interp.probe_script import main

    monkeypatch.chdir(tmp_path)
    module = script("probes/loss_spikes.py")

    def call(*arguments: str) -> Answer:
        return Answer(main(module.QUESTION, module.__doc__, arguments), *capsys.readouterr())

    return call


def test_a_spike_gets_a_row_a_trace_and_a_figure(ask: Ask, spiked: Path):
    answer = ask(str(spiked), *WINDOWS)
    assert answer.returncode == 0, answer.stderr
    assert "sharpness" in answer.stdout
    assert "no spikes" not in answer.stdout
    trace = xr.load_dataset(spiked / "loss_spikes-spiked.nc")
    assert trace.step.values.tolist() == [44, 52, 56]
    assert trace.spike_at.values.tolist() == [AT_IT]
    assert trace.window.values[-1] == 64
    assert trace.window_loss.sel(window=52).item() > 9
    assert (spiked / "loss_spikes.html").stat().st_size > 1_000_000


def test_the_figure_has_a_line_for_each_spike_and_the_limit_of_stability(
    ask: Ask, script: Callable[[str], ModuleType], spiked: Path, flat: Path, tmp_path: Path
):
    for folder in (spiked, flat):
        assert ask(str(folder), *WINDOWS, "--out", str(tmp_path)).returncode == 0
    trace, quiet = (xr.load_dataset(tmp_path / f"loss_spikes-{name}.nc") for name in ("spiked", "flat"))
    draw = script("probes/loss_spikes.py").figure
    loss, sharpness, gradient, adam = draw([trace], []).data
    assert list(loss.x) == trace.window.values.tolist()
    np.testing.assert_allclose(loss.y, trace.window_loss)
    for line, name in ((sharpness, "sharpness"), (gradient, "gradient_norm"), (adam, "preconditioned_sharpness")):
        assert list(line.x) == [44, 52, 56, None]
        assert list(line.y[:3]) == trace[name].values.tolist()
    assert [shape.y0 for shape in draw([trace], []).layout.shapes] == [pytest.approx(38_000)]
    assert [list(line.x) for line in draw([quiet], []).data] == [quiet.window.values.tolist()]
    both = [line.x for line in draw([quiet, trace], []).data if line.yaxis == "y2"]
    assert [list(x) for x in both] == [[], [44, 52, 56, None]]


def test_json_has_the_numbers(ask: Ask, spiked: Path):
    answer = json.loads(ask(str(spiked), *WINDOWS, "--json").stdout)
    (row,) = answer["table"]
    assert row["run"] == "spiked"
    assert [row[name] for name in ("from", "to", "before", "at")] == [48, 56, 44, 52]
    assert row["ratio"] > 100
    assert row["on W_V"] > 0.99
    assert row["Adam before"] > 0
    assert all(value is not None for value in row.values())


def test_a_run_without_spikes_says_so(ask: Ask, flat: Path, tmp_path: Path):
    answer = ask(str(flat), *WINDOWS, "--out", "results")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("flat: no spikes")
    assert xr.load_dataset(tmp_path / "results" / "loss_spikes-flat.nc").sizes["spike"] == 0
    assert json.loads(ask(str(flat), *WINDOWS, "--out", "results", "--json").stdout)["table"] == []


def test_of_seeds_those_without_spikes_are_named(ask: Ask, flat: Path, spiked: Path, tmp_path: Path):
    for seed, folder in enumerate((flat, spiked)):
        shutil.copytree(folder, tmp_path / "seeds" / f"seed-{seed}")
    answer = ask("seeds", "--seeds", "2", *WINDOWS)
    assert answer.returncode == 0, answer.stderr
    assert "seed-0: no spikes" in answer.stdout
    assert "seed-1: no spikes" not in answer.stdout
    table = json.loads(ask("seeds", "--seeds", "2", *WINDOWS, "--json").stdout)["table"]
    assert [row["run"] for row in table] == ["seed-1"]


def test_other_spikes_are_found_with_other_options(ask: Ask, spiked: Path):
    for options in (("--floor", "30"), ("--factor", "1000")):
        assert "no spikes" in ask(str(spiked), *WINDOWS, *options).stdout
    assert json.loads(ask(str(spiked), "--window-steps", "2", "--json").stdout)["table"][0]["from"] == 50


def test_another_weight_and_another_hook_can_be_asked_about(ask: Ask, spiked: Path):
    options = ("--weight", "blocks.0.mlp.W_in", "--hook", "mlp_out", "--json")
    (row,) = json.loads(ask(str(spiked), *WINDOWS, *options).stdout)["table"]
    assert row["on W_in"] < 0.01
    assert row["W_in / 2: sharpness"] is not None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--hook", "attn_uot"), "the model has no hook 'attn_uot', did you mean attn_out"),
        (("--weight", "W_V"), "the model has no weight 'W_V', known: blocks.0.attn.W_V"),
        (("--most", "0"), "at least one spike must be looked at, not 0"),
        (("--window-steps", "0"), "a window must have at least one step, not 0"),
        (("--factor", "1"), "the factor must be above 1, not 1.0"),
    ],
)
def test_bad_input_is_one_sentence(ask: Ask, spiked: Path, options: tuple[str, ...], sentence: str):
    answer = ask(str(spiked), *options)
    assert answer.returncode == 2
    assert answer.stderr.startswith("loss_spikes: ")
    assert sentence in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
    assert not (spiked / "loss_spikes.html").exists()


def test_a_checkpoint_without_losses_is_refused(ask: Ask, checkpoint: Path):
    answer = ask(str(checkpoint), "--text", str(checkpoint.parent / "tales.txt"))
    assert answer.returncode == 2
    assert "is a checkpoint: only a run directory has the losses in which to find spikes" in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
