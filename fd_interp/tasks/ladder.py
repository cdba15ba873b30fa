"""The best that can be predicted from a few lags: exactly, by going through all windows, or from drawn ones."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize
from scipy.sparse import csr_array
from scipy.special import log_softmax, xlogy

from fd_interp.config import InputError

Array = np.ndarray
Blocks = tuple[tuple[int, ...], ...]
Alphas = tuple[tuple[float, ...], ...]

LIMIT = 2**24
"""Most probabilities that are enumerated: a ladder of so many takes 1 GiB and a quarter of a minute."""


class Windows(NamedTuple):
    """The tokens before a predicted one, how probable they are, and what follows."""

    lags: tuple[int, ...]
    """Where the tokens of each column stand, counted backwards from the predicted one."""
    tokens: Int[Array, "window lag"]
    weights: Float[Array, " window"]
    """Sums to one."""
    next_token: Float[Array, "window vocab"]
    """Law of the token that follows each window."""


class Reading(NamedTuple):
    """Windows as a predictor sees them that reads some blocks of lags and nothing else."""

    windows: Windows
    seen: csr_array
    """`sum_{i in I(k)} alpha_i x_{t-i}` for each window (rows), blocks side by side (columns)."""


class Additive(NamedTuple):
    """A predictor `softmax(bias + sum_k B_k^T sum_{i in I(k)} alpha_i x_{t-i})`."""

    bias: Float[Array, " vocab"]
    B: Float[Array, "block source target"]


def enumerable(d_vocab: int, lookback: int) -> bool:
    """Whether there are few enough windows to go through."""
    return d_vocab ** (lookback + 1) <= LIMIT


def check_enumerable(d_vocab: int, lookback: int) -> None:
    """Raises an InputError with the size and the limit where there are too many windows."""
    if not enumerable(d_vocab, lookback):
        digits = (lookback + 1) * math.log10(d_vocab)
        raise InputError(
            f"{d_vocab}^{lookback + 1}, about 10^{digits:.1f}, probabilities are too many to enumerate; the limit is "
            f"10^{math.log10(LIMIT):.1f}, so take fewer tokens or shorter lags, or estimate from drawn windows"
        )


def every_window(next_token: Float[Array, "*window vocab"], *, burn_in: int, queries: int) -> Windows:
    """All windows with the probability that a query meets them, in sequences that start with a uniform window.

    Args:
        next_token: law of the next token, with an axis for the token at lag 1, at lag 2, ... before its own.
        burn_in: tokens generated before the window of the first query is complete.
        queries: how many neighbouring queries to average over.
    """
    *shape, d_vocab = next_token.shape
    law = np.full(shape, 1 / np.prod(shape))
    met = np.zeros(shape)
    for step in range(burn_in + queries):
        if step >= burn_in:
            met += law / queries
        joint = law[..., None] * next_token
        law = np.moveaxis(joint.sum(len(shape) - 1), -1, 0)  # forget the oldest; the new one is at lag 1
    tokens = np.indices(shape).reshape(len(shape), -1).T
    lags = tuple(range(1, len(shape) + 1))
    return Windows(lags, tokens, met.ravel(), next_token.reshape(-1, d_vocab))


def given(windows: Windows, lags: tuple[int, ...]) -> Windows:
    """What is known where only some lags are seen: windows that look alike are one, and the law is their mean."""
    seen = windows.tokens[:, [windows.lags.index(lag) for lag in lags]]
    distinct, place = np.unique(seen, axis=0, return_inverse=True)
    columns = np.arange(len(seen))
    gather = csr_array((windows.weights, (place.ravel(), columns)), shape=(len(distinct), len(seen)))
    weights = gather.sum(1)
    met = weights > 0
    return Windows(lags, distinct[met], weights[met], (gather @ windows.next_token)[met] / weights[met, None])


def read(windows: Windows, blocks: Blocks, alphas: Alphas) -> Reading:
    """These windows where only the lags of these blocks are seen."""
    windows = given(windows, tuple(dict.fromkeys(lag for block in blocks for lag in block)))
    n, d_vocab = windows.next_token.shape
    entries = [
        (number * d_vocab + windows.tokens[:, windows.lags.index(lag)], alpha)
        for number, (block, weights) in enumerate(zip(blocks, alphas, strict=True))
        for lag, alpha in zip(block, weights, strict=True)
    ]
    rows = np.tile(np.arange(n), len(entries))
    columns = np.ravel([place for place, _ in entries])
    values = np.repeat([alpha for _, alpha in entries], n)
    return Reading(windows, csr_array((values, (rows, columns)), shape=(n, len(blocks) * d_vocab)))


def entropy(windows: Windows) -> float:
    """Entropy of the next token given the window, in nats: the least loss of any predictor that sees it."""
    return float(-(windows.weights @ xlogy(windows.next_token, windows.next_token)).sum())


def loss(predictor: Additive, reading: Reading) -> float:
    """Expected cross-entropy in nats."""
    log_q = log_softmax(reading.seen @ predictor.B.reshape(-1, len(predictor.bias)) + predictor.bias, axis=1)
    return float(-(reading.windows.weights @ (reading.windows.next_token * log_q)).sum())


def best_additive(reading: Reading, tolerance: float) -> Additive:
    """The additive predictor of the least expected cross-entropy: convex, solved by Newton's method in a trust region.

    Where there is a block a bias would add nothing, since one-hot vectors add up to a constant.

    Args:
        tolerance: length of the gradient at which to stop.
    """
    seen, weights, next_token = reading.seen, reading.windows.weights[:, None], reading.windows.next_token
    d_vocab = next_token.shape[1]
    if not reading.windows.lags:
        return Additive(np.log(next_token[0]), np.zeros((0, d_vocab, d_vocab)))  # all windows look alike

    @lru_cache(maxsize=2)
    def predicted(B: bytes) -> tuple[Array, Array]:
        log_q = log_softmax(seen @ np.frombuffer(B).reshape(-1, d_vocab), axis=1)
        return log_q, np.exp(log_q)

    def loss_and_gradient(B: Array) -> tuple[float, Array]:
        log_q, q = predicted(B.tobytes())
        return float(-(weights * next_token * log_q).sum()), (seen.T @ (weights * (q - next_token))).ravel()

    def curvature(B: Array, direction: Array) -> Array:
        """Hessian times direction; the covariance of q is `diag(q) - q q^T`."""
        _, q = predicted(B.tobytes())
        change = seen @ direction.reshape(-1, d_vocab)
        change = weights * q * (change - (q * change).sum(1, keepdims=True))
        return (seen.T @ change).ravel()

    start = np.zeros_like(seen.T @ next_token).ravel()
    options = {"gtol": tolerance, "maxiter": 1000}
    found = minimize(loss_and_gradient, start, jac=True, hessp=curvature, method="trust-ncg", options=options)
    return Additive(np.zeros(d_vocab), found.x.reshape(-1, d_vocab, d_vocab))
