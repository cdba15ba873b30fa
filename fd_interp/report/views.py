"""Attention patterns of a series, read for its views."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

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
    return [series.inputs.token_strings[token] for token in tokens.tolist()], frames


def _patterns(model: lens.Model, tokens: Int[Tensor, " position"]) -> Tensor:
    hooks = lens.resolve_hooks(model, ["pattern"])
    cache = lens.run_and_cache(model, tokens[None], hooks).activations
    return torch.cat([cache[hook] for hook in hooks]).float()
