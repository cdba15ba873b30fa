"""Does a model that has learned p = 2 learn p = 3 or p = 4 sooner? Fine-tuning beside training from random weights.

The same seeds are trained on the larger p from three starts: their own random weights, what they became on p = 2, and,
as a control, what they became on p = 2 with shuffled labels, after as many steps in which nothing could be learned but
by heart. Data and optimizer are new each time, as in the paper's code. Seeds of which p = 2 was learned and those of
which it was not are looked at apart; random weights of the same seeds are the comparison for both, so that seeds which
are good for any p do not count as transfer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float
from scipy.stats import binomtest

from fd_interp.claims import Claim, Evidence, Finding, Verdict, judge, judge_control
from fd_interp.observation import Probe, Trace
from fd_interp.overrides import override
from fd_interp.papers.clustering.circuits import circuit
from fd_interp.papers.clustering.claims import PAPER, share_of
from fd_interp.papers.clustering.settings import CLUSTERING, STEPS_PER_EPOCH, probes
from fd_interp.probes.prediction import accuracy, held_out_loss
from fd_interp.report.figures import points_figure, scatter_figure
from fd_interp.report.page import Report, Section
from fd_interp.report.shares import share_figure
from fd_interp.reproduction import Job, Results, jobs_of, summary, traces_of_jobs, versions
from fd_interp.stages import first_step
from fd_interp.training.run import Every, Given, Run, Start
from fd_interp.training.series import atomic
from fd_interp.training.state import snapshot_name

FIRST_SEED = 16
"""The seeds before were looked at when it was decided what to claim, and for how many steps to train."""
TOGETHER = 16
STEPS = 200 * STEPS_PER_EPOCH
"""Of training on p = 2, and of fine-tuning; twice as many from random weights, to be compared at equal totals too."""
LEVELS = (0.9, 0.98)
"""Accuracies whose first steps are recorded; the second is that of a solved task."""
SIGNIFICANCE = 0.05
LARGER, CLAIMED = (3, 4), (3,)
"""Sizes that are trained on, and those of which a gain is claimed: too few seeds learn p = 4 in as many steps."""
DIRECT, TUNED, SHUFFLED = "random weights", "after p = 2", "after shuffled labels"
TABLE_FILE = "transfer.csv"

BASE = CLUSTERING.model_copy(
    update={
        "training": CLUSTERING.training.model_copy(update={"steps": STEPS}),
        "keep": CLUSTERING.keep.model_copy(update={"at": Every(stride=5 * STEPS_PER_EPOCH)}),
    }
)


class Transfer(NamedTuple):
    """One larger p, and what is trained for it; runs of one case differ in seeds, and starts, alone."""

    p: int
    source: Run
    shuffled: Run
    direct: Run
    tuned: Run
    """Without its start."""


def transfer_to(p: int, base: Run) -> Transfer:
    """What is to be trained: the base on p = 2, with room for p symbols, and on p."""
    task = base.task.model_copy(update={"p": 2, "least_vocab": max(p, 3)})
    ends = base.keep.model_copy(update={"at": Given()})
    source = base.model_copy(update={"task": task, "keep": ends})
    tuned = base.model_copy(update={"task": task.model_copy(update={"p": p})})
    longer = tuned.training.model_copy(update={"steps": 2 * tuned.training.steps})
    shuffled = source.model_copy(update={"task": task.model_copy(update={"shuffled": True})})
    return Transfer(p, source, shuffled, tuned.model_copy(update={"training": longer}), tuned)


def on_transfer(seeds: Sequence[int], out: Path, overrides: Sequence[str]) -> Results:
    """p = 2 before p = 3 and before p = 4, in eight coordinates, on seeds that begin at `FIRST_SEED`."""
    out = out.resolve()  # snapshots that a run starts from are named in it
    seeds = [FIRST_SEED + seed for seed in seeds]
    base = override(BASE, overrides)
    transfers = [transfer_to(p, base) for p in LARGER]
    sources = traces_of_jobs([job for each in transfers for job in _first_jobs(each, seeds, out)], _measured)
    tuned = traces_of_jobs([job for each in transfers for job in _second_jobs(each, seeds, out)], _measured)
    traces = sources | tuned
    found = {each.p: comparison(each, traces, seeds) for each in transfers}
    _write_table(found, out)
    verdicts = [verdict for p in CLAIMED for verdict in _verdicts(found[p], f"p-{p}")]
    shown = [_section(each, found[each.p]) for each in transfers]
    title = "Clustering heads: from p = 2 to larger p"
    return Results(verdicts, Report(title, PAPER, summary(verdicts, seeds), verdicts, shown, versions()))


def _measured(run: Run) -> list[Probe]:
    """Everything at the two ends of what is trained on p = 2, and accuracy alone on the larger p."""
    p = getattr(run.task, "p", 2)
    return probes(run) if p == 2 else [held_out_loss(run.queries), accuracy(run.queries)]


def _first_jobs(transfer: Transfer, seeds: Sequence[int], out: Path) -> list[Job]:
    cases = {"direct": transfer.direct, "source": transfer.source, "shuffled": transfer.shuffled}
    return [
        job
        for name, run in cases.items()
        for job in jobs_of(_case(name, transfer.p), run, seeds, out, together=TOGETHER)
    ]


def _second_jobs(transfer: Transfer, seeds: Sequence[int], out: Path) -> list[Job]:
    last = snapshot_name(transfer.source.training.steps)
    jobs = []
    for source, name in (("source", "tuned"), ("shuffled", "control")):
        for job in jobs_of(_case(name, transfer.p), transfer.tuned, seeds, out, together=TOGETHER):
            files = [out / _case(source, transfer.p) / f"seed-{run.seed}" / "weights" / last for run in job.runs]
            runs = zip(job.runs, files, strict=True)
            jobs.append(job._replace(runs=[_starting(run, file) for run, file in runs]))
    return jobs


def _starting(run: Run, file: Path) -> Run:
    return run.model_copy(update={"start": Start(snapshot=str(file))})


def _case(name: str, p: int) -> str:
    return f"p-{p}-{name}"


def comparison(transfer: Transfer, traces: Mapping[str, Sequence[Trace]], seeds: Sequence[int]) -> Trace:
    """Every seed from every start: the first kept steps at which accuracy passes the levels, NaN where it does not.

    `source` is the name of the circuit that p = 2 has ended as. Random weights are trained for twice the steps of the
    attribute `steps`, which is how long all starts can be compared.
    """
    cases = {DIRECT: "direct", TUNED: "tuned", SHUFFLED: "control"}
    sources = [circuit(trace) for trace in traces[_case("source", transfer.p)]]
    steps = transfer.tuned.training.steps
    of_start = [traces[_case(case, transfer.p)] for case in cases.values()]
    first = [[[_first(trace, level) for level in LEVELS] for trace in of_seeds] for of_seeds in of_start]
    reached = [[_accuracy_at(trace, steps) for trace in of_seeds] for of_seeds in of_start]
    return xr.Dataset(
        {
            "first": (("start", "seed", "level"), first),
            "accuracy": (("start", "seed"), reached),
            "source": ("seed", [one.name for one in sources]),
            "source_solved": ("seed", [one.solved for one in sources]),
        },
        coords={"start": list(cases), "seed": list(seeds), "level": list(LEVELS)},
        attrs={"steps": steps},
    )


def _first(trace: Trace, level: float) -> float:
    step = first_step(trace.accuracy > level)
    return np.nan if step is None else step


def _accuracy_at(trace: Trace, step: int) -> float:
    """Of the last snapshot until then: one that has diverged has none later."""
    return float(trace.accuracy.sel(step=slice(0, step))[-1])


class Paired(NamedTuple):
    """One start beside random weights of the same seeds."""

    sooner: int
    """Seeds that reach the level sooner, or alone."""
    later: int
    """Seeds that reach it later, or only from random weights; on all others there is a tie."""
    p_value: float
    """Of a sign test whether sooner is more frequent than later; ties say nothing. 1 where there are only ties."""
    superiority: float
    """Chance that a seed is sooner, ties counted as one half: 1/2 where the start makes no difference."""


def paired(
    other: Float[np.ndarray, " seed"], direct: Float[np.ndarray, " seed"], *, steps: float | int = np.inf
) -> Paired:
    """Compares the steps at which each seed reaches a level, NaN where it never does, or does after `steps`."""
    ours, theirs = (np.where(first <= steps, first, np.inf) for first in (other, direct))
    sooner, later = int((ours < theirs).sum()), int((ours > theirs).sum())
    decided = sooner + later
    p_value = float(binomtest(sooner, decided, alternative="greater").pvalue) if decided else 1.0
    superiority = (sooner + (len(ours) - decided) / 2) / len(ours) if len(ours) else np.nan
    return Paired(sooner, later, p_value, superiority)


def beside_direct(found: Trace, start: str, *, solved: bool) -> Trace:
    """One start and random weights, of the seeds that have learned p = 2, or of those that have not."""
    chosen = found.sel(seed=found.source_solved == solved, start=[DIRECT, start])
    return chosen.assign_coords(start=["direct", "other"])


def _sooner(evidence: Evidence) -> Finding:
    found = evidence.trace.sel(level=LEVELS[-1])
    steps = found.attrs["steps"]
    direct, other = (found["first"].sel(start=start).values for start in ("direct", "other"))
    seen = paired(other, direct, steps=steps)
    numbers = {
        "seeds": len(direct),
        "solved": int((other <= steps).sum()),
        "solved from random weights": int((direct <= steps).sum()),
        "sooner": seen.sooner,
        "later": seen.later,
        "p": seen.p_value,
        "superiority": seen.superiority,
    }
    return Finding(seen.p_value < SIGNIFICANCE, numbers)


SOONER = Claim(
    "sooner",
    "What has learned p = 2 learns a larger p sooner than the same seed does from random weights.",
    "ours, of the fine-tuning in the code of " + PAPER,
    f"accuracy above {LEVELS[-1]} sooner on more seeds than later, never being latest: p < {SIGNIFICANCE} in a "
    "one-sided sign test over seeds",
    _sooner,
)


def _verdicts(found: Trace, where: str) -> list[Verdict]:
    """The claim, and where it must fail: after shuffled labels, and where p = 2 was not learned."""
    tuned = _evidence(found, TUNED, solved=True)
    controls = (
        ("shuffled", "labels of p = 2 change places", _evidence(found, SHUFFLED, solved=True)),
        ("unsolved", "p = 2 was trained on but not learned", _evidence(found, TUNED, solved=False)),
    )
    return [judge(SOONER, tuned, where=where)] + [
        judge_control(SOONER, seen, where=f"{where}/{name}", control=taken_away, paired=tuned)
        for name, taken_away, seen in controls
    ]


def _evidence(found: Trace, start: str, *, solved: bool) -> list[Evidence]:
    """All of these seeds together; nothing where there are none, since that shows nothing."""
    trace = beside_direct(found, start, solved=solved)
    return [Evidence(trace, {})] if trace.sizes["seed"] else []


def shares(found: Trace) -> pd.DataFrame:
    """The share solved from each start, of the seeds that have learned p = 2 and of the others, after equal steps."""
    rows = []
    for name, chosen in (("learned", True), ("not learned", False)):
        seeds = found.sel(seed=found.source_solved == chosen, level=LEVELS[-1])
        for start in found["start"].values:
            n, solved = seeds.sizes["seed"], int((seeds["first"].sel(start=start) <= found.attrs["steps"]).sum())
            if n:
                low, high = share_of(solved, n)
                rows.append((start, name, n, solved, solved / n, low, high))
    return pd.DataFrame(rows, columns=["start", "p = 2", "n", "solved", "share", "low", "high"])


def at_equal_totals(found: Trace) -> Paired:
    """All seeds, the steps on p = 2 counted too: whether to begin with p = 2 is worth its steps."""
    return paired(*_counting_all(found), steps=2 * found.attrs["steps"])


def _counting_all(found: Trace) -> tuple[Float[np.ndarray, " seed"], Float[np.ndarray, " seed"]]:
    """Steps from the very beginning to a solved task, by way of p = 2 and directly."""
    first = found["first"].sel(level=LEVELS[-1])
    return first.sel(start=TUNED).values + found.attrs["steps"], first.sel(start=DIRECT).values


def _section(transfer: Transfer, found: Trace) -> Section:
    steps = found.attrs["steps"]
    title = f"Share that solves p = {transfer.p} within {steps} steps"
    figures = [_over_steps(found, transfer.p), _sooner_or_later(found)]
    wide = [share_figure(shares(found), ["start", "p = 2"], title)]
    return Section(f"From p = 2 to p = {transfer.p}", _text(transfer, found), figures=figures, wide_figures=wide)


def _over_steps(found: Trace, p: int) -> go.Figure:
    """The share of seeds that have solved the task by each step, of those that have learned p = 2."""
    first = found["first"].sel(level=LEVELS[-1], seed=found.source_solved)
    steps = np.linspace(0, found.attrs["steps"], 41)[1:]
    arrived = {str(start): (first.sel(start=start).values <= steps[:, None]) for start in found["start"].values}
    series = {start: by_step.mean(1).tolist() for start, by_step in arrived.items() if by_step.size}
    return points_figure("Seeds that have learned p = 2", f"step on p = {p}", "share solved", steps.tolist(), series)


def _sooner_or_later(found: Trace) -> go.Figure:
    """When each seed solves the task, from random weights and after p = 2, by what it was on p = 2."""
    first, never = found["first"].sel(level=LEVELS[-1]), 2.0 * found.attrs["steps"]
    pairs = first.sel(start=[DIRECT, TUNED]).fillna(never).transpose("seed", "start").values.tolist()
    points = [(*pair, f"seed {seed}") for pair, seed in zip(pairs, found.seed.values, strict=True)]
    kinds = {kind: [point for point, one in zip(points, found.source.values, strict=True) if one == kind]
             for kind in _kinds(found)}  # fmt: skip
    title = f"Step of accuracy {LEVELS[-1]} (never: {never:.0f})"
    return scatter_figure(title, DIRECT, TUNED, kinds, diagonal=True)


def _kinds(found: Trace) -> list[str]:
    return sorted({str(name) for name in found.source.values})


def _text(transfer: Transfer, found: Trace) -> str:
    counts = "; ".join(
        f"p = 2 {row[1]}, {row[0]}: {row[3]} of {row[2]} ({row[5]:.2f} to {row[6]:.2f})"
        for row in shares(found).itertuples(index=False)
    )
    steps, totals = found.attrs["steps"], at_equal_totals(found)
    by_way, direct = (int((arrived <= 2 * steps).sum()) for arrived in _counting_all(found))
    gain = paired(*beside_direct(found, TUNED, solved=True)["first"].values[::-1, :, -1], steps=steps)
    claimed = "" if transfer.p in CLAIMED else ", which is not claimed"
    return (
        f"The same seeds on p = {transfer.p}, from their random weights, from what they became on p = 2, and from what "
        f"they became on p = 2 with shuffled labels; new data, a new optimizer, {steps} steps each. Solved, with 95 % "
        f"intervals: {counts}. Of those that have learned p = 2, {gain.sooner} solve it sooner than from random "
        f"weights and {gain.later} later (p = {gain.p_value:.2g}){claimed}. {_by_circuit(found)} It is not claimed "
        f"that p = 2 is worth its price: with {2 * steps} steps in all, over all {found.sizes['seed']} seeds, {by_way} "
        f"solve the task by way of p = 2 and {direct} directly; by way of it {totals.sooner} are sooner and "
        f"{totals.later} later (p = {totals.p_value:.2g})."
    )


def _by_circuit(found: Trace) -> str:
    """Whether clustering heads are what carries over; too few seeds have become anything else to claim it."""
    reached = found["first"].sel(level=LEVELS[-1], start=TUNED).values <= found.attrs["steps"]
    kinds = {name: found.source.values == name for name in _kinds(found)}
    parts = [f"{name} {reached[chosen].sum()} of {chosen.sum()}" for name, chosen in kinds.items()]
    return f"Solved after p = 2, by what the seed had become there: {', '.join(parts)}."


def table(found: Trace) -> pd.DataFrame:
    """A row for each seed and start."""
    rows = [
        {
            "seed": int(seed),
            "source": str(found.source.sel(seed=seed).values),
            "source_solved": bool(found.source_solved.sel(seed=seed)),
            "start": str(start),
            "accuracy": float(found.accuracy.sel(seed=seed, start=start)),
        }
        | {f"first_above_{level}": float(found["first"].sel(seed=seed, start=start, level=level)) for level in LEVELS}
        for seed in found.seed.values
        for start in found["start"].values
    ]
    return pd.DataFrame(rows)


def _write_table(found: Mapping[int, Trace], out: Path) -> None:
    parts = [table(trace).assign(p=p) for p, trace in found.items()]
    with atomic(out / TABLE_FILE) as partial:
        pd.concat(parts).to_csv(partial, index=False)
