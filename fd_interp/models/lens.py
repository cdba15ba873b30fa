"""The one place that knows which TransformerLens is installed, and the one naming and layout of weights.

3.x builds a `HookedTransformer`; 4.x, where that was removed, a native `TransformerBridge`. Names and shapes of weights
are HookedTransformer's on both, so that a snapshot of a `Transformer` opens in plain TransformerLens: with
`HookedTransformer.load_state_dict(weights, strict=False)` on 3.x (it also has buffers), and with
`bridge.load_state_dict(convert_tl_checkpoint(weights, bridge.cfg))` on 4.x.
"""

import warnings
from collections.abc import Callable, Container, Mapping
from importlib import import_module
from importlib.metadata import version
from math import prod, sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from fd_interp.config import InputError, nearest
from fd_interp.models.config import Transformer
from fd_interp.models.hooks import (
    Activations,
    Model,
    hook_names,
    is_bridge,
    resolve_hooks,
    run_and_cache,
    run_with_gradients,
)

__all__ = [
    "Activations",
    "HookPoint",
    "HookedRootModule",
    "Model",
    "Weights",
    "build_decoder",
    "build_transformer",
    "hook_names",
    "load_weights",
    "resolve_hooks",
    "run_and_cache",
    "run_with_gradients",
    "to_device",
    "trainable",
    "weights",
]

Weights = dict[str, Tensor]
"""HookedTransformer's name -> tensor of HookedTransformer's shape (`blocks.0.attn.W_Q`: head d_model d_head)."""

HAS_HOOKED_TRANSFORMER = int(version("transformer-lens").split(".")[0]) < 4


def build_transformer(config: Transformer, d_vocab: int, n_ctx: int, dtype: torch.dtype = torch.float32) -> Model:
    """The configured transformer on the CPU, all weights zero and normalisation at the identity."""
    settings = {
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "d_model": config.d_model,
        "d_head": config.d_head,
        "d_mlp": config.d_mlp,
        "attn_only": config.d_mlp is None,
        "act_fn": config.act_fn,
        "normalization_type": config.normalization_type,
        "d_vocab": d_vocab,
        "n_ctx": n_ctx,
    }
    if config.attn_scale is not None:
        settings["attn_scale"] = config.attn_scale
    return build_decoder(settings, dtype)


def build_decoder(settings: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Model:
    """A decoder-only model on the CPU, all weights zero and normalisation at the identity.

    Args:
        settings: fields that `HookedTransformerConfig` and `TransformerBridgeConfig` share.
    """
    make = _hooked_transformer if HAS_HOOKED_TRANSFORMER else _native_bridge
    with torch.random.fork_rng(devices=[]):  # torch draws initial weights even when told that nobody wants them
        model = make(settings, dtype)
    for name, view in _hooked_views(model).items():
        view.fill_(1 if name.endswith(".w") else 0)
    return model


def _hooked_transformer(settings: Mapping[str, Any], dtype: torch.dtype) -> Any:
    transformer_lens: Any = import_module("transformer_lens")  # Any, because type checkers see one version only
    unneeded = {"init_weights": False, "device": "cpu", "default_prepend_bos": False}
    config = transformer_lens.HookedTransformerConfig(**settings, **unneeded, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="HookedTransformer is deprecated", category=DeprecationWarning)
        return transformer_lens.HookedTransformer(config)


def _native_bridge(settings: Mapping[str, Any], dtype: torch.dtype) -> Any:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot

    settings = dict(settings)
    attn_scale = settings.pop("attn_scale", sqrt(settings["d_head"]))
    bridge = boot(TransformerBridgeConfig(**settings, init_weights=False), dtype=dtype)
    # Set afterwards because the native attention refuses to be built with unscaled scores (attn_scale = 1), and so that
    # the config says what scores are divided by, as HookedTransformer's does.
    bridge.cfg.attn_scale = attn_scale
    for block in bridge.blocks:
        block.attn.original_component.scale = attn_scale
    return bridge


def to_device(model: Model, device: str) -> Model:
    """Moves the model; TransformerLens' own method says so on standard output."""
    nn.Module.to(cast(nn.Module, model), device)
    return model


def trainable(model: Model) -> dict[str, nn.Parameter]:
    """The parameters that training may move, live and in the layout of the installed version, by canonical name.

    Biases that HookedTransformer has and the native bridge lacks stay at zero and are left out on both.
    """
    parameters = _parameters(model)
    return {name: parameter for name, parameter in parameters.items() if not _held_at_zero(name, parameters)}


def weights(model: Model) -> Weights:
    """Copies of all weights, frozen ones too, without buffers."""
    views = _hooked_views(model)
    copies = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}
    if is_bridge(model):
        copies |= _zero_biases(views)
    return copies


def load_weights(model: Model, weights: Mapping[str, Tensor]) -> None:
    """Copies `weights` into the model's own parameters; nothing is written unless all of them fit.

    Raises:
        InputError: a name is missing or unknown, a shape differs, a value is not finite, or a bias that the installed
            version cannot represent is not zero.
    """
    views = _hooked_views(model)
    zero = _zero_biases(views) if is_bridge(model) else {}
    _check_fit(weights, {name: tuple(tensor.shape) for name, tensor in (views | zero).items()})
    for name in zero:
        if weights[name].count_nonzero():
            raise InputError(f"{name} must be zero, because the models of TransformerLens 4 have no such parameter")
    if is_bridge(model):
        for name, view in views.items():
            view.copy_(weights[name])
    else:
        model.load_state_dict(weights, strict=False)  # buffers, which are not weights, are missing


def _check_fit(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name in weights:
        if name not in shapes:
            raise InputError(f"the model has no weight '{name}', {nearest(name, shapes)}")
    for name, shape in shapes.items():
        if name not in weights:
            raise InputError(f"the weight '{name}' is missing, {nearest(name, weights)}")
        if tuple(weights[name].shape) != shape:
            raise InputError(f"{name} has shape {list(weights[name].shape)} where the model has {list(shape)}")
        if not weights[name].isfinite().all():
            wrong = prod(shape) - int(weights[name].isfinite().sum())
            raise InputError(f"{name} holds NaN or infinity in {wrong} of {prod(shape)} places")


def _parameters(model: Model) -> dict[str, nn.Parameter]:
    found = model.state_dict(keep_vars=True)
    named = {name: value for name, value in found.items() if isinstance(value, nn.Parameter)}
    if not is_bridge(model):
        return named
    if model.cfg.architecture != "TransformerLensNative":
        raise InputError(f"only native bridges have canonical weights, not one of {model.cfg.architecture}")
    return {_hooked_name(name, model.cfg): parameter for name, parameter in named.items()}


def _hooked_views(model: Model) -> Weights:
    """Each parameter seen in HookedTransformer's shape; writing to the view writes to the parameter."""
    live = {name: parameter.detach() for name, parameter in _parameters(model).items()}
    if not is_bridge(model):
        return live
    return {name: _hooked_view(name, parameter, model.cfg.d_head) for name, parameter in live.items()}


HOOKED_NAMES = {
    "embed.weight": "embed.W_E",
    "pos_embed.weight": "pos_embed.W_pos",
    "unembed.weight": "unembed.W_U",
    "q.weight": "W_Q",
    "k.weight": "W_K",
    "v.weight": "W_V",
    "o.weight": "W_O",
    "q.bias": "b_Q",
    "k.bias": "b_K",
    "v.bias": "b_V",
    "o.bias": "b_O",
    "in.weight": "W_in",
    "in.bias": "b_in",
    "gate.weight": "W_gate",
    "out.weight": "W_out",
    "out.bias": "b_out",
}
"""The last two words of a bridge's parameter name -> HookedTransformer's; those of normalisation follow a rule."""


def _hooked_name(name: str, cfg: Any) -> str:
    *outer, module, kind = name.split(".")
    hooked = HOOKED_NAMES.get(f"{module}.{kind}", f"{module}.{kind[0]}")
    if module in ("k", "v") and cfg.n_key_value_heads is not None:
        hooked = f"_{hooked}"  # HookedTransformer's W_K then is the copy expanded to all heads
    return ".".join([*outer, hooked])


HOOKED_VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "W_Q": lambda weight, d_head: weight.unflatten(0, (-1, d_head)).mT,
    "W_K": lambda weight, d_head: weight.unflatten(0, (-1, d_head)).mT,
    "W_V": lambda weight, d_head: weight.unflatten(0, (-1, d_head)).mT,
    "W_O": lambda weight, d_head: weight.T.unflatten(0, (-1, d_head)),
    "b_Q": lambda bias, d_head: bias.unflatten(0, (-1, d_head)),
    "b_K": lambda bias, d_head: bias.unflatten(0, (-1, d_head)),
    "b_V": lambda bias, d_head: bias.unflatten(0, (-1, d_head)),
    "W_in": lambda weight, _: weight.T,
    "W_gate": lambda weight, _: weight.T,
    "W_out": lambda weight, _: weight.T,
    "W_U": lambda weight, _: weight.T,
}
"""How a bridge's parameter looks in HookedTransformer's layout; the others look the same."""


def _hooked_view(name: str, parameter: Tensor, d_head: int) -> Tensor:
    view = HOOKED_VIEWS.get(name.rsplit(".", 1)[-1].removeprefix("_"))
    return parameter if view is None else view(parameter, d_head)


def _held_at_zero(name: str, names: Container[str]) -> bool:
    """Whether it is a bias that HookedTransformer has and the native bridge has not."""
    outer, _, short = name.rpartition(".")
    return name == "unembed.b_U" or (short in ("b_in", "b_out") and f"{outer}.W_gate" in names)


def _zero_biases(views: Weights) -> Weights:
    """Those biases as the bridge's other weights imply them."""
    return {
        bias: torch.zeros_like(view[0])
        for name, view in views.items()
        if _held_at_zero(bias := name.replace(".W_", ".b_"), views)
    }
