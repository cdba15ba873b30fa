"""Does attention go to frequent tokens, from which queries, and does it turn away from them later?"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fd_interp.measures import focus as measures
from fd_interp.observation import Observation, Probe, Variable, chosen_queries

PAPER = "arXiv 2605.01199, stages II and III"
PER_HEAD = ("layer", "head")


def frequency_focus(top: int = 1, rare: float = measures.RARE_SHARE) -> Probe:
    """Attention on the `top` most frequent tokens, as a probe.

    One token is the paper's case on its synthetic chains; on text we take ten.

    Args:
        rare: share of the other tokens that occur, the rarest first, whose queries count as rare. The paper has tokens
            of one high and several low frequencies; where frequencies are graded, as in Zipf's law, the middle ones
            focus longest.
    """

    def measure(seen: Observation) -> dict[str, Tensor]:
        patterns = seen.activations("pattern")
        what = seen.once(f"frequency_focus {top} {rare}", lambda: _asked(seen, patterns[0], top, rare))
        columns = [_of_layer(pattern, what) for pattern in patterns]
        return {name: torch.stack([column[name] for column in columns]) for name in columns[0]}

    frequent = "the most frequent token" if top == 1 else f"the {top} most frequent tokens"
    return Probe(
        "frequency_focus",
        {
            "attention_entropy": Variable(PER_HEAD, "entropy of attention", PAPER, "nats"),
            "focus_ratio": Variable(PER_HEAD, f"attention on {frequent} ÷ their share of the context", PAPER),
            "focus_ratio_rare": Variable(
                PER_HEAD, f"the same, over queries of the rarest {rare:.0%} of the other tokens", PAPER
            ),
            "focus_ratio_by_query": Variable((*PER_HEAD, "token"), "focus ratio by the query's token", PAPER),
            "self_focus": Variable(PER_HEAD, "attention on the query's own token ÷ its share of the context", PAPER),
            "frequency_slope": Variable(PER_HEAD, "slope of log attention lift against log frequency", PAPER),
        },
        measure,
        hooks=("pattern",),
    )


class _Asked(NamedTuple):
    """What depends on the batch alone, for layers that are all causal or all not.

    Tokens are numbered anew, so that a large vocabulary costs nothing.
    """

    distinct: Int[Tensor, " vocab"]
    tokens: Int[Tensor, "batch position"]
    queries: Bool[Tensor, "batch position"]
    share: Float[Tensor, "query_token key_token"]
    frequencies: Float[Tensor, " query_token"]
    frequent: Bool[Tensor, " query_token"]
    rare: Bool[Tensor, " query_token"]
    d_vocab: int


def _asked(seen: Observation, pattern: Tensor, top: int, rare: float) -> _Asked:
    distinct, tokens = seen.batch.tokens.unique(return_inverse=True)
    queries = chosen_queries(seen.batch)
    share = measures.share_by_token(tokens, queries, len(distinct), causal=measures.is_causal(pattern))
    return _Asked(
        distinct=distinct,
        tokens=tokens,
        queries=queries,
        share=share,
        frequencies=seen.frequencies[distinct],
        frequent=measures.frequent_tokens(seen.frequencies, top)[distinct],
        rare=measures.rare_tokens(seen.frequencies, top, rare)[distinct],
        d_vocab=len(seen.frequencies),
    )


def _of_layer(pattern: Tensor, what: _Asked) -> dict[str, Tensor]:
    mass = measures.mass_by_token(pattern, what.tokens, what.queries, len(what.distinct))
    attention = measures.TokenAttention(mass, what.share.to(mass))
    by_query = torch.full((len(mass), what.d_vocab), torch.nan, dtype=mass.dtype)
    by_query[:, what.distinct] = measures.focus_ratio_by_query(attention, what.frequent)
    return {
        "attention_entropy": measures.attention_entropy(pattern, what.queries),
        "focus_ratio": measures.focus_ratio(attention, what.frequent, torch.ones_like(what.frequent)),
        "focus_ratio_rare": measures.focus_ratio(attention, what.frequent, what.rare),
        "focus_ratio_by_query": by_query,
        "self_focus": measures.self_focus(attention),
        "frequency_slope": measures.frequency_slope(attention, what.frequencies),
    }
