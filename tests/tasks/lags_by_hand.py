"""The formulas of the tasks of lags, in loops over single numbers."""

import math
from collections.abc import Sequence
from itertools import product

from fd_interp.tasks.lags import Lags


def score(task: Lags, before: Sequence[int], known: int) -> list[float]:
    """`sum_{k <= known} A_k sum_{i in I(k)} alpha_i x_{t-i}` of what follows the tokens `before`."""
    total = [0.0] * task.d_vocab
    for k in range(known):
        strength = task.scale * task.ratio ** (len(task.blocks) - 1 - k) / getattr(task, "temperature", 1.0)
        for number, lag in enumerate(task.blocks[k]):
            if lag > len(before):
                continue
            alpha = task.alphas[k][number] if task.alphas else 1.0
            for v in range(task.d_vocab):
                total[v] += strength * float(task.feature_matrices[k, before[-lag], v]) * alpha
    return total


def law(task: Lags, before: Sequence[int], known: int | None = None) -> list[float]:
    """Probabilities of what follows; under the truncated teacher if `known`."""
    exponentials = [math.exp(s) for s in score(task, before, len(task.blocks) if known is None else known)]
    return [e / sum(exponentials) for e in exponentials]


def every_window(task: Lags) -> list[tuple[int, ...]]:
    """All windows of as many tokens as the farthest lag needs, oldest token first."""
    return list(product(range(task.d_vocab), repeat=max(lag for block in task.blocks for lag in block)))
