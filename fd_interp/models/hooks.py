"""Reading activations and their gradients at named hooks, on any model with TransformerLens' hooks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from fd_interp.config import InputError, nearest

T = TypeVar("T")

Activations = dict[str, Tensor]
"""Full hook name -> activation, batch first."""


@runtime_checkable
class Model(Protocol):
    """What HookedTransformer, TransformerBridge and our own HookedRootModules have in common."""

    @property
    def cfg(self) -> Any: ...

    @property
    def hook_dict(self) -> Mapping[str, HookPoint]: ...

    def __call__(self, tokens: Any) -> Any: ...

    def run_with_cache(self, *args: Any, **kwargs: Any) -> Any: ...

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any: ...

    def to(self, *args: Any, **kwargs: Any) -> Any: ...


class Cached(NamedTuple):
    """The logits of one forward pass and the activations that it passed through."""

    logits: Float[Tensor, "batch *position vocab"]
    activations: Activations


class Gradients(NamedTuple):
    """Activations, and the derivative of the loss with respect to each."""

    activations: Activations
    gradients: Activations


def is_bridge(model: Model) -> bool:
    """Whether the model is a TransformerBridge, which wraps another module, rather than hooked itself."""
    return not isinstance(model, HookedRootModule)


def hook_names(model: Model) -> list[str]:
    """Every hook of the model; a bridge has some under two names, HookedTransformer's and its own."""
    return list(model.hook_dict)


def resolve_hooks(model: Model, names: str | Sequence[str]) -> list[str]:
    """Full hook names, in the order asked and each once: `pattern` stands for `blocks.{l}.attn.hook_pattern`, every l.

    Raises:
        InputError: the model has no such hook, or has one that does not show what its name says.
    """
    known = hook_names(model)
    asked = [names] if isinstance(names, str) else names
    found = [full for name in asked for full in _expand(name, known)]
    if is_bridge(model) and any(name.endswith("hook_attn_scores") for name in found):
        raise InputError(
            "hook_attn_scores of a TransformerBridge can hold the pattern instead of the scores; "
            "read hook_q and hook_k, rotate them in a rotary model, and compute q @ k^T / cfg.attn_scale"
        )
    return list(dict.fromkeys(found))


def _expand(name: str, known: list[str]) -> list[str]:
    if name in known:
        return [name]
    found = [full for full in known if full.rsplit(".", 1)[-1] == f"hook_{name}"]
    if not found:
        short = {full.rsplit(".hook_", 1)[-1].removeprefix("hook_") for full in known}
        raise InputError(f"the model has no hook '{name}', {nearest(name, known if '.' in name else short)}")
    return found


def run_and_cache(model: Model, tokens: Int[Tensor, "batch position"], names: str | Sequence[str]) -> Cached:
    """One forward pass that reads the named hooks and nothing else; hooks of others stay, and their edits are seen.

    Raises:
        InputError: see `resolve_hooks`; or a hook exists and does not run.
    """
    names = resolve_hooks(model, names)
    read: Activations = {}

    def reader(name: str) -> Callable[..., None]:
        def keep(value: Tensor, hook: HookPoint) -> None:
            read[name] = value.detach()

        return keep

    with torch.no_grad(), _attached(model, {name: reader(name) for name in names}):
        logits = model(tokens)
    return Cached(logits, _all_of(names, read))


def run_with_gradients(
    model: Model,
    tokens: Int[Tensor, "batch position"],
    names: str | Sequence[str],
    loss_fn: Callable[[Float[Tensor, "batch *position vocab"]], Float[Tensor, ""]],
) -> Gradients:
    """Activations at the named hooks and the gradient of `loss_fn(logits)` with respect to each.

    A hook that runs more than once, on one value, gets the sum of its gradients. Parameters may be frozen, and their
    `.grad` is not touched.

    Raises:
        InputError: see `run_and_cache`; or the loss does not depend on a hook's value.
    """
    names = resolve_hooks(model, names)
    traced: dict[str, list[Tensor]] = {}

    def tracer(name: str) -> Callable[..., Tensor]:
        def trace(value: Tensor, hook: HookPoint) -> Tensor:
            if not value.is_floating_point():
                raise InputError(f"{name} holds token ids, which have no gradient")
            # A bridge shows its hooks a reshaped copy: only what the hook returns lies between weights and loss. The
            # view makes a node of its own, so that the gradient is of what passes this hook and not of a by-pass.
            node = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
            traced.setdefault(name, []).append(node)
            return node

        return trace

    with torch.enable_grad(), _attached(model, {name: tracer(name) for name in names}):
        loss = loss_fn(model(tokens))
    nodes = _all_of(names, traced)
    activations = {name: each[-1].detach() for name, each in nodes.items()}
    return Gradients(activations, _gradients(loss, nodes))


def _gradients(loss: Float[Tensor, ""], nodes: dict[str, list[Tensor]]) -> Activations:
    """Summed over the times that a hook ran: ln1 of HookedTransformer runs for queries, for keys and for values."""
    every = [node for each in nodes.values() for node in each]
    reached = bool(every) and loss.requires_grad
    found = iter(torch.autograd.grad(loss, every, allow_unused=True) if reached else [None] * len(every))
    return {name: _total(name, list(islice(found, len(each)))) for name, each in nodes.items()}


def _total(name: str, gradients: list[Tensor | None]) -> Tensor:
    used = [gradient for gradient in gradients if gradient is not None]
    if not used:
        raise InputError(f"the loss does not depend on {name}: what passes there is not used further on")
    return torch.stack(used).sum(0)


@contextmanager
def _attached(model: Model, hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Adds forward hooks and removes exactly these, whatever happens.

    TransformerLens' own context managers go by level, and `run_with_cache` of some versions removes the user's hooks.
    """
    points = model.hook_dict
    added = []
    try:
        for name, hook in hooks.items():
            points[name].add_hook(hook)
            added.append((points[name], points[name].fwd_hooks[-1]))
        yield
    finally:
        for point, handle in added:
            handle.hook.remove()
            point.fwd_hooks = [other for other in point.fwd_hooks if other is not handle]


def _all_of(names: list[str], read: dict[str, T]) -> dict[str, T]:
    """What was read, in the order asked."""
    for name in names:
        if name not in read:
            raise InputError(f"the model has the hook {name} but does not run it in its present settings")
    return {name: read[name] for name in names}
