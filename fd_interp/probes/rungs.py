"""On which rung of its task's ladder does a model stand: how far is it from each simpler predictor?"""

import torch
from torch import Tensor

from fd_interp.measures.prediction import cross_entropy, half_squared_distance, kl_divergence
from fd_interp.observation import LOGITS, Observation, Probe, Variable
from fd_interp.probes.prediction import loss_at
from fd_interp.tasks.high_order import HighOrderMarkov
from fd_interp.tasks.lag_regression import LagRegression

PAPER = "arXiv 2602.19143, Sec. 3"


def excess_over_rungs(task: HighOrderMarkov | LagRegression, queries: slice) -> Probe:
    """Held-out loss minus that of the best additive predictor from the k most important blocks, k from none to all.

    Both on the same sequences, so that their luck cancels.
    """

    def measure(seen: Observation) -> dict[str, Tensor]:
        rungs = seen.once("rungs", lambda: _losses_of_rungs(task, seen, queries))
        return {"excess_over_rung": loss_at(seen, queries) - rungs}

    meaning = "held-out loss above that of the best predictor from the most important blocks"
    return Probe(
        "excess_over_rungs",
        {"excess_over_rung": Variable(("rung",), meaning, PAPER, "nats")},
        measure,
        hooks=(LOGITS,),
    )


def _losses_of_rungs(task: HighOrderMarkov | LagRegression, seen: Observation, queries: slice) -> Tensor:
    tokens, targets = seen.batch.tokens, seen.batch.targets[:, queries]
    predictions = [task.rung(tokens, known)[:, queries] for known in range(task.n_blocks + 1)]
    if isinstance(task, LagRegression):
        return torch.stack([half_squared_distance(predicted, targets) for predicted in predictions])
    losses = torch.stack([cross_entropy(predicted, targets) for predicted in predictions])
    return losses - torch.tensor([rung.shortfall for rung in task.ladder])


def teacher_kl(task: HighOrderMarkov, queries: slice) -> Probe:
    """`KL(p_k || model)` to the truncated teacher `A_{1:k}`, k from none (uniform) to all, averaged over queries.

    The paper reads its stages from these: stage k lasts while the k-th is lowest.
    """

    def measure(seen: Observation) -> dict[str, Tensor]:
        teachers = seen.once("teachers", lambda: _teachers(task, seen, queries))
        log_probabilities = seen.cache[LOGITS][:, queries].log_softmax(-1)
        return {"teacher_kl": torch.stack([kl_divergence(p, log_probabilities).mean() for p in teachers])}

    return Probe(
        "teacher_kl",
        {"teacher_kl": Variable(("rung",), "KL(truncated teacher || model)", PAPER, "nats")},
        measure,
        hooks=(LOGITS,),
    )


def _teachers(task: HighOrderMarkov, seen: Observation, queries: slice) -> list[Tensor]:
    tokens, dtype = seen.batch.tokens, seen.cache[LOGITS].dtype
    return [task.teacher(tokens, known)[:, queries].to(dtype) for known in range(task.n_blocks + 1)]
