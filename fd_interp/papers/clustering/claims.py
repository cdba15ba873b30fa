"""What is claimed of one run of sparse modular addition, and of all seeds of a setting together."""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from scipy.stats import binomtest

from fd_interp.claims import Claim, Evidence, Finding
from fd_interp.observation import Trace
from fd_interp.papers.clustering.circuits import (
    CLUSTERING_HEAD,
    OTHER_LATTICE,
    OTHER_WAY,
    STUCK,
    Circuit,
    circuit,
    classifier_step,
    of_model,
    representation_step,
)

PAPER = "arXiv 2410.24050"
"""Known to us by its abstracts, reviews and code; its text is not, so that no number of it is cited."""

WHOLE = 0.98
"""Share between classes that a clustering head of the paper's model has at least."""
INFLUENCE = 0.99
"""Share of the influence that its informative positions have at least."""
UNCLUSTERED = 0.5
"""Share between classes below which a stuck model lies: the most that the best gauge finds in random points."""
EARLIER = (0.2, 0.45)
"""95 % interval of the share of seeds that solve the task in an earlier experiment of ours, 15 of 48."""


def _solved(evidence: Evidence) -> Finding:
    accuracy = float(evidence.trace.accuracy[-1])
    return Finding(accuracy == 1, {"accuracy": accuracy, "loss": float(evidence.trace.loss[-1])})


def _clustered(evidence: Evidence) -> Finding:
    end = of_model(evidence.trace).isel(step=-1)
    share, influence = float(end.f_type_gauge), float(end.influence_share)
    numbers = {"between classes": share, "influence": influence, "attention mass": float(end.informative_mass)}
    return Finding(share >= WHOLE and influence >= INFLUENCE, numbers)


def _representation_first(evidence: Evidence) -> Finding:
    trace = evidence.trace
    representation, classifier = representation_step(trace), classifier_step(trace)
    numbers: dict[str, float | int | None] = {"representation": representation, "classifier": classifier}
    if representation is None or classifier is None:
        return Finding(False, numbers)
    at = of_model(trace).sel(step=representation)
    numbers |= {"accuracy at first": float(at.accuracy), "of the nearest class": float(at.representation_accuracy)}
    return Finding(representation < classifier, numbers)


SOLVED = Claim(
    "solved",
    "The model labels every sequence right, not just those it was trained on.",
    PAPER,
    "accuracy 1 on the population",
    _solved,
)
CLUSTERED = Claim(
    "clustering-head",
    "The head maps the sequences of one class to one place, whatever their order and their spurious symbols.",
    f"{PAPER}, clustering heads; the measures are ours",
    f"in the best gauge at least {WHOLE} of the variance of xi's direction between classes, and at least {INFLUENCE} "
    "of the squared influence at informative positions",
    _clustered,
)
REPRESENTATION_FIRST = Claim(
    "representation-first",
    "Clusters form before the classifier that reads them.",
    f"{PAPER}, two-stage learning; the statistic is ours",
    "more than .9 of the variance between classes at an earlier step than accuracy above .98",
    _representation_first,
)

# Of all seeds of a setting: their traces with an axis `seed`.


def by_seed(trace: Trace) -> list[Trace]:
    """The seeds of a trace that has them all; steps that only longer runs have are left out."""
    return [trace.isel(seed=place).dropna("step", subset=["loss"]) for place in range(trace.sizes["seed"])]


def together(traces: Sequence[Trace], seeds: Sequence[int]) -> Trace:
    """The traces of seeds as one, with those variables that all of them have."""
    common = set.intersection(*({str(name) for name in trace.data_vars} for trace in traces))
    chosen = [trace[sorted(common)] for trace in traces]
    return xr.concat(
        chosen, xr.DataArray(list(seeds), dims="seed", name="seed"), join="outer", combine_attrs="override"
    )


def circuits(evidence: Evidence) -> list[Circuit]:
    """What each seed has become."""
    return [circuit(trace) for trace in by_seed(evidence.trace)]


def share_of(hits: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    interval = binomtest(hits, of).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def _solved_share(evidence: Evidence) -> Finding:
    found = circuits(evidence)
    solved = sum(one.solved for one in found)
    low, high = share_of(solved, len(found))
    numbers = {"solved": solved, "seeds": len(found), "share from": low, "share to": high}
    return Finding(low <= EARLIER[1] and high >= EARLIER[0], numbers)


def _ways(share: float, influence: float) -> Claim:
    def check(evidence: Evidence) -> Finding:
        solved = [one for one in circuits(evidence) if one.solved]
        heads = [one for one in solved if one.name == CLUSTERING_HEAD]
        others = [one for one in solved if one.name == OTHER_LATTICE]
        numbers = {
            "clustering heads": len(heads),
            "least share": min((one.f_type for one in heads), default=None),
            "least influence": min((one.influence_share for one in heads), default=None),
            "other lattices": len(others),
            "their most share": max((one.f_type for one in others), default=None),
            "unnamed": sum(one.name == OTHER_WAY for one in solved),
        }
        whole = all(one.f_type >= share and one.influence_share >= influence for one in heads)
        return Finding(bool(heads) and whole and len(heads) + len(others) == len(solved), numbers)

    return Claim(
        "two-ways",
        "Every seed that solves the task has a clustering head, or adds up its symbols with other odd weights at the "
        "informative positions and even ones elsewhere.",
        "ours; clustering heads are those of " + PAPER,
        f"no solved seed is neither; clustering heads have at least {share} of the variance between classes and "
        f"{influence} of the influence",
        check,
    )


SOLVED_SHARE = Claim(
    "solved-share",
    "Some seeds solve the task, others never leave the plateau.",
    "an earlier experiment of ours with the setting of " + PAPER,
    f"share solved overlaps {EARLIER[0]} to {EARLIER[1]} (15 of 48)",
    _solved_share,
)
TWO_WAYS = _ways(WHOLE, INFLUENCE)
TWO_WAYS_WIDE = _ways(0.9, 0.95)
"""In more coordinates a head keeps a little variance off its main axis."""


def _stuck(evidence: Evidence) -> Finding:
    shares = [one.f_type for one in circuits(evidence) if one.name == STUCK]
    numbers = {"stuck": len(shares), "most share": max(shares, default=None)}
    return Finding(bool(shares) and max(shares) < UNCLUSTERED, numbers)


STUCK_UNCLUSTERED = Claim(
    "stuck-unclustered",
    "The head of a model that has learned nothing has no more of the task's classes than random points.",
    "ours",
    f"accuracy below .6 goes with less than {UNCLUSTERED} of the variance between classes, the most of 2000 draws",
    _stuck,
)


def _two_stages(evidence: Evidence) -> Finding:
    solved = [one for one in circuits(evidence) if one.classifier is not None and one.solved]
    gaps = [
        one.classifier - one.representation
        for one in solved
        if one.classifier is not None and one.representation is not None
    ]
    numbers = {
        "solved": len(solved),
        "representation first": sum(gap > 0 for gap in gaps),
        "median steps between": float(np.median(gaps)) if gaps else None,
        "least": min(gaps, default=None),
    }
    return Finding(bool(solved) and len(gaps) == len(solved) and all(gap > 0 for gap in gaps), numbers)


TWO_STAGES = Claim(
    "two-stages",
    "In every seed that solves the task the head's own classes form before the classifier.",
    f"{PAPER}, two-stage learning; the statistic is ours",
    "more than .9 of the variance between the classes of its lattice before accuracy above .98, in all of them",
    _two_stages,
)


def _separates(evidence: Evidence) -> Finding:
    ends = [of_model(trace).isel(step=-1) for trace in by_seed(evidence.trace)]
    named = list(zip(circuits(evidence), ends, strict=True))
    heads = [float(end.criterion) for one, end in named if one.name == CLUSTERING_HEAD]
    stuck = [float(end.criterion) for one, end in named if one.name == STUCK]
    numbers = {
        "least of clustering heads": min(heads, default=None),
        "most of stuck heads": max(stuck, default=None),
    }
    return Finding(bool(heads) and bool(stuck) and min(heads) > max(stuck), numbers)


SEPARATES = Claim(
    "criterion",
    "A threshold on the criterion tells clustering heads from heads of models that have learned nothing.",
    "ours",
    "the least of clustering heads above the most of stuck ones",
    _separates,
)


def with_criterion(trace: Trace, variable: str) -> Trace:
    """The trace, to be asked whether one of its variables is a criterion."""
    return trace.assign(criterion=trace[variable])
