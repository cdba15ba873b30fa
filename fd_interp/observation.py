"""From a series of snapshots to a trace: named measurements with labelled axes, one row per step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xarray as xr
from einops import repeat
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.tasks.task import Batch
from fd_interp.training.series import Series
from fd_interp.training.threads import torch_threads

T = TypeVar("T")
Trace = xr.Dataset
"""Dims are among step, layer, head, token and seed; each variable has `long_name`, `units` and `source`."""

LOGITS = "logits"
"""What a probe names beside hooks when it reads the model's output."""


class Variable(NamedTuple):
    """One column of a trace: its dims after `step`, and what its numbers mean."""

    dims: tuple[str, ...]
    long_name: str
    source: str
    units: str = "1"
    names: Mapping[str, Sequence[str]] = {}
    """What the places along an axis are, if numbers do not say it; in the trace they are the coordinate `AXIS_name`."""


@dataclass(frozen=True)
class Observation:
    """What a probe may look at, at one step."""

    weights: lens.Weights
    previous: lens.Weights
    """Weights of the snapshot before; at the first, these weights."""
    first: lens.Weights
    cache: dict[str, Tensor]
    batch: Batch
    frequencies: Float[Tensor, " vocab"]
    kept: dict[str, Any] = field(default_factory=dict)
    """What probes have kept with `once`."""
    stored: Callable[[], dict[str, Tensor]] = dict
    """Reads what training kept of this step beside the weights (`Snapshot.activations`); empty if nothing."""
    step: int = 0
    """Training steps taken until this snapshot."""

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """What stays the same from snapshot to snapshot: computed at the first, and kept for the series."""
        if name not in self.kept:
            self.kept[name] = compute()
        return self.kept[name]

    def stacked(self, name: str, weights: lens.Weights | None = None) -> Float[Tensor, "layer head rows columns"]:
        """A per-head weight (`"W_Q"`) of all layers; keys and values shared by query heads are repeated for each."""
        weights = self.weights if weights is None else weights
        n_heads = len(weights["blocks.0.attn.W_Q"])
        layers = []
        while (prefix := f"blocks.{len(layers)}.attn.") + "W_Q" in weights:
            shared = weights.get(f"{prefix}{name}", weights.get(f"{prefix}_{name}"))
            if shared is None:
                raise InputError(f"the snapshot has no weight {prefix}{name}")
            layers.append(repeat(shared, "group m d -> (group copies) m d", copies=n_heads // len(shared)))
        return torch.stack(layers)

    def activations(self, act_name: str) -> list[Tensor]:
        """A hook's activation (`"pattern"`) in each layer."""
        end = f".hook_{act_name}"
        return [value for name, value in self.cache.items() if name.endswith(end)]


@dataclass(frozen=True)
class Probe:
    """A question about every snapshot: which hooks it reads, and what it measures there.

    `measure` returns one tensor for each of `variables`, shaped by that variable's dims.
    """

    name: str
    variables: dict[str, Variable]
    measure: Callable[[Observation], dict[str, Tensor]]
    hooks: tuple[str, ...] = field(default=())
    """Full hook names, short ones that stand for every layer (`"pattern"`), or `"logits"`."""


def observe(
    series: Series, probes: Sequence[Probe], batch: Batch | None = None, *, show_progress: bool = False
) -> Trace:
    """Runs each snapshot once on the batch, however many probes there are, and collects what they measure.

    Args:
        batch: sequences to run on; None takes the series' own held-out batch.

    Raises:
        InputError: two probes measure the same variable, or name an axis differently; a probe names a hook that does
            not exist, or measures other variables or axes than it declares; or the series changes shape.
    """
    variables = _declared(probes)
    batch = series.inputs.held_out if batch is None else batch
    model = series.build()
    _check_batch(batch, model)
    wanted = {hook for probe in probes for hook in probe.hooks}
    asked = lens.resolve_hooks(model, sorted(wanted - {LOGITS}))
    hooks = [hook for hook in lens.hook_names(model) if hook in asked]  # in the order of the layers
    rows: list[dict[str, np.ndarray]] = []
    first = previous = None
    kept: dict[str, Any] = {}
    threads = series.run.threads if series.run else torch.get_num_threads()
    with torch_threads(threads):
        for snapshot in tqdm(series, disable=None if show_progress else True, unit="snapshot", desc="observe"):
            weights = _same_shapes(snapshot.weights(), first, snapshot.step)
            first = weights if first is None else first
            cache = _run(model, weights, hooks, batch) if wanted else {}
            beside = (kept, snapshot.activations, snapshot.step)
            seen = Observation(weights, previous or weights, first, cache, batch, series.inputs.frequencies, *beside)
            rows.append({name: value for probe in probes for name, value in _measured(probe, seen).items()})
            previous = weights
    return _trace(series, variables, rows)


def _declared(probes: Sequence[Probe]) -> dict[str, Variable]:
    owner: dict[str, str] = {}
    for probe in probes:
        for name in probe.variables:
            if name in owner:
                raise InputError(f"probes {owner[name]} and {probe.name} both measure {name}; observe them apart")
            owner[name] = probe.name
    _check_names(variable for probe in probes for variable in probe.variables.values())
    return {name: variable for probe in probes for name, variable in probe.variables.items()}


def _check_names(variables: Iterable[Variable]) -> None:
    """An axis is the same for all variables, and so are the names along it."""
    known: dict[str, list[str]] = {}
    for dim, names in (named for variable in variables for named in variable.names.items()):
        if known.setdefault(dim, list(names)) != list(names):
            raise InputError(f"the axis {dim} cannot be both {known[dim]} and {list(names)}; observe them apart")


def _check_batch(batch: Batch, model: lens.Model) -> None:
    length, d_vocab, n_ctx = batch.tokens.shape[1], model.cfg.d_vocab, model.cfg.n_ctx
    if length > n_ctx:
        raise InputError(f"the sequences have {length} tokens, and the model sees at most {n_ctx}")
    least, most = int(batch.tokens.min()), int(batch.tokens.max())
    if least < 0 or most >= d_vocab:
        raise InputError(f"tokens must be in [0, {d_vocab}), the model's vocabulary, but go from {least} to {most}")


def _run(model: lens.Model, weights: lens.Weights, hooks: list[str], batch: Batch) -> dict[str, Tensor]:
    lens.load_weights(model, weights)
    logits, cache = lens.run_and_cache(model, batch.tokens, hooks)
    return cache | {LOGITS: logits}


def _same_shapes(weights: lens.Weights, first: lens.Weights | None, step: int) -> lens.Weights:
    for name, weight in (first or {}).items():
        if name not in weights or weights[name].shape != weight.shape:
            found = tuple(weights[name].shape) if name in weights else "no such weight"
            raise InputError(f"the series changes shape at step {step}: {name} was {tuple(weight.shape)}, now {found}")
    return weights


def _measured(probe: Probe, seen: Observation) -> dict[str, np.ndarray]:
    values = probe.measure(seen)
    if values.keys() != probe.variables.keys():
        raise InputError(f"probe {probe.name} declares {sorted(probe.variables)} but measured {sorted(values)}")
    for name, value in values.items():
        if value.ndim != len(dims := probe.variables[name].dims):
            shape = tuple(value.shape)
            raise InputError(f"probe {probe.name} declares {name} with the axes {dims} but measured shape {shape}")
        for dim, names in probe.variables[name].names.items():
            if len(names) != (places := value.shape[dims.index(dim)]):
                raise InputError(f"probe {probe.name} names {len(names)} places along {dim}, and {name} has {places}")
    return {name: value.detach().to("cpu", torch.float64).numpy() for name, value in values.items()}


def _trace(series: Series, variables: Mapping[str, Variable], rows: list[dict[str, np.ndarray]]) -> Trace:
    trace = xr.Dataset(
        {
            name: (("step", *variable.dims), np.stack([row[name] for row in rows]), _attributes(variable))
            for name, variable in variables.items()
        },
        coords={"step": series.steps},
        attrs={"series": series.name},
    )
    names = {f"{dim}_name": (dim, list(names)) for one in variables.values() for dim, names in one.names.items()}
    return trace.assign_coords({dim: np.arange(trace.sizes[dim]) for dim in trace.sizes if dim != "step"} | names)


def _attributes(variable: Variable) -> dict[str, str]:
    return {"long_name": variable.long_name, "units": variable.units, "source": variable.source}


def by_head(trace: Trace) -> Iterator[tuple[str, Trace]]:
    """Each layer and head's part of a trace, by TransformerLens' usual label (`L0H1`)."""
    for layer in range(trace.sizes["layer"]):
        for head in range(trace.sizes["head"]):
            yield f"L{layer}H{head}", trace.isel(layer=layer, head=head)


def chosen_queries(batch: Batch) -> Bool[Tensor, "batch query"]:
    """The queries that attention is measured at: all but the first quarter, which see too little to choose from."""
    length = batch.tokens.shape[1]
    return (torch.arange(length) >= length // 4).expand(len(batch.tokens), -1)
