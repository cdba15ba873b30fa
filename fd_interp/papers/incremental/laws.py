"""Claims about several runs at once: how a stage depends on the initial scale, on the number of sequences, on theory.

The traces of the runs lie side by side in one, along an axis of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from fd_interp.claims import Claim, Evidence, Finding
from fd_interp.observation import Trace
from fd_interp.papers.incremental.acquisition import acquisitions, flattest_step, nearest_rung
from fd_interp.papers.incremental.claims import PAPER
from fd_interp.theory import incremental as theory

Array = np.ndarray
LINEAR = 0.995
"""Least squared correlation of a line."""
PREDICTED = 0.2
"""Relative difference of a step from the one predicted."""
RUNG_OF_SIZE = {100: 2, 1000: 3}
"""The rung on which early stopping halts, by the number of training sequences; settled after seeing seeds 0 to 4."""
MASS = 0.1
"""Attention by which a head may differ from what is predicted."""


def side_by_side(traces: Mapping[Any, Trace], axis: str) -> Trace:
    """Traces along a new axis, NaN where one has ended; variables that only some of them have are left out."""
    common = set.intersection(*(set(trace.data_vars) for trace in traces.values()))
    parts = [trace[sorted(map(str, common))].drop_vars("block_name", errors="ignore") for trace in traces.values()]
    return xr.concat(parts, dim=pd.Index(list(traces), name=axis), join="outer", combine_attrs="drop_conflicts")


def parting_step(trace: Trace) -> int | None:
    """The step at which the second block is learned, by loss: heads have parted."""
    return acquisitions(_to_its_end(trace))[1].by_loss


def _to_its_end(trace: Trace) -> Trace:
    """Without the steps of runs beside it that lasted longer."""
    return trace.dropna("step", subset=["loss"])


class Line(NamedTuple):
    """A least-squares line, and how much of the variance it explains."""

    slope: float
    r_squared: float


def line_through(x: Array, y: Array) -> Line:
    """The line of y over x."""
    return Line(float(np.polyfit(x, y, 1)[0]), float(np.corrcoef(x, y)[0, 1] ** 2))


def _breaking(evidence: Evidence) -> Finding:
    stds = evidence.trace["std"].values
    steps = [parting_step(evidence.trace.sel(std=std)) for std in stds]
    numbers: dict[str, float | int | None] = {"first": steps[0], "last": steps[-1]}
    if None in steps:
        return Finding(False, numbers)
    decades, parted = -np.log10(stds), np.array(steps, dtype=float)
    linear, square = line_through(decades, parted), line_through(decades**2, parted)
    numbers |= {"steps a decade": linear.slope, "r^2": linear.r_squared, "of the square": square.r_squared}
    return Finding(linear.r_squared > max(LINEAR, square.r_squared) and linear.slope > 0, numbers)


BREAKING = Claim(
    "breaking",
    "Under Adam the time until heads part grows with the logarithm of their initial differences",
    f"{PAPER}, Fig. 4, our law",
    f"the step at which block 2 is learned is linear in log(1 / std), r^2 > {LINEAR} and more than for its square",
    _breaking,
)


def stopped_at(trace: Trace) -> tuple[int, int]:
    """The step of the best held-out loss, where early stopping halts, and the nearest rung there."""
    trace = _to_its_end(trace)
    best = int(trace.loss.values.argmin())
    return int(trace.step[best]), int(nearest_rung(trace)[best])


def _early_stopping(evidence: Evidence) -> Finding:
    sizes = evidence.trace["sequences"].values.tolist()
    stops = {size: stopped_at(evidence.trace.sel(sequences=size)) for size in sizes}
    rungs = [stops[size][1] for size in sorted(stops)]
    numbers = {f"N = {size}: rung": stops[size][1] for size in sorted(stops)}
    numbers |= {f"N = {size}: step": stops[size][0] for size in sorted(stops)}
    as_expected = all(stops[size][1] == rung for size, rung in RUNG_OF_SIZE.items())
    return Finding(as_expected and rungs == sorted(rungs), numbers)


EARLY_STOPPING = Claim(
    "early-stopping",
    "The fewer sequences there are, the lower the rung on which early stopping halts",
    f"{PAPER}, Fig. 5",
    ", ".join(f"N = {size}: rung {rung}" for size, rung in RUNG_OF_SIZE.items()) + ", and never lower with more",
    _early_stopping,
)


def _flow_predicts(evidence: Evidence) -> Finding:
    model, flow = (evidence.trace.sel(origin=origin) for origin in ("model", "flow"))
    off: dict[str, float | None] = {}
    for block, (seen, expected) in enumerate(zip(acquisitions(model), acquisitions(flow), strict=True), start=1):
        step, predicted = seen.by_coefficient, expected.by_coefficient
        off[f"block {block} off"] = None if step is None or predicted is None else (step - predicted) / predicted
    mass = float(abs(model.block_mass - flow.block_mass).isel(step=-1).max())
    close = all(value is not None and abs(value) < PREDICTED for value in off.values())
    return Finding(close and mass < MASS, off | {"final attention off by": mass})


FLOW_PREDICTS = Claim(
    "flow",
    "The gradient flow from the run's own start says when each block is learned, and by which head",
    f"{PAPER}, Eq. (4), form J^2",
    f"each block within {PREDICTED:.0%} of the step, each head within {MASS} of the final attention; nothing fitted",
    _flow_predicts,
)


FIG_10 = theory.Target.of_lags((1.7**2, 1.7, 1.0), (1, 2, 3), 40)
"""The target of the authors' simulation: three single lags among forty, m = 1.7."""


def flow_of_fig_10(delta: float, *, seed: int, until: int, n_heads: int = 3) -> Trace:
    """The flow of the authors' Fig. 10, in the form "fisher" as theirs, from a small start."""
    start = theory.Heads.small(n_heads, FIG_10, delta, np.random.default_rng(seed))
    return theory.flow(start, FIG_10, steps=np.arange(0, until + 0.5, 0.5), form="fisher")


def escape_flows(deltas: Sequence[float], *, seed: int) -> Trace:
    """That flow until heads part, from several starts, side by side."""
    return side_by_side({delta: flow_of_fig_10(delta, seed=seed, until=250) for delta in deltas}, "delta")


def half_time(flow: Trace, block: int) -> float | None:
    """When half of a block is learned, interpolated between the steps; None where it is not."""
    share = flow.effective_coefficient.isel(block=block).values
    after = int(np.argmax(share > 0.5))
    if not after:
        return None
    around = slice(after - 1, after + 1)
    return float(np.interp(0.5, share[around], flow.step.values[around]))


def _escape(evidence: Evidence) -> Finding:
    """`sqrt(1 / s_2 + kappa tau)` against `log(1 / delta)`, tau from the half-time of block 1 to that of block 2."""
    deltas = evidence.trace["delta"].values
    measured, expected = [], []
    for delta in deltas:
        flow = evidence.trace.sel(delta=delta)
        n_heads = flow.sizes["head"]
        first, second = half_time(flow, 0), half_time(flow, 1)
        if first is None or second is None:
            return Finding(False, {"slope": None})
        s_2 = float(np.interp(first, flow.step, flow.block_mass[:, 0, :, 1].mean("head")))
        kappa = (FIG_10.strengths[0] ** 2 - FIG_10.strengths[1] ** 2) / n_heads
        measured.append(np.sqrt(1 / s_2 + kappa * (second - first)))
        expected.append(np.sqrt(1 / s_2 + kappa * theory.escape_time(FIG_10, n_heads, float(delta), s_2)))
    line, law = (line_through(np.log(1 / deltas), np.array(y)) for y in (measured, expected))
    numbers = {"slope": line.slope, "predicted": law.slope, "r^2": line.r_squared}
    return Finding(abs(line.slope / law.slope - 1) < 0.1 and line.r_squared > 0.999, numbers)


ESCAPE = Claim(
    "escape",
    "In the flow the first plateau lasts as log^2 of the initial differences, with the offset of its start",
    f"{PAPER}, our derivation",
    "slope within 10% of kappa / (2 m_2), r^2 > 0.999, over delta = 1e-3 to 1e-11",
    _escape,
)


def _flow_plateaus(evidence: Evidence) -> Finding:
    flow, rungs = evidence.trace, theory.ladder(FIG_10)
    numbers: dict[str, float | None] = {}
    for known in (1, 2):
        after, before = half_time(flow, known - 1), half_time(flow, known)
        step = None if after is None or before is None else flattest_step(flow, round(after), round(before))
        numbers[f"rung {known} off"] = None if step is None else float(flow.loss.sel(step=step) / rungs[known] - 1)
    on_rungs = all(value is not None and abs(value) < 0.01 for value in numbers.values())
    numbers["final loss"] = final = float(flow.loss[-1])
    return Finding(on_rungs and final < 0.01 * float(rungs[0]), numbers)


FLOW_PLATEAUS = Claim(
    "flow-plateaus",
    "Plateaus of the flow are the rungs of the ladder",
    f"{PAPER}, regression variant",
    "each within 1% of L_k, the last below 1% of L_0",
    _flow_plateaus,
)


def _offset_identity(evidence: Evidence) -> Finding:
    """In the middle of the second plateau, which must be there."""
    flow = evidence.trace.isel(layer=0)
    second, third = half_time(flow, 1), half_time(flow, 2)
    if second is None or third is None:
        return Finding(False, {"predicted": None, "measured": None})
    at = flow.sel(step=(second + third) / 2, method="nearest")
    owner = int(at.block_mass.values[:, 1].argmax())
    offset = theory.offset(at.block_mass.values, at.value_coefficient.values, block=0, feature=1, owner=owner)
    return Finding(abs(offset.measured / offset.predicted - 1) < 0.02, offset._asdict())


OFFSET_IDENTITY = Claim(
    "offset-identity",
    "On the second plateau the other heads' values of feature 2 cancel what its owner writes of it on block 1",
    f"{PAPER}, Sec. 3.3, our identity",
    "sum_k v_k2 s_k1 = 0 within 2%",
    _offset_identity,
)
