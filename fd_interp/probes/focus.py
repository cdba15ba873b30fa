"""Does attention go to frequent tokens, from which queries, and does it turn away from them later?"""

import torch
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
        tokens, frequencies = seen.batch.tokens, seen.frequencies
        keys = measures.frequent_tokens(frequencies, top)[tokens]
        queries = chosen_queries(seen.batch)
        rare_queries = queries & measures.rare_tokens(frequencies, top, rare)[tokens]
        columns = [
            _of_layer(pattern, keys, queries, rare_queries, tokens, frequencies)
            for pattern in seen.activations("pattern")
        ]
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


def _of_layer(
    pattern: Tensor, keys: Tensor, queries: Tensor, rare_queries: Tensor, tokens: Tensor, frequencies: Tensor
) -> dict[str, Tensor]:
    mass, share = measures.attention_mass(pattern, keys), measures.visible_share(pattern, keys)
    return {
        "attention_entropy": measures.attention_entropy(pattern, queries),
        "focus_ratio": measures.mass_over_share(mass, share, queries),
        "focus_ratio_rare": measures.mass_over_share(mass, share, rare_queries),
        "focus_ratio_by_query": measures.mass_over_share_by_query(mass, share, queries, tokens, len(frequencies)),
        "self_focus": measures.self_focus(pattern, queries, tokens),
        "frequency_slope": measures.frequency_slope(pattern, queries, tokens, frequencies),
    }
