"""Everything that is reproduced of this paper: runs over seeds, verdicts, and the report."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import joblib

from fd_interp.claims import Claim, Evidence, Verdict, judge, judge_control
from fd_interp.observation import Trace
from fd_interp.overrides import override
from fd_interp.papers import incremental as paper
from fd_interp.papers.incremental import claims, laws, sections
from fd_interp.papers.incremental.cases import (
    AT_PAPER_SIZE,
    CASES,
    CLAIMS,
    CONTROLS,
    DELTAS,
    OF_SIZE,
    OF_STD,
    REPORTED,
    REPORTED_SEEDS,
    SIZES,
    STDS,
)
from fd_interp.report.page import Report
from fd_interp.reproduction import Results, evidence_of, judged, summary, traces_of, versions
from fd_interp.training.run import Run

T = TypeVar("T")


def on_small_chains(seeds: Sequence[int], out: Path, overrides: Sequence[str]) -> Results:
    """The chain of sixteen tokens: stages, their controls, the laws across runs, the flow, and the full model."""
    cases = {name: override(run, overrides) for name, run in CASES.items()}
    of_std = {_name("std", std): override(run, overrides) for std, run in OF_STD.items()}
    of_size = {_name("sequences", size): override(run, overrides) for size, run in OF_SIZE.items()}
    traces = traces_of(cases | of_std | of_size, seeds, out, paper.probes)
    reported = {name: override(run, overrides) for name, run in REPORTED.items()}
    reported_traces = traces_of(reported, seeds[:REPORTED_SEEDS], out, paper.probes)
    predicted = [flow for flows in _in_parallel(_predicted, seeds, run=cases["regression"]) for flow in flows]
    staged = _in_parallel(laws.flow_of_fig_10, seeds, delta=1e-6, until=450)
    escaping = _in_parallel(laws.escape_flows, seeds, deltas=DELTAS)

    verdicts = _verdicts(cases, traces)
    breaking = [laws.side_by_side(_at(traces, "std", STDS, index), "std") for index, _ in enumerate(seeds)]
    stopping = [laws.side_by_side(_at(traces, "sequences", SIZES, index), "sequences") for index, _ in enumerate(seeds)]
    verdicts += _judged_across(laws.BREAKING, breaking, "scale-of-start")
    verdicts += _judged_across(laws.EARLY_STOPPING, stopping, "sequences")
    compared = [
        laws.side_by_side({"model": trace, "flow": flow}, "origin")
        for trace, flow in zip(traces["regression"], predicted, strict=False)  # none where the theory does not apply
    ]
    verdicts += _judged_across(laws.FLOW_PREDICTS, compared, "regression")
    verdicts += _judged_across(laws.FLOW_PLATEAUS, staged, "population")
    verdicts += _judged_across(laws.OFFSET_IDENTITY, staged, "population")
    verdicts += _judged_across(laws.ESCAPE, escaping, "population")

    shown = [
        sections.of_case(out, "m-1.7", traces["m-1.7"]),
        sections.of_case(out, "m-2", traces["m-2"]),
        sections.of_case(out, "regression", traces["regression"], predicted),
        sections.of_orders(traces),
        sections.of_heads(traces, cases["m-1.7"]),
        sections.of_laws(breaking, stopping),
        sections.of_case(out, "full", traces["full"]),
        *(sections.of_case(out, case, seen, more=sections.outcome(seen)) for case, seen in reported_traces.items()),
    ]
    report = Report(paper.TITLE, paper.PAPER, summary(verdicts, seeds), verdicts, shown, versions())
    return Results(verdicts, report)


def at_the_size_of_the_paper(seeds: Sequence[int], out: Path, overrides: Sequence[str]) -> Results:
    """Fifty tokens, blocks of two lags, full matrices."""
    cases = {name: override(run, overrides) for name, run in AT_PAPER_SIZE.items()}
    traces = traces_of(cases, seeds, out, paper.probes)
    asked = (claims.ORDER, claims.DETECTORS, claims.COMPETITION, claims.PERMUTATION, claims.OFFSETS)
    verdicts = [v for name, run in cases.items() for v in judged(asked, run, traces[name], name)]
    shown = [sections.of_case(out, name, traces[name], more=sections.plateaus(traces[name])) for name in cases]
    title = f"{paper.TITLE}, at the paper's size"
    return Results(verdicts, Report(title, paper.PAPER, summary(verdicts, seeds), verdicts, shown, versions()))


def _verdicts(cases: Mapping[str, Run], traces: Mapping[str, list[Trace]]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for name, run in cases.items():
        verdicts += judged(CLAIMS.get(name, paper.claims_about(run)), run, traces[name], name)
    for control in CONTROLS:
        seen, paired = (evidence_of(traces[case], cases[case]) for case in (control.case, control.paired))
        verdicts += [
            judge_control(claim, seen, where=control.case, control=control.taken_away, paired=paired)
            for claim in control.must_fail
        ]
    return verdicts


def _predicted(run: Run, *, seed: int) -> list[Trace]:
    return paper.predicted(run, [seed])


def _in_parallel(flow: Callable[..., T], seeds: Sequence[int], **arguments: object) -> list[T]:
    workers: Any = joblib.Parallel(n_jobs=-1)
    return workers(joblib.delayed(flow)(seed=seed, **arguments) for seed in seeds)


def _name(axis: str, value: float | int) -> str:
    return f"{axis}-{value:g}"


def _at(
    traces: Mapping[str, list[Trace]], axis: str, values: Sequence[float] | Sequence[int], seed: int
) -> dict[float | int, Trace]:
    return {value: traces[_name(axis, value)][seed] for value in values}


def _judged_across(claim: Claim, traces: Sequence[Trace], where: str) -> list[Verdict]:
    """A claim about several runs of each seed; nothing where they are not to be had."""
    return [judge(claim, [Evidence(trace, {}) for trace in traces], where=where)] if traces else []
