import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fd_interp.measures.condensation import (
    condensation_order,
    direction_cosine,
    effective_rank,
    frobenius_norm,
    relative_norm_change,
    row_cosines,
    singular_ratio,
    singular_values,
    singular_vector_alignment,
    top_share,
)

PI = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(n, n, seed=seed)).Q


def spectrum_measures(weight: Tensor) -> Tensor:
    s = singular_values(weight)
    return torch.stack([top_share(s), effective_rank(s), singular_ratio(s)])


matrices = st.builds(normal, st.integers(2, 7), st.integers(2, 7), seed=st.integers(0, 10_000))
several = settings(deadline=None, max_examples=30)


def test_rank_one_is_fully_condensed():
    weight = torch.outer(PI, normal(6))
    torch.testing.assert_close(spectrum_measures(weight), torch.tensor([1.0, 1.0, 0.0]).double())


@pytest.mark.parametrize("n", [2, 3, 8])
def test_orthonormal_is_not_condensed_at_all(n: int):
    torch.testing.assert_close(spectrum_measures(rotation(n)), torch.tensor([1 / n, n, 1.0]).double())
    torch.testing.assert_close(spectrum_measures(rotation(9)[:n]), torch.tensor([1 / n, n, 1.0]).double())


def test_two_directions_by_hand():
    weight = torch.diag(torch.tensor([3.0, 4.0]))
    s = singular_values(weight)
    assert s.tolist() == [4.0, 3.0]
    assert top_share(s).item() == pytest.approx(16 / 25)
    assert singular_ratio(s).item() == pytest.approx(3 / 4)
    assert frobenius_norm(s).item() == pytest.approx(5)
    entropy = -(4 / 7) * math.log(4 / 7) - (3 / 7) * math.log(3 / 7)
    assert effective_rank(s).item() == pytest.approx(math.exp(entropy))


@given(matrices, st.floats(1e-3, 1e3), st.integers(0, 100))
@several
def test_spectrum_ignores_rotation_scale_and_row_order(weight: Tensor, scale: float, seed: int):
    rows, columns = weight.shape
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    for same in (
        rotation(rows, seed) @ weight,
        weight @ rotation(columns, seed),
        -scale * weight,
        weight[order],
        weight.mT,
    ):
        torch.testing.assert_close(spectrum_measures(same), spectrum_measures(weight), atol=1e-9, rtol=1e-9)


@given(matrices)
@several
def test_spectrum_stays_in_its_range(weight: Tensor):
    rank = min(weight.shape)
    share, effective, ratio = spectrum_measures(weight).tolist()
    assert 1 / rank - 1e-9 <= share <= 1 + 1e-9
    assert 1 - 1e-9 <= effective <= rank + 1e-9
    assert 0 <= ratio <= 1


@given(st.floats(0, 0.9), st.floats(0.05, 0.1))
@several
def test_a_growing_second_direction_raises_the_rank(second: float, more: float):
    before, after = (spectrum_measures(torch.diag(torch.tensor([1.0, s, 0.0]))) for s in (second, second + more))
    assert after[0] < before[0]
    assert after[1] > before[1]
    assert after[2] > before[2]


def test_zeros_have_no_directions():
    assert spectrum_measures(torch.zeros(3, 2)).isnan().all()


def test_a_single_column_has_no_second_direction():
    assert spectrum_measures(torch.tensor([[1.0], [2.0]])).tolist() == pytest.approx([1.0, 1.0, 0.0])


def test_half_precision_is_raised_to_single():
    s = singular_values(torch.eye(3, dtype=torch.bfloat16))
    assert s.dtype == torch.float32
    assert relative_norm_change(torch.eye(3).half() * 300, torch.eye(3).half()).item() == pytest.approx(299)


def test_leading_axes_are_independent_matrices():
    weights = torch.stack([normal(5, 3, seed=seed) for seed in range(6)]).view(2, 3, 5, 3)
    together = spectrum_measures(weights)
    one_by_one = torch.stack([spectrum_measures(weight) for weight in weights.flatten(0, 1)], dim=-1).view(3, 2, 3)
    torch.testing.assert_close(together, one_by_one)
    torch.testing.assert_close(
        direction_cosine(weights, torch.ones(5))[1, 2], direction_cosine(weights[1, 2], torch.ones(5))
    )
    torch.testing.assert_close(
        relative_norm_change(weights, weights.flip(0))[0, 1], relative_norm_change(weights[0, 1], weights[1, 1])
    )


@given(matrices)
@several
def test_frobenius_norm_is_the_root_of_the_sum_of_squares(weight: Tensor):
    assert frobenius_norm(singular_values(weight)).item() == pytest.approx(math.sqrt((weight**2).sum()))


def test_norm_change_counts_from_the_start():
    weight = normal(4, 3)
    changes = [relative_norm_change(scale * weight, weight).item() for scale in (1, 2, 0.5, 0, -1)]
    assert changes == pytest.approx([0, 1, -0.5, -1, 0], abs=1e-12)


def test_rows_sized_by_frequency_point_along_it():
    assert direction_cosine(torch.outer(PI, normal(6)), PI).item() == pytest.approx(1)
    assert direction_cosine(-torch.outer(PI, normal(6)), PI).item() == pytest.approx(1)


def test_rows_orthogonal_to_a_direction_do_not_point_along_it():
    assert direction_cosine(torch.outer(PI, normal(6)), torch.tensor([0.25, -0.5, 0, 0])).item() < 1e-7


def test_direction_cosine_by_hand():
    # The top left singular vector is e_1; (1, 1) is at 45 degrees.
    weight = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert direction_cosine(weight, torch.tensor([5.0, 5.0])).item() == pytest.approx(math.sqrt(0.5))


@given(st.integers(0, 1000), st.floats(1e-3, 1e3))
@several
def test_direction_cosine_follows_the_rows_and_ignores_the_rest(seed: int, scale: float):
    weight, order = normal(4, 3, seed=seed), torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    expected = direction_cosine(weight, PI)
    assert 0 <= expected <= 1 + 1e-9
    for same, along in (
        (weight[order], PI[order]),
        (weight @ rotation(3, seed), PI),
        (scale * weight, PI),
        (weight, scale * PI),
    ):
        torch.testing.assert_close(direction_cosine(same, along), expected, atol=1e-7, rtol=1e-7)


def test_a_matrix_is_aligned_with_itself_whatever_the_signs():
    weight = normal(5, 4)
    assert singular_vector_alignment(weight, weight).item() == pytest.approx(1)
    assert singular_vector_alignment(weight, -3 * weight).item() == pytest.approx(1)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    flipped = u * torch.tensor([1.0, -1.0, -1.0, 1.0])
    assert singular_vector_alignment(flipped @ torch.diag(s) @ v, weight).item() == pytest.approx(1)


def test_exchanged_and_turned_directions_are_not_aligned():
    first, second = torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([1.0, 2.0]))
    assert singular_vector_alignment(first, second).item() == pytest.approx(0)
    turn = torch.tensor([[math.cos(0.3), -math.sin(0.3)], [math.sin(0.3), math.cos(0.3)]])
    assert singular_vector_alignment(turn @ first, first).item() == pytest.approx(math.cos(0.3))


@given(matrices)
@several
def test_alignment_is_between_none_and_full(weight: Tensor):
    other = normal(*weight.shape, seed=20_000)
    assert 0 <= singular_vector_alignment(weight, other) < 1
    torch.testing.assert_close(singular_vector_alignment(weight, other), singular_vector_alignment(other, weight))


def test_row_cosines_by_hand():
    weight = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, -2.0], [0.0, 0.0]])
    expected = torch.tensor([[1, 0.6, 0, 0], [0.6, 1, -0.8, 0], [0, -0.8, 1, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(row_cosines(weight), expected)


@given(matrices)
@several
def test_row_cosines_see_angles_only(weight: Tensor):
    rows, columns = weight.shape
    lengths = normal(rows, seed=3).abs()[:, None] + 0.1
    torch.testing.assert_close(row_cosines(lengths * weight @ rotation(columns)), row_cosines(weight))
    torch.testing.assert_close(row_cosines(weight).diagonal(), torch.ones(rows, dtype=torch.float64))


def test_rows_of_rank_one_are_parallel_or_opposite():
    cosines = row_cosines(torch.outer(torch.tensor([1.0, -2.0, 0.5, -0.1]), normal(3).float()))
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    torch.testing.assert_close(cosines, torch.outer(signs, signs))


@given(st.permutations(range(8)))
@several
def test_condensation_order_groups_two_opposite_bundles(places: list[int]):
    bundles = torch.tensor([1.0, 1, 1, 1, 1, -1, -1, -1]).double()
    weight = torch.outer(bundles, normal(5)) + 0.05 * normal(8, 5, seed=2)
    order = condensation_order(row_cosines(weight[places]))
    assert sorted(order) == list(range(8))
    grouped = bundles[places][order]
    assert (grouped.diff() != 0).sum() == 1
