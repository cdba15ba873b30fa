"""Whether a head maps inputs of one class to one place: clustering heads (arXiv 2410.24050), in measures of our own.

The vectors are what a head writes for each input, or the same divided by their norm; leading axes are independent.
The *prefix* of an input is the tokens at its informative positions, the only ones that its label depends on. Prefixes
that the label cannot tell apart under reordering make a *class*: for a sum modulo p, those of one multiset of tokens.
A head may read the tokens of a position under other names, which changes the classes; each choice of names, up to those
that give the same classes, is a *gauge*. With two tokens and k informative positions there are `2^(k-1)`. In the wrong
gauge a perfect head looks unclustered.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor
from torch.nn import functional

from fd_interp.config import InputError
from fd_interp.measures._precision import at_least_single

LEAST_STEP = 1e-5
"""Median informative weight, in units of the largest weight, below which it is rounding and no unit of a lattice."""


def between_class_share(
    vectors: Float[Tensor, "*batch input d"], classes: Int[Tensor, " input"]
) -> Float[Tensor, "*batch"]:
    """Variance between class means ÷ total variance: the correlation ratio eta squared, the share of an ANOVA.

    In `[0, 1]`: 1 when inputs of one class have one vector, 0 when all classes have the same mean. Classes that say
    nothing have about `(classes - 1) / (inputs - 1)`, see `permuted_shares`. It does not change when all vectors are
    shifted, rotated or scaled, with the names of the classes or with the order of the inputs. NaN where all vectors are
    equal.

    Raises:
        InputError: there are fewer than two classes.
    """
    labels, count = _numbered(classes)
    centred = _centred(vectors)
    return _share(_between(centred, labels, count), centred)


def permuted_shares(
    vectors: Float[Tensor, "*batch input d"], classes: Int[Tensor, " input"], count: int, generator: torch.Generator
) -> Float[Tensor, "*batch count"]:
    """`between_class_share` with the classes dealt out anew, `count` times: what it is when classes say nothing.

    The mean over all permutations is `(classes - 1) / (inputs - 1)` exactly. Its errors are the same.
    """
    labels, n_classes = _numbered(classes)
    centred = _centred(vectors)
    shares = []
    for _ in range(count):
        order = torch.randperm(len(labels), generator=generator, device=generator.device).to(labels.device)
        shares.append(_share(_between(centred, labels[order], n_classes), centred))
    return torch.stack(shares, -1)


class Shares(NamedTuple):
    """How the variance of vectors divides; the three are not negative and add up to 1, or are NaN for equal vectors."""

    suffix: Float[Tensor, "*batch"]
    """Within prefixes: what the head says of tokens that do not matter."""
    permutation: Float[Tensor, "*batch"]
    """Between the prefixes of one class: what it says of their order."""
    type: Float[Tensor, "*batch"]
    """Between classes: the `between_class_share`; 1 for a clustering head."""


def nested_shares(
    vectors: Float[Tensor, "*batch input d"], prefixes: Int[Tensor, " input"], classes: Int[Tensor, " prefix"]
) -> Shares:
    """The variance within prefixes, between the prefixes of a class and between classes: nested ANOVA.

    Args:
        prefixes: the prefix of each input, from 0.
        classes: the class of each prefix; a prefix need not occur.

    Raises:
        InputError: a prefix has no class.
    """
    _check_prefixes(prefixes, len(classes))
    centred = _centred(vectors)
    names, labels = classes.unique(return_inverse=True)
    of_prefix = centroids(centred, prefixes, len(classes)).nan_to_num()
    of_class = centroids(centred, labels[prefixes], len(names)).nan_to_num()
    sizes = prefixes.bincount(minlength=len(classes))[:, None]
    parts = (
        (centred - of_prefix[..., prefixes, :]).square(),
        sizes * (of_prefix - of_class[..., labels, :]).square(),
        sizes * of_class[..., labels, :].square(),
    )
    suffix, permutation, kind = (part.sum((-2, -1)) for part in parts)
    total = suffix + permutation + kind
    return Shares(suffix / total, permutation / total, kind / total)


class BestGauge(NamedTuple):
    """The gauge in which vectors are clustered best."""

    gauge: Int[Tensor, "*batch"]
    """Its place among the given ones: the first of equally good ones."""
    type: Float[Tensor, "*batch"]
    """Share of the variance between its classes, in `[0, 1]`."""


def best_gauge(
    vectors: Float[Tensor, "*batch input d"], prefixes: Int[Tensor, " input"], gauges: Int[Tensor, "gauge prefix"]
) -> BestGauge:
    """The gauge whose classes hold most of the variance, and how much: the largest `Shares.type`.

    Whatever the vectors, the best of several gauges holds a good part of what lies between prefixes: compare it with
    `chance_type`. The share is NaN where all vectors are equal.

    Args:
        prefixes: the prefix of each input, from 0.
        gauges: for each gauge the class of each prefix.

    Raises:
        InputError: there is no gauge, or a prefix has no class.
    """
    if not len(gauges):
        raise InputError("there must be at least one gauge")
    _check_prefixes(prefixes, gauges.shape[1])
    centred = _centred(vectors)
    names, labels = gauges.unique(return_inverse=True)
    member = functional.one_hot(labels, len(names)).to(centred)  # gauge prefix class
    sums = torch.einsum("gpc,...pd->...gcd", member, _sums(centred, prefixes, gauges.shape[1]))
    sizes = member.mT @ prefixes.bincount(minlength=gauges.shape[1]).to(member)  # gauge class
    between = (sums.square().sum(-1) / sizes.clamp(min=1)).sum(-1)
    best = between.max(-1)
    return BestGauge(best.indices, _share(best.values, centred))


def chance_type(
    points: int, d: int, gauges: Int[Tensor, "gauge prefix"], count: int, generator: torch.Generator
) -> Float[Tensor, " count"]:
    """The share in the best gauge when the prefixes' centroids are random Gaussian points, drawn `count` times.

    For 32 points of the plane and the 16 gauges of two tokens at five positions it is .285 on average, and above .372
    in one of twenty. Suffixes that matter make the share of random vectors smaller still.

    Args:
        points: prefixes, as many as have a class in the gauges.

    Raises:
        InputError: there is another number of them in the gauges.
    """
    if points != gauges.shape[1]:
        raise InputError(f"there are {points} points, but the gauges give the class of {gauges.shape[1]}")
    drawn = torch.randn(count, points, d, generator=generator, device=generator.device).to(gauges.device)
    return best_gauge(drawn, torch.arange(points, device=gauges.device), gauges).type


def token_influence(
    vectors: Float[Tensor, "*batch input d"], pairs: Int[Tensor, "position pair 2"]
) -> Float[Tensor, "*batch position"]:
    """How far a vector moves, on average, when the token at each position is replaced: D_t.

    0 where the head says nothing of a position, however much attention it has. In the units of the vectors.

    Args:
        pairs: for each position, pairs of inputs that differ there and nowhere else.
    """
    ends = at_least_single(vectors)[..., pairs, :]
    return (ends[..., 0, :] - ends[..., 1, :]).norm(dim=-1).mean(-1)


def influence_share(
    influence: Float[Tensor, "*batch position"], informative: Bool[Tensor, " position"]
) -> Float[Tensor, "*batch"]:
    """Informative positions' share of the squared influence: I_inf = sum of D_t^2 over these ÷ over all.

    In `[0, 1]`: 1 when the head says nothing of the other positions, 0 when it speaks of them alone, the informative
    share of all positions when it treats all alike. NaN where nothing has influence.

    Raises:
        InputError: no position is informative.
    """
    _check_informative(informative)
    squares = at_least_single(influence).square()
    spoken = (squares * informative).sum(-1)
    return spoken / (spoken + (squares * ~informative).sum(-1))


class Lattice(NamedTuple):
    """What each token adds along a head's main axis, in units of the median informative step."""

    weights: Float[Tensor, "*batch position"]
    """What the vector moves by when the token goes from 0 to 1; the first informative one is positive."""
    r_squared: Float[Tensor, "*batch"]
    """Share of the vectors' variance that is linear in the tokens, along all axes."""
    off_integers: Float[Tensor, "*batch"]
    """Largest distance of a weight from the nearest integer, at most 1/2."""
    parity_holds: Bool[Tensor, "*batch"]
    """Whether the nearest integers are odd at the informative positions and even at the others."""


def lattice(
    vectors: Float[Tensor, "*batch input d"],
    bits: Real[Tensor, "input position"],
    informative: Bool[Tensor, " position"],
) -> Lattice:
    """Whether the vectors count modulo two: the regression of vectors on binary tokens, along its main axis.

    A head that adds up its tokens with odd integer weights at the informative positions and even ones elsewhere holds
    the parity that the label asks for, clustering head or not. The main axis is the first singular direction of the
    regression's coefficients; what lies off it is in `r_squared` alone. Read the parity with `off_integers` and
    `r_squared`: every weight is nearest to some integer, and small ones to an even one. Weights are NaN, and the parity
    does not hold, where more than half of the informative ones vanish, for there is no step to measure by.

    Raises:
        InputError: the tokens are not 0 and 1, or do not vary independently in these inputs; no position is
            informative.
    """
    centred = _centred(vectors)
    _check_informative(informative)
    coefficients, fitted = _regression(centred, bits)
    along = (coefficients @ torch.linalg.svd(coefficients, full_matrices=False).Vh[..., :1, :].mT)[..., 0]
    step = along[..., informative].abs().quantile(0.5, dim=-1)
    step = torch.where(step > LEAST_STEP * along.abs().amax(-1), step, torch.nan)
    step = torch.where(along[..., informative][..., 0] < 0, -step, step)
    weights = along / step[..., None]
    nearest = weights.round()
    return Lattice(
        weights,
        1 - _squares(centred - fitted) / _squares(centred),
        (weights - nearest).abs().amax(-1),
        ((nearest.remainder(2) == 1) == informative).all(-1),
    )


def _regression(
    centred: Float[Tensor, "*batch input d"], bits: Real[Tensor, "input position"]
) -> tuple[Float[Tensor, "*batch position d"], Float[Tensor, "*batch input d"]]:
    if ((bits != 0) & (bits != 1)).any():
        raise InputError("the tokens must be 0 and 1, for only these lie on a line whatever they mean")
    bits = bits.to(centred)
    bits = bits - bits.mean(0)
    gram = bits.mT @ bits
    if torch.linalg.matrix_rank(gram, hermitian=True) < len(gram):
        raise InputError("some position's tokens follow from the other positions': give inputs in which each varies")
    coefficients = torch.linalg.solve(gram, bits.mT @ centred)
    return coefficients, bits @ coefficients


def centroids(
    vectors: Float[Tensor, "*batch input d"], groups: Int[Tensor, " input"], count: int
) -> Float[Tensor, "*batch group d"]:
    """Mean vector of each of `count` groups of inputs, numbered from 0; NaN for a group without inputs."""
    return _sums(at_least_single(vectors), groups, count) / groups.bincount(minlength=count)[:, None]


def swap_matrix(
    means: Float[Tensor, "*batch prefix d"], tokens: Int[Tensor, "prefix position"]
) -> Float[Tensor, "*batch position position"]:
    """How far a prefix's centroid moves when the tokens at two positions change places, ÷ the centroids' diameter.

    The mean over the prefixes whose tokens differ there; the diameter is the largest distance of two centroids. In
    `[0, 1]`: 0 where the head ignores which of the two positions holds which token, and on the diagonal. It is not a
    matter of gauges: one of k positions whose two tokens a head reads under each other's name has 2/k in its row. NaN
    where all centroids are equal.

    Args:
        means: `centroids` of the inputs by prefix.
        tokens: the tokens of each prefix.

    Raises:
        InputError: a prefix is given twice, or not all that swaps lead to are given.
    """
    swapped, moved = _swapped(tokens)
    means = at_least_single(means)
    diameter = _distances(means, means).amax((-2, -1))
    moves = (means[..., swapped, :] - means[..., None, None, :, :]).norm(dim=-1).sum(-1) / moved.sum(-1).clamp(min=1)
    return moves / diameter[..., None, None]


def _swapped(
    tokens: Int[Tensor, "prefix position"],
) -> tuple[Int[Tensor, "position position prefix"], Bool[Tensor, "position position prefix"]]:
    """The prefix that each one becomes when two positions change places, and whether it is another."""
    numbers = tokens.unique(return_inverse=True)[1]
    places = (int(numbers.max()) + 1) ** torch.arange(tokens.shape[1], device=tokens.device)
    codes, order = (numbers @ places).sort()
    rises = numbers.T[None] - numbers.T[:, None]  # at [i, j]: what position i gains and position j loses
    wanted = (numbers @ places + rises * (places[:, None] - places)[..., None]).contiguous()
    found = torch.searchsorted(codes, wanted).clamp(max=len(codes) - 1)
    if (codes.diff() == 0).any() or (codes[found] != wanted).any():
        raise InputError("each prefix must be given once, and with it all that its tokens make in another order")
    return order[found], rises != 0


def representation_accuracy(
    vectors: Float[Tensor, "*batch input d"], classes: Int[Tensor, " input"], labels: Int[Tensor, " input"]
) -> Float[Tensor, "*batch"]:
    """Share of inputs whose nearest class centroid has their label: what the vectors say before any MLP.

    In `[0, 1]`. The label of a class is the most frequent one among its inputs. The centroids are those of the same
    inputs, so that classes of few inputs flatter: compare with permuted classes.

    Raises:
        InputError: there are fewer than two classes.
    """
    numbers, count = _numbered(classes)
    names, label = labels.unique(return_inverse=True)
    of_class = (numbers * len(names) + label).bincount(minlength=count * len(names)).view(count, -1).argmax(-1)
    centred = _centred(vectors)
    nearest = _distances(centred, centroids(centred, numbers, count)).argmin(-1)
    return (of_class[nearest] == label).to(centred).mean(-1)


def separability(vectors: Float[Tensor, "*batch input d"], classes: Int[Tensor, " input"]) -> Float[Tensor, "*batch"]:
    """Smallest distance of two class centroids ÷ mean distance of inputs from theirs.

    From 0. Above about 2 the clusters are apart: on average an input is closer to its own centroid than to the middle
    between the closest two. Unlike a share of variance it asks for every two classes, and it needs the gauge as well.
    Infinite, or by rounding huge, when inputs of one class have one vector; NaN where all vectors are equal.

    Raises:
        InputError: there are fewer than two classes.
    """
    labels, count = _numbered(classes)
    centred = _centred(vectors)
    means = centroids(centred, labels, count)
    itself = torch.eye(count, dtype=torch.bool, device=means.device)
    gap = _distances(means, means).masked_fill(itself, torch.inf).amin((-2, -1))
    return gap / (centred - means[..., labels, :]).norm(dim=-1).mean(-1)


class InformativeAttention(NamedTuple):
    """How a head's attention lies on the informative positions."""

    mass: Float[Tensor, "*batch"]
    """What they have together, in `[0, 1]`: their share of all positions for uniform attention."""
    entropy: Float[Tensor, "*batch"]
    """How evenly: the entropy among them ÷ its maximum, 1 when even, 0 on one of several; 1 for a single position."""


def informative_attention(
    pattern: Float[Tensor, "*batch position"], informative: Bool[Tensor, " position"]
) -> InformativeAttention:
    """Attention on the informative positions, and its evenness among them, which is NaN where they have none.

    This does NOT diagnose a clustering head. Heads of models that solve the task have masses from .29 to .86, models
    that have learned nothing up to .75. A position whose two tokens lie on one ray through the norm is attended to
    without saying anything; ask `token_influence`.

    Raises:
        InputError: no position is informative.
    """
    _check_informative(informative)
    attended = at_least_single(pattern)[..., informative]
    mass = attended.sum(-1)
    share = attended / mass[..., None]
    if share.shape[-1] == 1:
        return InformativeAttention(mass, share[..., 0])
    return InformativeAttention(mass, torch.special.entr(share).sum(-1) / math.log(share.shape[-1]))


def angle_change(
    vectors: Float[Tensor, "*batch input d"], before: Float[Tensor, "*batch input d"]
) -> Float[Tensor, "*batch"]:
    """Mean angle in radians between each vector and itself before: what a norm lets through of a change.

    In `[0, pi]`; 0 when all have kept their direction. NaN when one of them is zero.
    """
    now, then = (v / v.norm(dim=-1, keepdim=True) for v in (at_least_single(vectors), at_least_single(before)))
    # Not by the arc cosine, which rounds small angles away: in single precision below about 3e-4.
    return 2 * torch.atan2((now - then).norm(dim=-1), (now + then).norm(dim=-1)).mean(-1)


def smallest_norm(vectors: Float[Tensor, "*batch input d"]) -> Float[Tensor, "*batch"]:
    """Length of the shortest vector: the curvature of a norm that follows grows as it vanishes."""
    return at_least_single(vectors).norm(dim=-1).amin(-1)


def _centred(vectors: Float[Tensor, "*batch input d"]) -> Float[Tensor, "*batch input d"]:
    vectors = at_least_single(vectors)
    vectors = vectors - vectors[..., :1, :]  # without a rounding error where all are equal
    return vectors - vectors.mean(-2, keepdim=True)


def _sums(
    vectors: Float[Tensor, "*batch input d"], groups: Int[Tensor, " input"], count: int
) -> Float[Tensor, "*batch group d"]:
    sums = vectors.new_zeros(*vectors.shape[:-2], count, vectors.shape[-1])
    return sums.index_add_(-2, groups, vectors)


def _squares(vectors: Float[Tensor, "*batch input d"]) -> Float[Tensor, "*batch"]:
    return vectors.square().sum((-2, -1))


def _between(
    centred: Float[Tensor, "*batch input d"], labels: Int[Tensor, " input"], count: int
) -> Float[Tensor, "*batch"]:
    """Sum of squares between groups, none of which is empty."""
    return (_sums(centred, labels, count).square().sum(-1) / labels.bincount(minlength=count)).sum(-1)


def _share(between: Float[Tensor, "*batch"], centred: Float[Tensor, "*batch input d"]) -> Float[Tensor, "*batch"]:
    return (between / _squares(centred)).clamp(max=1)


def _distances(a: Float[Tensor, "*batch n d"], b: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n m"]:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")  # exactly 0 where two are equal


def _numbered(classes: Int[Tensor, " input"]) -> tuple[Int[Tensor, " input"], int]:
    """Classes numbered from 0, and how many there are."""
    names, labels = classes.unique(return_inverse=True)
    if len(names) < 2:
        raise InputError(f"there must be at least two classes, not {len(names)}")
    return labels, len(names)


def _check_prefixes(prefixes: Int[Tensor, " input"], count: int) -> None:
    least, greatest = (int(bound) for bound in prefixes.aminmax())
    if least < 0 or greatest >= count:
        outside = least if least < 0 else greatest
        raise InputError(f"prefix {outside} has no class: those with one are 0 to {count - 1}")


def _check_informative(informative: Bool[Tensor, " position"]) -> None:
    if not informative.any():
        raise InputError(f"at least one of the {len(informative)} positions must be informative")
