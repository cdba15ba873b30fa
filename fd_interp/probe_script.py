"""The command line that every file in probes/ shares: what to look at, on how many seeds, and where results go."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from fd_interp.command import exit_status
from fd_interp.config import InputError, nearest
from fd_interp.observation import Probe, Trace, observe
from fd_interp.overrides import override
from fd_interp.papers import setting, settings
from fd_interp.reproduction import results_folder, show_json, show_table, write_trace
from fd_interp.sources import open_source, with_random_weights
from fd_interp.training.loop import train
from fd_interp.training.series import Series, atomic

Row = dict[str, str | int | float | None]


@dataclass(frozen=True)
class Question:
    """What a probe script asks: the probes, the table, and the picture."""

    name: str
    probes: Callable[[Series, argparse.Namespace], Sequence[Probe]]
    """What to measure on a series, given the command line."""
    table: Callable[[Trace, Sequence[Trace]], list[Row]]
    """Rows about one seed's trace, beside those of random weights, if any."""
    figure: Callable[[Sequence[Trace], Sequence[Trace]], go.Figure]
    """From the traces of the seeds, and those of random weights, if any."""
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    """Adds options of this question alone to the command line."""
    look: Callable[[Series, Sequence[Probe], argparse.Namespace], Trace] = lambda series, probes, arguments: observe(
        series, probes, show_progress=not arguments.json
    )
    """Makes the trace of one seed; by default of all its snapshots."""
    nothing: str = "there is nothing to tell"
    """What is said of a seed that has no row."""


def main(question: Question, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Asks the question of whatever the command line names. 0: asked and answered; 2: bad input; 130: interrupted."""
    parser = _parser(description)
    question.add_options(parser)
    arguments, overrides = parser.parse_known_args(argv)

    def answer() -> int:
        series = _series(arguments, overrides)
        _ask(question, series, _controls(series, arguments.seeds), arguments)
        return 0

    return exit_status(question.name, answer)


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="With a SETTING, any field of it can follow, as in: --task.persistence 0.3",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="run directory, directory of seed-0, seed-1, ..., llama2.c checkpoint (.bin), or a SETTING to train first",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="seeds to train or read; of random weights for a checkpoint"
    )
    parser.add_argument("--text", help="stories to run a llama2.c checkpoint on")
    parser.add_argument("--tokenizer", help="folder with the checkpoint's tokenizer.json")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for results, and for runs to train (default: that of the run)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _series(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[Series]:
    if arguments.seeds < 1:
        raise InputError(f"--seeds must be at least 1, not {arguments.seeds}")
    path = Path(arguments.run)
    if not path.exists() and arguments.run in settings():
        run = override(setting(arguments.run), overrides)
        runs = [run.model_copy(update={"seed": run.seed + index}) for index in range(arguments.seeds)]
        folder = arguments.out or Path("runs") / arguments.run
        return [train(run, folder / f"seed-{run.seed}") for run in runs]
    if overrides:
        raise InputError(f"{overrides[0]} changes a setting, and {path} is none; {nearest(arguments.run, settings())}")
    if not path.exists():
        raise InputError(f"{path} is no file, no directory and no setting; {nearest(arguments.run, settings())}")
    seeds = [path / f"seed-{index}" for index in range(arguments.seeds)]
    if path.is_dir() and seeds[0].is_dir():
        return [open_source(seed) for seed in seeds]
    if path.is_dir() and arguments.seeds > 1:
        raise InputError(f"{path} holds one seed, not {arguments.seeds}; give a directory with seed-0, seed-1, ...")
    return [open_source(path, text=arguments.text, tokenizer=arguments.tokenizer)]


def _controls(series: Sequence[Series], seeds: int) -> list[Series]:
    """A run has its own start to compare with; a lone checkpoint gets random weights."""
    alone = len(series) == 1 and len(series[0]) == 1
    return [with_random_weights(series[0], seed) for seed in range(seeds)] if alone else []


def _ask(question: Question, series: list[Series], controls: list[Series], arguments: argparse.Namespace) -> None:
    probes = question.probes(series[0], arguments)
    traces = [question.look(one, probes, arguments) for one in series]
    random = [observe(one, probes) for one in controls]
    tables = [question.table(trace, random) for trace in traces]
    folder = arguments.out or results_folder(Path(series[0].name))
    files = []
    for one, trace in zip(series, traces, strict=True):
        kept = folder / f"{question.name}-{Path(one.name).stem}.nc"
        write_trace(trace, kept)
        files.append(str(kept))
    picture = folder / f"{question.name}.html"
    with atomic(picture) as partial:
        partial.write_text(question.figure(traces, random).to_html(include_plotlyjs=True), encoding="utf-8")
    names = [Path(one.name).name for one in series]
    rows = [{"run": name} | row for name, table in zip(names, tables, strict=True) for row in table]
    result: dict[str, Any] = {"probe": question.name, "table": rows, "traces": files, "figure": str(picture)}
    if arguments.json:
        show_json(result)
        return
    if rows:
        show_table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])
    for name in (name for name, table in zip(names, tables, strict=True) if not table):
        print(f"{name}: {question.nothing}")
    print(f"trace: {', '.join(files)}\nfigure: {picture.resolve()}")


def _cell(value: str | int | float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
