"""Everything that is reproduced of this paper: runs over seeds, verdicts, and the report."""

from collections.abc import Sequence
from pathlib import Path

from fd_interp.claims import Verdict, judge_control
from fd_interp.config import InputError
from fd_interp.observation import Trace
from fd_interp.overrides import override
from fd_interp.papers import focus_dilution as paper
from fd_interp.papers.focus_dilution import population
from fd_interp.papers.focus_dilution.settings import PAPER_PI, TEXT, ZIPF
from fd_interp.report.figures import Curve, one_head, overview_figure
from fd_interp.report.page import Report, Section
from fd_interp.report.sections import run_section
from fd_interp.reproduction import Results, evidence_of, judged, summary, traces_of, versions
from fd_interp.training.run import Run
from fd_interp.training.series import open_series

CHAIN_TEXT = (
    "One layer of attention without residual stream on {chain}, trained by gradient descent on the token after the "
    "last of 32. Solid: seeds, the first one strongly; dashed: descent on the population loss from the first seed's "
    "start, where contexts are infinitely long. Shaded: the stages of the first seed."
)
CONTROL_TEXT = (
    "The ratio of attention on the most frequent token to its share, in runs that lack what the cycle needs. The "
    "residual model is a result in itself: a plain transformer of one layer and one head, with residual stream, "
    "positions and trained W_V and W_O, shows no cycle under gradient descent on these chains and reaches the bigram "
    "with its attention as at the start."
)
FINITE_TEXT = (
    "Two controls are complete only in the population flow. In a finite context a query's own token is more visible "
    "than its frequency says: so equal rare tokens do get a second direction there, and with uniform frequencies "
    "attention learns in the end, though nothing condenses before."
)


def on_chains(seeds: Sequence[int], out: Path, overrides: Sequence[str]) -> Results:
    """The synthetic chains: the model itself and its population flow, with their controls."""
    base = {"zipf-8": override(ZIPF, overrides), "paper-pi": override(PAPER_PI, overrides)}
    controls = paper.controls(base["zipf-8"])
    cases = base | {control.name: control.run for control in controls}
    traces = traces_of(cases, seeds, out, paper.probes)
    theory = {case: paper.predicted(run, seeds) for case, run in cases.items()}

    verdicts: list[Verdict] = []
    for case, run in base.items():
        verdicts += judged(paper.claims_about(run), run, traces[case], f"{case}/model")
        verdicts += judged(paper.claims_about(run), run, theory[case], f"{case}/population")
        if theory[case]:
            verdicts += judged(population.rate_claims(run), run, population.flows(run, seeds), f"{case}/population")
    for control in controls:
        for limit, must_fail, seen in (
            ("model", control.in_model, traces),
            ("population", control.in_population, theory),
        ):
            evidence = evidence_of(seen[control.name], control.run)
            paired = evidence_of(seen["zipf-8"], base["zipf-8"])
            verdicts += [
                judge_control(
                    claim, evidence, where=f"{control.name}/{limit}", control=control.taken_away, paired=paired
                )
                for claim in must_fail
                if evidence
            ]

    chains = {"zipf-8": "eight tokens with Zipf's frequencies", "paper-pi": "the paper's four tokens"}
    sections = [
        run_section(
            paper, f"Chain {case}", CHAIN_TEXT.format(chain=chains[case]), open_series(out / case / "seed-0"),
            traces[case], theory[case],
        )
        for case in base
    ]  # fmt: skip
    sections.append(_controls_section({"the claim's own run": traces["zipf-8"]} | {
        control.taken_away: traces[control.name] for control in controls
    }))  # fmt: skip
    report = Report(paper.TITLE, paper.PAPER, summary(verdicts, seeds), verdicts, sections, versions())
    return Results(verdicts, report)


def on_text(seeds: Sequence[int], out: Path, overrides: Sequence[str], texts: Sequence[str]) -> Results:
    """The same model on real text."""
    cases = {Path(text).stem: override(TEXT, ["--task.source", text, *overrides]) for text in texts}
    if len(cases) < len(texts):
        raise InputError("two texts have the same file name; rename one")
    frozen = {f"{case}-frozen": _frozen(run) for case, run in cases.items()}
    traces = traces_of(cases | frozen, seeds, out, paper.probes)
    verdicts = [v for case, run in cases.items() for v in judged(paper.claims_about(run), run, traces[case], case)]
    for case, run in cases.items():
        evidence = evidence_of(traces[f"{case}-frozen"], run)
        paired = evidence_of(traces[case], run)
        held = "W_Q and W_K are held at their start"
        verdicts += [
            judge_control(claim, evidence, where=f"{case}-frozen", control=held, paired=paired)
            for claim in paper.claims_about(run)
            if claim.id in ("focus", "dilution")
        ]
    sections = [
        run_section(
            paper, f"Text {case}", "The model on windows of real text, byte-level BPE, loss on every position.",
            open_series(out / case / "seed-0"), traces[case],
        )
        for case in cases
    ]  # fmt: skip
    report = Report(f"{paper.TITLE}, on text", paper.PAPER, summary(verdicts, seeds), verdicts, sections, versions())
    return Results(verdicts, report)


def _frozen(run: Run) -> Run:
    return override(run, ["--model.fixed.W_Q", "init", "--model.fixed.W_K", "init"])


def _controls_section(groups: dict[str, list[Trace]]) -> Section:
    figure = overview_figure(
        [Curve("focus_ratio", "focus ratio")],
        "Attention on the most frequent token ÷ its share",
        {name: [one_head(trace) for trace in seeds] for name, seeds in groups.items()},
        levels=[("", 1.0)],
    )
    return Section("Controls", f"{CONTROL_TEXT} {FINITE_TEXT}", wide_figures=[figure])
