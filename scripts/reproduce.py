"""Reproduces a paper: trains its settings and controls over seeds, judges every claim, and writes a report.

    python scripts/reproduce.py focus-dilution
    python scripts/reproduce.py focus-dilution-text --text stories.txt
    python scripts/reproduce.py incremental

Exit status: 0 where every claim holds and every control fails as it must, 1 where not, 2 for bad input.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fd_interp.claims import Verdict
from fd_interp.command import exit_status
from fd_interp.config import InputError
from fd_interp.papers.clustering import reproduce as clustering
from fd_interp.papers.clustering import spikes as clustering_spikes
from fd_interp.papers.clustering import transfer as clustering_transfer
from fd_interp.papers.focus_dilution import reproduce as focus_dilution
from fd_interp.papers.incremental import reproduce as incremental
from fd_interp.report.page import report_page
from fd_interp.reproduction import Results, as_json, show_json
from fd_interp.training.series import atomic


class Reproduction(NamedTuple):
    """What to run, and on how many seeds unless told otherwise."""

    function: Callable[..., Results]
    seeds: int
    takes_text: bool = False


REPRODUCTIONS = {
    "focus-dilution": Reproduction(focus_dilution.on_chains, seeds=3),
    "focus-dilution-text": Reproduction(focus_dilution.on_text, seeds=3, takes_text=True),
    "incremental": Reproduction(incremental.on_small_chains, seeds=5),
    "incremental-paper": Reproduction(incremental.at_the_size_of_the_paper, seeds=1),
    "clustering": Reproduction(clustering.on_seeds, seeds=32),
    "clustering-spikes": Reproduction(clustering_spikes.on_spikes, seeds=19),
    "clustering-transfer": Reproduction(clustering_transfer.on_transfer, seeds=32),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any field of the runs can follow, as in: --training.batch_size 64 --keep.held_out 256",
        allow_abbrev=False,
    )
    seeds = ", ".join(f"{one.seeds} for {name}" for name, one in REPRODUCTIONS.items())
    parser.add_argument("setting", choices=REPRODUCTIONS)
    parser.add_argument("--seeds", type=int, help=f"how many seeds, from 0 on (default: {seeds})")
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
    reproduction = REPRODUCTIONS[arguments.setting]
    out = arguments.out or Path("runs") / arguments.setting
    seeds = range(reproduction.seeds if arguments.seeds is None else arguments.seeds)
    if not seeds:
        raise InputError(f"--seeds must be at least 1, not {arguments.seeds}")
    if bool(arguments.text) != reproduction.takes_text:
        needs = "needs --text with at least one file" if reproduction.takes_text else "takes no --text"
        raise InputError(f"{arguments.setting} {needs}")
    texts = {"texts": arguments.text} if reproduction.takes_text else {}
    results = reproduction.function(seeds, out, overrides, **texts)
    page = out / "report.html"
    with atomic(page) as partial:
        partial.write_text(report_page(results.report), encoding="utf-8")
    seconds = time.monotonic() - begun
    if arguments.json:
        show_json(as_json(arguments.setting, seeds, results.verdicts, seconds))
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
