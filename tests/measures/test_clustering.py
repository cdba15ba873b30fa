import math
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.measures.clustering import (
    angle_change,
    best_gauge,
    between_class_share,
    centroids,
    chance_type,
    influence_share,
    informative_attention,
    lattice,
    nested_shares,
    permuted_shares,
    representation_accuracy,
    separability,
    smallest_norm,
    swap_matrix,
    token_influence,
)

L, K = 12, 5
"""Positions, and how many of them the label depends on: the first ones."""
INPUTS = torch.tensor(list(product([0, 1], repeat=L)))
PREFIX_TOKENS = torch.tensor(list(product([0, 1], repeat=K)))
PREFIXES = INPUTS[:, :K] @ 2 ** torch.arange(K - 1, -1, -1)
FLIPS = torch.tensor([[0, *rest] for rest in product([0, 1], repeat=K - 1)])
GAUGES = (PREFIX_TOKENS ^ FLIPS[:, None]).sum(-1)
"""For each way of renaming tokens, the number of ones in each prefix: the class of a sum."""
PLAIN = GAUGES[0]
CLASSES = PLAIN[PREFIXES]
INFORMATIVE = torch.arange(L) < K

seeds = st.integers(0, 10_000)
several = settings(deadline=None, max_examples=30)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def permutation(seed: int, n: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed))


def flipped(tokens: Tensor, position: int) -> Tensor:
    return tokens ^ (torch.arange(tokens.shape[-1]) == position).long()


def pairs_of(tokens: Tensor) -> Tensor:
    """For each position the pairs of inputs that differ there alone, by looking each input up."""
    place = {tuple(row): i for i, row in enumerate(tokens.tolist())}
    partners = [[place[tuple(row)] for row in flipped(tokens, t).tolist()] for t in range(tokens.shape[1])]
    return torch.stack([torch.arange(len(tokens)).expand(tokens.shape[1], -1), torch.tensor(partners)], -1)


PAIRS = pairs_of(INPUTS)


def normed(vectors: Tensor) -> Tensor:
    return vectors / (vectors.square().mean(-1, keepdim=True).sqrt() + 1e-5)


def attention(strength: float) -> Tensor:
    """Attention of a head whose query asks for the second axis, on which positions say whether they are informative."""
    positions = torch.where(INFORMATIVE, 1.0, -1.0).double()
    keys = normed(torch.stack([torch.ones(L).double(), positions], -1))
    return (keys[:, 1] * strength / math.sqrt(2)).softmax(0)


def head(tokens: Tensor, strength: float = 12) -> Tensor:
    """The closed-form clustering head: its tokens lie at +1 and -1 of the first axis."""
    embedded = torch.stack(
        [1 - 2 * tokens.double(), torch.where(INFORMATIVE, 1.0, -1.0).double().expand(tokens.shape)], -1
    )
    return torch.einsum("t,...td->...d", attention(strength), normed(embedded))


def adding(*weights: float) -> Tensor:
    """What a head writes that adds up its tokens with these weights, along a direction of the plane."""
    return (INPUTS.double() @ torch.tensor(weights, dtype=torch.float64))[:, None] * torch.tensor([0.6, -0.8]) + 3


def copying(position: int) -> Tensor:
    return adding(*[float(t == position) for t in range(L)])


IDEAL = head(INPUTS)


# Shares of variance


def slow_share(vectors: Tensor, classes: Tensor) -> float:
    mean, between, total = vectors.mean(0), 0.0, 0.0
    for name in set(classes.tolist()):
        own = vectors[classes == name]
        between += len(own) * float((own.mean(0) - mean).square().sum())
    for vector in vectors:
        total += float((vector - mean).square().sum())
    return between / total


@given(seeds, st.integers(2, 5), st.integers(1, 4), st.integers(6, 30))
@several
def test_the_share_between_classes_is_that_of_slow_loops(seed: int, n_classes: int, d: int, n: int):
    classes = permutation(seed, n) % n_classes
    vectors = normal(seed, n, d) + normal(seed + 1, n_classes, d)[classes]
    assert between_class_share(vectors, classes).item() == pytest.approx(slow_share(vectors, classes))


def test_the_share_between_classes_by_hand():
    # The means of the classes are 1 and 5, the mean of all is 3: 4 times 2^2 between, 4 times 1^2 within.
    vectors = torch.tensor([[0.0], [2.0], [4.0], [6.0]])
    assert between_class_share(vectors, torch.tensor([0, 0, 1, 1])).item() == pytest.approx(16 / 20)
    assert between_class_share(vectors, torch.tensor([0, 1, 1, 0])) == 0


def test_classes_of_one_vector_each_have_all_the_variance():
    classes = permutation(0, 60) % 6
    corners = normal(1, 6, 3)
    assert between_class_share(corners[classes], classes).item() == pytest.approx(1)
    for seed in range(50):  # nor more, by rounding
        assert between_class_share(normal(seed, 6, 3).float()[classes], classes) <= 1


def test_the_share_rises_as_inputs_approach_their_class():
    classes, noise, means = permutation(0, 300) % 5, normal(1, 300, 2), normal(2, 5, 2)
    shares = [float(between_class_share(means[classes] + spread * noise, classes)) for spread in (10, 3, 1, 0.3, 0.1)]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] > 0.95


@given(seeds, st.integers(2, 5), st.integers(1, 4), st.floats(1e-3, 1e3))
@several
def test_the_share_and_the_gap_ignore_place_turn_size_names_and_order(seed: int, n_classes: int, d: int, size: float):
    n = 24
    classes = permutation(seed, n) % n_classes
    vectors = normal(seed, n, d) + normal(seed + 1, n_classes, d)[classes]
    turn, order = torch.linalg.qr(normal(seed + 2, d, d)).Q, permutation(seed + 3, n)
    moved = size * (vectors @ turn + normal(seed + 4, d))
    renamed = (permutation(seed + 5, n_classes) * 7 - 9)[classes]
    for measure in (between_class_share, separability):
        expected = measure(vectors, classes)
        torch.testing.assert_close(measure(moved, classes), expected)
        torch.testing.assert_close(measure(vectors, renamed), expected)
        torch.testing.assert_close(measure(vectors[order], classes[order]), expected)


def test_leading_axes_are_independent():
    vectors, gap = normal(0, 2, 3, len(INPUTS), 2) + IDEAL, normal(1, 2, 3, len(INPUTS), 2)
    measures: list[Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = [
        lambda v: between_class_share(v, CLASSES),
        lambda v: permuted_shares(v, CLASSES, 2, generator(0)),
        lambda v: nested_shares(v, PREFIXES, PLAIN),
        lambda v: best_gauge(v, PREFIXES, GAUGES),
        lambda v: token_influence(v, PAIRS),
        lambda v: influence_share(token_influence(v, PAIRS), INFORMATIVE),
        lambda v: lattice(v, INPUTS, INFORMATIVE),
        lambda v: centroids(v, PREFIXES, len(PLAIN)),
        lambda v: swap_matrix(centroids(v, PREFIXES, len(PLAIN)), PREFIX_TOKENS),
        lambda v: representation_accuracy(v, CLASSES, CLASSES % 2),
        lambda v: separability(v, CLASSES),
        lambda v: informative_attention(v[..., :L, 0].softmax(-1), INFORMATIVE),
        lambda v: angle_change(v, v + gap[: len(v)] if v.ndim == 4 else v + gap[0, 1]),
        smallest_norm,
    ]
    for measure in measures:
        together, alone = measure(vectors), measure(vectors[0, 1])
        for all_of_them, one in zip(
            together if isinstance(together, tuple) else [together],
            alone if isinstance(alone, tuple) else [alone],
            strict=True,
        ):
            torch.testing.assert_close(all_of_them[0, 1], one)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_equal_vectors_have_no_share(value: float):
    equal = torch.full((len(INPUTS), 2), value)
    assert between_class_share(equal, CLASSES).isnan()
    assert permuted_shares(equal, CLASSES, 3, generator(0)).isnan().all()
    assert torch.stack(nested_shares(equal, PREFIXES, PLAIN)).isnan().all()
    assert best_gauge(equal, PREFIXES, GAUGES).type.isnan()
    assert influence_share(token_influence(equal, PAIRS), INFORMATIVE).isnan()
    assert lattice(equal, INPUTS, INFORMATIVE).r_squared.isnan()
    assert separability(equal, CLASSES).isnan()


def test_there_must_be_two_classes():
    vectors = normal(0, 4, 2)
    for measure in (
        between_class_share,
        separability,
        lambda v, c: permuted_shares(v, c, 1, generator(0)),
        lambda v, c: representation_accuracy(v, c, c),
    ):
        with pytest.raises(InputError, match="at least two classes, not 1"):
            measure(vectors, torch.zeros(4, dtype=torch.long))


def test_classes_dealt_out_anew_have_the_share_of_chance():
    vectors, classes = IDEAL + 0.01 * normal(0, *IDEAL.shape), CLASSES
    some = permutation(1, len(INPUTS))[:60]  # few enough for chance to be seen
    vectors, classes = vectors[some], classes[some]
    shares = permuted_shares(vectors, classes, 2000, generator(2))
    n_classes = len(classes.unique())
    error = shares.std().item() / math.sqrt(len(shares))
    assert shares.mean().item() == pytest.approx((n_classes - 1) / (len(some) - 1), abs=4 * error)
    assert shares.std() > 0.01
    assert between_class_share(vectors, classes) > 0.95 > 2 * shares.max()


def test_permutations_come_from_the_generator():
    first, again, other = (permuted_shares(IDEAL, CLASSES, 3, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(set(first.tolist())) == 3


@given(seeds, st.floats(0, 3), st.floats(0, 3), st.floats(0.1, 3))
@several
def test_nested_shares_add_up_and_agree_with_shares_of_one_level(seed: int, suffix: float, order: float, kind: float):
    inputs = permutation(seed, len(INPUTS))[:200]
    prefixes, classes = PREFIXES[inputs], CLASSES[inputs]
    vectors = (
        suffix * normal(seed, 200, 3)
        + order * normal(seed + 1, len(PLAIN), 3)[prefixes]
        + kind * normal(seed + 2, K + 1, 3)[classes]
    )
    shares = nested_shares(vectors, prefixes, PLAIN)
    assert min(shares) >= 0
    assert sum(shares).item() == pytest.approx(1)
    assert shares.type.item() == pytest.approx(slow_share(vectors, classes), abs=1e-9)
    assert (shares.type + shares.permutation).item() == pytest.approx(slow_share(vectors, prefixes), abs=1e-9)


def test_each_level_of_variance_has_its_own_share():
    of_class = normal(0, K + 1, 2)[CLASSES]
    assert nested_shares(of_class, PREFIXES, PLAIN).type.item() == pytest.approx(1)
    # Within each class the prefixes' vectors have mean zero, and within each prefix those of the inputs.
    of_order = normal(1, len(PLAIN), 2)
    of_order = (of_order - centroids(of_order, PLAIN, K + 1)[PLAIN])[PREFIXES]
    assert nested_shares(of_order, PREFIXES, PLAIN).permutation.item() == pytest.approx(1)
    of_suffix = normal(2, 2 ** (L - K), 2)[INPUTS[:, K:] @ 2 ** torch.arange(L - K)]
    assert nested_shares(of_suffix, PREFIXES, PLAIN).suffix.item() == pytest.approx(1)


def test_a_prefix_need_not_occur():
    inputs = PREFIXES != 3
    shares = nested_shares(IDEAL[inputs], PREFIXES[inputs], PLAIN)
    assert shares.type.item() == pytest.approx(1, abs=1e-4)
    best = best_gauge(IDEAL[inputs], PREFIXES[inputs], GAUGES)
    assert best.gauge == 0
    torch.testing.assert_close(best.type, shares.type)
    means = centroids(IDEAL[inputs], PREFIXES[inputs], len(PLAIN))
    assert means[3].isnan().all()
    assert means[:3].isfinite().all()


@pytest.mark.parametrize("measure", [lambda v, p: nested_shares(v, p, PLAIN), lambda v, p: best_gauge(v, p, GAUGES)])
def test_a_prefix_needs_a_class(measure: Callable):
    vectors = normal(0, 3, 2)
    with pytest.raises(InputError, match="prefix 32 has no class: those with one are 0 to 31"):
        measure(vectors, torch.tensor([0, 1, 32]))
    with pytest.raises(InputError, match="prefix -1 has no class"):
        measure(vectors, torch.tensor([0, -1, 31]))


# Gauges


def test_the_closed_form_head_puts_its_attention_on_the_informative_positions():
    for strength, mass in ((1, 0.75), (3, 0.98), (6, 0.9997), (12, 1.0)):
        measured = informative_attention(attention(strength), INFORMATIVE)
        assert measured.mass.item() == pytest.approx(mass, abs=0.5 * 10 ** -len(f"{mass}".partition(".")[2]))
        assert measured.entropy.item() == pytest.approx(1)
    assert informative_attention(attention(0), INFORMATIVE).mass.item() == pytest.approx(K / L)


def test_the_closed_form_head_is_a_clustering_head():
    shares = nested_shares(IDEAL, PREFIXES, PLAIN)
    assert shares.type.item() == pytest.approx(1, abs=1e-6)
    assert max(shares.suffix, shares.permutation) < 1e-6
    assert best_gauge(IDEAL, PREFIXES, GAUGES).gauge == 0
    assert influence_share(token_influence(IDEAL, PAIRS), INFORMATIVE).item() == pytest.approx(1, abs=1e-6)
    assert swap_matrix(centroids(IDEAL, PREFIXES, len(PLAIN)), PREFIX_TOKENS).max() < 1e-6
    assert representation_accuracy(IDEAL, CLASSES, CLASSES % 2) == 1
    assert separability(IDEAL, CLASSES) > 100


def test_a_weaker_head_is_less_of_one():
    measured = [best_gauge(head(INPUTS, strength), PREFIXES, GAUGES).type.item() for strength in (0, 0.5, 1, 3)]
    assert measured == sorted(measured)
    assert measured[0] == pytest.approx(K / L, abs=1e-3)  # attends to every position alike
    assert measured[-1] > 0.99


@pytest.mark.parametrize("position", range(1, K))
def test_a_head_that_renames_the_tokens_of_one_position_is_clustered_in_another_gauge(position: int):
    renamed = head(flipped(INPUTS, position))
    best = best_gauge(renamed, PREFIXES, GAUGES)
    torch.testing.assert_close(best.type, best_gauge(IDEAL, PREFIXES, GAUGES).type)
    assert FLIPS[best.gauge].tolist() == [int(t == position) for t in range(K)]
    assert nested_shares(renamed, PREFIXES, PLAIN).type < 0.4


def test_the_plain_share_of_a_renamed_head_is_that_of_its_sum():
    # Of five equal variances one has the wrong sign, and the sum of the other signs explains (4 - 1)^2 / 5^2 of all.
    renamed = head(flipped(INPUTS, 2), 40)
    assert nested_shares(renamed, PREFIXES, PLAIN).type.item() == pytest.approx(9 / 25)


def test_renaming_the_first_position_gives_the_gauge_of_all_the_others():
    best = best_gauge(head(flipped(INPUTS, 0)), PREFIXES, GAUGES)
    assert best.type > 0.999
    assert FLIPS[best.gauge].tolist() == [0, 1, 1, 1, 1]


@given(seeds, st.integers(0, 15))
@several
def test_the_best_gauge_is_the_largest_of_the_nested_shares(seed: int, gauge: int):
    inputs = permutation(seed, len(INPUTS))[:300]
    vectors = head(INPUTS[inputs] ^ torch.cat([FLIPS[gauge], torch.zeros(L - K, dtype=torch.long)]), 1)
    vectors = vectors + 0.3 * normal(seed, *vectors.shape)
    best = best_gauge(vectors, PREFIXES[inputs], GAUGES)
    each = torch.stack([nested_shares(vectors, PREFIXES[inputs], classes).type for classes in GAUGES])
    assert best.gauge == each.argmax()
    torch.testing.assert_close(best.type, each.max())


def test_gauges_ignore_the_names_of_classes():
    renamed = GAUGES * 7 - 20
    assert torch.equal(best_gauge(IDEAL, PREFIXES, renamed).type, best_gauge(IDEAL, PREFIXES, GAUGES).type)


def test_there_must_be_a_gauge():
    with pytest.raises(InputError, match="at least one gauge"):
        best_gauge(IDEAL, PREFIXES, GAUGES[:0])


def test_random_prefixes_have_the_best_gauge_of_chance():
    chance = chance_type(len(PLAIN), 2, GAUGES, 2000, generator(0))
    assert chance.mean().item() == pytest.approx(0.285, abs=0.005)
    assert chance.quantile(0.95).item() == pytest.approx(0.372, abs=0.01)
    # Of one gauge it is that of any classes, five degrees of freedom of 31; and more dimensions leave less to chance.
    one = chance_type(len(PLAIN), 2, GAUGES[:1], 2000, generator(0))
    assert one.mean().item() == pytest.approx(5 / 31, abs=0.005)
    assert chance_type(len(PLAIN), 8, GAUGES, 500, generator(0)).mean() < 0.25


def test_chance_needs_as_many_points_as_the_gauges_classify():
    with pytest.raises(InputError, match="31 points, but the gauges give the class of 32"):
        chance_type(31, 2, GAUGES, 1, generator(0))


def test_random_vectors_are_no_clustering_head():
    random = normal(0, len(INPUTS), 2)
    assert best_gauge(random, PREFIXES, GAUGES).type < 0.02
    assert nested_shares(random, PREFIXES, PLAIN).suffix > 0.98
    assert influence_share(token_influence(random, PAIRS), INFORMATIVE).item() == pytest.approx(K / L, abs=0.02)
    assert separability(random, CLASSES) < 0.2
    assert representation_accuracy(random, CLASSES, CLASSES % 2).item() == pytest.approx(0.5, abs=0.05)
    assert swap_matrix(centroids(random, PREFIXES, len(PLAIN)), PREFIX_TOKENS).sum() > K * (K - 1) * 0.1


def test_shuffled_classes_are_none():
    shuffled = CLASSES[permutation(0, len(CLASSES))]
    assert between_class_share(IDEAL, shuffled) < 0.01
    assert between_class_share(IDEAL, CLASSES) > 0.99


def test_a_head_that_copies_one_informative_token_ignores_the_suffix_and_is_not_clustered():
    copy = copying(2)
    shares = nested_shares(copy, PREFIXES, PLAIN)
    assert shares.suffix.item() == pytest.approx(0)
    assert best_gauge(copy, PREFIXES, GAUGES).type.item() == pytest.approx(1 / K)  # one of the K terms of the sum
    assert influence_share(token_influence(copy, PAIRS), INFORMATIVE) == 1
    assert representation_accuracy(copy, CLASSES, CLASSES % 2) < 0.7


# Influence


def test_the_influence_of_a_token_is_how_far_it_moves_the_vector():
    weights = [3.0, 0.0, -2.0, *[0.0] * 8, 1.0]
    measured = token_influence(adding(*weights), PAIRS)
    torch.testing.assert_close(measured, torch.tensor(weights).double().abs())
    share = influence_share(measured, INFORMATIVE).item()
    assert share == pytest.approx((9 + 4) / (9 + 4 + 1))


def test_the_influence_is_a_mean_over_pairs():
    # Token 1 matters where token 0 is 1: there the vector moves by (3, 4).
    tokens = torch.tensor(list(product([0, 1], repeat=2)))
    vectors = (tokens[:, :1] * tokens[:, 1:]).float() * torch.tensor([3.0, 4.0])
    assert token_influence(vectors, pairs_of(tokens)).tolist() == [2.5, 2.5]


def test_a_head_that_copies_a_spurious_token_has_no_informative_influence():
    assert influence_share(token_influence(copying(K), PAIRS), INFORMATIVE) == 0
    assert influence_share(torch.ones(L), INFORMATIVE).item() == pytest.approx(K / L)


@given(seeds, st.floats(1e-3, 1e3))
@several
def test_the_share_of_influence_ignores_size_and_turn(seed: int, size: float):
    vectors = normal(seed, len(INPUTS), 3)
    expected = influence_share(token_influence(vectors, PAIRS), INFORMATIVE)
    moved = size * (vectors @ torch.linalg.qr(normal(seed + 1, 3, 3)).Q) + 1
    torch.testing.assert_close(influence_share(token_influence(moved, PAIRS), INFORMATIVE), expected)


@pytest.mark.parametrize(
    "measure",
    [
        lambda informative: influence_share(torch.ones(L), informative),
        lambda informative: informative_attention(torch.ones(L) / L, informative),
        lambda informative: lattice(IDEAL, INPUTS, informative),
    ],
)
def test_some_position_must_be_informative(measure: Callable):
    with pytest.raises(InputError, match="at least one of the 12 positions must be informative"):
        measure(torch.zeros(L, dtype=torch.bool))


# Lattice


def test_the_lattice_of_the_closed_form_head_has_a_step_at_each_informative_position():
    measured = lattice(IDEAL, INPUTS, INFORMATIVE)
    torch.testing.assert_close(measured.weights, INFORMATIVE.double(), atol=1e-6, rtol=0)
    assert measured.r_squared.item() == pytest.approx(1)
    assert measured.off_integers < 1e-6
    assert measured.parity_holds


def test_weights_are_in_units_of_the_median_informative_step_and_start_positive():
    weights = [-1.0, 1.0, -3.0, 1.0, 1.0, 2.0, 0.0, -2.0, 0.0, 0.0, 0.0, 0.0]
    for step in (0.01, -0.01, 70.0):
        measured = lattice(adding(*[step * w for w in weights]), INPUTS, INFORMATIVE)
        torch.testing.assert_close(measured.weights, -torch.tensor(weights).double())
        assert measured.parity_holds
        assert measured.off_integers < 1e-9
        assert measured.r_squared.item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("weights", "off"),
    [
        ([1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0], 0.0),  # a spurious token counts
        ([1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0], 0.0),  # an informative one does not
        ([1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0], 0.0),  # or counts twice
        ([1, 1, 1, 1, 1.6, 0, 0, 0, 0, 0, 0, 0], 0.4),
    ],
    ids=str,
)
def test_heads_that_count_otherwise_do_not_hold_the_parity(weights: list[float], off: float):
    measured = lattice(adding(*weights), INPUTS, INFORMATIVE)
    assert not measured.parity_holds
    assert measured.off_integers.item() == pytest.approx(off, abs=1e-9)


def test_a_head_that_copies_one_token_has_no_step():
    for dtype in (torch.float32, torch.float64):
        measured = lattice(copying(1).to(dtype), INPUTS, INFORMATIVE)
        assert measured.weights.isnan().all()
        assert not measured.parity_holds
        assert measured.r_squared.item() == pytest.approx(1)


def test_random_vectors_are_not_linear_in_the_tokens():
    measured = lattice(normal(0, len(INPUTS), 2), INPUTS, INFORMATIVE)
    assert measured.r_squared.item() == pytest.approx(L / (len(INPUTS) - 1), abs=0.003)
    assert measured.off_integers > 0.2


def test_the_product_of_two_tokens_is_half_linear():
    # x_0 XOR x_1 is orthogonal to every token.
    parity = (INPUTS[:, :1] ^ INPUTS[:, 1:2]).double()
    assert lattice(parity, INPUTS, INFORMATIVE).r_squared.item() == pytest.approx(0, abs=1e-9)
    assert lattice(parity + adding(*[1.0] * L)[:, :1], INPUTS, INFORMATIVE).r_squared.item() == pytest.approx(
        0.36 * L / (0.36 * L + 1)
    )


def test_off_the_main_axis_vectors_are_fitted_but_not_weighed():
    # Along the first axis all tokens count alike, along the second one position, less.
    along = adding(*[1.0] * K, *[0.0] * (L - K))
    off = 0.5 * INPUTS[:, -1:].double() * torch.tensor([0.8, 0.6])
    measured = lattice(along + off, INPUTS, INFORMATIVE)
    torch.testing.assert_close(measured.weights, INFORMATIVE.double())
    assert measured.r_squared.item() == pytest.approx(1)


@given(seeds, st.floats(1e-3, 1e3))
@several
def test_the_lattice_ignores_place_turn_size_and_order(seed: int, size: float):
    inputs = permutation(seed, len(INPUTS))[:200]
    vectors = head(INPUTS[inputs], 2) + 0.1 * normal(seed, 200, 2)
    moved = size * (vectors @ torch.linalg.qr(normal(seed + 1, 2, 2)).Q) - 2
    order = permutation(seed + 2, 200)
    expected = lattice(vectors, INPUTS[inputs], INFORMATIVE)
    torch.testing.assert_close(lattice(moved, INPUTS[inputs], INFORMATIVE), expected)
    torch.testing.assert_close(lattice(vectors[order], INPUTS[inputs][order].double(), INFORMATIVE), expected)


def test_a_lattice_needs_binary_tokens_that_vary_independently():
    with pytest.raises(InputError, match="must be 0 and 1"):
        lattice(IDEAL, INPUTS + 1, INFORMATIVE)
    for bits in (INPUTS * (torch.arange(L) != 7), INPUTS[:, [0, 0, *range(2, L)]]):
        with pytest.raises(InputError, match="give inputs in which each varies"):
            lattice(IDEAL.float(), bits, INFORMATIVE)


# Centroids


def test_centroids_by_hand():
    vectors = torch.tensor([[0.0, 1.0], [4.0, 1.0], [2.0, 5.0]])
    assert centroids(vectors, torch.tensor([1, 1, 0]), 2).tolist() == [[2.0, 5.0], [2.0, 1.0]]


def slow_swaps(means: Tensor, tokens: list[list[int]]) -> Tensor:
    place = {tuple(row): i for i, row in enumerate(tokens)}
    diameter = max(float((a - b).norm()) for a in means for b in means)
    k = len(tokens[0])
    moves = torch.zeros(k, k, dtype=means.dtype)
    for i, j in product(range(k), repeat=2):
        lengths = []
        for row in tokens:
            swapped = list(row)
            swapped[i], swapped[j] = row[j], row[i]
            if swapped != row:
                lengths.append(float((means[place[tuple(row)]] - means[place[tuple(swapped)]]).norm()))
        moves[i, j] = sum(lengths) / len(lengths) / diameter if lengths else 0
    return moves


@given(seeds, st.sampled_from([(2, 3), (3, 2), (3, 3), (2, 1)]))
@several
def test_the_swap_matrix_is_that_of_slow_loops(seed: int, sizes: tuple[int, int]):
    names, k = sizes
    tokens = torch.tensor(list(product([5, -1, 2][:names], repeat=k)))[permutation(seed, names**k)]
    means = normal(seed, names**k, 2)
    measured = swap_matrix(means, tokens)
    torch.testing.assert_close(measured, slow_swaps(means, tokens.tolist()))
    assert torch.equal(measured.diagonal(), torch.zeros(k, dtype=torch.float64))
    assert measured.max() <= 1
    torch.testing.assert_close(swap_matrix(3 * means + 1, tokens), measured)


def test_swaps_with_a_renamed_position_move_the_centroid_by_two_steps_of_five():
    renamed = head(flipped(INPUTS, 2))
    measured = swap_matrix(centroids(renamed, PREFIXES, len(PLAIN)), PREFIX_TOKENS)
    expected = torch.full((K, K), 0.0).double()
    expected[2], expected[:, 2] = 2 / K, 2 / K
    expected[2, 2] = 0
    torch.testing.assert_close(measured, expected, atol=1e-6, rtol=0)


def test_a_head_that_copies_one_token_notices_swaps_with_it_alone():
    measured = swap_matrix(centroids(copying(0), PREFIXES, len(PLAIN)), PREFIX_TOKENS)
    torch.testing.assert_close(measured[0, 1:], torch.ones(K - 1).double())
    torch.testing.assert_close(measured[1:, 1:], torch.zeros(K - 1, K - 1).double())


def test_swaps_need_every_prefix_once():
    means, tokens = normal(0, 4, 2), torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    for some in ([0, 1, 3], [0, 2, 3], [0, 1], [0, 2], [0, 1, 2, 2]):
        with pytest.raises(InputError, match="each prefix must be given once"):
            swap_matrix(means[some], tokens[some])
    assert swap_matrix(means[[1, 2]], tokens[[1, 2]])[0, 1] == 1  # the others' swaps lead nowhere else


# Clusters


def slow_accuracy(vectors: Tensor, classes: Tensor, labels: Tensor) -> float:
    names = sorted(set(classes.tolist()))
    means = [vectors[classes == name].mean(0) for name in names]
    majority = []
    for name in names:
        counted = Counter(labels[classes == name].tolist())
        majority.append(min(counted, key=lambda label: (-counted[label], label)))
    nearest = [min(range(len(names)), key=lambda c: float((v - means[c]).norm())) for v in vectors]
    return sum(majority[c] == label for c, label in zip(nearest, labels.tolist(), strict=True)) / len(vectors)


@given(seeds, st.integers(2, 5), st.integers(1, 3))
@several
def test_the_accuracy_of_the_nearest_centroid_is_that_of_slow_loops(seed: int, n_classes: int, d: int):
    classes = permutation(seed, 40) % n_classes
    vectors = normal(seed, 40, d) + normal(seed + 1, n_classes, d)[classes]
    labels = torch.where(normal(seed + 2, 40) > 1, 7, classes % 2 - 3)
    measured = representation_accuracy(vectors, classes, labels).item()
    assert measured == pytest.approx(slow_accuracy(vectors, classes, labels))


def test_a_renamed_head_needs_its_gauge_to_be_accurate_and_apart():
    renamed = head(flipped(INPUTS, 3))
    own = GAUGES[best_gauge(renamed, PREFIXES, GAUGES).gauge][PREFIXES]
    assert representation_accuracy(renamed, own, CLASSES % 2) == 1
    assert representation_accuracy(renamed, CLASSES, CLASSES % 2) < 0.7
    assert separability(renamed, own) > 100
    assert separability(renamed, CLASSES) < 2


def test_separability_by_hand():
    # Centroids at 0, 10 and 14; the inputs are 1, 1, 1, 1, 2 and 2 away from them.
    vectors = torch.tensor([[-1.0], [1.0], [9.0], [11.0], [12.0], [16.0]])
    assert separability(vectors, torch.tensor([0, 0, 1, 1, 2, 2])).item() == pytest.approx(4 / (8 / 6))


def test_two_classes_in_one_place_are_not_apart_whatever_the_others():
    places = torch.tensor([[0.0, 0.0], [100.0, 0.0], [100.0, 0.0]])
    classes = torch.arange(3).repeat_interleave(4)
    vectors = places[classes] + torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).repeat(3, 1)
    assert separability(vectors, classes) == 0
    assert between_class_share(vectors, classes) > 0.99  # which a share of variance does not see
    assert separability(vectors[:8], classes[:8]) == 100


def test_classes_of_one_vector_each_are_infinitely_far_apart():
    assert separability(torch.tensor([[0.0], [0.0], [1.0], [1.0]]), torch.tensor([0, 0, 1, 1])) == math.inf


# Attention, angles and norms


def test_the_entropy_says_how_even_attention_is():
    pattern = torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0], [0.3, 0.1, 0.6]])
    mass, entropy = informative_attention(pattern, torch.tensor([True, True, False]))
    torch.testing.assert_close(mass, torch.tensor([0.5, 0.5, 0.0, 0.4]))
    binary = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    torch.testing.assert_close(entropy, torch.tensor([1.0, 0.0, math.nan, binary]), equal_nan=True)
    alone = informative_attention(pattern, torch.tensor([False, False, True]))
    assert torch.equal(alone.mass, pattern[:, 2])
    assert torch.equal(alone.entropy, torch.ones(4))


def test_attention_to_a_position_whose_tokens_lie_on_one_ray_says_nothing_of_it():
    # Embeddings (2, 2) and (1, 1) are one vector behind the norm: the head attends to the second position in vain.
    tokens = torch.tensor(list(product([0, 1], repeat=2)))
    first = torch.stack([2.0 * tokens[:, 0] - 1, torch.zeros(4)], -1)
    second = (2.0 - tokens[:, 1:]).expand(-1, 2)
    pattern = torch.tensor([0.2, 0.8])
    vectors = 0.2 * normed(first) + 0.8 * normed(second)
    informative = torch.tensor([True, False])
    assert informative_attention(pattern, informative).mass.item() == pytest.approx(0.2)
    share = influence_share(token_influence(vectors, pairs_of(tokens)), informative)
    assert share.item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("angle", [0.0, 1e-5, 0.01, 1.0, math.pi / 2, 3.0, math.pi])
def test_the_angle_of_a_turn_is_found_whatever_the_lengths(angle: float):
    turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    before = normal(0, 50, 2).float()
    after = (before @ turn) * torch.linspace(0.1, 10, 50)[:, None]
    assert angle_change(after, before).item() == pytest.approx(angle, abs=3e-7, rel=0.01)


def test_the_angle_is_a_mean_and_a_zero_vector_has_none():
    now, before = torch.tensor([[0.0, 2.0], [5.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert angle_change(now, before).item() == pytest.approx(math.pi / 4)
    assert angle_change(torch.zeros(2, 2), before).isnan()


def test_the_smallest_norm_is_that_of_the_shortest_vector():
    assert smallest_norm(torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.5]])) == 0.5
    assert smallest_norm(torch.tensor([[3.0, 4.0], [6.0, 8.0]])) == 5


def test_half_precision_is_raised_to_single():
    half = IDEAL.half()
    assert nested_shares(half, PREFIXES, PLAIN).type.dtype == torch.float32
    assert best_gauge(half, PREFIXES, GAUGES).type > 0.99
    assert lattice(half, INPUTS, INFORMATIVE).parity_holds
