import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fd_interp.measures.lags import attention_by_block
from fd_interp.measures.specialization import (
    assigned_blocks,
    competition_index,
    cooperation_index,
    cooperative_offsets,
    effective_coefficients,
    participation_rank,
    redundancy,
    value_coefficients,
    value_cosines,
)

D = 6
INDICES = [competition_index, cooperation_index, redundancy]
FINAL = torch.tensor([[0.99, 0.0, 0.0], [0.06, 0.89, 0.04], [0.44, 0.01, 0.53]], dtype=torch.float64)
"""Three heads after training, the last one mixed: a table as in the paper's final phase."""
FINAL_VALUES = torch.tensor([[6.9, -1.1, -1.5], [-0.1, 6.2, 0.5], [1.9, -0.2, 5.4]], dtype=torch.float64)
"""How much of each feature those heads write."""

seeds = st.integers(0, 10_000)
sizes = st.integers(1, 5)
several = settings(deadline=None, max_examples=40)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def masses(seed: int, heads: int, blocks: int) -> Tensor:
    """Attention on disjoint blocks, sharp enough that all phases occur; one more block takes the rest."""
    scores = 3 * torch.randn(heads, blocks + 1, generator=generator(seed), dtype=torch.float64)
    return scores.softmax(-1)[:, :-1]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def all_on(top: list[int], blocks: int) -> Tensor:
    return torch.eye(blocks, dtype=torch.float64)[top]


def rotations(seed: int, count: int, d: int = D) -> Tensor:
    """Random rotations, evenly distributed: the signs make the decomposition unique."""
    q, r = torch.linalg.qr(normal(seed, count, d, d))
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]


def orthogonal_features(seed: int, count: int, d: int = D) -> Tensor:
    """Matrices of any length that are orthogonal in Frobenius norm."""
    frame = torch.linalg.qr(normal(seed, d * d, count)).Q.mT.reshape(count, d, d)
    return frame * torch.linspace(1, 3, count)[:, None, None]


def places(seed: int, n: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed))


def all_equal(measured: Tensor, value: float) -> bool:
    return torch.allclose(measured, torch.full_like(measured, value), atol=1e-9)


@pytest.mark.parametrize("heads", [2, 3, 5])
@pytest.mark.parametrize("blocks", [2, 3, 4])
@pytest.mark.parametrize("block", [0, 1])
def test_all_heads_on_one_block_compete_fully(heads: int, blocks: int, block: int):
    mass = all_on([block] * heads, blocks)
    assert competition_index(mass) == 1
    assert cooperation_index(mass).item() == pytest.approx(1 / min(heads, blocks))
    assert redundancy(mass) == 1
    assert participation_rank(mass).item() == pytest.approx(1)


@pytest.mark.parametrize("top", [[0, 1, 2], [2, 0, 1], [1, 0], [2, 0], [0, 1, 2, 1], [2, 2, 1, 0, 2]], ids=str)
def test_a_head_for_each_block_that_can_have_one_is_full_cooperation(top: list[int]):
    mass = all_on(top, 3)
    assert cooperation_index(mass) == 1
    assert competition_index(mass) == 0
    assert redundancy(mass).item() == pytest.approx(max(len(top) - 3, 0) / (len(top) - 1))


def test_equal_spread_over_blocks_is_neither():
    for heads in (2, 3, 4):
        mass = torch.full((heads, 3), 1 / 3, dtype=torch.float64)
        assert all_equal(competition_index(mass), 1 / 3)
        assert all_equal(cooperation_index(mass), 1 / 3)


def test_uniform_attention_has_the_shares_of_the_blocks():
    # Ten positions are seen: the blocks hold 1, 2 and 4 of them.
    blocks = [[1], [2, 3], [4, 5, 6, 7]]
    mass = attention_by_block(torch.full((1, 2, 10, 10), 0.1, dtype=torch.float64), blocks)
    assert competition_index(mass).item() == pytest.approx(0.4)
    assert cooperation_index(mass).item() == pytest.approx((0.4 + 0.2) / 2)


def test_one_head_has_its_largest_mass():
    mass = torch.tensor([[0.2, 0.5, 0.3]])
    assert competition_index(mass).item() == cooperation_index(mass).item() == 0.5
    assert redundancy(mass).isnan()


def test_the_trained_heads_by_hand():
    assert assigned_blocks(FINAL).tolist() == [0, 1, 2]
    assert cooperation_index(FINAL).item() == pytest.approx((0.99 + 0.89 + 0.53) / 3)
    assert competition_index(FINAL).item() == pytest.approx(0.06)
    assert redundancy(FINAL) == 0
    competitive = torch.tensor([[0.72, 0.10, 0.07], [0.70, 0.12, 0.05], [0.71, 0.11, 0.06]])
    assert competition_index(competitive).item() == pytest.approx(0.70)
    assert cooperation_index(competitive).item() == pytest.approx((0.72 + 0.12 + 0.06) / 3)
    assert redundancy(competitive) == 1


def test_two_top_blocks_among_three_heads_are_half_redundant():
    assert redundancy(torch.tensor([[0.6, 0.3], [0.4, 0.5], [0.9, 0.1]])) == 0.5
    assert redundancy(torch.tensor([[0.5, 0.5], [0.6, 0.4]])) == 1  # of two top blocks the first counts


@pytest.mark.parametrize("index", INDICES)
@given(seeds, sizes, sizes)
@several
def test_an_index_ignores_the_order_of_heads_and_blocks(index, seed: int, heads: int, blocks: int):
    mass = masses(seed, heads, blocks)
    mixed = mass[places(seed, heads)][:, places(seed + 1, blocks)]
    torch.testing.assert_close(index(mixed), index(mass), equal_nan=True)


@given(seeds, st.integers(2, 5), sizes)
@several
def test_indices_stay_in_their_range(seed: int, heads: int, blocks: int):
    mass = masses(seed, heads, blocks)
    competition, cooperation = competition_index(mass), cooperation_index(mass)
    assert 0 <= competition <= 1
    assert competition / min(heads, blocks) - 1e-12 <= cooperation <= 1
    assert max(0, (heads - blocks) / (heads - 1)) - 1e-12 <= redundancy(mass) <= 1


@given(seeds, st.integers(2, 5), st.integers(2, 5), st.floats(0.5, 1), st.floats(0.5, 1))
@several
def test_two_heads_on_different_blocks_leave_at_most_half(seed: int, heads: int, blocks: int, a: float, b: float):
    mass = masses(seed, heads, blocks)
    mass[0] = (1 - a) / (blocks - 1)
    mass[1] = (1 - b) / (blocks - 1)
    mass[0, 0], mass[1, 1] = a, b
    assert competition_index(mass) <= 0.5 + 1e-12


def test_heads_that_share_a_block_go_above_half():
    assert competition_index(torch.tensor([[0.6, 0.4], [0.8, 0.0]])) > 0.5


@given(seeds, sizes, sizes)
@several
def test_owners_are_the_best_of_all_one_to_one_assignments(seed: int, heads: int, blocks: int):
    mass = masses(seed, heads, blocks)
    few = min(heads, blocks)
    best = max(
        mass[list(some_heads), list(some_blocks)].sum().item()
        for some_heads in permutations(range(heads), few)
        for some_blocks in permutations(range(blocks), few)
    )
    owner = assigned_blocks(mass)
    owned = owner >= 0
    assert owned.sum() == few
    assert len(set(owner[owned].tolist())) == few
    assert set(owner.tolist()) <= set(range(-1, heads))
    assert mass[owner[owned], owned].sum().item() == pytest.approx(best)
    assert cooperation_index(mass).item() == pytest.approx(best / few)


def test_the_assignment_is_not_each_blocks_favourite_head():
    # Head 0 attends the most to both blocks, and the total is greatest when it leaves the first to head 1.
    assert assigned_blocks(torch.tensor([[0.5, 0.45], [0.4, 0.1]])).tolist() == [1, 0]


def test_blocks_without_owner_and_heads_without_block():
    assert assigned_blocks(torch.tensor([[0.1, 0.6, 0.2]])).tolist() == [-1, 0, -1]
    assert assigned_blocks(torch.tensor([[0.1], [0.7], [0.2]])).tolist() == [1]


@given(seeds, sizes, sizes)
@several
def test_owners_move_with_heads_and_blocks(seed: int, heads: int, blocks: int):
    mass = masses(seed, heads, blocks)
    head_places, block_places = places(seed, heads), places(seed + 1, blocks)
    moved = assigned_blocks(mass[head_places][:, block_places])
    names = torch.cat([head_places, torch.tensor([-1])])  # so that -1 stays -1
    assert torch.equal(names[moved], assigned_blocks(mass)[block_places])


@pytest.mark.parametrize("measure", [*INDICES, participation_rank])
def test_leading_axes_are_independent(measure):
    together = torch.stack([masses(seed, 3, 4) for seed in range(6)]).view(2, 3, 3, 4)
    measured = measure(together)
    assert measured.shape == (2, 3)
    torch.testing.assert_close(measured[1, 2], measure(together[1, 2]))
    assert measure(together[0]).shape == (3,)


@pytest.mark.parametrize("measure", [*INDICES, participation_rank])
def test_half_precision_is_raised_and_double_kept(measure):
    for dtype, kept in ((torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        assert measure(FINAL.to(dtype)).dtype == kept
        assert measure(FINAL.to(dtype)).item() == pytest.approx(measure(FINAL).item(), abs=0.01)


def test_masses_with_gradients_are_measured():
    for measure in (*INDICES, participation_rank, assigned_blocks):
        torch.testing.assert_close(measure(FINAL.clone().requires_grad_()).detach(), measure(FINAL))


@given(seeds, st.integers(1, 5), st.integers(1, 6))
@several
def test_proportional_heads_are_one_pattern(seed: int, heads: int, lags: int):
    by_lag = torch.outer(normal(seed, heads).abs() + 0.1, normal(seed + 1, lags).abs() + 0.1)
    assert participation_rank(by_lag).item() == pytest.approx(1)


@given(seeds, st.integers(1, 5), st.integers(1, 5))
@several
def test_orthogonal_heads_of_equal_length_are_as_many_patterns(seed: int, few: int, more: int):
    frame = 0.3 * torch.linalg.qr(normal(seed, few + more, few)).Q
    assert participation_rank(frame).item() == pytest.approx(few)
    assert participation_rank(frame.mT).item() == pytest.approx(few)


def test_participation_by_hand():
    # Squared singular values 9 and 1.
    assert participation_rank(torch.tensor([[3.0, 0, 0], [0, 0, 1.0]])).item() == pytest.approx(100 / 82)
    # Uncentred: two heads that agree are one pattern, even though their difference from the mean head is none.
    assert participation_rank(torch.full((2, 4), 0.25)).item() == pytest.approx(1)
    assert participation_rank(torch.zeros(2, 3)).isnan()


@given(seeds, sizes, sizes, st.floats(1e-6, 1e3))
@several
def test_participation_is_that_of_the_singular_values(seed: int, heads: int, lags: int, scale: float):
    by_lag = masses(seed, heads, lags)
    squares = torch.linalg.svdvals(by_lag) ** 2
    rank = participation_rank(by_lag)
    torch.testing.assert_close(rank, squares.sum() ** 2 / (squares**2).sum())
    assert 1 - 1e-9 <= rank <= min(heads, lags) + 1e-9
    torch.testing.assert_close(participation_rank(scale * by_lag), rank)
    torch.testing.assert_close(participation_rank(by_lag[places(seed, heads)][:, places(seed, lags)]), rank)


def test_participation_sees_how_much_each_head_attends():
    # Not a count of directions: a head that hardly attends hardly counts.
    assert participation_rank(torch.diag(torch.tensor([1.0, 1.0]))) == 2
    assert participation_rank(torch.diag(torch.tensor([1.0, 0.1]))).item() == pytest.approx(1.01**2 / 1.0001)


def test_values_by_hand():
    features = torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [3.0, 4.0]]])
    OV = torch.tensor([[[1.0, 5.0], [0.0, 0.0]], [[0.0, 0.0], [-6.0, -8.0]]])
    assert value_coefficients(OV, features).tolist() == [[0.5, 0.0], [0.0, -2.0]]
    cosines = value_cosines(OV, features)
    assert cosines.flatten().tolist() == pytest.approx([1 / math.sqrt(26), 0, 0, -1])


def test_values_are_read_source_by_target():
    feature = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert value_coefficients(feature[None], feature[None]).item() == 1
    assert value_coefficients(feature.mT[None], feature[None]).item() == 0


@given(seeds, st.integers(1, 4), st.integers(1, 4))
@several
def test_coefficients_of_orthogonal_features_are_those_they_were_mixed_with(seed: int, heads: int, blocks: int):
    features, mixed = orthogonal_features(seed, blocks), normal(seed + 1, heads, blocks)
    OV = torch.einsum("hb,bst->hst", mixed, features)
    torch.testing.assert_close(value_coefficients(OV, features), mixed)
    torch.testing.assert_close(value_cosines(OV, features).square().sum(-1), torch.ones(heads).double())


@given(seeds, st.integers(1, 4), st.integers(1, 4))
@several
def test_coefficients_of_orthogonal_features_are_the_closest_ones(seed: int, heads: int, blocks: int):
    features, OV = orthogonal_features(seed, blocks), normal(seed + 1, heads, D, D)
    closest = torch.linalg.lstsq(features.flatten(1).mT, OV.flatten(1).mT).solution.mT
    torch.testing.assert_close(value_coefficients(OV, features), closest)


def test_independent_rotations_hold_one_over_d_of_each_other():
    d = 20
    between = value_coefficients(rotations(0, 40, d), rotations(1, 40, d))
    assert between.square().mean().sqrt().item() == pytest.approx(1 / d, rel=0.1)
    mixed = value_coefficients(rotations(0, 2, d), rotations(0, 2, d))
    assert all_equal(mixed.diagonal(), 1)
    assert mixed[0, 1].abs() > 1e-3  # not zero, as it would be for orthogonal features


@given(seeds, st.floats(0.01, 100), st.floats(0.01, 100))
@several
def test_cosines_see_no_strength_and_coefficients_are_in_units_of_the_feature(seed: int, value: float, feature: float):
    OV, features = normal(seed, 3, D, D), normal(seed + 1, 2, D, D)
    cosines = value_cosines(OV, features)
    assert (cosines.abs() < 1).all()
    torch.testing.assert_close(value_cosines(value * OV, feature * features), cosines)
    torch.testing.assert_close(value_cosines(-OV, features), -cosines)
    coefficients = value_coefficients(OV, features)
    torch.testing.assert_close(value_coefficients(value * OV, feature * features), value / feature * coefficients)
    heads, blocks = places(seed, 3), places(seed, 2)
    torch.testing.assert_close(value_coefficients(OV[heads], features[blocks]), coefficients[heads][:, blocks])
    torch.testing.assert_close(value_cosines(OV[heads], features[blocks]), cosines[heads][:, blocks])


@given(seeds, st.floats(-20, 20).filter(lambda strength: abs(strength) > 1e-3))
@several
def test_values_that_are_a_feature_have_cosine_one_at_any_strength(seed: int, strength: float):
    features = normal(seed, 2, D, D)
    own = value_cosines(strength * features, features).diagonal()
    assert all_equal(own, math.copysign(1, strength))


def test_zeros_have_no_direction_and_zero_features_no_coefficient():
    features = orthogonal_features(0, 2)
    silent = torch.zeros(1, D, D).double()
    assert value_cosines(silent, features).isnan().all()
    assert value_coefficients(silent, features).tolist() == [[0, 0]]
    assert value_coefficients(features, torch.zeros(1, D, D)).isnan().all()


def test_leading_axes_of_values_are_independent():
    OV, features = normal(0, 4, 2, 3, D, D), normal(1, 2, D, D)
    for measure in (value_coefficients, value_cosines):
        together = measure(OV, features)
        assert together.shape == (4, 2, 3, 2)
        torch.testing.assert_close(together[3, 1], measure(OV[3, 1], features))
        assert measure(OV.bfloat16(), features).dtype == torch.float32


def test_effective_coefficients_by_hand():
    effective = effective_coefficients(FINAL, FINAL_VALUES)
    expected = [0.99 * 6.9 - 0.06 * 0.1 + 0.44 * 1.9, 0.89 * 6.2 - 0.01 * 0.2, 0.04 * 0.5 + 0.53 * 5.4]
    assert effective.tolist() == pytest.approx(expected)
    assert effective_coefficients(FINAL, torch.zeros(3, 3)).tolist() == [0, 0, 0]


@given(seeds, st.integers(0, 3))
@several
def test_a_learned_block_has_its_strength_times_its_weights_however_heads_divide_the_work(seed: int, spare: int):
    # Heads as many as lags or more can write every task exactly, even from random patterns.
    features, strengths = orthogonal_features(seed, 3), torch.tensor([2.89, 1.7, 1.0]).double()
    blocks, weights = [[0, 1], [2], [3, 4]], torch.tensor([0.7, 0.3, 1.0, 0.25, 0.5]).double()
    by_lag = (2 * normal(seed, 5 + spare, 6)).softmax(-1)[:, :5]
    wanted = torch.zeros(5, 3).double()  # lag block
    for k, block in enumerate(blocks):
        wanted[block, k] = strengths[k] * weights[block]
    mixed = torch.linalg.pinv(by_lag.mT) @ wanted
    OV = torch.einsum("hb,bst->hst", mixed, features)
    mass = torch.stack([by_lag[:, block].sum(-1) for block in blocks], -1)
    coefficients = value_coefficients(OV, features)
    expected = strengths * torch.tensor([1.0, 1.0, 0.75]).double()
    torch.testing.assert_close(effective_coefficients(mass, coefficients), expected)
    order = places(seed, len(mass))
    torch.testing.assert_close(effective_coefficients(mass[order], coefficients[order]), expected)
    assert not torch.allclose(effective_coefficients(mass, coefficients.roll(1, 0)), expected)


def test_leading_axes_of_effective_coefficients_are_independent():
    mass, coefficients = masses(0, 3, 2).expand(4, 5, 3, 2), normal(0, 4, 5, 3, 2)
    effective = effective_coefficients(mass, coefficients)
    assert effective.shape == (4, 5, 2)
    torch.testing.assert_close(effective[3, 1], effective_coefficients(mass[3, 1], coefficients[3, 1]))


def test_cooperative_offsets_by_hand():
    owners = assigned_blocks(FINAL)
    assert cooperative_offsets(FINAL_VALUES, owners).tolist() == [-0.1, -1.1, -1.5]
    competitive = torch.tensor([[2.0, 0.1, 0.0], [2.1, 0.2, 0.1], [1.9, 0.3, 0.2]])
    assert cooperative_offsets(competitive, torch.tensor([1, 2, 0])).tolist() == pytest.approx([1.9, 0.1, 0.1])


def test_an_owners_own_negative_coefficient_is_no_offset():
    assert cooperative_offsets(torch.tensor([[-3.0], [0.5]]), torch.tensor([0])).tolist() == [0.5]
    assert cooperative_offsets(torch.tensor([[-3.0], [0.5]]), torch.tensor([1])).tolist() == [-3.0]


def test_there_is_no_offset_without_an_owner_or_without_another_head():
    two = cooperative_offsets(torch.tensor([[1.0, -2.0, -3.0], [0.5, 4.0, -1.0]]), torch.tensor([0, 1, -1]))
    assert two[:2].tolist() == [0.5, -2.0]
    assert two[2].isnan()
    assert cooperative_offsets(torch.tensor([[1.0, -2.0]]), torch.tensor([0, -1])).isnan().all()


@given(seeds, st.integers(2, 5), sizes)
@several
def test_offsets_move_with_the_blocks_and_ignore_the_order_of_heads(seed: int, heads: int, blocks: int):
    coefficients, owners = normal(seed, heads, blocks), assigned_blocks(masses(seed, heads, blocks))
    offsets = cooperative_offsets(coefficients, owners)
    order, block_places = places(seed, heads), places(seed + 1, blocks)
    renamed = torch.cat([order.argsort(), torch.tensor([-1])])[owners]
    moved = cooperative_offsets(coefficients[order][:, block_places], renamed[block_places])
    torch.testing.assert_close(moved, offsets[block_places], equal_nan=True)


@given(seeds, st.floats(0.1, 1), st.floats(0.1, 0.9))
@several
def test_a_head_that_also_attends_elsewhere_must_be_cancelled_there(seed: int, strength: float, leak: float):
    # Head 1 owns block 1 and leaks onto block 0, so the owner of block 0 must write minus what leaks of feature 1.
    mass = torch.tensor([[1.0, 0.0], [leak, 1 - leak]], dtype=torch.float64)
    coefficients = torch.linalg.inv(mass.mT) @ torch.diag(torch.tensor([1.0, strength])).double()
    offsets = cooperative_offsets(coefficients, torch.tensor([0, 1]))
    assert offsets[1].item() == pytest.approx(-leak * strength / (1 - leak))
    assert offsets[0].item() == pytest.approx(0, abs=1e-12)
