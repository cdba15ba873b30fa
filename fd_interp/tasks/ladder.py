"""The best that can be predicted from a few lags: exactly, by going through all windows, or from drawn ones."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize
from scipy.sparse import csr_array
from scipy.special import log_softmax, xlogy

from fd_interp.config import InputError

Array = np.ndarray
LIMIT = 2**24
"""Most probabilities that are enumerated; their array takes 128 MiB."""


class Windows(NamedTuple):
    """The tokens before a predicted one, how probable they are, and what follows."""

    lags: tuple[int, ...]
    """Where the tokens of each column stand, counted backwards from the predicted one."""
    tokens: Int[Array, "window lag"]
    weights: Float[Array, " window"]
    """Sums to one."""
    next_token: Float[Array, "window vocab"]
    """Law of the token that follows each window."""


class Additive(NamedTuple):
    """A predictor `softmax(bias + sum_k sum_{i in I(k)} alpha_i B_k[x_{t-i}])`."""

    bias: Float[Array, " vocab"]
    B: Float[Array, "block source target"]


def enumerable(d_vocab: int, lookback: int) -> bool:
    """Whether there are few enough windows to go through."""
    return d_vocab ** (lookback + 1) <= LIMIT


def check_enumerable(d_vocab: int, lookback: int) -> None:
    """Raises an InputError with the size and the limit where there are too many windows."""
    if not enumerable(d_vocab, lookback):
        raise InputError(
            f"{d_vocab}^{lookback + 1} = {d_vocab ** (lookback + 1):.2g} probabilities are too many to enumerate; the "
            f"limit is {LIMIT:.2g}, so take fewer tokens or shorter lags, or estimate from drawn windows"
        )


def every_window(next_token: Float[Array, "*window vocab"], *, burn_in: int, queries: int) -> Windows:
    """All windows with the probability that a query meets them, from uniform tokens at the start.

    Args:
        next_token: law of the next token, with an axis for the token at lag 1, at lag 2, ... before its own.
        burn_in: tokens generated before the first query.
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
    d_vocab = windows.next_token.shape[1]
    seen = windows.tokens[:, [windows.lags.index(lag) for lag in lags]]
    distinct, first, place = np.unique(seen @ d_vocab ** np.arange(len(lags)), return_index=True, return_inverse=True)
    gather = csr_array((windows.weights, (place, np.arange(len(place)))), shape=(len(distinct), len(place)))
    joint, weights = gather @ windows.next_token, gather.sum(1)
    met = weights > 0
    return Windows(lags, seen[first][met], weights[met], joint[met] / weights[met, None])


def entropy(windows: Windows) -> float:
    """Entropy of the next token given the window, in nats: the least loss of any predictor that sees it."""
    return float(-(windows.weights @ xlogy(windows.next_token, windows.next_token)).sum())


def loss(windows: Windows, log_probabilities: Float[Array, "window vocab"]) -> float:
    """Expected cross-entropy of a predictor in nats."""
    return float(-(windows.weights @ (windows.next_token * log_probabilities)).sum())


def design(windows: Windows, blocks: tuple[tuple[int, ...], ...], alphas: tuple[tuple[float, ...], ...]) -> csr_array:
    """`sum_{i in I(k)} alpha_i x_{t-i}` for each window, blocks side by side."""
    n, d_vocab = windows.next_token.shape
    entries = [
        (number * d_vocab + windows.tokens[:, windows.lags.index(lag)], alpha)
        for number, (block, weights) in enumerate(zip(blocks, alphas, strict=True))
        for lag, alpha in zip(block, weights, strict=True)
    ]
    rows = np.tile(np.arange(n), len(entries))
    columns = np.ravel([place for place, _ in entries])
    values = np.repeat([alpha for _, alpha in entries], n)
    return csr_array((values, (rows, columns)), shape=(n, len(blocks) * d_vocab))


def best_additive(windows: Windows, seen: csr_array) -> Additive:
    """The additive predictor of the least expected cross-entropy; convex, solved by L-BFGS.

    Args:
        seen: from `design`. Where it has a block a bias would add nothing, since one-hot vectors add up to a constant.
    """
    assert seen.shape is not None
    d_vocab, columns = windows.next_token.shape[1], seen.shape[1]
    target = windows.weights[:, None] * windows.next_token
    if not columns:
        return Additive(np.log(target.sum(0)), np.zeros((0, d_vocab, d_vocab)))

    def objective(flat: Array) -> tuple[float, Array]:
        log_q = log_softmax(seen @ flat.reshape(-1, d_vocab), axis=1)
        excess = windows.weights[:, None] * np.exp(log_q) - target
        return float(-(target * log_q).sum()), (seen.T @ excess).ravel()

    start = np.zeros(columns * d_vocab)
    # The default rules stop while the loss still falls by what a claim would notice.
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 2000, "ftol": 1e-12})
    return Additive(np.zeros(d_vocab), found.x.reshape(-1, d_vocab, d_vocab))


def log_probabilities(predictor: Additive, seen: csr_array) -> Float[Array, "window vocab"]:
    """Of the next token after each window of a `design`."""
    d_vocab = len(predictor.bias)
    return log_softmax(seen @ predictor.B.reshape(-1, d_vocab) + predictor.bias, axis=1)
