import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr
from torch import Tensor

from fd_interp.measures.prediction import cross_entropy, kl_divergence


def predictor(seed: int, *shape: int) -> Tensor:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (3 * logits).log_softmax(-1)


seeds = st.integers(0, 10_000)
several = settings(deadline=None, max_examples=30)


@pytest.mark.parametrize("vocab", [2, 5])
def test_knowing_nothing_costs_the_log_of_the_vocabulary(vocab: int):
    log_p = torch.full((3, 4, vocab), -math.log(vocab))
    assert cross_entropy(log_p, torch.ones(3, 4, dtype=torch.long)).item() == pytest.approx(math.log(vocab))


def test_cross_entropy_by_hand():
    log_p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]).log()
    assert cross_entropy(log_p, torch.tensor([0, 2])).item() == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2)
    assert cross_entropy(log_p, torch.tensor([1, 0])).item() == pytest.approx(-(math.log(0.25) + math.log(0.1)) / 2)


def test_certainty_costs_nothing_when_right_and_everything_when_wrong():
    log_p = torch.tensor([[1.0, 0.0]]).log()
    assert cross_entropy(log_p, torch.tensor([0])) == 0
    assert cross_entropy(log_p, torch.tensor([1])) == math.inf


@given(seeds)
@several
def test_cross_entropy_is_torch_s(seed: int):
    log_p = predictor(seed, 2, 3, 5)
    targets = torch.randint(0, 5, (2, 3), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        cross_entropy(log_p, targets), torch.nn.functional.nll_loss(log_p.flatten(0, 1), targets.flatten())
    )


@given(seeds, seeds)
@several
def test_kl_divergence_is_the_sum_of_relative_entropies(first: int, second: int):
    reference, model = predictor(first, 2, 3, 5), predictor(second, 2, 3, 5)
    expected = rel_entr(reference.exp().numpy(), model.exp().numpy()).sum(-1)
    torch.testing.assert_close(kl_divergence(reference, model), torch.from_numpy(expected))
    assert (kl_divergence(reference, model) >= 0).all()
    assert (kl_divergence(reference, reference) == 0).all()


def test_kl_divergence_is_not_symmetric():
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
    assert kl_divergence(p, q).item() == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert kl_divergence(q, p).item() == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5))


def test_what_the_reference_rules_out_does_not_count():
    reference = torch.tensor([0.5, 0.5, 0.0]).log()
    assert kl_divergence(reference, torch.tensor([0.25, 0.25, 0.5]).log()).item() == pytest.approx(math.log(2))
    assert kl_divergence(reference, reference) == 0  # both rule the last one out


def test_ruling_out_what_happens_costs_everything():
    assert kl_divergence(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()) == math.inf


@given(seeds)
@several
def test_kl_divergence_is_what_the_model_loses_on_the_reference_s_samples(seed: int):
    reference, model = predictor(seed, 6), predictor(seed + 1, 6)
    every_target = torch.arange(6)
    costs = [cross_entropy(log_p.expand(1, 6), target[None]) for log_p in (model, reference) for target in every_target]
    lost = reference.exp() @ (torch.stack(costs[:6]) - torch.stack(costs[6:]))
    torch.testing.assert_close(kl_divergence(reference, model), lost)
