"""Where attention goes, by how frequent the attended token is.

Every function takes attention patterns `[batch, head, query, key]`, causal or not, of any model. A *focus ratio* is
attention mass on a set of tokens divided by the share of that set in what each query can see: 1 for uniform attention,
above 1 for focus, below 1 for dilution. Dividing by the measured share and not by the stationary probability matters:
on a persistent chain a query sees its own token more often than that.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fd_interp.measures._precision import at_least_single

LEAST_LIFT = 1e-6
"""Attention lifts are clipped here before their logarithm is taken."""
RARE_SHARE = 0.5
"""Share of the tokens that are not frequent, the rarest first, that counts as rare on a chain."""


def frequent_tokens(frequencies: Float[Tensor, " vocab"], count: int) -> Bool[Tensor, " vocab"]:
    """Which tokens are the `count` most frequent ones."""
    chosen = torch.zeros(len(frequencies), dtype=torch.bool, device=frequencies.device)
    chosen[frequencies.argsort(descending=True, stable=True)[:count]] = True
    return chosen


def rare_tokens(frequencies: Float[Tensor, " vocab"], frequent: int, fraction: float) -> Bool[Tensor, " vocab"]:
    """Which tokens are rare: a fraction of those that occur beside the `frequent` most frequent ones, the rarest first.

    The fraction is rounded to whole tokens, upwards at a half.
    """
    others = int((frequencies > 0).sum()) - frequent
    common = others - int(fraction * others + 0.5)
    return (frequencies > 0) & ~frequent_tokens(frequencies, frequent + common)


def attention_entropy(
    pattern: Float[Tensor, "batch head query key"], queries: Bool[Tensor, "batch query"]
) -> Float[Tensor, " head"]:
    """Mean entropy in nats of the chosen queries' attention: 0 on one key, `log n` when spread over n keys evenly."""
    pattern = at_least_single(pattern)
    least = torch.finfo(pattern.dtype).tiny
    # In place because memory is what takes the time; not by `entr`, which is slow at zero, where half a pattern is.
    negentropy = pattern.clamp(min=least).log_().mul_(pattern).sum(-1)  # b h q
    return -_mean_over(negentropy, queries)


def attention_mass(
    pattern: Float[Tensor, "batch head query key"], keys: Bool[Tensor, "batch key"]
) -> Float[Tensor, "batch head query"]:
    """Attention that each query puts on the keys of a set, in `[0, 1]`."""
    return torch.matmul(pattern, keys.to(pattern)[:, None, :, None])[..., 0]


def visible_share(
    pattern: Float[Tensor, "batch head query key"], keys: Bool[Tensor, "batch key"]
) -> Float[Tensor, "batch query"]:
    """Share of a set among the keys that each query can see: what uniform attention would put on it."""
    share = keys.to(pattern)
    if is_causal(pattern):
        return share.cumsum(-1) / torch.arange(1, share.shape[1] + 1, device=share.device)
    return share.mean(-1, keepdim=True).expand(-1, pattern.shape[2])


def is_causal(pattern: Float[Tensor, "batch head query key"]) -> bool:
    """Whether no query looks at a later key."""
    later = torch.ones(pattern.shape[-2:], dtype=pattern.dtype, device=pattern.device).triu(1)
    return not (torch.matmul(pattern.flatten(2), later.flatten()) > 0).any()


def focus_ratio(
    pattern: Float[Tensor, "batch head query key"],
    keys: Bool[Tensor, "batch key"],
    queries: Bool[Tensor, "batch query"],
) -> Float[Tensor, " head"]:
    """Attention mass of the chosen queries on the keys of a set ÷ the set's share of what these queries see.

    NaN when the set is not visible to any of the queries.
    """
    return mass_over_share(attention_mass(pattern, keys), visible_share(pattern, keys), queries)


def mass_over_share(
    mass: Float[Tensor, "batch head query"], share: Float[Tensor, "batch query"], queries: Bool[Tensor, "batch query"]
) -> Float[Tensor, " head"]:
    """`focus_ratio` of a set whose attention mass and visible share are at hand, since several may be asked for."""
    return _sum_over(mass, queries) / _sum_over(share[:, None], queries)


def focus_ratio_by_query(
    pattern: Float[Tensor, "batch head query key"],
    keys: Bool[Tensor, "batch key"],
    queries: Bool[Tensor, "batch query"],
    tokens: Int[Tensor, "batch query"],
    d_vocab: int,
) -> Float[Tensor, "head vocab"]:
    """The focus ratio of the queries that hold each token; NaN for a token that none of them holds."""
    mass, share = attention_mass(pattern, keys), visible_share(pattern, keys)
    return mass_over_share_by_query(mass, share, queries, tokens, d_vocab)


def mass_over_share_by_query(
    mass: Float[Tensor, "batch head query"],
    share: Float[Tensor, "batch query"],
    queries: Bool[Tensor, "batch query"],
    tokens: Int[Tensor, "batch query"],
    d_vocab: int,
) -> Float[Tensor, "head vocab"]:
    """`focus_ratio_by_query`, likewise."""
    chosen = queries[:, None]
    return _sum_by_token(mass * chosen, tokens, d_vocab) / _sum_by_token(share[:, None] * chosen, tokens, d_vocab)


def self_focus(
    pattern: Float[Tensor, "batch head query key"],
    queries: Bool[Tensor, "batch query"],
    tokens: Int[Tensor, "batch position"],
) -> Float[Tensor, " head"]:
    """Focus ratio of the chosen queries on their own token, wherever it stands in their context."""
    pattern = at_least_single(pattern)
    asked = torch.where(queries, tokens, -1)  # -1 equals no token
    same = (asked[:, :, None] == tokens[:, None, :]).to(pattern)  # b q k
    mass = torch.einsum("bhqk,bqk->bhq", pattern, same)
    share = torch.matmul(same.flatten(1), _uniform(pattern).flatten())  # b, over all queries
    return _sum_over(mass, queries) / share.sum()


def attention_lift(
    pattern: Float[Tensor, "batch head query key"],
    queries: Bool[Tensor, "batch query"],
    tokens: Int[Tensor, "batch key"],
    d_vocab: int,
) -> Float[Tensor, "head vocab"]:
    """Attention that each token receives ÷ what it would receive if attention were uniform; NaN for an unseen token."""
    return _received(pattern, queries, tokens, d_vocab) / _received_if_uniform(pattern, queries, tokens, d_vocab)


def frequency_slope(
    pattern: Float[Tensor, "batch head query key"],
    queries: Bool[Tensor, "batch query"],
    tokens: Int[Tensor, "batch key"],
    frequencies: Float[Tensor, " vocab"],
) -> Float[Tensor, " head"]:
    """Slope of log attention lift against log frequency: 0 for uniform attention, 1 for attention ∝ frequency.

    Least squares over the tokens that occur, each weighted by its share of the context, so that a few occurrences of
    rare tokens do not decide. Negative when rare tokens are preferred.
    """
    if_uniform = _received_if_uniform(pattern, queries, tokens, len(frequencies))
    lift = (_received(pattern, queries, tokens, len(frequencies)) / if_uniform).clamp(min=LEAST_LIFT).log()
    weight = if_uniform[0]
    seen = (weight > 0) & (frequencies.to(weight) > 0)
    lift, weight = lift[:, seen], weight[seen] / weight[seen].sum()
    log_frequency = frequencies.to(weight)[seen].log()
    centred = log_frequency - weight @ log_frequency
    return (lift * (weight * centred)).sum(-1) / (weight @ centred.square())


def _received(pattern: Tensor, queries: Tensor, tokens: Tensor, d_vocab: int) -> Float[Tensor, "head vocab"]:
    by_key = torch.matmul(queries.to(pattern)[:, None, None, :], pattern)[:, :, 0]  # b h k
    return _sum_by_token(by_key, tokens, d_vocab)


def _received_if_uniform(pattern: Tensor, queries: Tensor, tokens: Tensor, d_vocab: int) -> Float[Tensor, "one vocab"]:
    by_key = torch.matmul(queries.to(pattern), _uniform(pattern))  # b k
    return _sum_by_token(by_key[:, None], tokens, d_vocab)


def _uniform(pattern: Float[Tensor, "batch head query key"]) -> Float[Tensor, "query key"]:
    """Uniform attention over the keys that each query can see."""
    visible = torch.ones(pattern.shape[-2:], dtype=pattern.dtype, device=pattern.device)
    visible = visible.tril() if is_causal(pattern) else visible
    return visible / visible.sum(-1, keepdim=True)


def _sum_over(
    values: Float[Tensor, "batch head query"], queries: Bool[Tensor, "batch query"]
) -> Float[Tensor, " head"]:
    values = at_least_single(values)
    return torch.einsum("bhq,bq->h", values, queries.to(values))


def _mean_over(
    values: Float[Tensor, "batch head query"], queries: Bool[Tensor, "batch query"]
) -> Float[Tensor, " head"]:
    return _sum_over(values, queries) / queries.sum()


def _sum_by_token(
    values: Float[Tensor, "batch head position"], tokens: Int[Tensor, "batch position"], d_vocab: int
) -> Float[Tensor, "head vocab"]:
    by_head = at_least_single(values).transpose(0, 1).flatten(1)  # h (b p)
    sums = torch.zeros(len(by_head), d_vocab, dtype=by_head.dtype, device=values.device)
    return sums.index_add_(1, tokens.flatten(), by_head)
