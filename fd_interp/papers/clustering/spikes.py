"""Why does the loss spike? What is reproduced of it, and the experiment that changes one thing at a time."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from fd_interp.claims import Claim, Evidence, Finding, Verdict, judge, judge_control
from fd_interp.config import InputError
from fd_interp.observation import Probe, Trace
from fd_interp.overrides import override
from fd_interp.papers import clustering as paper
from fd_interp.papers.clustering.arms import (
    ARMS,
    BASE,
    SETTLING,
    SOLVING,
    UNCHANGED,
    W_V,
    Effect,
    arm_run,
    effects,
    epochs,
    spikes_per_100_epochs,
)
from fd_interp.probes.curvature import halving, loss_curvature, movement
from fd_interp.probes.spikes import (
    LossSpike,
    highest,
    loss_spikes,
    observe_spikes,
    quiet_windows,
    spike_table,
    training_losses,
)
from fd_interp.report.figures import COLOURS, GRID, scatter_figure
from fd_interp.report.page import Report, Section
from fd_interp.reproduction import Job, Results, in_parallel, jobs_of, seeded, summary, versions
from fd_interp.training.ensemble import train_together
from fd_interp.training.run import Run
from fd_interp.training.series import Series, atomic, open_series

MOST = 2
"""Spikes looked at in each seed, the highest, and as many windows without one."""
TOGETHER = 10
"""Seeds in one ensemble, so that two cores share them."""
W_IN = "blocks.0.mlp.W_in"
RISE = 3.0
"""How many times the sharpness before a spike counts as having shot up."""
ON_ONE_WEIGHT = 0.9
"""Share of the eigenvector's squared mass from which the sharpest direction counts as that of one weight."""
FOURFOLD = (3.0, 5.0)
"""What halving W_V multiplies the sharpness by, where the norm behind it makes the curvature."""


def on_spikes(seeds: Sequence[int], out: Path, overrides: Sequence[str]) -> Results:
    """The paper's setting on so many of the seeds that are known to solve it, and every arm from their fork on."""
    if len(seeds) > len(SOLVING):
        raise InputError(f"--seeds: {len(SOLVING)} seeds are known to solve the task, so there are no {len(seeds)}")
    out = out.resolve()  # arms start from snapshots that are named with their path
    chosen = SOLVING[: len(seeds)]
    base = override(BASE, overrides)
    in_parallel(_trained, jobs_of("base", base, chosen, out, together=TOGETHER))
    folders = [out / "base" / f"seed-{seed}" for seed in chosen]
    spikes = _table(in_parallel(_measured, folders, where=_spikes))
    quiet = _table(in_parallel(_measured, folders, where=_quiet))
    by_w_in = _table(in_parallel(_halved_w_in, folders))
    rates = dict(zip(ARMS, in_parallel(_rates, list(ARMS), base=base, seeds=chosen, out=out), strict=True))
    found = effects(rates)
    _write(spikes, out / "spikes.csv")
    _write(_of_arms(rates, chosen), out / "arms.csv")

    verdicts = [_judged(claim, spikes) for claim in (SHARPNESS_UP, FOURFOLD_WHEN_HALVED, ON_W_V)]
    verdicts.append(_control(SHARPNESS_UP, quiet, spikes, "windows without a spike"))
    verdicts.append(_control(FOURFOLD_WHEN_HALVED, by_w_in, spikes, "W_in is halved, which no norm follows"))
    verdicts.append(judge(FEWER_WHEN_HELD, [Evidence(_as_trace(found), {})], where="arms"))
    shown = [_section_of_spikes(spikes, quiet), _section_of_arms(rates, found)]
    title = "Clustering heads: why the loss spikes"
    return Results(verdicts, Report(title, paper.PAPER, summary(verdicts, chosen), verdicts, shown, versions()))


def _rates(name: str, *, base: Run, seeds: Sequence[int], out: Path) -> list[float]:
    """Trains an arm on all seeds, and counts."""
    runs = [
        arm_run(
            ARMS[name],
            seeded(base, seed),
            open_series(out / "base" / f"seed-{seed}"),
            out / "starts" / name / f"{seed}",
        )
        for seed in seeds
    ]
    series = train_together(runs, [out / name / f"seed-{seed}" for seed in seeds], show_progress=False)
    return [spikes_per_100_epochs(one, epochs(base, SETTLING)) for one in series]


def _trained(job: Job) -> None:
    train_together(job.runs, job.directories, show_progress=False)


Where = Callable[[Series], list[LossSpike]]


def _spikes(series: Series) -> list[LossSpike]:
    return highest(loss_spikes(training_losses(series), series.steps), MOST)


def _quiet(series: Series) -> list[LossSpike]:
    return quiet_windows(training_losses(series), series.steps, MOST)


def _measured(directory: Path, *, where: Where) -> pd.DataFrame:
    """What is seen at some places of the training of a seed."""
    series = open_series(directory)
    assert series.run is not None
    asked = [halving(series.run, W_V), loss_curvature(series.run), movement()]
    return _seen(series, asked, where(series))


def _halved_w_in(directory: Path) -> pd.DataFrame:
    """What halving W_in does before the spikes."""
    series = open_series(directory)
    assert series.run is not None
    before = [spike._replace(at=None, after=None) for spike in _spikes(series)]
    return _seen(series, [halving(series.run, W_IN), loss_curvature(series.run)], before)


def _seen(series: Series, asked: Sequence[Probe], places: Sequence[LossSpike]) -> pd.DataFrame:
    assert series.run is not None
    table = spike_table(observe_spikes(series, asked, places), W_V)
    table.insert(0, "seed", series.run.seed)
    return table


def _table(of_seeds: Sequence[pd.DataFrame]) -> pd.DataFrame:
    seen = [table for table in of_seeds if len(table)]
    if not seen:
        raise InputError("no seed's loss spikes, so there is nothing to look at; train for longer (--training.steps)")
    return pd.concat(seen, ignore_index=True)


def _sharpness_up(evidence: Evidence) -> Finding:
    ratios = evidence.trace.sharpness_ratio.dropna("index")
    up = int((ratios >= RISE).sum())
    numbers = {"looked at": ratios.size, "up": up, "median ratio": float(ratios.median())}
    return Finding(ratios.size > 0 and up > ratios.size / 2, numbers)


def _fourfold(evidence: Evidence) -> Finding:
    table = evidence.trace.dropna("index", subset=["halved_sharpness_ratio_before"])
    ratios, lie = table.halved_sharpness_ratio_before, table.sharpness_mass_before > ON_ONE_WEIGHT
    within = (ratios >= FOURFOLD[0]) & (ratios <= FOURFOLD[1])
    numbers = {
        "looked at": ratios.size,
        "4 ± 1": int(within.sum()),
        "median": float(ratios.median()),
        "along W_V": int(lie.sum()),
        "of these 4 ± 1": int((within & lie).sum()),
    }
    return Finding(int((within & lie).sum()) > int(lie.sum()) / 2, numbers)


def _on_w_v(evidence: Evidence) -> Finding:
    mass = evidence.trace.sharpness_mass_at.dropna("index")
    most = int((mass > 0.5).sum())
    return Finding(
        most > mass.size / 2, {"looked at": mass.size, "more than half": most, "median": float(mass.median())}
    )


SHARPNESS_UP = Claim(
    "sharpness-up",
    "The largest eigenvalue of the Hessian shoots up at a loss spike.",
    f"{paper.PAPER}, loss spikes from the curvature of normalisation; the statistic is ours",
    f"at least {RISE:g} times that of the last quiet snapshot, in most spikes",
    _sharpness_up,
)
FOURFOLD_WHEN_HALVED = Claim(
    "fourfold-when-halved",
    "Where the sharpest direction is that of W_V, the curvature is the norm's: with W_V halved it is fourfold.",
    "ours; of all spikes together about half are within 4 ± 1, and that more would be does not hold",
    f"4 ± 1 times the sharpness, in most spikes with {ON_ONE_WEIGHT} of the eigenvector on W_V before them",
    _fourfold,
)
ON_W_V = Claim(
    "on-w-v",
    "The sharpest direction is that of W_V, whose output the norm divides.",
    "ours",
    "more than half of the eigenvector's squared mass at the spike, in most of them",
    _on_w_v,
)


def _fewer_when_held(evidence: Evidence) -> Finding:
    held = evidence.trace.sel(arm="w-v-held")
    numbers = {"spikes in 100 epochs": float(held.rate), **_interval(held)}
    return Finding(float(held.high) < 0, numbers)


def _interval(arm: Trace) -> dict[str, float | int | None]:
    return {"more than unchanged": float(arm.difference), "from": float(arm.low), "to": float(arm.high)}


FEWER_WHEN_HELD = Claim(
    "fewer-when-w-v-held",
    "Part of the spikes comes from moving W_V: with it held they are rarer.",
    "ours",
    "95 % interval of the difference to the unchanged arm below zero",
    _fewer_when_held,
)


def _judged(claim: Claim, table: pd.DataFrame) -> Verdict:
    return judge(claim, [Evidence(xr.Dataset.from_dataframe(table), {})], where="spikes")


def _control(claim: Claim, table: pd.DataFrame, paired: pd.DataFrame, taken_away: str) -> Verdict:
    seen, own = ([Evidence(xr.Dataset.from_dataframe(each), {})] for each in (table, paired))
    return judge_control(claim, seen, where="spikes", control=taken_away, paired=own)


def _as_trace(found: Mapping[str, Effect]) -> Trace:
    table = pd.DataFrame([effect._asdict() for effect in found.values()], index=pd.Index(list(found), name="arm"))
    return xr.Dataset.from_dataframe(table)


def _of_arms(rates: Mapping[str, Sequence[float]], seeds: Sequence[int]) -> pd.DataFrame:
    """A row for each arm and seed."""
    wide = pd.DataFrame(rates, index=pd.Index(seeds, name="seed"))
    return wide.melt(ignore_index=False, var_name="arm", value_name="spikes_per_100_epochs").reset_index()


def _write(table: pd.DataFrame, file: Path) -> None:
    with atomic(file) as partial:
        table.to_csv(partial, index=False)


SPIKES_TEXT = (
    "The highest spikes of each seed, and as many windows without one. Left: sharpness, the largest eigenvalue of the "
    "Hessian, in the last quiet snapshot and at the height of the spike; above the dotted line it has risen. Right: "
    "what halving W_V does to sharpness and loss before the spike. Sharpness follows the loss (random changes of the "
    "weights that raise the loss as much raise it as much), and that the norm makes the curvature is as true where "
    "nothing spikes: neither says by itself why the loss spikes. The next section changes one thing at a time."
)
ARMS_TEXT = (
    "Every arm goes on from the same snapshot of the same seeds (epoch 600) with one change, 300 epochs long, of which "
    "the first hundred are not counted. Bars: 95 % intervals of the difference to the unchanged arm, by bootstrap over "
    "seeds. Arms whose intervals overlap are not told apart, and only that of W_V held is claimed. Plain gradient "
    "descent at this rate hardly moves, and without the norm most seeds lose what they had learned: that they do not "
    "spike says little."
)


def _section_of_spikes(spikes: pd.DataFrame, quiet: pd.DataFrame) -> Section:
    kinds = {"spikes": spikes, "quiet windows": quiet}
    risen = {name: _points(table, "sharpness_before", "sharpness_at") for name, table in kinds.items()}
    ratios = ("halved_loss_ratio_before", "halved_sharpness_ratio_before")
    halved = {name: _points(table, *ratios) for name, table in kinds.items()}
    left = scatter_figure("Sharpness", "in the last quiet snapshot", "at the spike", risen, diagonal=True)
    left.update_xaxes(type="log").update_yaxes(type="log")
    right = scatter_figure("With W_V halved", "times the loss", "times the sharpness", halved)
    return Section("Around spikes", SPIKES_TEXT, figures=[left, right])


def _points(table: pd.DataFrame, x: str, y: str) -> list[tuple[float, float, str]]:
    return [
        (row[x], row[y], f"seed {row['seed']}, step {row['start']:.0f}: loss {row['height']:.3g}")
        for row in table.dropna(subset=[x, y]).to_dict("records")
    ]


def _section_of_arms(rates: Mapping[str, Sequence[float]], found: Mapping[str, Effect]) -> Section:
    names = [ARMS[name].what for name in found]
    difference = [effect.difference for effect in found.values()]
    error: Any = {
        "array": [effect.high - effect.difference for effect in found.values()],
        "arrayminus": [effect.difference - effect.low for effect in found.values()],
    }
    bars = go.Scatter(
        x=difference,
        y=names,
        error_x=error,
        mode="markers",
        marker={"color": COLOURS[0], "size": 10},
        customdata=[[effect.rate, effect.standardized] for effect in found.values()],
        hovertemplate="%{customdata[0]:.2f} spikes in 100 epochs, d = %{customdata[1]:.2f}<extra></extra>",
    )
    figure = go.Figure(bars).update_yaxes(autorange="reversed", gridcolor=GRID)
    figure.add_vline(x=0, line={"color": "#999", "dash": "dot"})
    figure.update_xaxes(title="spikes in 100 epochs, more than unchanged", gridcolor=GRID)
    unchanged = found[UNCHANGED].rate
    title = f"What changes how often the loss spikes (unchanged: {unchanged:.2f} in 100 epochs)"
    figure.update_layout(template="plotly_white", height=460, title={"text": title, "font": {"size": 14}, "x": 0.02})
    return Section("One change at a time", f"{ARMS_TEXT} {len(rates[UNCHANGED])} seeds.", wide_figures=[figure])
