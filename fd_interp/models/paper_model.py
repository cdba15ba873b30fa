"""What the papers' own models have in common: TransformerLens' hooks and names round maths written as functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from fd_interp.models.lens import HookedRootModule, HookPoint

EVERY_QUERY = slice(None)
HEAD_HOOKS = ("q", "k", "v", "attn_scores", "pattern", "z")

Tap = Callable[[str, Tensor], Tensor]
"""Sees each named activation on its way, and may replace it."""


def silent(name: str, value: Tensor) -> Tensor:
    """The tap of a model that nobody listens to."""
    return value


def shown(tap: Tap, name: str, value: Tensor, layout: str, **sizes: int) -> Tensor:
    """Taps an activation that lies in memory in an order of its own, which hooks see in TransformerLens'.

    Args:
        layout: from the one to the other, in einops' language. Where nobody listens nothing is rearranged: in a model
            this small a view takes as long as a product.
    """
    if tap is silent:
        return value
    ours, theirs = layout.split(" -> ")
    return rearrange(tap(name, rearrange(value, layout, **sizes)), f"{theirs} -> {ours}")


@dataclass(frozen=True)
class Shape:
    """TransformerLens' names for the sizes, as its tools look them up in `model.cfg`."""

    d_model: int
    d_head: int
    n_heads: int
    d_vocab: int
    n_ctx: int
    attn_scale: float
    n_layers: int = 1
    attn_only: bool = True
    normalization_type: None = None
    attention_dir: str = "causal"

    @property
    def d_vocab_out(self) -> int:
        return self.d_vocab


class PaperModel(HookedRootModule):
    """A hooked module that can be asked for the logits of some positions: `model(tokens, queries=slice(-1, None))`."""

    cfg: Shape

    @property
    def tap(self) -> Tap:
        """Passes activations to the hooks, if there are any."""
        return self._tap if any(map(_is_heard, self.hook_dict.values())) else silent

    def _tap(self, name: str, value: Tensor) -> Tensor:
        """What a hook returns may broadcast to what it replaces, as in TransformerLens."""
        edited = self.hook_dict[name](value)
        return edited if edited is value else edited.expand_as(value)


def _is_heard(point: HookPoint) -> bool:
    hooks = point._forward_hooks or point._forward_pre_hooks or point._backward_hooks or point._backward_pre_hooks
    return bool(hooks)


def parameters(dtype: torch.dtype, **shapes: tuple[int, ...]) -> nn.Module:
    """A module that holds parameters of these names and shapes, at zero."""
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))
    return module


def attention_block(attn: nn.Module, hooks: Sequence[str] = HEAD_HOOKS) -> nn.Module:
    """A block of attention alone, with TransformerLens' hooks, round the module that holds its weights."""
    for name in hooks:
        attn.add_module(f"hook_{name}", HookPoint())
    block = nn.Module()
    block.add_module("attn", attn)
    for name in ("hook_resid_pre", "hook_attn_out", "hook_resid_post"):
        block.add_module(name, HookPoint())
    return block


def causal_mask(n_ctx: int, dtype: torch.dtype) -> Float[Tensor, "query key"]:
    """Added to scores: minus infinity where a key is later than the query."""
    return torch.full((n_ctx, n_ctx), float("-inf"), dtype=dtype).triu(1)
