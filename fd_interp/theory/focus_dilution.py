"""Population gradient flow of the one-layer model on a Markov chain (arXiv 2605.01199), and its closed forms.

As the context grows, what a query sees approaches the stationary distribution, and a query of token i attends to token
j with `a_ij = pi_j e^{Phi_ij} / sum_k pi_k e^{Phi_ik}`, `Phi = W_E W_Q W_K^T W_E^T`. The loss is then a function of the
weights alone, with the gradients below. The paper states closed forms in terms of Phi and `M = W_E W_U`; the ones here
are our own derivation and agree with the stages that it describes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from scipy.integrate import solve_ivp
from scipy.special import softmax, xlogy

from fd_interp.config import InputError
from fd_interp.measures import condensation, focus, redistribution
from fd_interp.tasks.markov import MarkovChain

PER_HEAD = ("layer", "head")
Array = np.ndarray


class PopulationWeights(NamedTuple):
    """The four matrices of the one-head model, in double precision; leading axes (seeds) are allowed on all of them."""

    W_E: Float[Array, "*seed vocab d_model"]
    W_Q: Float[Array, "*seed d_model d_head"]
    W_K: Float[Array, "*seed d_model d_head"]
    W_U: Float[Array, "*seed d_model vocab"]

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor]) -> "PopulationWeights":
        """From a snapshot of the one-layer model with one head."""
        attn = "blocks.0.attn."
        if len(weights[attn + "W_Q"]) > 1:
            raise InputError(f"the theory is of one head, but W_Q has {len(weights[attn + 'W_Q'])}")
        matrices = (weights["embed.W_E"], weights[attn + "W_Q"][0], weights[attn + "W_K"][0], weights["unembed.W_U"])
        return cls(*(matrix.double().numpy() for matrix in matrices))

    @classmethod
    def stack(cls, members: Sequence["PopulationWeights"]) -> "PopulationWeights":
        """Several, on a new leading axis."""
        return cls(*(np.stack(matrices) for matrices in zip(*members, strict=True)))


class Population(NamedTuple):
    """What the weights compute in the limit of long contexts."""

    attention: Float[Array, "*seed query key"]
    loss: Float[Array, "*seed"]
    D: Float[Array, "*seed vocab vocab"]
    """`-dL/dM`, M = W_E W_U."""
    G: Float[Array, "*seed query key"]
    """`-dL/dPhi`."""


def population(weights: PopulationWeights, chain: MarkovChain, *, attn_scale: float = 1.0) -> Population:
    """Attention by token, loss, and its gradients with respect to M and Phi."""
    pi, P = chain.token_frequencies().numpy(), chain.transition.numpy()
    if weights.W_E.shape[-2] != len(pi):
        raise InputError(f"W_E has {weights.W_E.shape[-2]} rows; a chain of {len(pi)} tokens needs one row for each")
    scores = weights.W_E @ weights.W_Q @ _T(weights.W_E @ weights.W_K) / attn_scale
    attention = softmax(np.log(pi) + scores, axis=-1)
    M = weights.W_E @ weights.W_U
    f = attention @ M
    log_p = f - _logsumexp(f)
    e = P - np.exp(log_p)
    loss = -((pi[:, None] * P) * log_p).sum((-2, -1))
    D = _T(pi[:, None] * attention) @ e
    G = pi[:, None] * attention * (e @ _T(M) - (e * f).sum(-1, keepdims=True))
    return Population(attention, loss, D, G)


def velocity(weights: PopulationWeights, chain: MarkovChain, *, attn_scale: float = 1.0) -> PopulationWeights:
    """Minus the gradient of the population loss: the right-hand side of the flow."""
    return _velocity(weights, population(weights, chain, attn_scale=attn_scale), attn_scale)


def _velocity(weights: PopulationWeights, at: Population, attn_scale: float) -> PopulationWeights:
    W_E, W_Q, W_K, W_U = weights
    G = at.G / attn_scale
    keys, queries = W_E @ W_K, W_E @ W_Q
    return PopulationWeights(
        W_E=at.D @ _T(W_U) + G @ keys @ _T(W_Q) + _T(G) @ queries @ _T(W_K),
        W_Q=_T(W_E) @ G @ keys,
        W_K=_T(W_E) @ _T(G) @ queries,
        W_U=_T(W_E) @ at.D,
    )


def descend(
    start: PopulationWeights, chain: MarkovChain, *, lr: float, keep: Sequence[int], attn_scale: float = 1.0
) -> xr.Dataset:
    """Gradient descent on the population loss, kept at the given steps, as a trace.

    The variables have the names of the measured ones; a leading axis of the weights becomes the dim `seed`.
    """
    kept: list[tuple[PopulationWeights, Population]] = []
    weights, wanted = start, _kept_steps(keep)
    for step in range(wanted[-1] + 1):
        at = population(weights, chain, attn_scale=attn_scale)
        if not np.isfinite(at.loss).all():
            raise InputError(f"the descent diverges at step {step}: lr must be smaller than {lr}")
        if step in wanted:
            kept.append((weights, at))
        change = _velocity(weights, at, attn_scale)
        weights = PopulationWeights(*(w + lr * v for w, v in zip(weights, change, strict=True)))
    return _trace(kept, wanted, chain)


def flow(
    start: PopulationWeights,
    chain: MarkovChain,
    *,
    lr: float,
    keep: Sequence[int],
    attn_scale: float = 1.0,
    rtol: float = 1e-6,
) -> xr.Dataset:
    """The gradient flow itself, integrated by SciPy, as a trace; step k stands for the time `k * lr`."""
    shapes = [matrix.shape for matrix in start]
    sizes = np.cumsum([matrix.size for matrix in start])[:-1]

    def unpack(state: Array) -> PopulationWeights:
        parts = np.split(state, sizes)
        return PopulationWeights(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))

    def right_hand_side(_: float, state: Array) -> Array:
        return _pack(velocity(unpack(state), chain, attn_scale=attn_scale))

    wanted = _kept_steps(keep)
    times = np.array(wanted) * lr
    solution = solve_ivp(
        right_hand_side, (0, max(times[-1], lr)), _pack(start), method="RK45", t_eval=times, rtol=rtol, atol=rtol * 1e-3
    )
    path = [unpack(state) for state in solution.y.T]
    kept = [(weights, population(weights, chain, attn_scale=attn_scale)) for weights in path]
    return _trace(kept, wanted, chain)


def conserved(weights: PopulationWeights) -> Float[Array, "*seed d_model d_model"]:
    """`W_E^T W_E - W_U W_U^T - W_Q W_Q^T - W_K W_K^T`, which the flow leaves as it is."""
    W_E, W_Q, W_K, W_U = weights
    return _T(W_E) @ W_E - W_U @ _T(W_U) - W_Q @ _T(W_Q) - W_K @ _T(W_K)


class CondensedSaddle(NamedTuple):
    """The critical point at the end of stage I: `W_E = g pi alpha^T`, `W_U = alpha beta^T`, and `p = pi`."""

    g: float
    beta: Float[Array, " vocab"]


def condensed_saddle(chain: MarkovChain) -> CondensedSaddle:
    """theta_c^1 as reached from a small start, where `|W_E| = |W_U|` because the flow conserves their difference."""
    pi = chain.token_frequencies().numpy()
    logits = np.log(pi) - np.log(pi).mean()
    norm = np.linalg.norm(pi)
    g = float(np.sqrt(np.linalg.norm(logits) / norm**3))
    return CondensedSaddle(g, logits / (g * norm**2) if g > 0 else logits)


def condensation_rate(chain: MarkovChain) -> float:
    """Stage I: rate of exponential growth at the origin, `|pi| |pi - u|`, u uniform. 0 for uniform pi: stuck."""
    pi = chain.token_frequencies().numpy()
    return float(np.linalg.norm(pi) * np.linalg.norm(pi - 1 / len(pi)))


def sign_criterion(chain: MarkovChain) -> float:
    """`S = sum_i pi_i^2 beta . (P_i - pi)` at the saddle: positive for focus, negative for anti-focus, 0 for none."""
    pi, P = chain.token_frequencies().numpy(), chain.transition.numpy()
    return float(pi**2 @ (P - pi) @ condensed_saddle(chain).beta)


def focus_rate(chain: MarkovChain, *, attn_scale: float = 1.0) -> float:
    """Stage II: rate c in `dW_Q/dt = c alpha alpha^T W_K`, `c = g^3 Var_pi(pi_J) S`; proportional to persistence.

    Negative where attention turns away from frequent tokens; W_Q and W_K then grow at the rate |c|.
    """
    pi = chain.token_frequencies().numpy()
    variance = pi @ pi**2 - (pi @ pi) ** 2
    return float(condensed_saddle(chain).g ** 3 * variance * sign_criterion(chain)) / attn_scale


def degenerate_loss(chain: MarkovChain) -> float:
    """Loss at the critical point where the rank-one manifold ends when all tokens but the most frequent are equal.

    The model then knows the frequent token's row and the mean of the others':
    `pi_1 H(P_1) + (1 - pi_1) CE(P_low, mean P_low)`.
    """
    pi, P = chain.token_frequencies().numpy(), chain.transition.numpy()
    low = np.arange(len(pi)) != pi.argmax()
    predicted = np.where(low[:, None], pi[low] @ P[low] / pi[low].sum(), P)
    return float(-(pi[:, None] * xlogy(P, predicted)).sum())


def transverse_rate(
    weights: PopulationWeights, chain: MarkovChain, *, attn_scale: float = 1.0
) -> Float[Array, "*seed"]:
    """Stage IV: `sigma_1(D)`, the rate at which a new embedding direction grows from a rank-one critical point."""
    return np.linalg.svd(population(weights, chain, attn_scale=attn_scale).D, compute_uv=False)[..., 0]


def growth_rate(
    steps: Sequence[int] | Array, norms: Sequence[float] | Array, *, lr: float, between: tuple[float, float]
) -> float:
    """Slope of log norm against time `step * lr` while the norm is between two bounds; NaN with fewer than 3 points."""
    time, log_norm = np.asarray(steps) * lr, np.log(norms)
    inside = (norms > np.asarray(between[0])) & (norms < np.asarray(between[1]))
    return float(np.polyfit(time[inside], log_norm[inside], 1)[0]) if inside.sum() >= 3 else float("nan")


def _kept_steps(keep: Sequence[int]) -> list[int]:
    steps = sorted(set(keep))
    if not steps or steps[0] < 0:
        raise InputError(f"keep must name at least one step, and none before 0, not {list(keep)}")
    return steps


def _trace(kept: list[tuple[PopulationWeights, Population]], steps: list[int], chain: MarkovChain) -> xr.Dataset:
    weights = PopulationWeights(*(np.stack(matrices) for matrices in zip(*(w for w, _ in kept), strict=True)))
    at = Population(*(np.stack(values) for values in zip(*(p for _, p in kept), strict=True)))
    lead = ("step", "seed")[: at.loss.ndim]
    baselines = {baseline.name: baseline.loss for baseline in chain.baselines()}
    values = {
        "loss": (lead, at.loss),
        "excess_over_unigram": (lead, at.loss - baselines["unigram"]),
        "excess_over_best": (lead, at.loss - baselines["bigram"]),
    }
    values |= {name: (lead, value) for name, value in _of_matrix("W_E", weights.W_E).items()}
    values |= {name: (lead, value) for name, value in _of_matrix("W_U", _T(weights.W_U)).items()}
    for name in ("W_Q", "W_K"):
        measured = _of_matrix(name, getattr(weights, name))
        values |= {key: ((*lead, *PER_HEAD), value[..., None, None]) for key, value in measured.items()}
    values |= {name: (lead, value) for name, value in _along_alpha(weights).items()}
    values |= _of_embedding(weights.W_E, chain, lead)
    values |= _of_attention(at.attention, chain, lead)
    trace = xr.Dataset(values, coords={"step": steps, "token": np.arange(chain.d_vocab), "layer": [0], "head": [0]})
    return trace.assign_attrs(series="population gradient flow", source="arXiv 2605.01199, long-context limit")


def _of_matrix(name: str, weight: Array) -> dict[str, Array]:
    s = condensation.singular_values(torch.from_numpy(np.ascontiguousarray(weight)))
    norm = condensation.frobenius_norm(s)
    return {
        f"{name}_top_share": condensation.top_share(s).numpy(),
        f"{name}_effective_rank": condensation.effective_rank(s).numpy(),
        f"{name}_singular_ratio": condensation.singular_ratio(s).numpy(),
        f"{name}_norm": norm.numpy(),
        f"{name}_norm_change": (norm / norm[0] - 1).numpy(),
    }


def _along_alpha(weights: PopulationWeights) -> dict[str, Array]:
    """Sizes of what grows along the embedding's top direction: W_E and W_U in stage I, W_Q + W_K in stage II."""
    alpha = np.linalg.svd(weights.W_E, full_matrices=False).Vh[..., :1, :]
    embedding = alpha @ _T(weights.W_E)
    unembedding = alpha @ weights.W_U
    return {
        "condensing": np.hypot(*(np.linalg.norm(part, axis=(-2, -1)) for part in (embedding, unembedding))),
        "focusing": np.linalg.norm(alpha @ (weights.W_Q + weights.W_K), axis=(-2, -1)),
    }


def _of_embedding(W_E: Array, chain: MarkovChain, lead: tuple[str, ...]) -> dict[str, tuple[tuple[str, ...], Array]]:
    weight, pi = torch.from_numpy(W_E), chain.token_frequencies()
    gamma = redistribution.embedding_along_alpha(weight, pi)
    return {
        "W_E_frequency_cosine": (lead, condensation.direction_cosine(weight, pi).numpy()),
        "embedding_norm": ((*lead, "token"), redistribution.embedding_norms(weight).numpy()),
        "embedding_along_alpha": ((*lead, "token"), gamma.numpy()),
        "gamma_perp": (lead, redistribution.gamma_perp(gamma, pi).numpy()),
    }


def _of_attention(
    attention: Array, chain: MarkovChain, lead: tuple[str, ...]
) -> dict[str, tuple[tuple[str, ...], Array]]:
    pi = chain.token_frequencies()
    by_token = focus.TokenAttention(pi[:, None] * torch.from_numpy(attention), torch.outer(pi, pi))
    top, rare = focus.frequent_tokens(pi, 1), focus.rare_tokens(pi, 1, focus.RARE_SHARE)
    by_query = focus.focus_ratio_by_query(by_token, top)
    per_head = {
        "focus_ratio": focus.focus_ratio(by_token, top, torch.ones_like(top)),
        "focus_ratio_rare": focus.focus_ratio(by_token, top, rare),
        "self_focus": focus.self_focus(by_token),
        "frequency_slope": focus.frequency_slope(by_token, pi),
    }
    values = {name: ((*lead, *PER_HEAD), value.numpy()[..., None, None]) for name, value in per_head.items()}
    return values | {"focus_ratio_by_query": ((*lead, *PER_HEAD, "token"), by_query.numpy()[..., None, None, :])}


def _pack(weights: PopulationWeights) -> Float[Array, " size"]:
    return np.concatenate([matrix.ravel() for matrix in weights])


def _T(matrix: Array) -> Array:
    return np.swapaxes(matrix, -1, -2)


def _logsumexp(f: Array) -> Array:
    top = f.max(-1, keepdims=True)
    return top + np.log(np.exp(f - top).sum(-1, keepdims=True))
