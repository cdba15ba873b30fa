import random
import warnings
from collections.abc import Container
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.config import Transformer

D_VOCAB, N_CTX = 11, 6
FULL = Transformer(n_layers=2, n_heads=3, d_model=8, d_head=5, d_mlp=7, normalization_type="LN")
ATTENTION_ONLY = Transformer(n_layers=1, n_heads=2, d_model=4, d_head=3)
GROUPED = {
    "n_layers": 1,
    "n_heads": 4,
    "n_key_value_heads": 2,
    "d_model": 6,
    "d_head": 4,
    "d_mlp": 5,
    "gated_mlp": True,
    "act_fn": "silu",
    "normalization_type": "RMS",
    "final_rms": True,
    "positional_embedding_type": "rotary",
    "rotary_dim": 4,
    "rotary_adjacent_pairs": True,
    "d_vocab": D_VOCAB,
    "n_ctx": N_CTX,
}
TOKENS = torch.tensor([[1, 4, 1, 10, 0, 3], [2, 2, 9, 7, 5, 6]])
HELD_AT_ZERO = ("unembed.b_U", "blocks.0.mlp.b_in", "blocks.0.mlp.b_out")
"""Of the grouped model; of the others the first only."""

on_3 = pytest.mark.skipif(not lens.HAS_HOOKED_TRANSFORMER, reason="HookedTransformer was removed in 4.0")
on_4 = pytest.mark.skipif(lens.HAS_HOOKED_TRANSFORMER, reason="convert_tl_checkpoint came in 4.0")


def build(config: Transformer) -> lens.Model:
    return lens.build_transformer(config, D_VOCAB, N_CTX)


class Toy(lens.HookedRootModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Module()
        self.embed.W_E = nn.Parameter(torch.ones(D_VOCAB, 3))
        self.register_buffer("mask", torch.ones(2))
        self.cfg = {"d_vocab": D_VOCAB}
        self.setup()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embed.W_E[tokens] @ self.embed.W_E.T


MODELS = {
    "full": lambda: build(FULL),
    "attention only": lambda: build(ATTENTION_ONLY),
    "grouped": lambda: lens.build_decoder(GROUPED),
    "ours": Toy,
}
"""Each kind of model -> how to make one."""


def held_at_zero(names: Container[str]) -> tuple[str, ...]:
    return HELD_AT_ZERO if "blocks.0.mlp.W_gate" in names else HELD_AT_ZERO[:1]


def some_weights(model: lens.Model) -> lens.Weights:
    generator = torch.Generator().manual_seed(0)
    likes = dict(sorted(lens.weights(model).items()))
    zero = held_at_zero(likes)
    return {
        name: torch.zeros_like(like) if name in zero else torch.randn(like.shape, generator=generator).to(like) / 2
        for name, like in likes.items()
    }


def transcription(config: Transformer, weights: lens.Weights, tokens: Tensor) -> Tensor:
    """The transformer written out from the names and shapes alone."""

    def normalised(x: Tensor, name: str) -> Tensor:
        if config.normalization_type is None:
            return x
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * weights[f"{name}.w"] + weights[f"{name}.b"] if config.normalization_type == "LN" else x

    activations = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "silu": functional.silu,
        "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh(sqrt(2 / torch.pi) * (x + 0.044715 * x**3))),
    }
    length = tokens.shape[1]
    scale = config.attn_scale or sqrt(config.d_head)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    resid = weights["embed.W_E"][tokens] + weights["pos_embed.W_pos"][:length]
    for layer in range(config.n_layers):
        block = {name.removeprefix(f"blocks.{layer}."): weight for name, weight in weights.items()}
        x = normalised(resid, f"blocks.{layer}.ln1")
        for head in range(config.n_heads):
            q, k, v = (x @ block[f"attn.W_{part}"][head] + block[f"attn.b_{part}"][head] for part in "QKV")
            pattern = (q @ k.mT / scale).masked_fill(future, -torch.inf).softmax(-1)
            resid = resid + pattern @ v @ block["attn.W_O"][head]
        resid = resid + block["attn.b_O"]
        if config.d_mlp:
            x = normalised(resid, f"blocks.{layer}.ln2")
            hidden = activations[config.act_fn](x @ block["mlp.W_in"] + block["mlp.b_in"])
            resid = resid + hidden @ block["mlp.W_out"] + block["mlp.b_out"]
    return normalised(resid, "ln_final") @ weights["unembed.W_U"] + weights["unembed.b_U"]


configs = st.builds(
    Transformer,
    n_layers=st.integers(1, 2),
    n_heads=st.integers(1, 3),
    d_model=st.integers(2, 6),
    d_head=st.integers(1, 5),
    d_mlp=st.none() | st.integers(1, 7),
    act_fn=st.sampled_from(["relu", "gelu", "gelu_new", "silu"]),
    normalization_type=st.sampled_from([None, "LN", "LNPre"]),
    attn_scale=st.sampled_from([None, 1.0, 2.5]),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configs)
def test_a_transformer_is_what_its_weights_say(config: Transformer) -> None:
    model = lens.build_transformer(config, D_VOCAB, N_CTX, torch.float64)
    weights = some_weights(model)
    lens.load_weights(model, weights)
    with torch.no_grad():
        logits = model(TOKENS)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, transcription(config, weights, TOKENS), atol=1e-9, rtol=1e-9)


def test_the_config_says_what_scores_are_divided_by() -> None:
    assert lens.build_transformer(FULL, D_VOCAB, N_CTX).cfg.attn_scale == pytest.approx(sqrt(5))
    unscaled = FULL.model_copy(update={"attn_scale": 1.0})
    assert lens.build_transformer(unscaled, D_VOCAB, N_CTX).cfg.attn_scale == 1.0


def test_building_touches_no_global_generator_and_warns_of_nothing() -> None:
    before, python_before = torch.get_rng_state(), random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lens.build_transformer(FULL, D_VOCAB, N_CTX)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python_before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_new_model_has_zero_weights_and_normalisation_at_the_identity(dtype: torch.dtype) -> None:
    for name, weight in lens.weights(lens.build_transformer(FULL, D_VOCAB, N_CTX, dtype)).items():
        assert weight.dtype == dtype
        assert torch.equal(weight, torch.full_like(weight, 1 if name.endswith(".w") else 0)), name


def test_weights_have_the_names_and_shapes_of_hooked_transformer() -> None:
    shapes = {name: tuple(weight.shape) for name, weight in lens.weights(build(ATTENTION_ONLY)).items()}
    assert shapes == {
        "embed.W_E": (11, 4),
        "pos_embed.W_pos": (6, 4),
        "blocks.0.attn.W_Q": (2, 4, 3),
        "blocks.0.attn.W_K": (2, 4, 3),
        "blocks.0.attn.W_V": (2, 4, 3),
        "blocks.0.attn.W_O": (2, 3, 4),
        "blocks.0.attn.b_Q": (2, 3),
        "blocks.0.attn.b_K": (2, 3),
        "blocks.0.attn.b_V": (2, 3),
        "blocks.0.attn.b_O": (4,),
        "unembed.W_U": (4, 11),
        "unembed.b_U": (11,),
    }


def test_grouped_heads_keep_their_own_few_weights() -> None:
    shapes = {name: tuple(weight.shape) for name, weight in lens.weights(lens.build_decoder(GROUPED)).items()}
    assert shapes["blocks.0.attn._W_K"] == shapes["blocks.0.attn._W_V"] == (2, 6, 4)
    assert shapes["blocks.0.attn._b_K"] == shapes["blocks.0.attn._b_V"] == (2, 4)
    assert shapes["blocks.0.mlp.W_gate"] == (6, 5)
    assert shapes["blocks.0.mlp.b_in"] == (5,)
    assert shapes["blocks.0.mlp.b_out"] == (6,)


@pytest.mark.parametrize("kind", MODELS)
def test_loaded_weights_are_read_back_exactly(kind: str) -> None:
    model = MODELS[kind]()
    given = some_weights(model)
    lens.load_weights(model, given)
    found = lens.weights(model)
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given)
    assert all(weight.is_contiguous() and not weight.requires_grad for weight in found.values())


@pytest.mark.parametrize("kind", MODELS)
def test_weights_are_copies_both_ways(kind: str) -> None:
    model = MODELS[kind]()
    given = some_weights(model)
    lens.load_weights(model, given)
    kept = {name: weight.clone() for name, weight in given.items()}
    taken = lens.weights(model)
    for weights in (given, taken):
        for weight in weights.values():
            weight.add_(1)
        assert all(torch.equal(weight, kept[name]) for name, weight in lens.weights(model).items())


@pytest.mark.parametrize("kind", MODELS)
def test_trainable_parameters_are_live_under_the_right_name(kind: str) -> None:
    model = MODELS[kind]()
    trainable = lens.trainable(model)
    names = lens.weights(model).keys()
    assert trainable.keys() == names - set(held_at_zero(names))
    assert {id(parameter) for parameter in trainable.values()} <= {id(parameter) for parameter in model.parameters()}
    for number, name in enumerate(trainable, start=2):
        with torch.no_grad():
            trainable[name].fill_(number)
        changed = {other for other, weight in lens.weights(model).items() if (weight == number).all()}
        assert changed == {name}


@pytest.mark.parametrize("kind", MODELS)
def test_every_trainable_parameter_gets_a_gradient(kind: str) -> None:
    model = MODELS[kind]()
    lens.load_weights(model, some_weights(model))
    model(TOKENS)[..., 0].logsumexp(-1).sum().backward()
    assert [name for name, parameter in lens.trainable(model).items() if parameter.grad is None] == []


def test_buffers_are_no_weights() -> None:
    assert lens.weights(Toy()).keys() == {"embed.W_E"}


def replaced(model: lens.Model, name: str, weight: Tensor | None) -> lens.Weights:
    kept = {other: value for other, value in some_weights(model).items() if other != name}
    return kept if weight is None else kept | {name: weight}


@pytest.mark.parametrize(
    ("name", "weight", "sentence"),
    [
        ("blocks.0.attn.W_QK", torch.zeros(1), "no weight 'blocks.0.attn.W_QK', did you mean blocks.0.attn.W"),
        ("blocks.1.attn.W_V", None, "'blocks.1.attn.W_V' is missing"),
        ("unembed.b_U", None, "'unembed.b_U' is missing"),
        ("unembed.W_U", torch.zeros(11, 8), r"unembed.W_U has shape \[11, 8\] where the model has \[8, 11\]"),
        ("embed.W_E", torch.full((11, 8), torch.nan), "embed.W_E holds NaN or infinity in 88 of 88 places"),
        ("ln_final.b", torch.tensor([torch.inf] + [0.0] * 7), "ln_final.b holds NaN or infinity in 1 of 8 places"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_written(
    name: str, weight: Tensor | None, sentence: str
) -> None:
    model = build(FULL)
    before = lens.weights(model)
    with pytest.raises(InputError, match=sentence):
        lens.load_weights(model, replaced(model, name, weight))
    assert all(torch.equal(weight, before[name]) for name, weight in lens.weights(model).items())


@on_4
def test_a_bridge_refuses_biases_that_it_would_drop() -> None:
    model = build(FULL)
    with pytest.raises(InputError, match="b_U must be zero"):
        lens.load_weights(model, replaced(model, "unembed.b_U", torch.ones(11)))


@on_4
def test_bridges_of_other_architectures_have_no_canonical_weights() -> None:
    model = build(FULL)
    model.cfg.architecture = "GPT2LMHeadModel"
    with pytest.raises(InputError, match="not one of GPT2LMHeadModel"):
        lens.weights(model)


def settings_of(config: Transformer) -> dict[str, Any]:
    same = {"n_layers", "n_heads", "d_model", "d_head", "d_mlp", "act_fn", "normalization_type"}
    return config.model_dump(include=same) | {
        "attn_only": config.d_mlp is None,
        "d_vocab": D_VOCAB,
        "n_ctx": N_CTX,
    }


@on_3
@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
@pytest.mark.parametrize("config", [FULL, ATTENTION_ONLY])
def test_a_snapshot_opens_in_plain_hooked_transformer(config: Transformer) -> None:
    import transformer_lens

    model = build(config)
    lens.load_weights(model, some_weights(model))
    plain = transformer_lens.HookedTransformer(transformer_lens.HookedTransformerConfig(**settings_of(config)))
    left = plain.load_state_dict(lens.weights(model), strict=False)
    assert left.unexpected_keys == []
    assert all(name.endswith((".mask", ".IGNORE")) for name in left.missing_keys)
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), atol=1e-6, rtol=0)


@on_4
@pytest.mark.parametrize("config", [FULL, ATTENTION_ONLY])
def test_a_snapshot_opens_in_a_plain_bridge(config: Transformer) -> None:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot
    from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

    model = build(config)
    lens.load_weights(model, some_weights(model))
    plain = boot(TransformerBridgeConfig(**settings_of(config), seed=0))
    plain.load_state_dict(convert_tl_checkpoint(lens.weights(model), plain.cfg))
    torch.testing.assert_close(plain(TOKENS), model(TOKENS), atol=1e-6, rtol=0)
