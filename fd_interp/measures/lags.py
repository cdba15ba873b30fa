"""Where attention goes, by distance from the token that is predicted; for any model's patterns, causal or not.

A query at position q predicts token q + 1. *Lag* l counts back from that token: it is the key at position q + 1 - l, so
lag 1 is the query's own token and lag 2 the one before, where a previous-token head looks. A *block* is a set of lags.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.measures._precision import at_least_single

LAST_QUERY = slice(-1, None)
"""The query that sees the whole sequence: the one that the head-to-pattern masses of arXiv 2602.19143 are read from."""


def full_context(lags: Sequence[int]) -> slice:
    """The queries that see every one of these lags."""
    return slice(max(lags) - 1, None)


def attention_by_lag(
    pattern: Float[Tensor, "batch head query key"], lags: Sequence[int], queries: slice | None = None
) -> Float[Tensor, "head lag"]:
    """Mean attention of the chosen queries to the key at each lag, in `[0, 1]`; the queries with full context if None.

    Over all lags that a query sees, the attention of a causal head adds up to 1.

    Raises:
        InputError: no lag, a lag below 1, a repeated one, one beyond the context or out of sight of a chosen query;
            no query; a pattern with fewer or more queries than keys.
    """
    if pattern.ndim != 4:
        raise InputError(f"the pattern must have the axes batch, head, query, key, and not {pattern.ndim} of them")
    n_queries, n_keys = pattern.shape[-2:]
    if n_queries != n_keys:
        raise InputError(f"the pattern has {n_queries} queries and {n_keys} keys, and must have as many of each")
    _check(lags, n_keys)
    asked = range(n_queries)[full_context(lags) if queries is None else queries]
    if not asked:
        raise InputError(f"{queries} chooses none of the {n_queries} queries")
    if min(asked) < max(lags) - 1:
        raise InputError(f"query {min(asked)} cannot see lag {max(lags)}: the first that can is query {max(lags) - 1}")
    by_lag = []
    for lag in lags:
        along = pattern.diagonal(1 - lag, dim1=-2, dim2=-1)  # its first entry is that of query lag - 1
        along = along[..., min(asked) - lag + 1 : max(asked) - lag + 2 : abs(asked.step)]
        by_lag.append(at_least_single(along).mean((0, -1)))
    return torch.stack(by_lag, -1)


def _check(lags: Sequence[int], n_keys: int) -> None:
    if not lags:
        raise InputError("there must be at least one lag")
    for lag in lags:
        if lag < 1:
            raise InputError(f"lag {lag} is not in the past: the first is lag 1, the query's own token")
        if lag > n_keys:
            raise InputError(f"lag {lag} reaches beyond the context of {n_keys} positions")
        if list(lags).count(lag) > 1:
            raise InputError(f"lag {lag} is repeated, and each must be given once")


def block_mass(
    by_lag: Float[Tensor, "*head lag"], lags: Sequence[int], blocks: Sequence[Sequence[int]]
) -> Float[Tensor, "*head block"]:
    """Sums what is given for each lag over the lags of each block.

    Blocks may overlap: a lag counts in each block that has it, and once in each. The masses of disjoint blocks add up
    to at most 1.

    Raises:
        InputError: a block has a lag that is not among the given ones.
    """
    if not all(blocks):
        raise InputError("a block must have at least one lag")
    for absent in (lag for block in blocks for lag in block if lag not in lags):
        raise InputError(f"a block has lag {absent}, which is not among the lags {list(lags)}")
    by_lag = at_least_single(by_lag)
    member = [[float(lag in block) for block in blocks] for lag in lags]
    return by_lag @ torch.tensor(member).to(by_lag)


def attention_by_block(
    pattern: Float[Tensor, "batch head query key"], blocks: Sequence[Sequence[int]], queries: slice | None = None
) -> Float[Tensor, "head block"]:
    """Mean attention of the chosen queries on each block: `block_mass` of `attention_by_lag`, with its errors.

    With `LAST_QUERY` it is the head-to-pattern mass of arXiv 2602.19143.
    """
    lags = sorted({lag for block in blocks for lag in block})
    return block_mass(attention_by_lag(pattern, lags, queries), lags, blocks)
