"""How good is the model, where its training looks, in itself and beside what its task knows?"""

from jaxtyping import Float
from torch import Tensor

from fd_interp.measures.prediction import cross_entropy, half_squared_distance
from fd_interp.observation import LOGITS, Observation, Probe, Variable
from fd_interp.tasks.task import Task

EVERY_POSITION = slice(None)


def held_out_loss(queries: slice = EVERY_POSITION) -> Probe:
    """Loss on the batch at the positions `queries` (`Run.queries` for those that a run is trained on)."""
    return Probe(
        "held_out_loss",
        {"loss": Variable((), f"held-out loss, {_described(queries)}", "", "nats")},
        lambda seen: {"loss": loss_at(seen, queries)},
        hooks=(LOGITS,),
    )


def excess_loss(task: Task, queries: slice = EVERY_POSITION) -> Probe:
    """Cross-entropy minus that of the token frequencies, and of the task's best predictor, on the same sequences.

    Model and predictor have the same luck with the sequences, so the difference says more than the loss itself.
    """

    def measure(seen: Observation) -> dict[str, Tensor]:
        tokens, targets = seen.batch.tokens, seen.batch.targets[:, queries]
        loss = loss_at(seen, queries)
        unigram = -seen.frequencies.log()[targets]
        return {
            "excess_over_unigram": loss - unigram[unigram.isfinite()].mean(),
            "excess_over_best": loss - cross_entropy(task.bayes(tokens)[:, queries], targets),
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


def loss_at(seen: Observation, queries: slice) -> Float[Tensor, ""]:
    """Cross-entropy in nats of the model's predictions there, or in a regression half their squared distance."""
    logits, targets = seen.cache[LOGITS][:, queries], seen.batch.targets[:, queries]
    if targets.is_floating_point():
        return half_squared_distance(logits, targets.to(logits))
    return cross_entropy(logits.log_softmax(-1), targets)


def _described(queries: slice) -> str:
    if queries == EVERY_POSITION:
        return "all positions"
    return "last position" if queries.start == -1 else f"positions from {queries.start} on"


def accuracy(queries: slice, of: str = "held-out sequences") -> Probe:
    """How often the most likely token is the target, at `queries`.

    Args:
        of: which sequences they are, for whoever reads the trace.
    """

    def measure(seen: Observation) -> dict[str, Tensor]:
        right = seen.cache[LOGITS][:, queries].argmax(-1) == seen.batch.targets[:, queries]
        return {"accuracy": right.double().mean()}

    return Probe("accuracy", {"accuracy": Variable((), f"accuracy on {of}", "task")}, measure, hooks=(LOGITS,))
