import inspect
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fd_interp import measures
from fd_interp.measures import clustering, focus, lags, prediction

D_VOCAB, LENGTH = 4, 6
TOKENS = torch.tensor([[0, 1, 2, 3, 0, 1], [2, 2, 0, 1, 3, 0]])
LOGITS = torch.randn(2, LENGTH, D_VOCAB, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(D_VOCAB, 3, generator=torch.Generator().manual_seed(1))
SCORES = torch.randn(2, 3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))
CAUSAL = (SCORES + torch.full((LENGTH, LENGTH), -torch.inf).triu(1)).softmax(-1)
FREQUENCIES = torch.tensor([0.4, 0.3, 0.2, 0.1])
BITS = torch.arange(2**LENGTH)[:, None] >> torch.arange(LENGTH) & 1
VECTORS = torch.randn(len(BITS), 3, generator=torch.Generator().manual_seed(3))
LOSSES = np.array([1.0, 1.0, 9.0, 1.0])
LOSSES.flags.writeable = False
EVERYWHERE = torch.ones_like(TOKENS, dtype=torch.bool)

INPUTS: dict[str, Any] = {
    "weight": WEIGHT,
    "start": WEIGHT + 1,
    "previous": WEIGHT - 1,
    "direction": FREQUENCIES,
    "singular_values": torch.tensor([3.0, 2.0, 1.0]),
    "cosines": WEIGHT @ WEIGHT.mT,
    "W_E": WEIGHT,
    "gamma": WEIGHT[:, 0],
    "frequencies": FREQUENCIES,
    "pattern": CAUSAL,
    "causal": True,
    "attention": focus.attention_by_token(CAUSAL, TOKENS, EVERYWHERE, D_VOCAB),
    "keys": FREQUENCIES > 0.25,
    "queries": EVERYWHERE,
    "tokens": TOKENS,
    "d_vocab": D_VOCAB,
    "count": 2,
    "frequent": 1,
    "fraction": 0.5,
    "log_probabilities": LOGITS.log_softmax(-1),
    "reference": (2 * LOGITS).log_softmax(-1),
    "predicted": LOGITS,
    "targets": TOKENS,
    "lags": [3, 1, 2],
    "blocks": [[1, 2], [3]],
    "by_lag": CAUSAL[0, :, -1, :3],
    "mass": CAUSAL[0, :, -1, :2],
    "OV": SCORES[0, :, :D_VOCAB, :D_VOCAB],
    "features": SCORES[1, :2, :D_VOCAB, :D_VOCAB],
    "coefficients": SCORES[0, :, 0, :2],
    "owners": torch.tensor([2, 0]),
    "vectors": VECTORS,
    "before": VECTORS + 1,
    "classes": BITS[:, 0],
    "labels": BITS[:, 1],
    "groups": BITS[:, 2],
    "prefixes": BITS[:, 0] + 2 * BITS[:, 1],
    "gauges": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]),
    "generator": torch.Generator().manual_seed(4),
    "points": 4,
    "d": 3,
    "pairs": torch.arange(len(BITS)).view(2, -1, 2),
    "bits": BITS,
    "informative": torch.arange(LENGTH) < 2,
    "influence": SCORES[0, 0].abs(),
    "means": VECTORS[:4],
    "losses": LOSSES,
    "window": 2,
    "factor": 5.0,
    "floor": 0.0,
}
"""One valid input for each parameter name that the measures share."""

OWN_INPUTS: dict[Callable, dict[str, Any]] = {
    focus.focus_ratio: {"queries": FREQUENCIES < 0.35},
    lags.attention_by_lag: {"queries": slice(3, None)},
    lags.attention_by_block: {"queries": slice(3, None)},
    clustering.nested_shares: {"classes": torch.tensor([0, 1, 1, 2])},
    clustering.swap_matrix: {"tokens": BITS[:4, :2]},
    prediction.half_squared_distance: {"targets": 2 * LOGITS},
}
"""For measures that mean something else by a name: a set of tokens, positions that are the same everywhere, vectors,
classes of prefixes."""

VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all-to-all": {"pattern": SCORES.softmax(-1), "causal": False},
    "many-tokens": {"d_vocab": LENGTH + 1},
}
"""Inputs for which a measure may compute in another way."""


def public_measures() -> list[Callable]:
    names = [module.name for module in iter_modules(measures.__path__) if not module.name.startswith("_")]
    modules = [import_module(f"fd_interp.measures.{name}") for name in names]
    return [
        member
        for module in modules
        for name, member in vars(module).items()
        if inspect.isfunction(member) and member.__module__ == module.__name__ and not name.startswith("_")
    ]


def name_of(measure: Callable) -> str:
    return f"{measure.__module__.rpartition('.')[2]}.{measure.__name__}"


def test_all_measures_are_here():
    names = {name_of(measure) for measure in public_measures()}
    assert {"condensation.row_cosines", "focus.frequency_slope", "prediction.kl_divergence"} < names
    assert {"redistribution.gamma_perp", "condensation.singular_values", "focus.is_causal"} < names
    assert {"clustering.between_class_share", "spikes.spikes"} < names
    assert {"lags.attention_by_lag", "lags.block_mass", "specialization.cooperation_index"} < names


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors_among(value)


def test_tensors_of_a_token_attention_are_looked_at():
    attention = INPUTS["attention"]
    assert [id(tensor) for tensor in tensors_among([1, attention])] == [id(attention.mass), id(attention.share)]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("measure", public_measures(), ids=name_of)
def test_a_measure_never_writes_to_its_input(measure: Callable, variant: dict[str, Any]):
    inputs = INPUTS | variant | OWN_INPUTS.get(measure, {})
    given = {name: inputs[name] for name in inspect.signature(measure).parameters}
    tensors = list(tensors_among(given.values()))
    before, versions = [tensor.clone() for tensor in tensors], [tensor._version for tensor in tensors]
    result = measure(**given)
    assert [tensor._version for tensor in tensors] == versions
    assert all(map(torch.equal, tensors, before))
    for tensor in tensors_among([result]):  # nor does it return a view through which its caller would write
        assert tensor.untyped_storage().data_ptr() not in {given.untyped_storage().data_ptr() for given in tensors}
