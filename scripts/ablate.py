"""Ablations of sparse modular addition: how often it is solved, over seeds, by whatever field of a run is varied.

    python scripts/ablate.py clustering-2d --vary training.optimizer.lr 1e-3 3e-3 1e-2 --vary model.d_mlp 8 32 128
    python scripts/ablate.py clustering-2d --recipe lr --seeds 32
    python scripts/ablate.py clustering --recipe k --training.steps 12800

Trains every combination of values on every seed, each run in a directory of its own, and writes runs.csv (a row for
each run), summary.csv (a row for each combination, with Wilson's 95 % interval of the share of seeds that solve the
task) and shares.html. What is there already is not trained again: the same command goes on where it was interrupted,
and with more seeds trains the new ones alone. Exit status: 0, or 2 for bad input.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fd_interp.ablation import SNAPSHOTS, grid, outcomes, summary
from fd_interp.command import exit_status
from fd_interp.config import InputError
from fd_interp.papers.clustering.settings import SETTINGS
from fd_interp.report.shares import share_figure
from fd_interp.reproduction import show_json, show_table, versions
from fd_interp.training.series import atomic

SEEDS = 16


class Recipe(NamedTuple):
    """A grid with a name."""

    axes: Mapping[str, tuple[str, ...]]
    about: str
    seeds: int = SEEDS
    epochs: int | None = None
    """Passes through the training set, where the number of steps is not the same for all."""


RECIPES = {
    "seed": Recipe({}, "nothing is varied, 100 seeds", seeds=100),
    "batch-size": Recipe(
        {"training.batch_size": tuple(str(2**power) for power in range(12))},
        "2^0 to 2^11, for 1000 epochs each, so that small batches take more steps",
        epochs=1000,
    ),
    "lr": Recipe(
        {"training.optimizer.lr": tuple(f"{lr:.3g}" for lr in np.geomspace(1, 1e-4, 20))}, "20 from 1 to 1e-4"
    ),
    "width": Recipe({"model.d_mlp": tuple(f"{d:.0f}" for d in np.geomspace(10, 10_000, 20))}, "20 from 10 to 10,000"),
    "d": Recipe({"model.d_model": ("2", "3", "4", "6", "8", "16")}, "coordinates, 2 to 16 (ours)"),
    "length": Recipe({"task.length": ("5", "6", "8", "10", "12", "14", "16")}, "symbols, 5 to 16 (ours)"),
    "k": Recipe({"task.k": ("2", "3", "4", "5", "6", "7", "8")}, "informative symbols, 2 to 8 (ours)"),
}
"""The grids of the paper's code, and what it has no grid of."""

COST = """cost: a step of 16 seeds takes a little more than a millisecond of one core, at the default width and batch
size of 32: some 80 seconds for clustering-paper, 25 for clustering-2d and 8 for clustering. Width 128 takes 1.6 times
as long, 1000 4 times, 10,000 30 times; batch size 1 0.7 times, 256 2.3 times, 2048 15 times. On clustering-paper, 16
seeds of a recipe keep one core busy for about 10 minutes (d, length, k), half an hour (lr), an hour (batch-size) or
three (width), and 100 seeds for 10 minutes (seed). All cores are used."""


def _parser() -> argparse.ArgumentParser:
    recipes = "\n".join(f"  {name:11} {recipe.about}" for name, recipe in RECIPES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"recipes:\n{recipes}\n\n{COST}\n\n"
        "Any field of the runs can follow, for all of them, as in: --training.steps 12800 --task.length 10",
        allow_abbrev=False,
    )
    parser.add_argument("setting", choices=SETTINGS)
    every = "a field of the run and its values; given several times, for all combinations"
    parser.add_argument("--vary", nargs="+", action="append", default=[], metavar=("FIELD", "VALUE"), help=every)
    parser.add_argument("--recipe", choices=RECIPES, help="a grid with a name, see below; --vary adds to it")
    parser.add_argument("--seeds", type=int, help=f"how many seeds, from 0 on (default: {SEEDS}, or the recipe's)")
    parser.add_argument("--epochs", type=int, help="passes through the training set, in place of the number of steps")
    often = "how often the accuracy is looked at on the way (default: %(default)s)"
    parser.add_argument("--snapshots", type=int, default=SNAPSHOTS, help=often)
    parser.add_argument("--out", type=Path, help="directory for all of it (default: runs/ablations/SETTING-FIELDS)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what the command line names."""
    arguments, overrides = _parser().parse_known_args(argv)
    return exit_status("ablate", lambda: ablate(arguments, overrides))


def ablate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Trains, measures, writes the tables and says what came out."""
    begun = time.monotonic()
    recipe = RECIPES[arguments.recipe] if arguments.recipe else Recipe({}, "")
    axes = dict(recipe.axes) | _varied(arguments.vary)
    number = recipe.seeds if arguments.seeds is None else arguments.seeds
    for option, value in (("seeds", number), ("snapshots", arguments.snapshots), ("epochs", arguments.epochs)):
        if value is not None and value < 1:
            raise InputError(f"--{option} must be at least 1, not {value}")
    epochs = recipe.epochs if arguments.epochs is None else arguments.epochs
    points = grid(SETTINGS[arguments.setting], axes, overrides, epochs=epochs, snapshots=arguments.snapshots)
    default = "-".join([arguments.setting, *(field.rsplit(".", 1)[-1] for field in axes)])
    out = arguments.out or Path("runs") / "ablations" / default
    runs = outcomes(points, range(number), out)
    shares = summary(points, runs)
    for table, name in ((runs, "runs.csv"), (shares, "summary.csv")):
        with atomic(out / name) as partial:
            table.to_csv(partial, index=False)
    with atomic(out / "shares.html") as partial:
        title = f"{arguments.setting}: share of {number} seeds that solve the task, 95 % intervals"
        share_figure(shares, list(points[0].values), title).write_html(partial, include_plotlyjs=True)
    seconds = time.monotonic() - begun
    if arguments.json:
        show_json(_as_json(arguments.setting, points[0].values, number, shares, out, seconds))
    else:
        show_table(list(shares.columns), [[_cell(value) for value in row] for row in shares.itertuples(index=False)])
        _say_diverged(shares)
        print(f"{seconds:.0f} seconds. Tables and figure: {out.resolve()}")
    return 0


def _varied(given: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    axes: dict[str, tuple[str, ...]] = {}
    for field, *values in given:
        if not values:
            raise InputError(f"--vary {field} needs values")
        if field in axes:
            raise InputError(f"--vary {field} is given twice; give all of its values at once")
        axes[field] = tuple(values)
    return axes


def _as_json(
    setting: str, varied: Mapping[str, object], seeds: int, shares: pd.DataFrame, out: Path, seconds: float
) -> dict[str, object]:
    return {
        "setting": setting,
        "varied": list(varied),
        "seeds": seeds,
        "summary": [dict(zip(shares.columns, row, strict=True)) for row in shares.astype(object).values.tolist()],
        "out": str(out.resolve()),
        "versions": versions(),
        "seconds": round(seconds, 1),
    }


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if np.isnan(value) else f"{value:.3g}" if abs(value) < 1 else f"{value:.0f}"
    return "" if value is None else str(value)


def _say_diverged(shares: pd.DataFrame) -> None:
    if diverged := int(shares.diverged.sum()):
        print(f"{diverged} of {int(shares.n.sum())} runs diverged, and count as not solved.")


if __name__ == "__main__":
    sys.exit(main())
