"""The clustering head in closed form: the test of what measures it."""

import torch

from fd_interp.models import lens
from fd_interp.models.build import build
from fd_interp.models.config import LearnedQuery
from fd_interp.sources import from_checkpoints
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.series import Series


def ideal_weights(task: SparseModularAddition, attention: float = 12.0) -> lens.Weights:
    """A head of two coordinates that attends to informative positions and counts their ones.

    `W_E = (1, 0), (-1, 0)`, `W_pos = (0, 1)` at informative positions and `(0, -1)` elsewhere, and a query
    `(0, lambda)`: xi is then the sum of the informative symbols, up to a shift. There is no MLP, so what the model says
    of the label is no more than the side of xi.

    Args:
        attention: lambda; the attention on the informative positions is .75, .98, .9997, 1.0000 at 1, 3, 6, 12 for five
            of twelve positions.
    """
    model = build(LearnedQuery(), task.d_vocab, task.length)
    weights = {name: torch.zeros_like(weight) for name, weight in lens.weights(model).items()}
    weights["embed.W_E"][:2] = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    weights["pos_embed.W_pos"][:, 1] = torch.where(task.informative, 1.0, -1.0)
    weights["blocks.0.attn.b_Q"][0, 1] = attention
    weights["blocks.0.attn.W_V"][0] = torch.eye(2)
    return weights


def ideal_series(task: SparseModularAddition) -> Series:
    """That head as a series of one snapshot, on all sequences."""
    tokens, targets = task.population
    return from_checkpoints(
        lambda: build(LearnedQuery(), task.d_vocab, task.length),
        {0: lambda: ideal_weights(task)},
        torch.cat([tokens, targets[:, -1:]], dim=1),
        name="closed form",
    )
