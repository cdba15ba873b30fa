"""How good is the model, where its training looks, in itself and beside what its task knows?"""

from typing import Literal

from torch import Tensor

from fd_interp.measures.prediction import cross_entropy
from fd_interp.observation import LOGITS, Observation, Probe, Variable
from fd_interp.tasks.task import Task

Positions = Literal["last", "all"]


def held_out_loss(loss_on: Positions = "all") -> Probe:
    """Cross-entropy on the batch, at the last position or at all of them."""
    return Probe(
        "held_out_loss",
        {"loss": Variable((), f"held-out cross-entropy, {loss_on} position(s)", "", "nats")},
        lambda seen: {"loss": _loss(seen, loss_on)},
        hooks=(LOGITS,),
    )


def excess_loss(task: Task, loss_on: Positions = "all") -> Probe:
    """Cross-entropy minus that of the token frequencies, and of the task's best predictor, on the same sequences.

    Model and predictor have the same luck with the sequences, so the difference says more than the loss itself.
    """
    chosen = _chosen(loss_on)

    def measure(seen: Observation) -> dict[str, Tensor]:
        tokens, targets = seen.batch.tokens[:, chosen], seen.batch.targets[:, chosen]
        loss = _loss(seen, loss_on)
        unigram = -seen.frequencies.log()[targets]
        return {
            "excess_over_unigram": loss - unigram[unigram.isfinite()].mean(),
            "excess_over_best": loss - cross_entropy(task.bayes(tokens), targets),
        }

    return Probe(
        "excess_loss",
        {
            "excess_over_unigram": Variable(
                (), "held-out cross-entropy above that of the token frequencies", "", "nats"
            ),
            "excess_over_best": Variable((), "held-out cross-entropy above the task's best predictor", "", "nats"),
        },
        measure,
        hooks=(LOGITS,),
    )


def _chosen(loss_on: Positions) -> slice:
    return slice(-1, None) if loss_on == "last" else slice(None)


def _loss(seen: Observation, loss_on: Positions) -> Tensor:
    chosen = _chosen(loss_on)
    return cross_entropy(seen.cache[LOGITS][:, chosen].log_softmax(-1), seen.batch.targets[:, chosen])
