"""Reproduces a paper: trains its settings and controls over seeds, judges every claim, and writes a report.

    python scripts/reproduce.py focus-dilution
    python scripts/reproduce.py focus-dilution-text --text stories.txt

Exit status: 0 where every claim holds and every control fails as it must, 1 where not, 2 for bad input.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fd_interp.claims import Claim, Evidence, Verdict, judge, judge_control
from fd_interp.command import exit_status
from fd_interp.config import InputError
from fd_interp.observation import Trace
from fd_interp.overrides import override
from fd_interp.papers import focus_dilution as paper
from fd_interp.papers.focus_dilution import population
from fd_interp.papers.focus_dilution.settings import PAPER_PI, TEXT, ZIPF
from fd_interp.report.figures import one_head, overview_figure
from fd_interp.report.page import Report, Section, report_page
from fd_interp.report.sections import run_section
from fd_interp.reproduction import as_json, show_json, traces_of, versions
from fd_interp.training.run import Run
from fd_interp.training.series import atomic, open_series

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


class Results(NamedTuple):
    """What a reproduction leaves."""

    setting: str
    seeds: Sequence[int]
    verdicts: list[Verdict]
    report: Report


def focus_dilution(arguments: argparse.Namespace, overrides: list[str]) -> Results:
    """The synthetic chains: the model itself and its population flow, with their controls."""
    seeds, out = range(arguments.seeds), arguments.out
    base = {"zipf-8": override(ZIPF, overrides), "paper-pi": override(PAPER_PI, overrides)}
    controls = paper.controls(base["zipf-8"])
    cases = base | {control.name: control.run for control in controls}
    traces = traces_of(cases, seeds, out, paper.probes)
    theory = {case: paper.predicted(run, seeds) for case, run in cases.items()}

    verdicts: list[Verdict] = []
    for case, run in base.items():
        verdicts += _judged(paper.claims_about(run), run, traces[case], f"{case}/model")
        verdicts += _judged(paper.claims_about(run), run, theory[case], f"{case}/population")
        if theory[case]:
            verdicts += _judged(population.rate_claims(run), run, population.flows(run, seeds), f"{case}/population")
    for control in controls:
        for limit, must_fail, seen in (
            ("model", control.in_model, traces),
            ("population", control.in_population, theory),
        ):
            evidence = [_evidence(trace, control.run) for trace in seen[control.name]]
            paired = [_evidence(trace, base["zipf-8"]) for trace in seen["zipf-8"]]
            verdicts += [
                judge_control(
                    claim, evidence, where=f"{control.name}/{limit}", control=control.taken_away, paired=paired
                )
                for claim in must_fail
                if evidence
            ]

    texts = {"zipf-8": "eight tokens with Zipf's frequencies", "paper-pi": "the paper's four tokens"}
    sections = [
        run_section(
            paper, f"Chain {case}", CHAIN_TEXT.format(chain=texts[case]), open_series(out / case / "seed-0"),
            traces[case], theory[case],
        )
        for case in base
    ]  # fmt: skip
    sections.append(_controls_section({"the claim's own run": traces["zipf-8"]} | {
        control.taken_away: traces[control.name] for control in controls
    }))  # fmt: skip
    report = Report(paper.TITLE, paper.PAPER, _summary(verdicts, seeds), verdicts, sections, versions())
    return Results("focus-dilution", seeds, verdicts, report)


def focus_dilution_text(arguments: argparse.Namespace, overrides: list[str]) -> Results:
    """The same model on real text."""
    seeds, out = range(arguments.seeds), arguments.out
    cases = {Path(text).stem: override(TEXT, ["--task.source", text, *overrides]) for text in arguments.text}
    if len(cases) < len(arguments.text):
        raise InputError("two texts have the same file name; rename one")
    frozen = {f"{case}-frozen": _frozen(run) for case, run in cases.items()}
    traces = traces_of(cases | frozen, seeds, out, paper.probes)
    verdicts = [v for case, run in cases.items() for v in _judged(paper.claims_about(run), run, traces[case], case)]
    for case, run in cases.items():
        evidence = [_evidence(trace, run) for trace in traces[f"{case}-frozen"]]
        paired = [_evidence(trace, run) for trace in traces[case]]
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
    report = Report(f"{paper.TITLE}, on text", paper.PAPER, _summary(verdicts, seeds), verdicts, sections, versions())
    return Results("focus-dilution-text", seeds, verdicts, report)


def _frozen(run: Run) -> Run:
    return override(run, ["--model.fixed.W_Q", "init", "--model.fixed.W_K", "init"])


def _evidence(trace: Trace, run: Run) -> Evidence:
    return Evidence.of(trace, run.task.baselines())


def _judged(claims: Sequence[Claim], run: Run, seeds: Sequence[Trace], where: str) -> list[Verdict]:
    evidence = [_evidence(trace, run) for trace in seeds]
    return [judge(claim, evidence, where=where) for claim in claims] if evidence else []


def _controls_section(groups: dict[str, list[Trace]]) -> Section:
    figure = overview_figure(
        "focus_ratio",
        "Attention on the most frequent token ÷ its share",
        {name: [one_head(trace) for trace in seeds] for name, seeds in groups.items()},
        level=1.0,
    )
    return Section("Controls", f"{CONTROL_TEXT} {FINITE_TEXT}", wide_figures=[figure])


def _summary(verdicts: Sequence[Verdict], seeds: Sequence[int]) -> str:
    claims = [verdict for verdict in verdicts if verdict.control is None]
    controls = [verdict for verdict in verdicts if verdict.control is not None]
    return (
        f"{sum(v.holds for v in claims)} of {len(claims)} claims hold and {sum(v.holds for v in controls)} of "
        f"{len(controls)} controls fail as they must, each over {len(seeds)} seeds."
    )


REPRODUCTIONS = {"focus-dilution": focus_dilution, "focus-dilution-text": focus_dilution_text}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any field of the run can follow, as in: --task.persistence 0.3 --model.d_model 32",
        allow_abbrev=False,
    )
    parser.add_argument("setting", choices=REPRODUCTIONS)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0 on (default: 3)")
    parser.add_argument("--out", type=Path, help="directory for runs and report (default: runs/SETTING)")
    parser.add_argument("--text", nargs="+", default=[], metavar="PATH", help="text files, for focus-dilution-text")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Reproduces what the command line names; see the exit statuses above."""
    arguments, overrides = _parser().parse_known_args(argv)
    return exit_status("reproduce", lambda: reproduce(arguments, overrides))


def reproduce(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Runs, judges, writes the report and says what came out."""
    begun = time.monotonic()
    arguments.out = arguments.out or Path("runs") / arguments.setting
    if arguments.seeds < 1:
        raise InputError(f"--seeds must be at least 1, not {arguments.seeds}")
    if arguments.setting.endswith("-text") and not arguments.text:
        raise InputError("focus-dilution-text needs --text with at least one file")
    results = REPRODUCTIONS[arguments.setting](arguments, overrides)
    page = arguments.out / "report.html"
    with atomic(page) as partial:
        partial.write_text(report_page(results.report), encoding="utf-8")
    seconds = time.monotonic() - begun
    if arguments.json:
        show_json(as_json(results.setting, results.seeds, results.verdicts, seconds))
    else:
        _print_verdicts(results.verdicts)
        print(f"{results.report.summary}\n{seconds:.0f} seconds. Report: {page.resolve()}")
    return 0 if all(verdict.holds for verdict in results.verdicts) else 1


def _print_verdicts(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        good, bad = (
            ("holds", "DOES NOT HOLD") if verdict.control is None else ("fails, as it must", "HOLDS, AND MUST NOT")
        )
        print(f"{good if verdict.holds else bad:18} {verdict.id:38} {verdict.measured}")


if __name__ == "__main__":
    sys.exit(main())
