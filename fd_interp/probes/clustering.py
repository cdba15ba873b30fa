"""Is a head a clustering head: does it map what the task cannot tell apart to one place? (arXiv 2410.24050)

What a head writes (`hook_z`, xi in the paper where there is one head) is looked at after the last position, as it is
and divided by its length, which is what a normalisation lets through.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fd_interp.measures import clustering
from fd_interp.observation import LOGITS, Observation, Probe, Variable
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.tasks.task import Batch

FORMS = ("xi", "normalized")
"""What a head writes, and its direction."""
PERMUTATIONS = 20
PER_HEAD = ("layer", "head")
BY_FORM = (*PER_HEAD, "form")


def clustering_head(task: SparseModularAddition) -> Probe:
    """How the variance of what each head writes divides, plainly and in the best gauge, and which symbols it speaks of.

    On sequences of `task.held_out`.
    """

    def measure(seen: Observation) -> dict[str, Tensor]:
        tokens = seen.batch.tokens
        prefixes, pairs = seen.once("prefixes", lambda: task.prefixes(tokens)), _pairs(task, seen)
        written = _both_forms(_last_written(seen))
        direction = written[..., 1, :, :]
        plain = clustering.nested_shares(written, prefixes, task.gauges[0])
        best = clustering.best_gauge(written, prefixes, task.gauges)
        influence = clustering.token_influence(direction, pairs)
        return {
            "f_suffix": plain.suffix,
            "f_permutation": plain.permutation,
            "f_type": plain.type,
            "f_type_gauge": best.type,
            "gauge": best.gauge,
            "influence": influence,
            "influence_share": clustering.influence_share(influence, task.informative),
        }

    names = {"form": FORMS}
    return Probe(
        "clustering_head",
        {
            "f_suffix": Variable(BY_FORM, "share of variance within prefixes: symbols that do not matter", "ours"),
            "f_permutation": Variable(BY_FORM, "share between prefixes of one class: the order of symbols", "ours"),
            "f_type": Variable(BY_FORM, "share between classes (1: a clustering head)", "ours", names=names),
            "f_type_gauge": Variable(BY_FORM, "share between classes, in the best gauge", "ours"),
            "gauge": Variable(BY_FORM, "number of that gauge in task.gauges", "ours"),
            "influence": Variable((*PER_HEAD, "position"), "how far xi's direction moves with each symbol", "ours"),
            "influence_share": Variable(PER_HEAD, "informative positions' share of the squared influence", "ours"),
        },
        measure,
        hooks=("z",),
    )


def classifier_of_head(task: SparseModularAddition) -> Probe:
    """What the direction of xi says of the label before any MLP, by the nearest class centroid in the best gauge."""

    def measure(seen: Observation) -> dict[str, Tensor]:
        prefixes = seen.once("prefixes", lambda: task.prefixes(seen.batch.tokens))
        labels = seen.once("labels", lambda: task.labels(seen.batch.tokens))
        heads = _both_forms(_last_written(seen))[:, :, 1]
        directions = heads.flatten(0, 1)
        gauges = clustering.best_gauge(directions, prefixes, task.gauges).gauge
        classes = [task.gauges[gauge][prefixes] for gauge in gauges]
        heads_and_classes = list(zip(directions, classes, strict=True))
        accuracy = [clustering.representation_accuracy(xi, of_input, labels) for xi, of_input in heads_and_classes]
        apart = [clustering.separability(xi, of_input) for xi, of_input in heads_and_classes]
        return {
            "representation_accuracy": torch.stack(accuracy).view(heads.shape[:2]),
            "separability": torch.stack(apart).view(heads.shape[:2]),
        }

    return Probe(
        "classifier_of_head",
        {
            "representation_accuracy": Variable(PER_HEAD, "accuracy of the nearest class centroid, no MLP", "ours"),
            "separability": Variable(PER_HEAD, "smallest gap between classes, in radii (2: apart)", "ours"),
        },
        measure,
        hooks=("z",),
    )


def attention_on_informative(task: SparseModularAddition) -> Probe:
    """Attention of the last query on the informative positions, which does *not* tell a clustering head."""

    def measure(seen: Observation) -> dict[str, Tensor]:
        patterns = torch.stack([pattern[:, :, -1] for pattern in seen.activations("pattern")])
        found = clustering.informative_attention(patterns, task.informative)
        return {"informative_mass": found.mass.mean(1), "informative_entropy": found.entropy.mean(1)}

    return Probe(
        "attention_on_informative",
        {
            "informative_mass": Variable(PER_HEAD, "attention on informative positions (not diagnostic)", "ours"),
            "informative_entropy": Variable(PER_HEAD, "its evenness among them", "ours"),
        },
        measure,
        hooks=("pattern",),
    )


def lattice_of_head(task: SparseModularAddition) -> Probe:
    """What each symbol adds along a head's main axis, in units of the median informative step; for two symbols."""

    def measure(seen: Observation) -> dict[str, Tensor]:
        found = clustering.lattice(_last_written(seen), seen.batch.tokens, task.informative)
        return {
            "lattice_weight": found.weights,
            "lattice_r_squared": found.r_squared,
            "off_integers": found.off_integers,
            "parity_holds": found.parity_holds.double(),
        }

    return Probe(
        "lattice_of_head",
        {
            "lattice_weight": Variable((*PER_HEAD, "position"), "weight of each symbol in xi", "ours", "steps"),
            "lattice_r_squared": Variable(PER_HEAD, "share of xi's variance that is linear in the symbols", "ours"),
            "off_integers": Variable(PER_HEAD, "largest distance of a weight from an integer", "ours", "steps"),
            "parity_holds": Variable(PER_HEAD, "1: weights round to odd informative and even spurious ones", "ours"),
        },
        measure,
        hooks=("z",),
    )


def memorization(task: SparseModularAddition) -> Probe:
    """Accuracy on the training set and on all sequences that are not in it; measured on the whole population.

    Raises:
        InputError: the population is too large, or there is no training set.
    """
    numbers = _numbers(task, task.training_set.tokens)
    unseen = torch.ones(len(task.population.tokens), dtype=torch.bool)
    unseen[numbers] = False
    taught = task.training_set.targets[:, -1]

    def measure(seen: Observation) -> dict[str, Tensor]:
        says = seen.cache[LOGITS][:, -1].argmax(-1)
        right = says == seen.batch.targets[:, -1]
        return {
            "train_accuracy": (says[numbers] == taught).double().mean(),
            "unseen_accuracy": right[unseen].double().mean(),
        }

    return Probe(
        "memorization",
        {
            "train_accuracy": Variable((), "accuracy on the training set", "ours"),
            "unseen_accuracy": Variable((), "accuracy on the sequences that are not in it", "ours"),
        },
        measure,
        hooks=(LOGITS,),
    )


Classes = Callable[[Batch], Int[Tensor, "batch query"]]
"""The class of every query of a batch, or of its last queries; -1 leaves one out."""


def class_share(by: Mapping[str, Classes], permutations: int = PERMUTATIONS, seed: int = 0) -> Probe:
    """Whether any head of any model maps inputs of one class to one place: the share of variance between classes.

    A query behind the sequence, like that of `LearnedQuery`, stands for the last one.

    Args:
        by: the ways to class inputs that are asked about, by name.
        permutations: how often the classes are permuted, for a share to compare with.
        seed: of the permutations.

    Raises:
        InputError: when it measures, fewer than two classes.
    """

    def measure(seen: Observation) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shares, permuted = [], []
        for name, classes in by.items():
            of_query = seen.once(f"classes by {name}", lambda classes=classes: classes(seen.batch))
            last = min(of_query.shape[1], seen.activations("z")[0].shape[1])
            labels = of_query[:, -last:].flatten()
            asked = labels >= 0
            written = _both_forms(torch.stack([_by_query(z[:, -last:]) for z in seen.activations("z")])[:, :, asked])
            shares.append(clustering.between_class_share(written, labels[asked]))
            permuted.append(clustering.permuted_shares(written, labels[asked], permutations, generator).amax(-1))
        return {"class_share": torch.stack(shares, -1), "class_share_permuted": torch.stack(permuted, -1)}

    dims, names = (*BY_FORM, "by"), {"form": FORMS, "by": list(by)}
    return Probe(
        "class_share",
        {
            "class_share": Variable(dims, "share of variance between classes (1: clustered)", "ours", names=names),
            "class_share_permuted": Variable(dims, f"the largest of {permutations} with permuted classes", "ours"),
        },
        measure,
        hooks=("z",),
    )


def token_at_lag(lag: int) -> Classes:
    """Classes by the token at a lag from what is predicted: at lag 1 the query's own, at lag 2 the one before."""

    def classes(batch: Batch) -> Int[Tensor, "batch query"]:
        found = torch.full_like(batch.tokens, -1)
        found[:, lag - 1 :] = batch.tokens[:, : batch.tokens.shape[1] - lag + 1]
        return found

    return classes


def class_of_sum(task: SparseModularAddition) -> Classes:
    """Classes of sparse modular addition, at the last query."""

    def classes(batch: Batch) -> Int[Tensor, "batch query"]:
        return task.classes(batch.tokens)[:, None]

    return classes


def _both_forms(written: Float[Tensor, "layer head input d_head"]) -> Float[Tensor, "layer head form input d_head"]:
    """What each head writes, and its direction."""
    return torch.stack([written, written / written.norm(dim=-1, keepdim=True)], 2)


def _last_written(seen: Observation) -> Float[Tensor, "layer head batch d_head"]:
    return torch.stack([z[:, -1].transpose(0, 1) for z in seen.activations("z")])


def _by_query(z: Float[Tensor, "batch query head d_head"]) -> Float[Tensor, "head batch_and_query d_head"]:
    return z.flatten(0, 1).transpose(0, 1)


def _pairs(task: SparseModularAddition, seen: Observation) -> Int[Tensor, "position pair two"]:
    return seen.once("neighbours", lambda: task.neighbours(seen.batch.tokens))


def _numbers(task: SparseModularAddition, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, " batch"]:
    """Each sequence's place in the population."""
    return (tokens * task.p ** torch.arange(task.length).flip(0)).sum(1)
