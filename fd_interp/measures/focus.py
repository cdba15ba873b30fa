"""Where attention goes, by how frequent the attended token is.

`attention_by_token` adds up attention patterns `[batch, head, query, key]` of any model, causal or not, by the tokens
that queries and keys hold; the other measures read the result. A *focus ratio* is attention mass on a set of tokens
divided by the share of that set in what the queries can see: 1 for uniform attention, above 1 for focus, below 1 for
dilution. Dividing by the measured share and not by the stationary probability matters: on a persistent chain a query
sees its own token more often than that.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from fd_interp.config import InputError
from fd_interp.measures._precision import at_least_single

LEAST_LIFT = 1e-6
"""Attention lifts are clipped here before their logarithm is taken."""
RARE_SHARE = 0.5
"""Share of the tokens that are not frequent, the rarest first, that counts as rare on a chain."""


class TokenAttention(NamedTuple):
    """Attention from queries that hold one token to keys that hold another, summed over a batch."""

    mass: Float[Tensor, "*head query_token key_token"]
    """What the patterns put there."""
    share: Float[Tensor, "query_token key_token"]
    """What uniform attention over the visible keys would put there."""


def attention_by_token(
    pattern: Float[Tensor, "batch head query key"],
    tokens: Int[Tensor, "batch key"],
    queries: Bool[Tensor, "batch query"],
    d_vocab: int,
) -> TokenAttention:
    """Sums the attention of the chosen queries by query token and key token; the paper's attention matrix by token.

    Memory goes with the square of `d_vocab`; with a large vocabulary number the distinct tokens of the batch anew.
    """
    pattern = at_least_single(pattern)
    mass = mass_by_token(pattern, tokens, queries, d_vocab)
    return TokenAttention(mass, share_by_token(tokens, queries, d_vocab, causal=is_causal(pattern)).to(mass))


def mass_by_token(
    pattern: Float[Tensor, "batch head query key"],
    tokens: Int[Tensor, "batch key"],
    queries: Bool[Tensor, "batch query"],
    d_vocab: int,
) -> Float[Tensor, "head query_token key_token"]:
    """`TokenAttention.mass`, for a series whose share stays the same from snapshot to snapshot.

    Raises:
        InputError: the pattern is not that of every query of the tokens.
    """
    if pattern.shape[-2:] != (tokens.shape[1], tokens.shape[1]):
        raise InputError(
            f"the pattern has {pattern.shape[-2]} queries and {pattern.shape[-1]} keys, "
            f"and must have as many of each as there are positions, {tokens.shape[1]}"
        )
    pattern, tokens = at_least_single(pattern), tokens.long()
    if d_vocab <= tokens.shape[1]:
        # Products with one-hot vectors; for few tokens much faster than adding entry by entry.
        held = functional.one_hot(tokens, d_vocab).to(pattern)  # b k v
        by_key = torch.matmul(pattern, held[:, None])  # b h q v
        return torch.einsum("bqu,bhqv->huv", held * queries[..., None], by_key)
    pairs = tokens[:, :, None] * d_vocab + tokens[:, None, :]  # b q k
    asked = (pattern * queries[:, None, :, None]).transpose(0, 1).flatten(1)  # h (b q k)
    sums = torch.zeros(len(asked), d_vocab**2, dtype=asked.dtype, device=asked.device)
    return sums.index_add_(1, pairs.flatten(), asked).unflatten(1, (d_vocab, d_vocab))


def share_by_token(
    tokens: Int[Tensor, "batch key"], queries: Bool[Tensor, "batch query"], d_vocab: int, *, causal: bool
) -> Float[Tensor, "query_token key_token"]:
    """`TokenAttention.share`, in double precision."""
    visible = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.float64, device=tokens.device)
    visible = visible.tril() if causal else visible
    uniform = visible / visible.sum(-1, keepdim=True)
    return mass_by_token(uniform.expand(len(tokens), 1, -1, -1), tokens, queries, d_vocab)[0]


def is_causal(pattern: Float[Tensor, "batch head query key"]) -> bool:
    """Whether no query looks at a later key."""
    later = torch.ones(pattern.shape[-2:], dtype=pattern.dtype, device=pattern.device).triu(1)
    return not (torch.matmul(pattern.flatten(2), later.flatten()) > 0).any()


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
    return -torch.einsum("bhq,bq->h", negentropy, queries.to(negentropy)) / queries.sum()


def focus_ratio(
    attention: TokenAttention, keys: Bool[Tensor, " key_token"], queries: Bool[Tensor, " query_token"]
) -> Float[Tensor, "*head"]:
    """Attention mass on a set of tokens ÷ the set's share of what the queries see, over queries of another set.

    NaN when the set is not visible to any of the queries.
    """
    between = queries[:, None] & keys
    return (attention.mass * between).sum((-2, -1)) / (attention.share * between).sum()


def focus_ratio_by_query(
    attention: TokenAttention, keys: Bool[Tensor, " key_token"]
) -> Float[Tensor, "*head query_token"]:
    """The focus ratio of the queries that hold each token; NaN for a token that none of them holds."""
    return (attention.mass * keys).sum(-1) / (attention.share * keys).sum(-1)


def self_focus(attention: TokenAttention) -> Float[Tensor, "*head"]:
    """Focus ratio of the queries on their own token, wherever it stands in their context."""
    return attention.mass.diagonal(dim1=-2, dim2=-1).sum(-1) / attention.share.trace()


def attention_lift(attention: TokenAttention) -> Float[Tensor, "*head key_token"]:
    """Attention that each token receives ÷ what it would receive if attention were uniform; NaN for an unseen token."""
    return attention.mass.sum(-2) / attention.share.sum(-2)


def frequency_slope(attention: TokenAttention, frequencies: Float[Tensor, " key_token"]) -> Float[Tensor, "*head"]:
    """Slope of log attention lift against log frequency: 0 for uniform attention, 1 for attention ∝ frequency.

    Least squares over the tokens that occur, each weighted by its share of the context, so that a few occurrences of
    rare tokens do not decide. Negative when rare tokens are preferred; NaN when all are equally frequent.
    """
    weight = attention.share.sum(-2)
    seen = (weight > 0) & (frequencies.to(weight) > 0)
    lift = attention_lift(attention)[..., seen].clamp(min=LEAST_LIFT).log()
    weight = weight[seen] / weight[seen].sum()
    log_frequency = frequencies.to(weight)[seen].log()
    log_frequency = log_frequency - log_frequency[:1]  # without a rounding error where all are equally frequent
    centred = log_frequency - weight @ log_frequency
    return lift @ (weight * centred) / (weight @ centred.square())
