"""Attention patterns of a series, read for its views."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.report.attention import AttentionFrame
from fd_interp.training.series import Series

MOST_FRAMES = 40
"""Steps in the slider of a view, where a series has more."""


def spread_steps(series: Series, most: int = MOST_FRAMES) -> list[int]:
    """At most so many of the kept steps, evenly spread among them, the first and the last included."""
    kept = series.steps
    places = torch.linspace(0, len(kept) - 1, min(most, len(kept))).round().long().unique()
    return [kept[place] for place in places]


def attention_of(series: Series, steps: Sequence[int], *, sequence: int = 0) -> tuple[list[str], list[AttentionFrame]]:
    """The tokens of one held-out sequence, and its attention patterns at each of the steps.

    A learned query that stands behind the sequence has a place of its own there.

    Raises:
        InputError: there is no such sequence, or a step is not kept.
    """
    held_out = series.inputs.held_out.tokens
    if not 0 <= sequence < len(held_out):
        raise InputError(
            f"there are {len(held_out)} held-out sequences, so sequence must be below that, not {sequence}"
        )
    tokens = held_out[sequence]
    model = series.build()
    frames = []
    for step in steps:
        lens.load_weights(model, series.at(step).weights())
        frames.append(AttentionFrame(step, _patterns(model, tokens)))
    names = [series.inputs.token_strings[token] for token in tokens.tolist()]
    return names + ["query"] * (frames[0].patterns.shape[-1] - len(names)), frames


def _patterns(model: lens.Model, tokens: Int[Tensor, " position"]) -> Tensor:
    hooks = lens.resolve_hooks(model, ["pattern"])
    cache = lens.run_and_cache(model, tokens[None], hooks).activations
    patterns = torch.cat([cache[hook] for hook in hooks]).float()
    return _behind(patterns) if patterns.shape[-2] == 1 < len(tokens) else patterns


def _behind(patterns: Float[Tensor, "layer head 1 key"]) -> Float[Tensor, "layer head place place"]:
    """A query that stands behind the sequence, like that of `LearnedQuery`, as the last of the places."""
    return functional.pad(patterns, (0, 1, patterns.shape[-1], 0))
