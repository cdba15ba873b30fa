"""What a run has become in the end, and when: stuck, a clustering head, or another lattice; representation, classifier.

In every run that solves the task the head adds its symbols up with integer weights, odd at the informative positions
and even at the others (`lattice_of_head`). If the even ones are zero, and the odd ones plus or minus one, it is a
clustering head; otherwise it tells apart more than the task's classes, and the classifier reads the parity of the sum.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fd_interp.observation import Trace
from fd_interp.probes.clustering import Classes
from fd_interp.stages import Stage, first_step
from fd_interp.tasks.task import Batch

SOLVED_FROM = 0.98
"""Accuracy on the population from which the paper's code counts a run as a success."""
STUCK_UNTIL = 0.6
"""Accuracy below which nothing has been learned."""
CLUSTERED_FROM = 0.9
"""Share between classes, in the best gauge, from which a head counts as clustered."""
ON_LATTICE = 0.25
"""Distance from the integers up to which weights count as integers."""

CLUSTERING_HEAD, OTHER_LATTICE, OTHER_WAY, PARTIAL, STUCK = (
    "clustering head",
    "another lattice",
    "another way",
    "partly learned",
    "stuck",
)

NAMES = (CLUSTERING_HEAD, OTHER_LATTICE, OTHER_WAY, PARTIAL, STUCK)


class Circuit(NamedTuple):
    """What one seed has become in the end."""

    name: str
    accuracy: float
    f_type: float
    """Of the direction of xi, in the best gauge."""
    influence_share: float
    weights: tuple[int, ...]
    """Of the symbols in xi, rounded, in units of the median informative step; empty where they are no integers."""
    representation: int | None
    """The step of `representation_step`."""
    classifier: int | None
    """The step of `classifier_step`."""

    @property
    def solved(self) -> bool:
        return self.accuracy > SOLVED_FROM


def of_model(trace: Trace) -> Trace:
    """The one head of the paper's model, the direction of what it writes, and its first classes."""
    places = {"layer": 0, "head": 0, "form": 1, "by": 0}
    return trace.isel({dim: place for dim, place in places.items() if dim in trace.dims})


def circuit(trace: Trace) -> Circuit:
    """What a run of the paper's model ends as."""
    end = of_model(trace).isel(step=-1)
    accuracy, f_type, influence = float(end.accuracy), float(end.f_type_gauge), float(end.influence_share)
    weights = _integers(end)
    return Circuit(
        _name(accuracy, f_type, weights) if "lattice_weight" in end else _name_by_share(accuracy, f_type),
        accuracy,
        f_type,
        influence,
        weights,
        representation_step(trace),
        classifier_step(trace),
    )


def _name(accuracy: float, f_type: float, weights: tuple[int, ...]) -> str:
    """By the weights alone, so that what is measured of a clustering head is no part of what makes it one."""
    if accuracy <= SOLVED_FROM:
        return _name_by_share(accuracy, f_type)
    if not weights:
        return OTHER_WAY
    return CLUSTERING_HEAD if max(map(abs, weights)) == 1 else OTHER_LATTICE


def _name_by_share(accuracy: float, f_type: float) -> str:
    """Where there are no weights to tell it by, as with more than two symbols."""
    if accuracy <= SOLVED_FROM:
        return STUCK if accuracy < STUCK_UNTIL else PARTIAL
    return CLUSTERING_HEAD if f_type > CLUSTERED_FROM else OTHER_WAY


def _integers(end: Trace) -> tuple[int, ...]:
    """Weights that round to odd integers at the informative positions and even ones elsewhere, and lie near them."""
    if "lattice_weight" not in end or not bool(end.parity_holds) or not float(end.off_integers) < ON_LATTICE:
        return ()
    return tuple(int(weight) for weight in end.lattice_weight.values.round())


def representation_step(trace: Trace) -> int | None:
    """When the head has its form: the first step at which more than .9 of the variance lies between classes.

    Of the variance of xi's direction; between the classes that it has in the end (`class_share`) where those were
    looked at, otherwise those of the task in the best gauge.
    """
    head = of_model(trace)
    return first_step((head.class_share if "class_share" in head else head.f_type_gauge) > CLUSTERED_FROM)


def classifier_step(trace: Trace) -> int | None:
    """The first step at which more than .98 of the sequences are labelled right."""
    return first_step(trace.accuracy > SOLVED_FROM)


def lattice_classes(weights: tuple[int, ...]) -> Classes:
    """Classes by the weighted sum of the symbols, which is what a head on a lattice tells apart."""

    def classes(batch: Batch) -> Int[Tensor, "batch query"]:
        sums = (batch.tokens * torch.tensor(weights)).sum(1, keepdim=True)
        return sums - sums.min()

    return classes


def stages(trace: Trace) -> list[Stage]:
    """A plateau, then the representation, then the classifier."""
    representation, classifier = representation_step(trace), classifier_step(trace)
    last = int(trace.step[-1])
    first = min((step for step in (representation, classifier) if step is not None), default=last)
    return [
        Stage("I plateau", 0, first, f"loss {float(trace.loss[0]):.2f} to {_loss(trace, first)}"),
        Stage(
            "II representation", representation, _until(representation, classifier, last), _seen(trace, representation)
        ),
        Stage("III classifier", classifier, None if classifier is None else last, _seen(trace, classifier)),
    ]


def _until(start: int | None, following: int | None, last: int) -> int | None:
    if start is None:
        return None
    return last if following is None or following < start else following


def _seen(trace: Trace, step: int | None) -> str:
    if step is None:
        most = of_model(trace)
        share, accuracy = float(most.f_type_gauge.max()), float(most.accuracy.max())
        return f"not reached: share between classes at most {share:.2f}, accuracy at most {accuracy:.3f}"
    at = of_model(trace).sel(step=step)
    return (
        f"share between classes {float(at.f_type_gauge):.2f}, accuracy {float(at.accuracy):.3f}, "
        f"of the nearest class {float(at.representation_accuracy):.3f}"
    )


def _loss(trace: Trace, step: int) -> str:
    return f"{float(trace.loss.sel(step=step)):.2g}"
