"""Claims and controls of arXiv 2602.19143 on trained models, on seeds that the reproduction does not use."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import plotly.graph_objects as go
import pytest

from fd_interp.claims import Claim, Evidence, judge, judge_control
from fd_interp.config import InputError
from fd_interp.models.config import OneLayer, Transformer
from fd_interp.observation import Trace, observe
from fd_interp.overrides import override
from fd_interp.papers import focus_dilution, incremental, paper_of, probes_of, setting
from fd_interp.papers.incremental import claims, laws, sections
from fd_interp.papers.incremental.cases import (
    AT_PAPER_SIZE,
    CASES,
    CLAIMS,
    CONTROLS,
    OF_SIZE,
    OF_STD,
    REPORTED,
    SIZES,
    STDS,
)
from fd_interp.papers.incremental.settings import FULL, INCREMENTAL, SETTINGS, changed
from fd_interp.report.page import Report, report_page
from fd_interp.report.sections import run_section
from fd_interp.training.loop import train
from fd_interp.training.run import Run
from fd_interp.training.series import Series
from tests.papers.staged import staged

SEEDS = (11, 12)
TraceOf = Callable[[str, int], Trace]


@pytest.fixture(scope="module")
def trace_of(tmp_path_factory: pytest.TempPathFactory) -> TraceOf:
    """The trace of a case and a seed, trained when first asked for; of the full model, only its beginning."""

    @cache
    def trained(case: str, seed: int) -> Trace:
        run = CASES[case]
        training = run.training.model_copy(update={"steps": 120} if case.startswith("full") else {})
        run = run.model_copy(update={"seed": seed, "training": training})
        series = train(run, tmp_path_factory.mktemp("runs") / f"{case}-{seed}", show_progress=False)
        return observe(series, incremental.probes(run))

    return trained


@pytest.mark.parametrize("claim", incremental.claims_about(INCREMENTAL), ids=lambda claim: claim.id)
def test_a_claim_holds_on_trained_models(claim: Claim, trace_of: TraceOf) -> None:
    verdict = judge(claim, [Evidence(trace_of("m-1.7", seed), {}) for seed in SEEDS], where="m-1.7")
    assert verdict.holds, verdict.measured


@pytest.mark.parametrize("seed", SEEDS)
def test_stages_of_a_trained_model_cover_training_in_order(seed: int, trace_of: TraceOf) -> None:
    stages = incremental.stages(trace_of("m-1.7", seed))
    assert (stages[0].start, stages[-1].end) == (0, INCREMENTAL.training.steps)
    for before, after in pairwise(stages):
        assert before.end == after.start
    assert "on the rung" in stages[1].seen


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: f"{control.case}-beside-{control.paired}")
def test_a_control_fails_on_a_trained_model(control, trace_of: TraceOf) -> None:
    seen, paired = ([Evidence(trace_of(case, SEEDS[0]), {})] for case in (control.case, control.paired))
    for claim in control.must_fail:
        verdict = judge_control(claim, seen, where=control.case, control=control.taken_away, paired=paired)
        assert verdict.holds, verdict.measured


def test_heads_that_start_alike_stay_one_head_for_ever(trace_of: TraceOf) -> None:
    trace = trace_of("alike", SEEDS[0])
    for name in ("block_mass", "value_coefficient"):
        assert (trace[name] == trace[name].isel(head=0)).all(), name
    one = trace_of("heads-1", SEEDS[0])
    assert float(abs(trace.loss[-1] / one.loss[-1] - 1)) < 0.02


def test_what_has_another_claim_holds_it(trace_of: TraceOf) -> None:
    for case in ("alike", "heads-1"):
        for claim in CLAIMS.get(case, incremental.claims_about(CASES[case])):
            verdict = judge(claim, [Evidence(trace_of(case, SEEDS[0]), {})], where=case)
            assert verdict.holds, verdict.measured
    for claim in incremental.claims_about(CASES["equal"]):
        assert claim.check(Evidence(trace_of("equal", SEEDS[0]), {})).holds, claim.id


def test_controls_are_of_cases_and_of_claims_that_hold_on_their_pairs() -> None:
    for control in CONTROLS:
        assert {control.case, control.paired} <= CASES.keys()
        asked = CLAIMS.get(control.paired, incremental.claims_about(CASES[control.paired]))
        assert set(control.must_fail) <= set(asked)
    assert CLAIMS.keys() <= CASES.keys()


def test_cases_of_a_law_differ_in_nothing_else() -> None:
    assert len({changed(run, model=INCREMENTAL.model).model_dump_json() for run in OF_STD.values()}) == 1
    alike = {"task": INCREMENTAL.task, "training": INCREMENTAL.training}  # few sequences need fewer steps
    assert len({changed(run, **alike).model_dump_json() for run in OF_SIZE.values()}) == 1
    assert [run.model.std for run in OF_STD.values() if run.model.kind == "minimal"] == list(OF_STD)
    assert [run.task.sequences for run in OF_SIZE.values() if run.task.kind == "high_order"] == list(OF_SIZE)


SMALL = ["--training.steps", "3", "--training.batch_size", "8", "--keep.held_out", "8", "--keep.at.stride", "1"]
RUNS: dict[str, Run] = {
    **SETTINGS,
    "incremental-paper": override(SETTINGS["incremental-paper"], ["--task.d_vocab", "3"]),
    "loss on all": override(INCREMENTAL, ["--training.loss_on", "all"]),
    "loss on the last": override(INCREMENTAL, ["--training.loss_on", "last"]),
    "regression on all": override(SETTINGS["incremental-regression"], ["--training.loss_on", "full_context"]),
    "regression by a transformer": changed(SETTINGS["incremental-regression"], model=FULL.model),
    "another model": changed(INCREMENTAL, model=OneLayer(n_heads=2)),
    "deep": changed(INCREMENTAL, model=Transformer(n_layers=2, n_heads=2)),
    "more heads than blocks": override(INCREMENTAL, ["--model.n_heads", "5"]),
    "one head": override(INCREMENTAL, ["--model.n_heads", "1"]),
}
SMALLER = {name: override(run, SMALL) for name, run in RUNS.items()}


@pytest.fixture(scope="module", params=SMALLER)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Series:
    """A few steps of each setting, and of runs that differ from them in what is measured."""
    directory = tmp_path_factory.mktemp("small") / "run"
    run = SMALLER[request.param]
    if run.task == INCREMENTAL.task:
        run = run.model_copy(update={"task": INCREMENTAL.task})  # which has found its ladder already
    return train(run, directory, show_progress=False)


def test_every_run_can_be_measured_judged_and_reported(small: Series) -> None:
    run = small.run
    assert run is not None
    assert paper_of(run) is incremental
    trace = observe(small, probes_of(run))
    assert trace.step.values.tolist() == [0, 1, 2, 3]
    assert np.isfinite(trace.loss).all()
    assert [probe.name for probe in incremental.probes(run)][:3] == [
        "held_out_loss", "excess_over_rungs", "head_specialization"
    ]  # fmt: skip
    for claim in incremental.claims_about(run):
        assert not claim.check(Evidence(trace, {})).holds, claim.id  # after three steps
    panels = incremental.panels(small)
    section = run_section(incremental, "small", "what", small, [trace, trace], incremental.predicted(run, [0]))
    assert len(section.figures) == len(panels)
    assert len(section.stages) == trace.sizes["rung"]
    page = report_page(Report("t", "s", "", [], [section]))
    assert all(panel.title.split()[0] in page for panel in panels)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_has_claims(name: str) -> None:
    assert setting(name) == SETTINGS[name]
    assert incremental.claims_about(setting(name))


def test_what_is_measured_is_what_the_model_can_tell() -> None:
    names = {name: {probe.name for probe in incremental.probes(run)} for name, run in RUNS.items()}
    chain = {"held_out_loss", "excess_over_rungs", "head_specialization", "excess_loss", "teacher_kl"}
    assert names["incremental"] == names["incremental-paper"] == {*chain, "value_alignment"}
    assert names["incremental-two-layers"] == chain
    assert names["incremental-full"] == {*chain, "value_alignment", "skip_alignment"}
    assert names["deep"] == {*chain, "skip_alignment"}
    assert names["incremental-regression"] == {*chain, "value_alignment"} - {"excess_loss", "teacher_kl"}


def test_a_run_is_judged_by_what_can_hold_on_it() -> None:
    staged = set(incremental.claims_about(INCREMENTAL))
    assert staged - set(incremental.claims_about(SETTINGS["incremental-double"])) == {claims.PERMUTATION}
    assert claims.ORDER not in incremental.claims_about(SETTINGS["incremental-equal"])
    assert incremental.claims_about(SETTINGS["incremental-full"]) == (claims.SKIP,)
    assert incremental.claims_about(CASES["full-without-lag-1"]) == ()
    for other in ("incremental-two-layers", "incremental-overlapping"):
        assert incremental.claims_about(SETTINGS[other]) == (claims.RUNG_OF_HEADS,)
    assert incremental.claims_about(RUNS["one head"]) == incremental.claims_about(RUNS["another model"])
    assert claims.SOLVED in incremental.claims_about(SETTINGS["incremental-regression"])


def test_tasks_of_lags_are_of_this_paper_and_others_are_not() -> None:
    for run in (*SETTINGS.values(), *CASES.values(), *REPORTED.values(), *AT_PAPER_SIZE.values()):
        assert paper_of(run) is incremental
    assert all(paper_of(run) is focus_dilution for run in focus_dilution.SETTINGS.values())
    assert {probe.name for probe in probes_of(INCREMENTAL)} == {probe.name for probe in incremental.probes(INCREMENTAL)}
    with pytest.raises(InputError, match="did you mean incremental-double"):
        setting("incremental-duoble")


def test_a_changed_run_is_checked_anew() -> None:
    assert changed(INCREMENTAL, seed=3) == INCREMENTAL.model_copy(update={"seed": 3})
    with pytest.raises(ValueError, match="seed"):
        changed(INCREMENTAL, seed=-1)


@pytest.mark.parametrize(
    ("heads", "titles"),
    [
        (1, ["Attention of head 1"]),
        (2, ["Attention of head 1", "Attention of head 2"]),
        (3, [f"Attention of head {n}, the one of block {n} in the end" for n in (1, 2, 3)]),
        (4, [*(f"Attention of head {n}, the one of block {n} in the end" for n in (1, 2, 3)), "Attention of head 4"]),
    ],
)
def test_a_panel_names_the_block_of_a_head_where_each_block_has_one(heads: int, titles: list[str]) -> None:
    run = override(INCREMENTAL, ["--model.n_heads", str(heads)])
    run = run.model_copy(update={"task": INCREMENTAL.task})
    series = Series("no snapshot yet", (), MagicMock(), MagicMock(), run)
    assert [panel.title for panel in incremental.panels(series) if panel.title.startswith("Attention")] == titles


def test_sections_across_cases_draw_each_of_them() -> None:
    traces = {case: [staged()] for case in CASES}
    orders = sections.of_orders(traces)
    assert len(lines(orders.wide_figures[0])) == 4 * 3
    run = override(INCREMENTAL, ["--task.d_vocab", "4"])
    (figure,) = sections.of_heads(traces, run).wide_figures
    assert len(lines(figure)) == 5
    layout: Any = figure.layout
    assert {shape.y0 for shape in layout.shapes} == {rung.loss for rung in run.task.baselines()[2:]}


def test_sections_of_laws_show_when_heads_part_and_where_training_halts() -> None:
    parting = {std: staged((100, step, None)) for std, step in zip(STDS, (200, 300, 400, None), strict=True)}
    halting = {
        size: staged((100, 300, 600)[:rung] + (None,) * (3 - rung))
        for size, rung in zip(SIZES, (1, 2, 3, 3), strict=True)
    }
    section = sections.of_laws([laws.side_by_side(parting, "std")], [laws.side_by_side(halting, "sequences")])
    parted, halted = (list(lines(figure)[0].y) for figure in section.figures)
    assert parted == [200, 300, 400, None]
    assert halted == [1, 2, 3, 3]
    assert len(lines(section.wide_figures[0])) == len(SIZES) * 3


def test_what_is_only_reported_is_told_in_a_sentence() -> None:
    told = sections.outcome([staged(), staged((100, 300, None))])
    assert "Nearest rung at the end: [3, 2]" in told
    assert "+0.0%, +25.0%" in told
    assert sections.plateaus([staged()]) == "Loss on the plateaus and at the end: 1.50, 1.00, 0.80."


def lines(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if isinstance(trace, go.Scatter)]


def test_heads_are_shown_in_the_order_of_the_blocks_that_they_end_on() -> None:
    mixed = staged().isel(head=[2, 0, 1]).assign_coords(head=range(3))
    shown = incremental.shown(mixed)
    assert shown.block_mass.isel(step=-1).argmax("block").values.tolist() == [0, 1, 2]
    assert "layer" not in shown.dims
    many = mixed.isel(head=[0, 0, 1, 2])
    assert incremental.shown(many).block_mass.isel(step=-1).argmax("block").values.tolist() == [0, 1, 2, 2]
    assert incremental.shown(mixed.isel(head=[0, 2])).block_mass.isel(step=-1).argmax("block").values.tolist() == [1, 2]
