"""A probe of your own: name what it measures, read the hooks it needs, return tensors.

Here: how much a head looks at the token before.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from fd_interp import Every, Keep, MarkovChain, Observation, OneLayer, Probe, Run, Training, Variable, observe, train


def measure(seen: Observation) -> dict[str, Tensor]:
    """Mean attention of each head to the position just before the query, `[layer, head]`."""
    before = [pattern.diagonal(offset=-1, dim1=-2, dim2=-1).mean((0, -1)) for pattern in seen.activations("pattern")]
    return {"previous_token": torch.stack(before)}


PREVIOUS_TOKEN = Probe(
    name="previous_token",
    variables={
        "previous_token": Variable(("layer", "head"), "attention to the previous position", "Elhage et al. 2021")
    },
    measure=measure,
    hooks=("pattern",),
)

# It runs on every snapshot of any series. Positions mean nothing to this model, so it must find nothing.
run = Run(
    task=MarkovChain.zipf(8, context=16), model=OneLayer(), training=Training(steps=200), keep=Keep(at=Every(stride=50))
)
series = train(run, Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example-probe"))
print(observe(series, [PREVIOUS_TOKEN]).previous_token.to_dataframe())
