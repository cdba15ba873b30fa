import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fd_interp.measures.redistribution import embedding_along_alpha, embedding_norms, gamma_perp

PI = torch.tensor([0.1, 0.6, 0.2, 0.1], dtype=torch.float64)
SYMMETRIC = torch.tensor([0.55, 0.15, 0.15, 0.15], dtype=torch.float64)
ALPHA = torch.tensor([0.6, 0.0, -0.8], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


seeds = st.integers(0, 10_000)
several = settings(deadline=None, max_examples=30)


def test_norms_by_hand():
    assert embedding_norms(torch.tensor([[3.0, 4.0], [0.0, 0.0], [-2.0, 0.0]])).tolist() == [5, 0, 2]


@given(seeds, st.floats(0.01, 100))
@several
def test_norms_ignore_rotation_and_follow_scale(seed: int, scale: float):
    W_E, rotation = normal(4, 3, seed=seed), torch.linalg.qr(normal(3, 3, seed=seed)).Q
    torch.testing.assert_close(embedding_norms(scale * W_E @ rotation), scale * embedding_norms(W_E))


@pytest.mark.parametrize("sign", [1, -1])
def test_gamma_is_the_length_along_the_condensed_direction(sign: int):
    gamma = torch.tensor([0.3, 2.0, -0.5, 0.0], dtype=torch.float64)
    torch.testing.assert_close(embedding_along_alpha(sign * torch.outer(gamma, ALPHA), PI), gamma)


def test_gamma_of_a_token_that_has_turned_away_is_negative():
    gamma = torch.tensor([-0.3, 2.0, 0.5, 0.1], dtype=torch.float64)
    assert (embedding_along_alpha(torch.outer(gamma, ALPHA), PI) < 0).tolist() == [True, False, False, False]


def test_gamma_ignores_what_is_orthogonal_to_alpha():
    gamma = torch.tensor([1.0, 3.0, 1.0, 0.5], dtype=torch.float64)
    across, small = torch.tensor([0.0, 1.0, 0.0]).double(), torch.tensor([1.0, -0.5, 0.5, 0.0]).double()
    assert gamma @ small == 0  # so that alpha stays the top direction
    torch.testing.assert_close(embedding_along_alpha(torch.outer(gamma, ALPHA) + torch.outer(small, across), PI), gamma)


@given(seeds, st.floats(0.01, 100))
@several
def test_gamma_ignores_rotation_and_sign_and_follows_scale(seed: int, scale: float):
    W_E, rotation = normal(4, 3, seed=seed), torch.linalg.qr(normal(3, 3, seed=seed)).Q
    gamma = embedding_along_alpha(W_E, PI)
    assert gamma @ PI >= 0
    for same in (W_E @ rotation, -W_E):
        torch.testing.assert_close(embedding_along_alpha(same, PI), gamma, atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(embedding_along_alpha(scale * W_E, PI), scale * gamma, atol=1e-7, rtol=1e-7)


def test_gamma_keeps_its_size_where_the_frequencies_leave_its_sign_open():
    gamma = embedding_along_alpha(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.tensor([0.5, 0.5]))
    assert gamma.abs().tolist() == [1, 1]


@given(st.floats(-100, 100))
@several
def test_gamma_perp_of_frequencies_is_zero(scale: float):
    assert abs(gamma_perp(scale * PI, PI)) < 1e-12


def test_gamma_perp_is_the_papers_for_equal_other_tokens():
    high, low = 1.7, 0.4
    gamma = torch.tensor([high, low, low, low], dtype=torch.float64)
    assert gamma_perp(gamma, SYMMETRIC).item() == pytest.approx((1 - 0.55) * high - 3 * 0.55 * low)


def test_gamma_perp_is_positive_where_mass_moved_to_the_most_frequent_token():
    assert gamma_perp(PI + torch.tensor([0, 0.1, 0, 0]), PI) > 0
    assert gamma_perp(PI - torch.tensor([0, 0.1, 0, 0]), PI) < 0
    assert gamma_perp(PI + torch.tensor([0.1, 0, 0, 0]), PI) < 0
    assert abs(gamma_perp(PI + torch.tensor([0.1, 0, -0.1, 0]), PI)) < 1e-12  # moved between the others


def test_gamma_perp_from_an_embedding():
    W_E = -torch.outer(PI + torch.tensor([-0.02, 0.1, 0, 0]), ALPHA)
    expected = (1 - 0.6) * 0.7 - 0.6 * (0.08 + 0.2 + 0.1)
    assert gamma_perp(embedding_along_alpha(W_E, PI), PI).item() == pytest.approx(expected)


def test_leading_axes_are_independent_embeddings():
    W_E = normal(2, 5, 4, 3)
    gamma = embedding_along_alpha(W_E, PI)
    torch.testing.assert_close(gamma[1, 3], embedding_along_alpha(W_E[1, 3], PI))
    torch.testing.assert_close(gamma_perp(gamma, PI)[0, 4], gamma_perp(gamma[0, 4], PI))
    torch.testing.assert_close(embedding_norms(W_E)[0, 2], embedding_norms(W_E[0, 2]))


@given(seeds)
@several
def test_relabelling_tokens_relabels_gamma(seed: int):
    W_E, order = normal(4, 3, seed=seed), torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    gamma = embedding_along_alpha(W_E, PI)
    torch.testing.assert_close(embedding_along_alpha(W_E[order], PI[order]), gamma[order], atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(gamma_perp(gamma[order], PI[order]), gamma_perp(gamma, PI))


def test_half_precision_is_raised_to_single():
    W_E = torch.outer(PI, ALPHA).half()
    assert embedding_norms(W_E).dtype == embedding_along_alpha(W_E, PI).dtype == torch.float32
    torch.testing.assert_close(embedding_along_alpha(W_E, PI), PI.float(), atol=1e-3, rtol=0)
