import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
import xarray as xr

from fd_interp.claims import Verdict
from fd_interp.config import InputError
from fd_interp.observation import Trace, observe
from fd_interp.papers import focus_dilution, probes_of
from fd_interp.papers.clustering.ideal import ideal_series
from fd_interp.report.attention import AttentionFrame, attention_fragment, bundle_script, plotly_script
from fd_interp.report.figures import (
    COLOURS,
    SHADES,
    Curve,
    Panel,
    by_token,
    head_figure,
    one_head,
    overview_figure,
    panel_figure,
    points_figure,
    row_cosine_figure,
    scatter_figure,
    to_html,
)
from fd_interp.report.page import MOST_COLUMNS, Report, Section, report_page
from fd_interp.report.sections import run_section
from fd_interp.report.views import attention_of, spread_steps
from fd_interp.stages import Stage
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.series import Series, open_series

VOID = {"meta", "input", "br", "link", "img", "hr"}
LIVE = "<script>alert('x')</script><b>&amp;"
STAGES = [Stage("I first", 0, 10, "seen"), Stage("II second", 10, 100, "seen"), Stage("III never", None, None, "none")]


class Outline(HTMLParser):
    """Checks that every element is closed, and collects what is shown and what is loaded."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"script", "style"}:
            self.text += data

    @property
    def loads(self) -> list[str]:
        named = [value for _, attrs in self.tags for name, value in attrs.items() if name in {"src", "href", "data"}]
        return [value or "" for value in named if not (value or "").startswith("#")]


def without_libraries(page: str) -> str:
    return page.replace(bundle_script(), "").replace(plotly_script(), "")


def a_trace(steps: tuple[int, ...] = (0, 1, 10, 100), seed: int = 0) -> Trace:
    draws = np.random.default_rng(seed)
    return xr.Dataset(
        {
            "loss": ("step", np.linspace(2, 1, len(steps)) + seed, {"long_name": "the loss"}),
            "focus": (("step", "layer", "head"), draws.random((len(steps), 2, 2)), {"long_name": "the focus"}),
            "norm": (("step", "token"), draws.random((len(steps), 3))),
        },
        coords={"step": list(steps)},
    )


def a_verdict(identity: str = "case/claim", *, holds: bool = True, control: str | None = None) -> Verdict:
    return Verdict(identity, f"statement of {identity}", "source", "expected", f"measured {identity}", holds, control)


def lines(figure: go.Figure) -> list[go.Scatter]:
    return [trace for trace in figure.data if isinstance(trace, go.Scatter)]


@pytest.fixture(scope="module")
def series(small_directory: Path) -> Series:
    return open_series(small_directory)


@pytest.fixture(scope="module")
def trace(series: Series) -> Trace:
    return observe(series, probes_of(series.run))


@pytest.fixture(scope="module")
def page(series: Series, trace: Trace) -> str:
    """A page with the section of a tiny run twice, a claim and a control."""
    section = run_section(focus_dilution, "small run", "what it is", series, [trace, trace])
    verdicts = [a_verdict("small/one"), a_verdict("small/two", holds=False), a_verdict("less/one", control="less")]
    return report_page(Report("A title", "a source", "in short", verdicts, [section, section], {"torch": "1.2.3"}))


def test_a_page_holds_each_library_once_and_loads_nothing(page: str) -> None:
    assert page.count(plotly_script()) == 1
    assert page.count(bundle_script()) == 1
    assert page.count("var CircuitsVis=") == 1
    rest = without_libraries(page)
    assert Outline(rest).loads == []
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(|\bimport\s*\(|fetch\(""", rest)
    assert "cdn.plot.ly" not in rest
    assert "unpkg" not in rest
    assert len(page) < 12e6


def test_a_page_without_attention_has_no_script_for_it() -> None:
    page = report_page(Report("t", "s", "in short", [], [Section("one", "text", figures=[go.Figure()])]))
    assert page.count(plotly_script()) == 1
    assert "CircuitsVis" not in without_libraries(page)
    assert bundle_script() not in page


def test_a_page_shows_what_it_was_given(page: str, series: Series, trace: Trace) -> None:
    outline = Outline(without_libraries(page))
    shown = " ".join(outline.text.split())
    for text in ("A title", "a source", "in short", "small run", "what it is", "torch 1.2.3"):
        assert text in shown, text
    for stage in focus_dilution.stages(trace):
        assert stage.name in shown
        assert stage.seen in shown
    titles = [panel.title for panel in focus_dilution.panels(series)]
    assert len(titles) > 5
    drawn = without_libraries(page).replace("\\u00f7", "÷").replace("\\u002f", "/")
    assert all(title in drawn for title in titles)
    ids = [attrs["id"] for _, attrs in outline.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    assert {"section-0", "section-1", "attention-0", "attention-1"} <= set(ids)


def test_verdicts_are_counted_and_each_is_measured_beside_its_claim(page: str) -> None:
    shown = " ".join(Outline(without_libraries(page)).text.split())
    assert "Claims: 1 of 2 hold" in shown
    assert re.search(r"Controls, on which .* must fail: 1 of 1 do", shown)
    for identity in ("small/one", "small/two", "less/one"):
        assert f"measured {identity}" in shown
    assert re.search(r"measured small/one holds .*measured small/two does not hold .*less/one fails, as it must", shown)


def at_a_glance(verdicts: list[Verdict]) -> tuple[Outline, str]:
    """What stands above where each verdict is measured; a claim says the same of every case."""
    verdicts = [verdict._replace(statement=verdict.id.split("/")[-1]) for verdict in verdicts]
    page = without_libraries(report_page(Report("t", "s", "", verdicts, [])))
    outline = Outline(page[page.index("<h3>") : page.index('<p><a href="#measured">')])
    return outline, " ".join(outline.text.split())


@pytest.mark.parametrize(("cases", "listed"), [(MOST_COLUMNS, False), (MOST_COLUMNS + 1, True), (20, True)])
def test_claims_about_many_cases_list_them_and_about_few_are_a_matrix(cases: int, listed: bool) -> None:
    verdicts = [a_verdict(f"case-{number}/one", holds=number != 3) for number in range(cases)]
    verdicts.append(a_verdict("case-0/two"))
    outline, shown = at_a_glance(verdicts)
    columns = sum(tag == "th" for tag, _ in outline.tags)
    assert columns == (2 if listed else 1 + cases)
    for number in range(cases):
        assert shown.count(f"case-{number}") >= 1
        assert (f"case-{number} {'✗' if number == 3 else '✓'}" in shown) == listed
    assert f"Claims: {cases} of {cases + 1} hold" in shown
    if listed:
        one, two = shown.split(" one one ")[1].split(" two two ")
        assert (one.count("✓"), one.count("✗"), two.split()) == (cases - 1, 1, ["case-0", "✓"])
    titles = [attrs["title"] for _, attrs in outline.tags if attrs.get("title")]
    assert titles == [verdict.measured for verdict in sorted(verdicts, key=lambda each: each.id.endswith("two"))]


def test_a_matrix_leaves_open_what_was_not_judged() -> None:
    verdicts = [a_verdict("a/one"), a_verdict("b/one", holds=False), a_verdict("a/two")]
    _, shown = at_a_glance(verdicts)
    assert shown.endswith("one one holds does not hold two two holds –")


def test_whatever_text_is_given_is_shown_as_text() -> None:
    verdicts = [
        Verdict(f"{LIVE}/claim", LIVE, LIVE, LIVE, LIVE, False, None),
        Verdict(f"{LIVE}/control", LIVE, LIVE, LIVE, LIVE, True, LIVE),
    ]
    pattern = np.eye(2)[None, None]
    section = Section(LIVE, LIVE, [Stage(LIVE, 0, 1, LIVE)], view=([LIVE, "</script>"], [AttentionFrame(0, pattern)]))
    panel = Panel(LIVE, (Curve("loss", LIVE),), levels=((LIVE, 1.0),))
    drawn = Section("drawn", "text", figures=[panel_figure(panel, [a_trace()], [Stage(f"{LIVE} x", 0, 10, "")])])
    page = without_libraries(report_page(Report(LIVE, LIVE, LIVE, verdicts, [section, drawn], {LIVE: LIVE})))
    assert "<script>alert" not in page
    assert "</script><b>" not in page
    outline = Outline(page)  # and so every element is closed where it was opened
    assert outline.text.count(LIVE) >= 15
    assert all("alert" not in name for _, attrs in outline.tags for name in attrs)


def test_a_panel_draws_a_line_for_each_curve_and_seed_the_first_strongest() -> None:
    panel = Panel(
        "Title", (Curve("loss", "the loss"), Curve("norm", "of token 2", {"token": 2})), levels=(("level", 1.5),)
    )
    seeds = [a_trace(), a_trace(seed=1), a_trace(seed=2)]
    figure = panel_figure(panel, seeds, predicted=[a_trace((0, 50), seed=3), a_trace((0, 50), seed=4)])
    assert figure.layout.title.text == "Title"
    drawn = lines(figure)
    assert len(drawn) == 2 * 4  # of the theory, the first seed only
    expected = [*(seed.loss for seed in seeds), a_trace((0, 50), seed=3).loss]
    expected += [*(seed.norm.sel(token=2) for seed in seeds), a_trace((0, 50), seed=3).norm.sel(token=2)]
    for line, values in zip(drawn, expected, strict=True):
        np.testing.assert_array_equal(line.y, values)
        np.testing.assert_array_equal(line.x, np.maximum(values.step, 1))  # a logarithmic axis has no zero
    assert [line.line.dash for line in drawn] == ["solid", "solid", "solid", "dash"] * 2
    assert [line.showlegend for line in drawn] == [True, False, False, False] * 2
    assert drawn[0].opacity > drawn[1].opacity == drawn[2].opacity
    assert drawn[0].line.width > drawn[1].line.width
    assert {line.line.color for line in drawn[:4]} == {COLOURS[0]} != {line.line.color for line in drawn[4:]}
    assert "theory" in drawn[3].hovertemplate
    (level,) = [shape for shape in figure.layout.shapes if shape.type == "line"]
    assert (level.y0, level.y1) == (1.5, 1.5)
    assert "level" in [annotation.text for annotation in figure.layout.annotations]
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "linear")
    assert panel_figure(Panel("t", (Curve("loss", "l"),), log_y=True), seeds).layout.yaxis.type == "log"


def test_a_curve_is_drawn_at_its_place_on_each_axis() -> None:
    trace = a_trace()
    panel = Panel(
        "t", (Curve("focus", "one", {"layer": 1, "head": 0}), Curve("focus", "other", {"head": 1, "layer": 0}))
    )
    one, other = lines(panel_figure(panel, [trace]))
    np.testing.assert_array_equal(one.y, trace.focus.isel(layer=1, head=0))
    np.testing.assert_array_equal(other.y, trace.focus.isel(layer=0, head=1))


def test_a_theory_is_drawn_only_where_it_has_the_curve() -> None:
    panel = Panel("t", (Curve("loss", "the loss"), Curve("norm", "a norm", {"token": 0})))
    theory = a_trace(seed=3)[["loss"]]
    drawn = lines(panel_figure(panel, [a_trace()], predicted=[theory]))
    assert [line.line.dash for line in drawn] == ["solid", "dash", "solid"]
    np.testing.assert_array_equal(drawn[1].y, theory.loss)
    assert len(lines(panel_figure(panel, [a_trace()], predicted=[a_trace()[["focus"]]]))) == 2


def test_stages_are_shaded_where_they_were() -> None:
    figure = panel_figure(Panel("t", (Curve("loss", "l"),)), [a_trace()], STAGES)
    shades = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert [(shape.x0, shape.x1) for shape in shades] == [(1, 10), (10, 100)]
    assert [shape.fillcolor for shape in shades] == list(SHADES[:2])
    assert all(shape.layer == "below" for shape in shades)
    names = {annotation.text: annotation.x for annotation in figure.layout.annotations}
    assert names == {"I": pytest.approx(0), "II": pytest.approx(1)}  # placed by exponent
    assert figure.layout.xaxis.range == pytest.approx((0, 2))
    assert not panel_figure(Panel("t", (Curve("loss", "l"),)), [a_trace()]).layout.shapes


def test_the_stages_of_a_run_are_shaded_in_its_report(series: Series, trace: Trace) -> None:
    paper = ModuleType("paper")
    paper.__dict__.update(vars(focus_dilution) | {"stages": lambda trace: STAGES})
    section = run_section(paper, "t", "", series, [trace])
    assert section.stages == STAGES
    for figure in section.figures:
        assert sum(shape.type == "rect" for shape in figure.layout.shapes) == 2


@pytest.mark.parametrize("steps", [(0,), (0, 1), (5,), (100, 200)])
def test_any_steps_can_be_drawn(steps: tuple[int, ...]) -> None:
    figure = panel_figure(Panel("t", (Curve("loss", "l"),)), [a_trace(steps)])
    low, high = figure.layout.xaxis.range
    assert np.isfinite([low, high]).all()
    assert low <= np.log10(max(steps[0], 1)) <= np.log10(max(steps[-1], 1)) <= high
    assert low < high
    assert "NaN" not in to_html(figure)


def test_only_the_most_frequent_tokens_get_a_line() -> None:
    panel = by_token("t", "norm", [(token, f"token {token}") for token in range(20)], levels=(("one", 1.0),))
    assert [curve.at for curve in panel.curves] == [{"token": token} for token in range(8)]
    assert (panel.curves[3].label, panel.curves[3].variable, panel.levels) == ("token 3", "norm", (("one", 1.0),))


def test_every_head_gets_a_line_of_its_own() -> None:
    seeds = [a_trace(), a_trace(seed=1)]
    figure = head_figure(seeds, ["focus", "loss"])
    drawn = lines(figure)
    heads = [line.name for line in drawn if line.showlegend]
    assert heads == ["L0H0", "L0H1", "L1H0", "L1H1"]
    assert len(drawn) == 2 * 4 + 2
    np.testing.assert_array_equal(drawn[2].y, seeds[0].focus.sel(layer=1, head=0))
    np.testing.assert_array_equal(drawn[7].y, seeds[1].focus.sel(layer=1, head=1))
    assert [annotation.text for annotation in figure.layout.annotations] == ["the focus", "the loss"]
    np.testing.assert_array_equal(one_head(seeds[0], 1, 0).focus, seeds[0].focus.sel(layer=1, head=0))
    assert one_head(seeds[0].loss.to_dataset()).loss.dims == ("step",)


def test_an_overview_has_a_panel_for_each_group() -> None:
    groups = {f"group {n}": [a_trace(seed=n), a_trace(seed=n + 10)] for n in range(4)}
    figure = overview_figure([Curve("loss", "the loss")], "Overview", groups, levels=[("", 1.0)])
    assert [annotation.text for annotation in figure.layout.annotations] == list(groups)
    drawn = lines(figure)
    assert len(drawn) == 8
    assert [shape.y0 for shape in figure.layout.shapes] == [1.0] * 4
    np.testing.assert_array_equal(drawn[6].y, groups["group 3"][0].loss)
    assert (figure.layout.title.text, figure.layout.showlegend) == ("Overview", False)


def test_an_overview_can_have_several_curves_and_named_levels() -> None:
    groups = {"one": [a_trace(), a_trace(seed=1)], "other": [a_trace(seed=2)]}
    curves = [Curve("norm", f"token {token}", {"token": token}) for token in range(2)]
    figure = overview_figure(curves, "Norms", groups, levels=[("low", 0.5), ("high", 1.0)])
    drawn = lines(figure)
    np.testing.assert_array_equal(drawn[2].y, groups["one"][0].norm.sel(token=1))
    np.testing.assert_array_equal(drawn[3].y, groups["one"][1].norm.sel(token=1))
    np.testing.assert_array_equal(drawn[5].y, groups["other"][0].norm.sel(token=1))
    assert [line.name for line in drawn if line.showlegend] == ["token 0", "token 1"]
    assert figure.layout.showlegend
    assert drawn[2].line.color == drawn[5].line.color != drawn[0].line.color
    assert [shape.y0 for shape in figure.layout.shapes] == [0.5, 1.0] * 2
    assert [annotation.text for annotation in figure.layout.annotations] == ["one", "other", *["low", "high"] * 2]


def test_points_are_joined_in_a_line_for_each_seed_and_gaps_stay_gaps() -> None:
    figure = points_figure(
        "Halting", "sequences", "rung", [30, 100, 1000], {"seed 0": [1, None, 3], "seed 1": [1, 2, 3]}
    )
    first, second = lines(figure)
    assert (list(first.x), list(first.y), list(second.y)) == ([30, 100, 1000], [1, None, 3], [1, 2, 3])
    assert (first.name, second.name) == ("seed 0", "seed 1")
    assert first.line.color != second.line.color
    assert (figure.layout.xaxis.type, figure.layout.xaxis.title.text) == ("log", "sequences")
    assert (figure.layout.yaxis.title.text, figure.layout.title.text) == ("rung", "Halting")


def test_points_of_each_kind_have_a_colour_and_say_what_they_are() -> None:
    kinds = {"one": [(0.5, 3, "first"), (2, 1, "second")], "other": [(4, -1.5, "third")], "none": []}
    figure = scatter_figure("Kinds", "across", "up", kinds)
    one, other = lines(figure)
    assert (one.x, one.y, one.text) == ((0.5, 2), (3, 1), ("first", "second"))
    assert (other.x, other.y, other.text) == ((4,), (-1.5,), ("third",))
    assert [each.name for each in (one, other)] == ["one", "other"]
    assert one.marker.color != other.marker.color
    later = lines(scatter_figure("Kinds", "across", "up", {"one": [], "other": [(1, 1, "")]}))
    assert [each.marker.color for each in later] == [other.marker.color]  # a kind without points keeps its colour
    assert {each.mode for each in (one, other)} == {"markers"}
    assert "%{text}" in one.hovertemplate
    axes = (figure.layout.title.text, figure.layout.xaxis.title.text, figure.layout.yaxis.title.text)
    assert axes == ("Kinds", "across", "up")
    assert not figure.layout.shapes


def test_a_diagonal_goes_through_all_points() -> None:
    (line,) = scatter_figure("t", "x", "y", {"a": [(2, 5, "")], "b": [(-1, 3, "")]}, diagonal=True).layout.shapes
    assert (line.x0, line.y0, line.x1, line.y1) == (-1, -1, 5, 5)
    (line,) = scatter_figure("t", "x", "y", {"a": []}, diagonal=True).layout.shapes
    assert (line.x0, line.y0, line.x1, line.y1) == (0, 0, 1, 1)


def test_cosines_are_those_of_the_embeddings_at_each_step(series: Series) -> None:
    figure = row_cosine_figure(series, [0, 20])
    assert [annotation.text for annotation in figure.layout.annotations] == ["step 0", "step 20"]
    first, last = figure.data
    order = [series.inputs.token_strings.index(name) for name in last.x]
    assert sorted(order) == [0, 1, 2, 3]
    for heat, step in ((first, 0), (last, 20)):
        W_E = torch.nn.functional.normalize(series.at(step).weights()["embed.W_E"].double(), dim=1)
        np.testing.assert_allclose(np.array(heat.z), (W_E @ W_E.T)[order][:, order], atol=1e-6)
        assert list(heat.x) == list(heat.y) == list(last.x)


@pytest.mark.parametrize("steps", [[0], [0, 10], [0, 10, 20, 30]])
def test_a_section_is_made_of_any_number_of_snapshots(series: Series, steps: list[int]) -> None:
    some = Series("some", tuple(series.at(step) for step in steps), series.build, series.read_inputs, series.run)
    trace = observe(some, probes_of(some.run))
    section = run_section(focus_dilution, "t", "", some, [trace])
    assert section.view is not None
    tokens, frames = section.view
    assert [frame.step for frame in frames] == steps
    assert len(tokens) == 6
    report_page(Report("t", "s", "", [], [section]))


@pytest.mark.parametrize(
    ("most", "expected"), [(40, [0, 10, 20, 30]), (4, [0, 10, 20, 30]), (3, [0, 20, 30]), (2, [0, 30]), (1, [0])]
)
def test_steps_are_spread_over_the_series(series: Series, most: int, expected: list[int]) -> None:
    assert spread_steps(series, most) == expected


def test_the_attention_that_is_shown_is_that_of_the_sequence_at_the_step(series: Series) -> None:
    tokens, frames = attention_of(series, [10, 30], sequence=2)
    held_out = series.inputs.held_out.tokens
    assert tokens == [series.inputs.token_strings[token] for token in held_out[2].tolist()]
    for frame in frames:
        cached = series.at(frame.step).activations()["blocks.0.attn.hook_pattern"][2]
        assert frame.patterns.shape == (1, 1, 6, 6)
        torch.testing.assert_close(torch.as_tensor(frame.patterns)[0], cached)
    assert attention_fragment(tokens, frames, element_id="a")


def test_a_query_behind_the_sequence_has_a_place_of_its_own() -> None:
    task = SparseModularAddition(length=4, k=2)
    series = ideal_series(task)
    tokens, (frame,) = attention_of(series, [0], sequence=5)
    assert tokens == ["0", "1", "0", "1", "query"]
    assert frame.patterns.shape == (1, 1, 5, 5)
    shown = torch.as_tensor(frame.patterns)[0, 0]
    assert not shown[:4].any()
    assert not shown[:, 4].any()
    cached = series[0].cache(["blocks.0.attn.hook_pattern"], series.inputs.held_out.tokens[5:6])
    torch.testing.assert_close(shown[4, :4], cached["blocks.0.attn.hook_pattern"][0, 0, 0])
    torch.testing.assert_close(shown[4, :2], torch.full((2,), 0.5))
    assert attention_fragment(tokens, [frame], element_id="a")


@pytest.mark.parametrize("sequence", [-1, 16])
def test_a_sequence_that_is_not_there_is_refused(series: Series, sequence: int) -> None:
    with pytest.raises(InputError, match=rf"there are 16 held-out sequences, so sequence .*, not {sequence}"):
        attention_of(series, [0], sequence=sequence)


def test_models_in_double_precision_can_be_viewed(series: Series) -> None:
    model = series[-1].model().to(torch.float64)
    doubled = Series("double", series.snapshots, lambda: model, series.read_inputs, series.run)
    tokens, frames = attention_of(doubled, [30])
    assert frames[0].patterns.dtype == torch.float32
    assert attention_fragment(tokens, frames, element_id="a")
