import math
import re

import numpy as np
import pytest
import torch
import xarray as xr

from fd_interp.config import InputError
from fd_interp.measures import focus as measures
from fd_interp.probes.condensation import EMBEDDING_CONDENSATION
from fd_interp.probes.focus import frequency_focus
from fd_interp.probes.prediction import excess_loss, held_out_loss
from fd_interp.probes.redistribution import REDISTRIBUTION
from fd_interp.tasks.markov import MarkovChain
from fd_interp.theory import focus_dilution as theory
from fd_interp.theory.focus_dilution import PopulationWeights

PAPER = MarkovChain.paper()
ZIPF = MarkovChain.zipf(8)
ANTITONE = MarkovChain.antitone((0.4, 0.3, 0.2, 0.1))
SYMMETRIC = MarkovChain.symmetric_low(3, 0.5)
UNIFORM = MarkovChain.uniform(5)


def general(d_vocab: int, seed: int) -> MarkovChain:
    rows = np.random.default_rng(seed).dirichlet(np.ones(d_vocab), size=d_vocab)
    pi = np.full(d_vocab, 1 / d_vocab)
    for _ in range(500):
        pi = pi @ rows
    return MarkovChain(pi=tuple(pi), redraw=tuple(map(tuple, rows)), persistence=0.1)


GENERAL = general(4, seed=3)
CHAINS = {"persistent": PAPER, "zipf": ZIPF, "general": GENERAL, "antitone": ANTITONE, "uniform": UNIFORM}
every_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)


def random_weights(chain: MarkovChain, *, std: float, seed: int = 0, d_model: int = 5, d_head: int = 3):
    draw = np.random.default_rng(seed).normal
    V, d, h = chain.d_vocab, d_model, d_head
    return PopulationWeights(*(draw(scale=std, size=shape) for shape in ((V, d), (d, h), (d, h), (d, V))))


def direction(d_model: int, seed: int = 0) -> np.ndarray:
    alpha = np.random.default_rng(seed).normal(size=d_model)
    return alpha / np.linalg.norm(alpha)


def at_saddle(chain: MarkovChain, alpha: np.ndarray, *, d_head: int = 3) -> PopulationWeights:
    saddle, pi = theory.condensed_saddle(chain), np.array(chain.pi)
    no_attention = np.zeros((len(alpha), d_head))
    return PopulationWeights(np.outer(saddle.g * pi, alpha), no_attention, no_attention, np.outer(alpha, saddle.beta))


def slow_loss(weights: list[torch.Tensor], chain: MarkovChain, attn_scale: float) -> torch.Tensor:
    """The long-context loss, one query, key and target at a time."""
    W_E, W_Q, W_K, W_U = weights
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(chain.d_vocab):
        query = W_E[i] @ W_Q
        seen = [chain.pi[j] * torch.exp(query @ (W_E[j] @ W_K) / attn_scale) for j in range(chain.d_vocab)]
        logits = sum(seen[j] / sum(seen) * (W_E[j] @ W_U) for j in range(chain.d_vocab))
        for target in range(chain.d_vocab):
            p = chain.transition[i, target].item()
            loss = loss - chain.pi[i] * p * (logits[target] - torch.log(torch.exp(logits).sum()))
    return loss


@pytest.mark.parametrize("attn_scale", [1.0, 2.5])
@every_chain
def test_velocity_is_minus_the_gradient_of_the_loss(chain: MarkovChain, attn_scale: float):
    for seed in range(2):
        weights = random_weights(chain, std=0.8, seed=seed)
        leaves = [torch.tensor(matrix, requires_grad=True) for matrix in weights]
        loss = slow_loss(leaves, chain, attn_scale)
        assert theory.population(weights, chain, attn_scale=attn_scale).loss == pytest.approx(loss.item())
        velocity = theory.velocity(weights, chain, attn_scale=attn_scale)
        for moves, gradient in zip(velocity, torch.autograd.grad(loss, leaves), strict=True):
            np.testing.assert_allclose(moves, -gradient.numpy(), atol=1e-12)


@pytest.mark.parametrize("attn_scale", [1.0, 2.5])
def test_seeds_move_independently(attn_scale: float):
    members = [random_weights(GENERAL, std=0.8, seed=seed) for seed in range(3)]
    together = theory.velocity(PopulationWeights.stack(members), GENERAL, attn_scale=attn_scale)
    alone = PopulationWeights.stack([theory.velocity(member, GENERAL, attn_scale=attn_scale) for member in members])
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)
    assert theory.conserved(PopulationWeights.stack(members)).shape == (3, 5, 5)
    assert theory.transverse_rate(PopulationWeights.stack(members), GENERAL).shape == (3,)


@every_chain
def test_attention_rows_sum_to_one_and_start_at_the_frequencies(chain: MarkovChain):
    attention = theory.population(random_weights(chain, std=1.0), chain).attention
    np.testing.assert_allclose(attention.sum(-1), 1)
    at_start = theory.population(random_weights(chain, std=0.0), chain)
    np.testing.assert_allclose(at_start.attention, np.tile(chain.pi, (chain.d_vocab, 1)))
    assert at_start.loss == pytest.approx(math.log(chain.d_vocab))


@every_chain
def test_the_condensed_saddle_is_a_fixed_point_at_the_unigram_loss(chain: MarkovChain):
    saddle = at_saddle(chain, direction(5))
    for moves in theory.velocity(saddle, chain):
        np.testing.assert_allclose(moves, 0, atol=1e-12)
    assert theory.population(saddle, chain).loss == pytest.approx(chain.baselines()[1].loss)
    assert np.linalg.norm(saddle.W_E) == pytest.approx(np.linalg.norm(saddle.W_U))


def test_beside_the_saddle_the_embedding_moves():
    saddle = at_saddle(PAPER, direction(5))
    beside = saddle._replace(W_E=1.1 * saddle.W_E)
    assert np.abs(theory.velocity(beside, PAPER).W_U).max() > 1e-2


def test_the_origin_flows_to_the_saddle():
    saddle = theory.condensed_saddle(PAPER)
    frozen = random_weights(PAPER, std=1e-3)._replace(W_Q=np.zeros((5, 3)), W_K=np.zeros((5, 3)))
    trace = theory.flow(frozen, PAPER, lr=1.0, keep=[0, 200])
    # What a small start leaves on the other directions is of its own size.
    np.testing.assert_allclose(trace.embedding_along_alpha[-1], saddle.g * np.array(PAPER.pi), atol=5e-3)
    assert float(trace.W_U_norm[-1]) == pytest.approx(np.linalg.norm(saddle.beta), rel=5e-3)
    assert float(trace.excess_over_unigram[-1]) == pytest.approx(0, abs=1e-4)


@every_chain
def test_the_flow_conserves_what_it_should(chain: MarkovChain):
    weights = random_weights(chain, std=0.8)
    velocity = theory.velocity(weights, chain)

    def rate_of_change(quadratic) -> np.ndarray:
        ahead, behind = (
            PopulationWeights(*(w + sign * v for w, v in zip(weights, velocity, strict=True))) for sign in (1, -1)
        )
        return (quadratic(ahead) - quadratic(behind)) / 2  # exact, since the quantity is quadratic in the weights

    np.testing.assert_allclose(rate_of_change(theory.conserved), 0, atol=1e-12)
    without_keys = rate_of_change(lambda w: theory.conserved(w) + w.W_K @ w.W_K.T)
    assert np.abs(without_keys).max() > 1e-6


def test_conserved_along_the_flow():
    start = random_weights(PAPER, std=0.3)
    trace = theory.flow(start, PAPER, lr=0.2, keep=range(0, 501, 50), rtol=1e-8)

    def drift(*signs: int) -> float:
        norms = [trace[f"{name}_norm"].values.squeeze() ** 2 for name in ("W_E", "W_U", "W_Q", "W_K")]
        return np.ptp(sum(sign * norm for sign, norm in zip(signs, norms, strict=True)))

    assert drift(1, -1, -1, -1) < 1e-5  # the trace of the conserved matrix
    assert drift(1, -1, 0, 0) > 1e-2
    assert drift(1, 1, -1, -1) > 1


def test_descent_is_a_first_order_integrator_of_the_flow():
    start, end = random_weights(ZIPF, std=0.4), 16.0
    exact = theory.flow(start, ZIPF, lr=end, keep=[1], rtol=1e-10)
    rates = np.array([0.2, 0.1, 0.05, 0.025])
    for name in ("loss", "W_E_norm", "focus_ratio"):
        by_rate = [theory.descend(start, ZIPF, lr=lr, keep=[round(end / lr)])[name] for lr in rates]
        errors = [abs(float(trace.squeeze()) - float(exact[name].squeeze())) for trace in by_rate]
        assert errors[-1] < 5e-3
        order = np.polyfit(np.log(rates), np.log(errors), 1)[0]
        assert order == pytest.approx(1, abs=0.2)


def test_stage_one_grows_at_the_condensation_rate():
    for chain in (PAPER, ZIPF, GENERAL):
        trace = theory.flow(random_weights(chain, std=1e-6), chain, lr=0.5, keep=range(0, 200))
        growth = theory.growth_rate(trace.step.values, trace.W_E_norm.values, lr=0.5, between=(1e-4, 1e-2))
        assert growth == pytest.approx(theory.condensation_rate(chain), rel=0.03)


def test_condensation_rate_by_hand():
    pi, from_uniform = math.sqrt(0.25 + 2 * 0.0625), math.sqrt(1 / 6**2 + 2 / 12**2)
    assert theory.condensation_rate(SYMMETRIC) == pytest.approx(pi * from_uniform)
    assert theory.condensation_rate(UNIFORM) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("attn_scale", [1.0, 3.0])
@pytest.mark.parametrize("chain", [PAPER, ZIPF, GENERAL, ANTITONE], ids=["paper", "zipf", "general", "antitone"])
def test_focus_rate_is_the_eigenvalue_at_the_saddle(chain: MarkovChain, attn_scale: float):
    d_model, d_head, small = 4, 2, 1e-4
    alpha = direction(d_model)
    saddle = at_saddle(chain, alpha, d_head=d_head)
    rate = theory.focus_rate(chain, attn_scale=attn_scale)

    def response(index: int) -> np.ndarray:
        change = np.zeros(2 * d_model * d_head)
        change[index] = small
        W_Q, W_K = change.reshape(2, d_model, d_head)
        moved = theory.velocity(saddle._replace(W_Q=W_Q, W_K=W_K), chain, attn_scale=attn_scale)
        return np.stack([moved.W_Q, moved.W_K]).ravel() / small

    jacobian = np.stack([response(index) for index in range(2 * d_model * d_head)], axis=1)
    projector = rate * np.kron(np.outer(alpha, alpha), np.eye(d_head))
    np.testing.assert_allclose(jacobian, np.kron([[0, 1], [1, 0]], projector), atol=1e-9)
    assert np.linalg.eigvalsh(jacobian).max() == pytest.approx(abs(rate), abs=1e-9)
    assert abs(rate) > 1e-4


def test_focus_rate_is_proportional_to_persistence():
    rates = [theory.focus_rate(MarkovChain.zipf(6, persistence=p)) / p for p in (-0.05, 0.1, 0.5, 0.9)]
    assert rates == pytest.approx([rates[0]] * 4)
    assert rates[0] > 0
    assert theory.focus_rate(MarkovChain.zipf(6, persistence=0.0)) == pytest.approx(0, abs=1e-12)


def test_focus_rate_is_the_covariance_formula_on_a_persistent_chain():
    pi = np.array(PAPER.pi)
    norm = np.linalg.norm(pi)
    covariance = pi @ (pi * np.log(pi)) - (pi @ pi) * (pi @ np.log(pi))
    variance = pi @ pi**2 - (pi @ pi) ** 2
    g_squared = np.linalg.norm(np.log(pi) - np.log(pi).mean()) / norm**3
    expected = 0.5 * g_squared * variance * covariance / norm**2
    assert theory.focus_rate(PAPER) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("chain", "sign"), [(PAPER, 1), (ZIPF, 1), (MarkovChain.antitone(ZIPF.pi), -1)], ids=["paper", "zipf", "antitone"]
)
def test_attention_goes_where_the_sign_says(chain: MarkovChain, sign: int):
    rate = theory.focus_rate(chain)
    assert np.sign(theory.sign_criterion(chain)) == np.sign(rate) == sign
    start = random_weights(chain, std=1e-3)
    start = at_saddle(chain, direction(5))._replace(W_Q=start.W_Q, W_K=start.W_K)
    trace = theory.flow(start, chain, lr=1 / abs(rate), keep=[0, 6])
    before, after = trace.focus_ratio.values.squeeze()
    assert before == pytest.approx(1, abs=1e-4)
    assert sign * (after - 1) > 1e-2


def test_without_persistence_or_without_frequent_tokens_attention_goes_nowhere():
    assert theory.sign_criterion(ANTITONE) < 0
    for chain in (MarkovChain.zipf(8, persistence=0.0), UNIFORM):
        assert theory.sign_criterion(chain) == pytest.approx(0, abs=1e-12)
        assert theory.focus_rate(chain) == pytest.approx(0, abs=1e-12)


def test_uniform_frequencies_are_stuck_at_uniform_predictions():
    no_attention = np.zeros((5, 3))
    flat = random_weights(UNIFORM, std=0.3)._replace(W_Q=no_attention, W_K=no_attention, W_U=np.zeros((5, 5)))
    for moves in theory.velocity(flat, UNIFORM):
        np.testing.assert_allclose(moves, 0, atol=1e-15)
    assert np.abs(theory.velocity(flat, MarkovChain.zipf(5)).W_U).max() > 1e-2
    assert np.isfinite(theory.condensed_saddle(UNIFORM).beta).all()


def test_degenerate_loss_by_hand():
    of_frequent = -(0.75 * math.log(0.75) + 2 * 0.125 * math.log(0.125))
    of_the_others = -(0.25 * math.log(0.25) + 0.75 * math.log(0.375))
    assert theory.degenerate_loss(SYMMETRIC) == pytest.approx(0.5 * of_frequent + 0.5 * of_the_others)


def test_degenerate_loss_lies_between_unigram_and_bigram():
    for chain in (SYMMETRIC, MarkovChain.symmetric_low(5, 0.55)):
        _, unigram, bigram = (baseline.loss for baseline in chain.baselines())
        assert bigram + 0.01 < theory.degenerate_loss(chain) < unigram - 0.01
    never = MarkovChain.antitone((0.5, 0.25, 0.25))  # its zero probabilities cost nothing
    assert theory.degenerate_loss(never) == pytest.approx(never.baselines()[2].loss)


def test_equal_rare_tokens_take_a_rank_one_embedding_to_the_degenerate_loss():
    start = random_weights(SYMMETRIC, std=1e-3, d_model=3)
    trace = theory.descend(start, SYMMETRIC, lr=1.0, keep=[0, 1000, 3000])
    assert float(trace.excess_over_unigram[1]) == pytest.approx(0, abs=1e-3)
    assert float(trace.loss[2]) == pytest.approx(theory.degenerate_loss(SYMMETRIC), abs=1e-3)
    assert (trace.W_E_effective_rank[1:] < 1.05).all()


def test_a_new_direction_grows_at_the_transverse_rate():
    alpha, across = np.eye(5)[0], np.eye(5)[1]
    gamma, beta = np.array([1.2, 0.3, -0.4, 0.1]), np.array([0.9, -0.1, -0.5, -0.6])
    W_Q, W_K = np.outer(alpha, [1.0, 0.5, 0.0]), np.outer(alpha, [0.8, -0.2, 0.3])
    on_ray = PopulationWeights(np.outer(gamma, alpha), W_Q, W_K, np.outer(alpha, beta))
    left, values, right = np.linalg.svd(theory.population(on_ray, PAPER).D)
    rate = theory.transverse_rate(on_ray, PAPER)
    assert rate == pytest.approx(values[0])
    small = 1e-6
    perturbed = on_ray._replace(
        W_E=on_ray.W_E + small * np.outer(left[:, 0], across), W_U=on_ray.W_U + small * np.outer(across, right[0])
    )
    velocity = theory.velocity(perturbed, PAPER)
    np.testing.assert_allclose(velocity.W_E @ across / small, rate * left[:, 0], atol=1e-4)
    np.testing.assert_allclose(across @ velocity.W_U / small, rate * right[0], atol=1e-4)


def test_growth_rate_of_an_exponential():
    steps = np.arange(50)
    norms = np.where(steps < 40, np.exp(0.3 * 0.1 * steps), 100.0)
    assert theory.growth_rate(steps, norms, lr=0.1, between=(1.1, 3.0)) == pytest.approx(0.3)
    assert theory.growth_rate(steps.tolist(), norms.tolist(), lr=0.2, between=(1.1, 3.0)) == pytest.approx(0.15)
    assert math.isnan(theory.growth_rate(steps, norms, lr=0.1, between=(1.0, 1.05)))


@pytest.fixture(scope="module")
def trace() -> xr.Dataset:
    members = [random_weights(PAPER, std=0.1, seed=seed) for seed in range(3)]
    return theory.descend(PopulationWeights.stack(members), PAPER, lr=0.2, keep=[50, 0, 200])


def test_what_grows_is_measured_along_the_top_direction_of_the_embedding():
    alpha, v = direction(5), np.array([0.3, 0.0, 0.4])
    saddle = at_saddle(PAPER, alpha)._replace(W_Q=np.outer(alpha, v), W_K=np.outer(alpha, v))
    aligned = theory.descend(saddle, PAPER, lr=0.1, keep=[0])
    assert aligned.condensing.item() == pytest.approx(np.hypot(*map(np.linalg.norm, (saddle.W_E, saddle.W_U))))
    assert aligned.focusing.item() == pytest.approx(2 * 0.5)
    opposed = theory.descend(saddle._replace(W_K=-saddle.W_K), PAPER, lr=0.1, keep=[0])
    assert opposed.focusing.item() == pytest.approx(0, abs=1e-12)


OF_THE_POPULATION_ONLY = {"condensing", "focusing"}


def test_predictions_have_the_names_and_dims_of_the_measurements(trace: xr.Dataset):
    probes = [
        EMBEDDING_CONDENSATION,
        frequency_focus(),
        REDISTRIBUTION,
        held_out_loss(slice(-1, None)),
        excess_loss(PAPER, slice(-1, None)),
    ]
    variables = {name: variable for probe in probes for name, variable in probe.variables.items()}
    assert set(trace) - OF_THE_POPULATION_ONLY <= set(variables)
    assert {"loss", "W_E_top_share", "focus_ratio_rare", "gamma_perp", "W_K_norm_change"} <= set(trace)
    for name in set(trace) - OF_THE_POPULATION_ONLY:
        assert trace[name].dims == ("step", "seed", *variables[name].dims), name
    assert trace.step.values.tolist() == [0, 50, 200]


def test_each_seed_has_its_own_trace(trace: xr.Dataset):
    alone = theory.descend(random_weights(PAPER, std=0.1, seed=1), PAPER, lr=0.2, keep=[0, 50, 200])
    xr.testing.assert_allclose(trace.isel(seed=1), alone)


def test_norm_change_starts_at_zero_and_excess_is_over_the_baselines(trace: xr.Dataset):
    _, unigram, bigram = (baseline.loss for baseline in PAPER.baselines())
    assert (trace.W_Q_norm_change[0] == 0).all()
    np.testing.assert_allclose(trace.W_E_norm_change, trace.W_E_norm / trace.W_E_norm[0] - 1)
    np.testing.assert_allclose(trace.loss - trace.excess_over_unigram, unigram)
    np.testing.assert_allclose(trace.loss - trace.excess_over_best, bigram)


def test_attention_is_measured_as_on_a_context_that_holds_each_token_as_often_as_pi_says():
    chain = MarkovChain(pi=(0.25, 0.5, 0.125, 0.125))
    weights = random_weights(chain, std=1.0)
    predicted = theory.descend(weights, chain, lr=0.1, keep=[0]).isel(step=0, layer=0, head=0)
    tokens = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 3]])
    scores = torch.from_numpy(weights.W_E @ weights.W_Q @ (weights.W_E @ weights.W_K).T)
    pattern = scores[tokens[0]][:, tokens[0]].softmax(-1)[None, None]
    attention = measures.attention_by_token(pattern, tokens, torch.ones_like(tokens, dtype=torch.bool), 4)
    token = torch.arange(4)
    frequent, rare, every = token == 1, token >= 2, token >= 0
    measured = {
        "focus_ratio": measures.focus_ratio(attention, frequent, every),
        "focus_ratio_rare": measures.focus_ratio(attention, frequent, rare),
        "focus_ratio_by_query": measures.focus_ratio_by_query(attention, frequent),
        "self_focus": measures.self_focus(attention),
        "frequency_slope": measures.frequency_slope(attention, chain.token_frequencies()),
    }
    for name, value in measured.items():
        np.testing.assert_allclose(predicted[name], value[0], err_msg=name)
    assert np.ptp(predicted.focus_ratio_by_query.values) > 0.1  # attention is far from uniform


def test_weights_of_a_snapshot():
    W_Q, W_K = torch.randn(2, 1, 5, 3, generator=torch.Generator().manual_seed(0))
    snapshot = {"embed.W_E": torch.ones(4, 5), "unembed.W_U": torch.ones(5, 4)}
    weights = PopulationWeights.of(snapshot | {"blocks.0.attn.W_Q": W_Q, "blocks.0.attn.W_K": W_K})
    assert weights.W_E.dtype == np.float64
    np.testing.assert_array_equal(weights.W_Q, W_Q[0].numpy())
    np.testing.assert_array_equal(weights.W_K, W_K[0].numpy())
    two_heads = {"blocks.0.attn.W_Q": W_Q.expand(2, -1, -1), "blocks.0.attn.W_K": W_K.expand(2, -1, -1)}
    with pytest.raises(InputError, match="the theory is of one head, but W_Q has 2"):
        PopulationWeights.of(snapshot | two_heads)


@pytest.mark.parametrize("follow", [theory.descend, theory.flow])
def test_bad_input_is_named(follow):
    weights = random_weights(PAPER, std=0.1)
    for keep in ([], [-1, 3]):
        with pytest.raises(
            InputError, match=re.escape(f"keep must name at least one step, and none before 0, not {keep}")
        ):
            follow(weights, PAPER, lr=0.1, keep=keep)
    with pytest.raises(InputError, match="W_E has 4 rows; a chain of 8 tokens needs one row for each"):
        follow(weights, ZIPF, lr=0.1, keep=[1])
    assert follow(weights, PAPER, lr=0.1, keep=[0]).step.values.tolist() == [0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_descent_that_diverges_says_so():
    with pytest.raises(InputError, match=r"the descent diverges at step \d+: lr must be smaller than 100"):
        theory.descend(random_weights(PAPER, std=0.3), PAPER, lr=100.0, keep=[1000])
