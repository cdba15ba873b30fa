import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor

from fd_interp.measures.prediction import half_squared_distance
from fd_interp.models.config import Minimal
from fd_interp.models.minimal import MinimalAttention
from fd_interp.tasks.lag_regression import LagRegression
from fd_interp.tasks.lags import frobenius_orthogonal
from fd_interp.theory import incremental as theory
from tests.tasks import lags_by_hand as by_hand

REGRESSIONS = {
    "lags": LagRegression(d_vocab=3, context=4),
    "blocks": LagRegression(d_vocab=3, blocks=((2, 1), (4,)), alphas=((0.7, 0.3), (1.5,)), ratio=2.5, context=4),
    "overlapping": LagRegression(d_vocab=3, blocks=((1, 2), (2, 3)), overlapping=True, scale=0.5, context=3),
    "binary": LagRegression(d_vocab=2, blocks=((4,), (2,)), ratio=1.0, context=6),
}
every_regression = pytest.mark.parametrize("task", REGRESSIONS.values(), ids=REGRESSIONS)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def all_sequences(task: LagRegression) -> Tensor:
    """Every sequence once: a mean over them is an expectation."""
    return torch.cartesian_prod(*[torch.arange(task.d_vocab)] * task.context)


@given(st.integers(3, 8), st.integers(0, 1000))
@settings(deadline=None, max_examples=25)
def test_features_are_orthonormal_and_know_nothing_of_the_mean_token(d_vocab: int, seed: int):
    features = LagRegression(d_vocab=d_vocab, feature_seed=seed).feature_matrices
    products = torch.einsum("jst,kst->jk", features, features)
    torch.testing.assert_close(products, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(features.sum(1), torch.zeros(3, d_vocab, dtype=torch.float64))
    assert features.sum(2).abs().max() > 1e-3  # only what reads tokens is centred, not what is written


@every_regression
def test_targets_are_the_formula_at_every_position(task: LagRegression):
    tokens, targets = task.sample(5, generator())
    assert tokens.shape == (5, task.context)
    for sequence, vectors in zip(tokens.tolist(), targets.tolist(), strict=True):
        for position, vector in enumerate(vectors):
            assert vector == pytest.approx(by_hand.score(task, sequence[: position + 1], task.n_blocks), abs=1e-12)
    assert torch.equal(task.bayes(tokens), targets)
    assert targets.abs().max() > 0.1


@every_regression
def test_tokens_are_uniform_and_independent(task: LagRegression):
    tokens = task.sample(40_000, generator(1)).tokens
    number = (tokens * task.d_vocab ** torch.arange(task.context)).sum(1)
    counts = torch.bincount(number, minlength=task.d_vocab**task.context).numpy()
    expected = 40_000 / len(counts)
    assert chi2.sf(np.square(counts - expected).sum() / expected, len(counts) - 1) > 1e-5


def test_a_batch_is_a_function_of_the_generator():
    task = REGRESSIONS["lags"]
    assert torch.equal(task.sample(4, generator(3)).tokens, task.sample(4, generator(3)).tokens)
    going_on = generator(3)
    assert not torch.equal(task.sample(40, going_on).tokens, task.held_out(40, going_on).tokens)
    before = torch.get_rng_state()
    task.sample(4, generator())
    assert torch.equal(before, torch.get_rng_state())


def rung_losses(task: LagRegression, tokens: Tensor, position: int) -> list[float]:
    targets = task.bayes(tokens)[:, position]
    predictions = [task.rung(tokens, known)[:, position] for known in range(task.n_blocks + 1)]
    return [half_squared_distance(predicted, targets).item() for predicted in predictions]


def test_the_ladder_by_hand():
    assert [rung.loss for rung in LagRegression(ratio=2.0, d_vocab=10).baselines()] == pytest.approx(
        [(16 + 4 + 1) / 20, (4 + 1) / 20, 1 / 20, 0]
    )
    blocks = LagRegression(d_vocab=5, blocks=((2, 1), (4,)), alphas=((0.7, 0.3), (1.5,)), ratio=2.0, scale=3.0)
    rungs = blocks.baselines()
    assert [rung.loss for rung in rungs] == pytest.approx([(36 * 0.58 + 9 * 2.25) / 10, 9 * 2.25 / 10, 0])
    assert [rung.name for rung in rungs] == ["rung 0: no lag", "rung 1: lags 2, 1", "rung 2: lags 2, 1, 4"]


@every_regression
def test_rungs_lose_what_the_ladder_says_where_all_lags_are_seen(task: LagRegression):
    ladder = [rung.loss for rung in task.baselines()]
    tokens = all_sequences(task)
    for position in range(task.context):
        found = rung_losses(task, tokens, position)
        if position >= task.lookback - 1:
            assert found == pytest.approx(ladder, abs=1e-12)
        else:
            assert found[0] < ladder[0] - 1e-3


def test_samples_cost_what_the_ladder_says():
    task = LagRegression()
    tokens, targets = task.held_out(4000, generator(2))
    for known, baseline in enumerate(task.baselines()[:-1]):
        error = (task.rung(tokens, known) - targets)[:, task.lookback - 1 :].square().sum(-1).mean(1) / 2
        assert abs(error.mean() - baseline.loss) < 4 * error.std() / math.sqrt(4000)
        assert abs(error.mean() - 1.1 * baseline.loss) > 4 * error.std() / math.sqrt(4000)


@pytest.mark.parametrize("name", ["lags", "blocks", "binary"])
def test_a_rung_is_the_mean_of_all_that_looks_alike(name: str):
    task = REGRESSIONS[name]
    tokens = all_sequences(task)
    targets = task.bayes(tokens)[:, -1]
    for known in range(task.n_blocks + 1):
        seen = tokens[:, [-lag for lag in task.lags_of(known)]]
        mean = torch.empty_like(targets)
        for sequence, row in enumerate(seen):
            mean[sequence] = targets[(seen == row).all(1)].mean(0)
        torch.testing.assert_close(task.rung(tokens, known)[:, -1], mean)


def test_all_tokens_are_equally_frequent():
    torch.testing.assert_close(REGRESSIONS["binary"].token_frequencies(), torch.tensor([0.5, 0.5]).double())


class Match(NamedTuple):
    """A model's loss and gradients, each beside the theory's."""

    loss: tuple[Tensor, Tensor]
    values: tuple[Tensor, Tensor]
    logits: tuple[Tensor, Tensor]


def model_and_theory(task: LagRegression, features: Tensor, attn_scale: float = 1.0) -> Match:
    """In expectation, after the last position, of two heads with random attention and values among the features."""
    draw = np.random.default_rng(0).normal
    heads = theory.Heads(draw(size=(2, task.context)), draw(size=(2, task.n_blocks)))
    model = MinimalAttention(Minimal(n_heads=2, attn_scale=attn_scale), task.d_vocab, task.context, torch.float64)
    attn = model.blocks[0].attn
    by_key = torch.from_numpy(heads.logits[:, ::-1].copy())  # lag 1 is the last key
    with torch.no_grad():
        attn.W_Q[:] = attn_scale * by_key[:, None]
        attn.W_V[:] = torch.einsum("hj,jst->hst", torch.from_numpy(heads.values), features)

    tokens = all_sequences(task)
    strengths = torch.tensor(task.strengths, dtype=torch.float64)
    targets = task.read(tokens, strengths[:, None, None] * features)[:, -1]
    loss = half_squared_distance(model(tokens)[:, -1], targets)
    loss.backward()

    alphas = np.zeros((task.n_blocks, task.context))
    for number, (block, weights) in enumerate(zip(task.blocks, task.weights, strict=True)):
        alphas[number, np.array(block) - 1] = weights
    target = theory.Target(np.array(task.strengths), alphas)
    moves = theory.velocity(heads, target, form="gradient")
    expected = torch.tensor(theory.loss(heads, target) / task.d_vocab)
    values = -torch.einsum("hj,jst->hst", torch.from_numpy(moves.values), features) / task.d_vocab
    logits = -torch.from_numpy(moves.logits[:, ::-1].copy()) / task.d_vocab / attn_scale
    return Match((loss.detach(), expected), (attn.W_V.grad, values), (attn.W_Q.grad[:, -1], logits))


@pytest.mark.parametrize("attn_scale", [1.0, 2.0])
@every_regression
def test_one_hot_tokens_are_as_good_as_isotropic_inputs(task: LagRegression, attn_scale: float):
    for found, expected in model_and_theory(task, task.feature_matrices, attn_scale):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
        assert expected.abs().max() > 1e-3


def test_but_not_for_features_of_the_mean_token():
    task = REGRESSIONS["lags"]
    drawn = np.random.default_rng(1).normal(size=(3, 3, 3))
    features = torch.from_numpy(frobenius_orthogonal(drawn / np.linalg.norm(drawn, axis=(1, 2), keepdims=True)))
    torch.testing.assert_close(torch.einsum("jst,kst->jk", features, features), torch.eye(3, dtype=torch.float64))
    for found, expected in model_and_theory(task, features):
        assert ((found - expected).abs().max() > 0.1 * expected.abs().max()).item()
