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


def attention_entropy(
    pattern: Float[Tensor, "batch head query key"], queries: Bool[Tensor, "batch query"]
) -> Float[Tensor, " head"]:
    """Mean entropy in nats of the chosen queries' attention: 0 on one key, `log n` when spread over n keys evenly."""
    entropy = torch.special.entr(pattern).sum(-1)  # b h q
    return _mean_over(entropy, queries)


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
    return not pattern.triu(1).any()


def focus_ratio(
    pattern: Float[Tensor, "batch head query key"],
    keys: Bool[Tensor, "batch key"],
    queries: Bool[Tensor, "batch query"],
) -> Float[Tensor, " head"]:
    """Attention mass of the chosen queries on the keys of a set ÷ the set's share of what these queries see.

    NaN when the set is not visible to any of the queries.
    """
    mass = _sum_over(attention_mass(pattern, keys), queries)
    share = _sum_over(visible_share(pattern, keys)[:, None], queries)
    return mass / share


def focus_ratio_by_query(
    pattern: Float[Tensor, "batch head query key"],
    keys: Bool[Tensor, "batch key"],
    queries: Bool[Tensor, "batch query"],
    tokens: Int[Tensor, "batch query"],
    d_vocab: int,
) -> Float[Tensor, "head vocab"]:
    """The focus ratio of the queries that hold each token; NaN for a token that none of them holds."""
    mass = _sum_by_token(attention_mass(pattern, keys), tokens, queries, d_vocab)
    share = _sum_by_token(visible_share(pattern, keys)[:, None], tokens, queries, d_vocab)
    return mass / share


def self_focus(
    pattern: Float[Tensor, "batch head query key"],
    queries: Bool[Tensor, "batch query"],
    tokens: Int[Tensor, "batch position"],
) -> Float[Tensor, " head"]:
    """Focus ratio of the chosen queries on their own token, wherever it stands in their context."""
    same = (tokens[:, :, None] == tokens[:, None, :]).to(pattern)  # b q k
    visible = torch.ones_like(same[0]).tril() if is_causal(pattern) else torch.ones_like(same[0])
    share = (same * visible).sum(-1) / visible.sum(-1)
    mass = torch.einsum("bhqk,bqk->bhq", pattern, same)
    return _sum_over(mass, queries) / _sum_over(share[:, None], queries)


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
    lift = attention_lift(pattern, queries, tokens, len(frequencies)).clamp(min=LEAST_LIFT).log()
    weight = _received_if_uniform(pattern, queries, tokens, len(frequencies))[0]
    seen = (weight > 0) & (frequencies.to(weight) > 0)
    lift, weight = lift[:, seen], weight[seen] / weight[seen].sum()
    log_frequency = frequencies.to(weight)[seen].log()
    centred = log_frequency - weight @ log_frequency
    return (lift * (weight * centred)).sum(-1) / (weight @ centred.square())


def _received(pattern: Tensor, queries: Tensor, tokens: Tensor, d_vocab: int) -> Float[Tensor, "head vocab"]:
    by_key = torch.matmul(queries.to(pattern)[:, None, None, :], pattern)[:, :, 0]  # b h k
    return _sum_by_token(by_key, tokens, torch.ones_like(tokens, dtype=torch.bool), d_vocab)


def _received_if_uniform(pattern: Tensor, queries: Tensor, tokens: Tensor, d_vocab: int) -> Float[Tensor, "one vocab"]:
    length = tokens.shape[1]
    uniform = torch.ones(length, length, dtype=pattern.dtype, device=pattern.device)
    if is_causal(pattern):
        uniform = uniform.tril() / torch.arange(1, length + 1, device=pattern.device)[:, None]
    else:
        uniform = uniform / length
    return _received(uniform.expand(len(tokens), 1, -1, -1), queries, tokens, d_vocab)


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
    values: Float[Tensor, "batch head position"],
    tokens: Int[Tensor, "batch position"],
    chosen: Bool[Tensor, "batch position"],
    d_vocab: int,
) -> Float[Tensor, "head vocab"]:
    by_head = (at_least_single(values) * chosen[:, None]).transpose(0, 1).flatten(1)  # h (b p)
    sums = torch.zeros(len(by_head), d_vocab, dtype=by_head.dtype, device=values.device)
    return sums.index_add_(1, tokens.flatten(), by_head)
