"""The `fd-interp` command. Heavy libraries are imported by the verbs that need them, so that `--help` is quick."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fd_interp.observation import Trace
    from fd_interp.training.series import Series


REPORT_TEXT = (
    "Solid: the run. Dashed, where the theory applies: descent on the population loss from the run's own start. "
    "Shaded: its stages. Dotted: losses of simpler predictors, and uniform attention."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb. 0: done, and every claim holds; 1: a claim does not hold; 2: bad input; 130: interrupted."""
    arguments, rest = _parser().parse_known_args(argv)
    if rest and arguments.verb is not train:
        print(f"fd-interp: unknown option {rest[0]}; see fd-interp {arguments.name} --help", file=sys.stderr)
        return 2
    from fd_interp.command import exit_status

    return exit_status("fd-interp", lambda: arguments.verb(arguments, rest))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fd-interp", description="Watch attention learn.", allow_abbrev=False)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(
        function: Callable[..., int], text: str, *, takes_run: bool = True, **more: Any
    ) -> argparse.ArgumentParser:
        name = function.__name__.removesuffix("_")
        added = verbs.add_parser(name, help=text, description=function.__doc__, allow_abbrev=False, **more)
        added.set_defaults(verb=function, name=name)
        if takes_run:
            added.add_argument("run", metavar="RUN", type=Path, help="run directory, or a llama2.c checkpoint (.bin)")
            added.add_argument("--text", help="stories to run a llama2.c checkpoint on")
            added.add_argument("--tokenizer", help="folder with the checkpoint's tokenizer.json")
        return added

    listing = verb(list_, "named settings, or the fields of one", takes_run=False)
    listing.add_argument("setting", nargs="?", metavar="SETTING")
    training = verb(
        train,
        "train a setting",
        takes_run=False,
        epilog="Any field: --task.persistence 0.3 --training.optimizer.kind adamw",
    )
    training.add_argument("setting", metavar="SETTING", help="a name from `fd-interp list`")
    training.add_argument("--out", type=Path, help="run directory (default: runs/SETTING/seed-SEED)")
    verb(observe, "measure every snapshot and keep the trace")
    verb(stages, "when each stage began, and what was seen")
    verb(check, "judge the paper's claims on a run")
    reporting = verb(report, "write a page with stages, curves and attention")
    reporting.add_argument("--out", type=Path, help="HTML file (default: report.html in the run directory)")
    playing = verb(sandbox, "write a page on which every tensor of a learned-query model moves")
    playing.add_argument("--out", type=Path, help="HTML file (default: sandbox.html in the run directory)")
    playing.add_argument("--most", type=int, default=200, help="frames at most (default: 200)")
    playing.add_argument("--png", metavar="FOLDER", type=Path, help="also write each frame as a picture")
    playing.add_argument("--film", metavar="FILE", type=Path, help="also write an animation (.gif or .webp)")
    viewing = verb(view, "write a page of attention patterns")
    viewing.add_argument("--step", type=int, help="one step (default: a slider over up to 40 of them)")
    viewing.add_argument("--sequence", type=int, default=0, help="which held-out sequence (default: 0)")
    viewing.add_argument("--out", type=Path, help="HTML file (default: attention.html in the run directory)")
    for parser_of_verb in verbs.choices.values():
        parser_of_verb.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def list_(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    """Lists the named settings, or every field of one with its value and meaning."""
    from fd_interp.overrides import fields_of
    from fd_interp.papers import setting, settings

    if arguments.setting:
        run = setting(arguments.setting)
        rows = [(f"--{field.path}", field.value, field.meaning) for field in fields_of(run)]
        _show(arguments, json.loads(run.model_dump_json()), ("field", "value", "meaning"), rows)
        return 0
    known = settings()
    rows = [(name, run.task.kind, run.model.kind, str(run.training.steps)) for name, run in known.items()]
    as_json = {name: json.loads(run.model_dump_json()) for name, run in known.items()}
    _show(arguments, as_json, ("setting", "task", "model", "steps"), rows)
    return 0


def train(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Trains a setting, or goes on where that was interrupted. Every field can be changed on the command line."""
    from fd_interp.overrides import override
    from fd_interp.papers import setting
    from fd_interp.training import loop

    run = override(setting(arguments.setting), overrides)
    directory = arguments.out or Path("runs") / arguments.setting / f"seed-{run.seed}"
    begun = time.monotonic()
    series = loop.train(run, directory, show_progress=not arguments.json)
    seconds = round(time.monotonic() - begun, 1)
    if arguments.json:
        print(json.dumps({"run": str(directory), "steps": series.steps, "seconds": seconds}))
    else:
        print(f"{len(series)} snapshots up to step {series.steps[-1]} in {directory} ({seconds} s)")
        print(f"next: fd-interp report {directory}")
    return 0


def observe(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    """Measures every snapshot, writes the trace as netCDF beside the run, and prints where each number went."""
    import numpy as np

    trace, file = _observed(arguments, _opened(arguments))
    rows, values = [], {}
    for name, variable in trace.data_vars.items():
        mean = variable.mean([dim for dim in variable.dims if dim != "step"], skipna=True).values
        values[name] = {
            "first": float(mean[0]),
            "last": float(mean[-1]),
            "min": float(np.fmin.reduce(mean)),
            "max": float(np.fmax.reduce(mean)),
        }
        rows.append((str(name), *(f"{value:.4g}" for value in values[name].values()), variable.attrs["long_name"]))
    _show(
        arguments,
        {"trace": str(file), "variables": values},
        ("variable", "first", "last", "min", "max", "meaning"),
        rows,
    )
    if not arguments.json:
        print(f"{trace.sizes['step']} steps in {file}; those with further axes are shown as their mean")
    return 0


def stages(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    """Prints the stages of a run's first cycle."""
    from fd_interp.papers import paper_of

    series = _opened(arguments)
    paper = paper_of(_run_of(series))
    found = paper.stages(_observed(arguments, series)[0])
    rows = [(stage.name, _or_dash(stage.start), _or_dash(stage.end), stage.seen) for stage in found]
    _show(arguments, {"stages": [stage._asdict() for stage in found]}, ("stage", "from", "to", "seen"), rows)
    return 0


def check(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    """Judges the paper's claims on one run. Exit status 1 where one does not hold."""
    from fd_interp.claims import Evidence, judge
    from fd_interp.papers import paper_of
    from fd_interp.reproduction import as_json

    begun = time.monotonic()
    series = _opened(arguments)
    run = _run_of(series)
    trace, _ = _observed(arguments, series)
    evidence = [Evidence.of(trace, run.task.baselines())]
    verdicts = [judge(claim, evidence, where=arguments.run.name) for claim in paper_of(run).claims_about(run)]
    rows = [("holds" if v.holds else "does not hold", v.id, v.expected, v.measured) for v in verdicts]
    summary = as_json(str(arguments.run), [run.seed], verdicts, time.monotonic() - begun)
    _show(arguments, summary, ("", "claim", "expected", "measured"), rows)
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def report(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    """Writes a page about one run that works offline: claims, stages, curves with the theory, attention."""
    from fd_interp.claims import Evidence, judge
    from fd_interp.papers import paper_of
    from fd_interp.report.page import Report, report_page
    from fd_interp.report.sections import run_section
    from fd_interp.reproduction import versions

    series = _opened(arguments)
    run = _run_of(series)
    trace, _ = _observed(arguments, series)
    paper = paper_of(run)
    evidence = [Evidence.of(trace, run.task.baselines())]
    verdicts = [judge(claim, evidence, where=arguments.run.name) for claim in paper.claims_about(run)]
    theory = paper.predicted(run, [run.seed], steps=max(series.steps[-1], 1))
    section = run_section(paper, arguments.run.name, REPORT_TEXT, series, [trace], theory)
    held = f"{sum(v.holds for v in verdicts)} of {len(verdicts)} claims hold on this run of seed {run.seed}."
    page = report_page(Report(paper.TITLE, paper.PAPER, held, verdicts, [section], versions()))
    return _write_page(arguments, page, arguments.out or arguments.run / "report.html")


def sandbox(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    """Writes a page that works offline: every tensor of a learned-query model while it learns, with a step slider.

    --png and --film need the optional packages: pip install "fd-interp[film]".
    """
    from fd_interp.report.sandbox import recorded, sandbox_page
    from fd_interp.training.state import LOSSES_FILE, losses_of

    pictures = arguments.png or arguments.film
    if pictures:
        from fd_interp.report.film import check_exportable, export

        check_exportable(arguments.film)
    series, show_progress = _opened(arguments), not arguments.json
    shown = recorded(series, most=arguments.most, show_progress=show_progress)
    if len(shown.steps) < shown.kept:
        spread = f"{len(shown.steps)} of {shown.kept} snapshots are shown, evenly spread among them"
        print(f"fd-interp: {spread} (--most)", file=sys.stderr)
    shown = shown._replace(trace=_curves(arguments, series))
    if (arguments.run / LOSSES_FILE).exists():
        shown = shown._replace(losses=tuple(losses_of(arguments.run)))
    if pictures:
        files = export(shown, pngs=arguments.png, film=arguments.film, show_progress=show_progress)
        print(f"fd-interp: {len(files)} files with pictures, the last of them {files[-1]}", file=sys.stderr)
    return _write_page(arguments, sandbox_page(shown), arguments.out or arguments.run / "sandbox.html")


def view(arguments: argparse.Namespace, _rest: Sequence[str]) -> int:
    """Writes a page with the attention patterns of one held-out sequence, over the steps or at one."""
    from fd_interp.report.attention import attention_page
    from fd_interp.report.views import attention_of, spread_steps
    from fd_interp.reproduction import results_folder

    series = _opened(arguments)
    steps = spread_steps(series) if arguments.step is None else [arguments.step]
    tokens, frames = attention_of(series, steps, sequence=arguments.sequence)
    page = attention_page(f"Attention of {arguments.run.name}", tokens, frames)
    return _write_page(arguments, page, arguments.out or results_folder(arguments.run) / "attention.html")


def _opened(arguments: argparse.Namespace) -> "Series":
    from fd_interp.sources import open_source

    return open_source(arguments.run, text=arguments.text, tokenizer=arguments.tokenizer)


def _observed(arguments: argparse.Namespace, series: "Series") -> "tuple[Trace, Path]":
    from fd_interp.papers import probes_of
    from fd_interp.reproduction import TRACE_FILE, observed, results_folder

    if series.run is not None and series.steps[-1] < series.run.training.steps:
        unfinished = f"{series.name} is unfinished, at step {series.steps[-1]} of {series.run.training.steps}"
        print(f"fd-interp: {unfinished}; what follows is about its steps so far", file=sys.stderr)
    file = results_folder(arguments.run) / TRACE_FILE
    return observed(series, probes_of(series.run), file, show_progress=not arguments.json), file


def _curves(arguments: argparse.Namespace, series: "Series") -> "Trace":
    """What the sandbox draws over the steps: from the trace that `observe` has left, if it has seen every snapshot."""
    import xarray as xr

    from fd_interp.observation import observe
    from fd_interp.papers import probes_of
    from fd_interp.report.sandbox_panels import CURVES
    from fd_interp.reproduction import TRACE_FILE, results_folder

    file = results_folder(arguments.run) / TRACE_FILE
    if file.exists():
        trace = xr.load_dataset(file)
        if trace.step.values.tolist() == series.steps:
            return trace
    drawn = [probe for probe in probes_of(series.run) if probe.variables.keys() & CURVES]
    return observe(series, drawn, show_progress=not arguments.json)


def _run_of(series: "Series") -> Any:
    from fd_interp.config import InputError

    if series.run is None:
        raise InputError(
            f"{series.name} is one checkpoint, and stages need a run; try fd-interp observe, or a probe script"
        )
    return series.run


def _write_page(arguments: argparse.Namespace, page: str, file: Path) -> int:
    from fd_interp.training.series import atomic

    with atomic(file) as partial:
        partial.write_text(page, encoding="utf-8")
    print(json.dumps({"page": str(file)}) if arguments.json else f"open {file.resolve()}")
    return 0


def _show(arguments: argparse.Namespace, as_json: Any, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from fd_interp.reproduction import show_json, show_table

    if arguments.json:
        show_json(as_json)
    else:
        show_table(columns, rows)


def _or_dash(step: int | None) -> str:
    return "-" if step is None else str(step)


if __name__ == "__main__":
    sys.exit(main())
