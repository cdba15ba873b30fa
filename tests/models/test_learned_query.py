import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformer_lens import ActivationCache

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights, trained
from fd_interp.models.config import LearnedQuery, Minimal, ModelConfig, OneLayer, Transformer
from fd_interp.models.learned_query import (
    NAMES,
    LearnedQueryAttention,
    LearnedQueryWeights,
    gathered,
    learned_query_logits,
    one_hot_places,
    rms_scale,
)

D_VOCAB, N_CTX = 3, 6
TOKENS = torch.randint(D_VOCAB, (7, N_CTX), generator=torch.Generator().manual_seed(5))
LABELS = TOKENS[:, :3].sum(1) % D_VOCAB
CONFIGS = {
    "default": LearnedQuery(d_mlp=8),
    "wide": LearnedQuery(d_model=5, d_mlp=8),
    "large eps": LearnedQuery(d_model=3, d_mlp=8, eps=0.5),
    "not normalised": LearnedQuery(d_model=3, d_mlp=8, normalized=()),
    "before attention": LearnedQuery(d_model=3, d_mlp=8, normalized=("ln1",)),
    "before the MLP": LearnedQuery(d_model=3, d_mlp=8, normalized=("ln2",)),
}
DEFAULT = CONFIGS["default"]
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def learned_query(
    config: LearnedQuery, *, seed: int = 0, dtype: torch.dtype = torch.float64, n_ctx: int = N_CTX
) -> LearnedQueryAttention:
    model = LearnedQueryAttention(config, D_VOCAB, n_ctx, dtype)
    lens.load_weights(model, initial_weights(config, lens.weights(model), torch.Generator().manual_seed(seed)))
    return model


def close(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 1e-11, "rtol": 1e-11}


def look(value: Tensor, hook: object) -> None:
    """A hook that makes the model compute every activation."""


def heard(model: LearnedQueryAttention, tokens: Tensor = TOKENS) -> Tensor:
    return model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", look)])


each_path = pytest.mark.parametrize("forward", [lambda model: model(TOKENS), heard], ids=["silent", "heard"])


def loss_of(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, -1], LABELS)


def gradients(model: LearnedQueryAttention, loss: Tensor) -> lens.Weights:
    parameters = lens.trainable(model)
    found = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def names_of(config: LearnedQuery) -> list[str]:
    """Every hook that runs, in the order of a forward pass."""
    norms = {where: [f"{where}.hook_{part}" for part in ("scale", "normalized")] for where in config.normalized}
    attn = [f"attn.hook_{part}" for part in ("q", "k", "v", "attn_scores", "pattern", "z")]
    block = ["hook_resid_pre", *norms.get("ln1", []), *attn, "hook_attn_out", "hook_resid_mid"]
    block += [*norms.get("ln2", []), "mlp.hook_pre", "mlp.hook_post", "hook_mlp_out", "hook_resid_post"]
    return ["hook_embed", "hook_pos_embed"] + [f"blocks.0.{name}" for name in block]


each_hook = pytest.mark.parametrize(
    ("config", "name"),
    [pytest.param(config, name, id=f"{id}: {name}") for id, config in CONFIGS.items() for name in names_of(config)],
)


def normalized(vector: list[float], eps: float) -> list[float]:
    rms = math.sqrt(sum(x * x for x in vector) / len(vector))
    return [x / (rms + eps) for x in vector]


def times(vector: list[float], matrix: list[list[float]]) -> list[float]:
    return [sum(x * row[column] for x, row in zip(vector, matrix, strict=True)) for column in range(len(matrix[0]))]


def transcribed(weights: dict[str, Any], tokens: list[int], config: LearnedQuery) -> dict[str, list[float]]:
    """One sequence, in the words of `LearnedQuery`."""
    zs = []
    for position, token in enumerate(tokens):
        z = [e + p for e, p in zip(weights["W_E"][token], weights["W_pos"][position], strict=True)]
        zs.append(normalized(z, config.eps) if "ln1" in config.normalized else z)
    scores = [sum(q * x for q, x in zip(weights["b_Q"][0], z, strict=True)) / math.sqrt(config.d_model) for z in zs]
    total = sum(math.exp(score) for score in scores)
    pattern = [math.exp(score) / total for score in scores]
    xi = [0.0] * config.d_model
    for share, z in zip(pattern, zs, strict=True):
        xi = [x + share * v for x, v in zip(xi, times(z, weights["W_V"][0]), strict=True)]
    read = normalized(xi, config.eps) if "ln2" in config.normalized else xi
    pre = [x + b for x, b in zip(times(read, weights["W_in"]), weights["b_in"], strict=True)]
    post = [x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in pre]
    out = [x + m + b for x, m, b in zip(xi, times(post, weights["W_out"]), weights["b_out"], strict=True)]
    logits = [sum(x * e for x, e in zip(out, embedding, strict=True)) for embedding in weights["W_E"]]
    return {"pattern": pattern, "xi": xi, "read": read, "post": post, "logits": logits}


@each_dtype
@each_config
def test_it_is_the_slow_transcription_of_its_definition(config: LearnedQuery, dtype: torch.dtype) -> None:
    model = learned_query(config, dtype=dtype)
    weights = {name.rsplit(".", 1)[-1]: value.double().tolist() for name, value in lens.weights(model).items()}
    logits, cached = lens.run_and_cache(model, TOKENS, ["pattern", "attn_out", "pre", "post"])
    one_hot = one_hot_places(TOKENS, D_VOCAB, dtype)
    assert logits.dtype == model(TOKENS).dtype == dtype
    xi = gathered(model.matrices(), one_hot, config)
    for row, tokens in enumerate(TOKENS.tolist()):
        expected = transcribed(weights, tokens, config)
        for found in (logits, model(TOKENS)):
            np.testing.assert_allclose(found[row, 0].detach(), expected["logits"], **close(dtype))
        np.testing.assert_allclose(cached["blocks.0.attn.hook_pattern"][row, 0, 0], expected["pattern"], **close(dtype))
        np.testing.assert_allclose(cached["blocks.0.hook_attn_out"][row, 0], expected["xi"], **close(dtype))
        np.testing.assert_allclose(xi[row].detach(), expected["xi"], **close(dtype))
        np.testing.assert_allclose(cached["blocks.0.mlp.hook_post"][row, 0], expected["post"], **close(dtype))
    assert logits.std() > 1e-2


@each_config
def test_each_normalisation_and_its_eps_matter(config: LearnedQuery) -> None:
    def logits(**fields: Any) -> Tensor:
        other = LearnedQueryAttention(config.model_copy(update=fields), D_VOCAB, N_CTX, torch.float64)
        lens.load_weights(other, lens.weights(learned_query(config)))
        return other(TOKENS)

    for where in ("ln1", "ln2"):
        switched = set(config.normalized) ^ {where}
        assert (logits(normalized=tuple(switched)) - logits()).abs().max() > 1e-2
    more = (logits(eps=config.eps + 0.5) - logits()).abs().max()
    assert (more > 1e-2) == bool(config.normalized)


@each_config
def test_looking_changes_neither_logits_nor_gradients(config: LearnedQuery) -> None:
    model = learned_query(config)
    silent = model(TOKENS)
    for name in names_of(config):
        seen = model.run_with_hooks(TOKENS, fwd_hooks=[(name, look)])
        torch.testing.assert_close(seen, silent, **close())
    found, expected = gradients(model, loss_of(heard(model))), gradients(model, loss_of(silent))
    assert found.keys() == set(NAMES)
    for name, gradient in found.items():
        assert expected[name].abs().max() > 1e-6, name
        torch.testing.assert_close(gradient, expected[name], **close())
    assert torch.equal(model(TOKENS), silent)


@each_config
def test_every_hook_runs_once_in_order_with_one_query(config: LearnedQuery) -> None:
    model = learned_query(config)
    seen: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Callable[..., None]:
        def keep(value: Tensor, hook: object) -> None:
            assert name not in seen
            seen[name] = tuple(value.shape)

        return keep

    model.run_with_hooks(TOKENS, fwd_hooks=[(name, note(name)) for name in model.hook_dict])
    assert list(seen) == names_of(config)
    batch, d_model, d_mlp = len(TOKENS), config.d_model, config.d_mlp
    block, stream, query = "blocks.0.", (batch, N_CTX, d_model), (batch, 1, d_model)
    expected = dict.fromkeys(("hook_embed", "hook_pos_embed", f"{block}hook_resid_pre"), stream)
    expected |= {f"{block}attn.hook_{part}": (batch, N_CTX, 1, d_model) for part in ("k", "v")}
    expected |= {f"{block}attn.hook_{part}": (batch, 1, 1, d_model) for part in ("q", "z")}
    expected |= {f"{block}attn.hook_{part}": (batch, 1, 1, N_CTX) for part in ("attn_scores", "pattern")}
    expected |= {f"{block}hook_{part}": query for part in ("attn_out", "resid_mid", "mlp_out", "resid_post")}
    expected |= {f"{block}mlp.hook_{part}": (batch, 1, d_mlp) for part in ("pre", "post")}
    for where, shape in (("ln1", stream), ("ln2", query)):
        if where in config.normalized:
            expected |= {f"{block}{where}.hook_scale": (*shape[:2], 1), f"{block}{where}.hook_normalized": shape}
    assert seen == expected


def test_a_cache_is_read_as_transformer_lens_reads_it() -> None:
    model = learned_query(DEFAULT)
    logits, cached = model.run_with_cache(TOKENS)
    cache = ActivationCache(cached, model)
    assert set(cached) == set(names_of(DEFAULT))
    torch.testing.assert_close(cache["resid_mid", 0], cache["attn_out", 0])
    torch.testing.assert_close(cache["resid_mid", 0] + cache["mlp_out", 0], cache["resid_post", 0])
    torch.testing.assert_close(cache["resid_post", 0] @ model.W_U, logits)
    torch.testing.assert_close(cache["embed"], model.W_E[TOKENS])
    torch.testing.assert_close(cache["embed"] + cache["pos_embed"], cache["resid_pre", 0])
    torch.testing.assert_close(cache["pattern", 0].sum(-1), torch.ones(len(TOKENS), 1, 1).double())
    torch.testing.assert_close(cache["resid_pre", 0], cache["scale", 0, "ln1"] * cache["normalized", 0, "ln1"])
    torch.testing.assert_close(cache["k", 0][:, :, 0], cache["normalized", 0, "ln1"])


def test_a_norm_that_is_not_there_is_not_read() -> None:
    model = learned_query(CONFIGS["before attention"])
    with pytest.raises(InputError, match=r"blocks.0.ln2.hook_scale but does not run it"):
        lens.run_and_cache(model, TOKENS, "blocks.0.ln2.hook_scale")


def sloped(value: Tensor) -> Tensor:
    """Changed along every axis but the first, so that neither softmax nor a norm undoes it."""
    for axis in range(1, value.ndim):
        size = value.shape[axis]
        value = value * torch.linspace(0.3, 1.7, size).view(size, *[1] * (value.ndim - 1 - axis))
    return value


@each_hook
def test_an_edit_of_one_sequence_at_any_hook_reaches_its_logits_alone_and_goes_with_its_hook(
    config: LearnedQuery, name: str
) -> None:
    model = learned_query(config)
    untouched = model(TOKENS)

    def edit(value: Tensor, hook: object) -> Tensor:
        return torch.cat([value[:1], sloped(value[1:2]), value[2:]])

    edited = model.run_with_hooks(TOKENS, fwd_hooks=[(name, edit)])
    torch.testing.assert_close(edited[[0, 2, 3]], untouched[[0, 2, 3]], **close())
    assert (edited[1] - untouched[1]).abs().max() > 1e-4
    assert torch.equal(model(TOKENS), untouched)


def edited(model: LearnedQueryAttention, name: str, value: Tensor) -> Tensor:
    return model.run_with_hooks(TOKENS, fwd_hooks=[(f"blocks.0.{name}", lambda seen, hook: value)])


@each_config
def test_ablations_leave_what_the_definition_leaves(config: LearnedQuery) -> None:
    model = learned_query(config)
    weights, cache = model.matrices(), model.run_with_cache(TOKENS)[1]
    zero = torch.zeros(1, dtype=torch.float64)  # broadcasts
    xi, v = cache["blocks.0.hook_attn_out"], cache["blocks.0.attn.hook_v"]
    without_mlp = (xi + weights.b_out) @ weights.W_E.T
    torch.testing.assert_close(edited(model, "mlp.hook_post", zero), without_mlp, **close())

    nothing = (functional.gelu(weights.b_in) @ weights.W_out + weights.b_out) @ weights.W_E.T
    torch.testing.assert_close(edited(model, "hook_attn_out", zero), nothing.expand(len(TOKENS), 1, -1), **close())

    uniform = torch.full((N_CTX,), 1 / N_CTX, dtype=torch.float64)
    mean = edited(model, "hook_attn_out", v[:, :, 0].mean(1, keepdim=True))
    torch.testing.assert_close(edited(model, "attn.hook_pattern", uniform), mean, **close())
    torch.testing.assert_close(edited(model, "attn.hook_q", zero), mean, **close())  # all scores alike
    assert (mean - model(TOKENS)).abs().max() > 1e-3
    assert (without_mlp - model(TOKENS)).abs().max() > 1e-3


@each_config
def test_many_seeds_at_once_are_what_each_is_alone(config: LearnedQuery) -> None:
    models = [learned_query(config, seed=seed) for seed in range(4)]
    batches = [TOKENS.roll(seed, 0).roll(seed, 1) for seed in range(4)]
    stacked = LearnedQueryWeights(
        *[torch.stack(each).detach().requires_grad_() for each in zip(*[m.matrices() for m in models], strict=True)]
    )
    one_hot = torch.stack([one_hot_places(tokens, D_VOCAB, torch.float64) for tokens in batches])
    together = learned_query_logits(stacked, one_hot, config)
    slopes = torch.autograd.grad(together.square().sum(), list(stacked))
    assert together.shape == (4, len(TOKENS), D_VOCAB)
    for seed, (model, tokens) in enumerate(zip(models, batches, strict=True)):
        alone = model(tokens)[:, 0]
        torch.testing.assert_close(together[seed], alone, **close())
        of_each = torch.autograd.grad(alone.square().sum(), list(model.matrices()))
        for found, expected in zip(slopes, of_each, strict=True):
            torch.testing.assert_close(found[seed], expected, atol=1e-10, rtol=1e-9)
    assert (together[0] - together[1]).abs().max() > 1e-2


def test_a_token_has_its_place() -> None:
    places = one_hot_places(torch.tensor([[0, 2], [1, 1]]), 3, torch.float32)
    assert places.tolist() == [[1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 1, 0]]


@each_path
def test_positions_may_change_places_with_their_embeddings(forward: Callable[[Any], Tensor]) -> None:
    model = learned_query(DEFAULT)
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    moved = model(TOKENS[:, order])
    assert (moved - forward(model)).abs().max() > 1e-3
    with torch.no_grad():
        model.pos_embed.W_pos.copy_(model.pos_embed.W_pos[order])
    torch.testing.assert_close(model(TOKENS[:, order]), forward(learned_query(DEFAULT)), **close())


@pytest.mark.parametrize("length", [1, 4])
def test_a_shorter_sequence_is_one_of_its_first_positions(length: int) -> None:
    model, shorter = learned_query(DEFAULT), LearnedQueryAttention(DEFAULT, D_VOCAB, length, torch.float64)
    weights = lens.weights(model)
    lens.load_weights(shorter, weights | {"pos_embed.W_pos": weights["pos_embed.W_pos"][:length]})
    for logits in (model(TOKENS[:, :length]), heard(model, TOKENS[:, :length])):
        torch.testing.assert_close(logits, shorter(TOKENS[:, :length]), **close())


@pytest.mark.parametrize("wrong", [D_VOCAB, -1])
@pytest.mark.parametrize("position", [0, 2, N_CTX - 1])
def test_a_token_that_is_none_is_refused(wrong: int, position: int) -> None:
    model, tokens = learned_query(DEFAULT), TOKENS.clone()
    tokens[1, position] = wrong
    for forward in (model, lambda tokens: heard(model, tokens)):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            forward(tokens)


@pytest.mark.parametrize("queries", [slice(-1, None), slice(None), slice(2, 4)], ids=str)
def test_there_is_one_query_whichever_are_asked_for(queries: slice) -> None:
    model = learned_query(DEFAULT)
    assert torch.equal(model(TOKENS, queries=queries), model(TOKENS))
    assert model(TOKENS).shape == (len(TOKENS), 1, D_VOCAB)


def test_eps_is_added_to_the_root() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-6, 0.0]])
    assert rms_scale(vectors, 0.5)[:, 0].tolist() == pytest.approx([math.sqrt(12.5) + 0.5, 0.5, 0.5 + 1e-6 / 2**0.5])
    assert rms_scale(vectors, 0.5)[0].item() != pytest.approx(math.sqrt(12.5 + 0.25), abs=0.1)  # inside of the root


@each_path
def test_a_vector_of_zero_stays_zero_and_has_finite_gradients(forward: Callable[[Any], Tensor]) -> None:
    model = learned_query(DEFAULT)
    with torch.no_grad():
        model.embed.W_E[0] = -model.pos_embed.W_pos[2]
        model.blocks[0].attn.W_V.zero_()
    cache = lens.run_and_cache(model, TOKENS, ["blocks.0.ln1.hook_normalized", "blocks.0.ln2.hook_normalized"])[1]
    at_zero = cache["blocks.0.ln1.hook_normalized"][:, 2][TOKENS[:, 2] == 0]
    assert len(at_zero)
    assert at_zero.count_nonzero() == cache["blocks.0.ln2.hook_normalized"].count_nonzero() == 0
    slopes = gradients(model, loss_of(forward(model)))
    assert all(slope.isfinite().all() for slope in slopes.values())
    assert slopes["blocks.0.attn.W_V"].abs().max() > 1


def test_the_unembedding_is_the_embedding_and_learns_from_both_ends() -> None:
    model = learned_query(DEFAULT)
    assert torch.equal(model.W_U, model.W_E.T)
    assert "unembed.W_U" not in lens.weights(model)
    whole = gradients(model, loss_of(model(TOKENS)))["embed.W_E"]
    written: list[Tensor] = []
    logits = model.run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.0.hook_resid_post", lambda value, hook: written.append(value))]
    )
    slope = (logits.softmax(-1)[:, 0] - functional.one_hot(LABELS, D_VOCAB)) / len(TOKENS)
    as_unembedding = slope.T @ written[0][:, 0]
    W_E = model.embed.W_E
    (as_embedding,) = torch.autograd.grad(loss_of(written[0] @ W_E.detach().T), W_E)
    torch.testing.assert_close(as_embedding + as_unembedding, whole, **close())
    assert as_embedding.abs().max() > 1e-3
    assert as_unembedding.abs().max() > 1e-3


# The construction of the same model out of TransformerLens' own transformer: a token behind the sequence whose
# embeddings are zero, so that its query is b_Q, and whose key is masked.


def native(config: LearnedQuery, weights: lens.Weights, n_ctx: int, eps: float) -> tuple[Any, lens.Weights]:
    """The bridge, and its parameters under our names."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
    from transformer_lens.model_bridge.sources.native import NativeModel

    d_model = config.d_model
    cfg = TransformerBridgeConfig(
        n_layers=1, n_heads=1, d_head=d_model, d_model=d_model, d_mlp=config.d_mlp, act_fn="gelu",
        normalization_type="RMSPre", eps=eps, attention_dir="bidirectional", n_ctx=n_ctx + 1,
        d_vocab=D_VOCAB + 1, d_vocab_out=D_VOCAB + 1,
    )  # fmt: skip
    model: Any = NativeModel(cfg).to(weights["embed.W_E"].dtype)
    model.ln_out = nn.Identity()
    model.head.weight = model.tok_embed.weight
    attn, mlp = model.layers[0].attn, model.layers[0].mlp
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.tok_embed.weight[:D_VOCAB] = weights["embed.W_E"]
        model.pos.weight[:n_ctx] = weights["pos_embed.W_pos"]
        attn.q.bias.copy_(weights["blocks.0.attn.b_Q"][0])
        attn.v.weight.copy_(weights["blocks.0.attn.W_V"][0].T)
        for linear in (attn.k, attn.o):
            linear.weight.copy_(torch.eye(d_model))
        mlp.fc_in.weight.copy_(weights["blocks.0.mlp.W_in"].T)
        mlp.fc_in.bias.copy_(weights["blocks.0.mlp.b_in"])
        mlp.fc_out.weight.copy_(weights["blocks.0.mlp.W_out"].T)
        mlp.fc_out.bias.copy_(weights["blocks.0.mlp.b_out"])
    live = {
        "embed.W_E": model.tok_embed.weight,
        "pos_embed.W_pos": model.pos.weight,
        "blocks.0.attn.b_Q": attn.q.bias,
        "blocks.0.attn.W_V": attn.v.weight,
        "blocks.0.mlp.W_in": mlp.fc_in.weight,
        "blocks.0.mlp.b_in": mlp.fc_in.bias,
        "blocks.0.mlp.W_out": mlp.fc_out.weight,
        "blocks.0.mlp.b_out": mlp.fc_out.bias,
    }

    def without_final_norm(adapter: Any) -> None:
        adapter.component_mapping["ln_final"] = GeneralizedComponent(name="ln_out", config=adapter.cfg)

    bridge = build_bridge_from_module(
        model, "TransformerLensNative", tl_config=cfg, post_adapter_hook=without_final_norm
    )
    return bridge, live


def gradients_of_native(live: lens.Weights, loss: Tensor, n_ctx: int) -> lens.Weights:
    slopes = dict(zip(live, torch.autograd.grad(loss, list(live.values())), strict=True))
    slopes["embed.W_E"] = slopes["embed.W_E"][:D_VOCAB]
    slopes["pos_embed.W_pos"] = slopes["pos_embed.W_pos"][:n_ctx]
    slopes["blocks.0.attn.b_Q"] = slopes["blocks.0.attn.b_Q"][None]
    slopes["blocks.0.attn.W_V"] = slopes["blocks.0.attn.W_V"].T[None]
    return slopes | {name: slopes[name].T for name in ("blocks.0.mlp.W_in", "blocks.0.mlp.W_out")}


ON_TRANSFORMER_LENS_4 = pytest.mark.skipif(lens.HAS_HOOKED_TRANSFORMER, reason="3.x has no native bridge")
SEQUENCES = torch.randint(2, (256, 12), generator=torch.Generator().manual_seed(1))
WITH_QUERY = functional.pad(SEQUENCES, (0, 1), value=D_VOCAB)
BUT_THE_QUERY = functional.pad(torch.ones_like(SEQUENCES), (0, 1))
SEEN = {  # name of an activation: where the query's is in the bridge's
    "blocks.0.attn.hook_pattern": (slice(None), slice(None), slice(-1, None), slice(12)),
    "blocks.0.hook_attn_out": (slice(None), slice(-1, None)),
    "blocks.0.hook_resid_mid": (slice(None), slice(-1, None)),
    "blocks.0.ln2.hook_normalized": (slice(None), slice(-1, None)),
    "blocks.0.mlp.hook_post": (slice(None), slice(-1, None)),
    "blocks.0.hook_mlp_out": (slice(None), slice(-1, None)),
}


def both(config: LearnedQuery, seed: int, eps: float, dtype: torch.dtype) -> tuple[LearnedQueryAttention, Any, Any]:
    ours = learned_query(config, seed=seed, dtype=dtype, n_ctx=12)
    return ours, *native(config, lens.weights(ours), 12, eps)


@ON_TRANSFORMER_LENS_4
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("d_model", [2, 8])
def test_it_is_a_transformer_of_transformer_lens_with_a_token_more(d_model: int, seed: int) -> None:
    """In double precision and with next to no eps, which has another place there."""
    ours, theirs, live = both(LearnedQuery(d_model=d_model, eps=0.0), seed, 1e-30, torch.float64)
    logits, cache = theirs.run_with_cache(WITH_QUERY, attention_mask=BUT_THE_QUERY, names_filter=list(SEEN))
    silent, (looked, cached) = ours(SEQUENCES), ours.run_with_cache(SEQUENCES)
    assert silent.std() > 1e-2
    for found in (silent, looked):
        torch.testing.assert_close(found, logits[:, -1:, :D_VOCAB], atol=1e-10, rtol=1e-10)
    for name, place in SEEN.items():
        torch.testing.assert_close(cached[name], cache[name][place], atol=1e-10, rtol=1e-10)
    labels = SEQUENCES[:, :5].sum(1) % 2
    found = gradients(ours, functional.cross_entropy(silent[:, 0], labels))
    of_theirs = theirs(WITH_QUERY, attention_mask=BUT_THE_QUERY)[:, -1, :D_VOCAB]
    expected = gradients_of_native(live, functional.cross_entropy(of_theirs, labels), 12)
    assert found.keys() == expected.keys()
    for name, slope in found.items():
        assert slope.abs().max() > 1e-4, name
        torch.testing.assert_close(slope, expected[name], atol=1e-9, rtol=1e-8)
    leaking = theirs(WITH_QUERY)[:, -1:, :D_VOCAB]
    assert (leaking - silent).abs().max() > 1e-3


@ON_TRANSFORMER_LENS_4
@pytest.mark.parametrize(("d_model", "seed", "within"), [(2, 0, 1e-5), (2, 3, 1e-5), (8, 0, 1e-4), (8, 2, 1e-4)])
def test_as_in_the_paper_it_is_that_transformer_to_single_precision(d_model: int, seed: int, within: float) -> None:
    ours, theirs, live = both(LearnedQuery(d_model=d_model), seed, 1e-10, torch.float32)
    logits, cache = theirs.run_with_cache(WITH_QUERY, attention_mask=BUT_THE_QUERY, names_filter=list(SEEN))
    silent, (looked, cached) = ours(SEQUENCES), ours.run_with_cache(SEQUENCES)
    for found in (silent, looked):
        torch.testing.assert_close(found, logits[:, -1:, :D_VOCAB], atol=within, rtol=within)
    least = cached["blocks.0.ln2.hook_scale"].min().item()
    for name, place in SEEN.items():
        # The other place of eps moves a normalised vector by eps / rms of its size.
        allowed = max(within, 2e-5 / least) if "ln2" in name or "mlp" in name else within
        torch.testing.assert_close(cached[name], cache[name][place], atol=allowed, rtol=allowed)
    labels = SEQUENCES[:, :5].sum(1) % 2
    found = gradients(ours, functional.cross_entropy(silent[:, 0], labels))
    of_theirs = theirs(WITH_QUERY, attention_mask=BUT_THE_QUERY)[:, -1, :D_VOCAB]
    expected = gradients_of_native(live, functional.cross_entropy(of_theirs, labels), 12)
    for name, slope in found.items():
        torch.testing.assert_close(slope, expected[name], atol=1e-4 * slope.abs().max().item(), rtol=0)


def drawn(config: ModelConfig, seed: int = 0, n_ctx: int = 50) -> lens.Weights:
    """By the end of their names."""
    weights = lens.weights(build(config, 40, n_ctx, torch.float64))
    found = initial_weights(config, weights, torch.Generator().manual_seed(seed))
    return {name.rsplit(".", 1)[-1]: weight for name, weight in found.items()}


BIG = LearnedQuery(d_model=25, d_mlp=400)


def assert_normal(weight: Tensor, std: float) -> None:
    assert abs(weight.mean()) <= 5 * std / math.sqrt(weight.numel())
    assert abs(weight.std() - std) <= 5 * std / math.sqrt(2 * weight.numel())
    assert weight.abs().max() > 2.5 * std  # no uniform law of this spread goes as far


def assert_uniform(weight: Tensor, bound: float) -> None:
    n, std = weight.numel(), bound / math.sqrt(3)
    assert (1 - 12 / n) * bound < weight.abs().max() <= bound
    assert abs(weight.mean()) <= 5 * std / math.sqrt(n)
    assert abs(weight.square().mean() - std**2) <= 5 * bound**2 * math.sqrt(4 / 45 / n)


def test_embeddings_start_normal_and_the_rest_uniform_with_the_bound_of_what_it_reads() -> None:
    weights = drawn(BIG)
    for name in ("W_E", "W_pos"):
        assert_normal(weights.pop(name), 1.0)
    for name in ("W_out", "b_out"):
        assert_uniform(weights.pop(name), 1 / 20)
    assert weights.keys() == {"b_Q", "W_V", "W_in", "b_in"}
    for weight in weights.values():
        assert_uniform(weight, 1 / 5)


def test_a_weight_can_be_given_a_normal_law() -> None:
    weights, default = drawn(BIG.model_copy(update={"stds": {"W_V": 0.3, "b_Q": 0.0}})), drawn(BIG)
    assert_normal(weights["W_V"], 0.3)
    assert weights["b_Q"].count_nonzero() == 0
    assert_uniform(weights["W_E"], 1 / 5)  # the exceptions of the default are gone
    assert torch.equal(weights["b_in"], drawn(BIG.model_copy(update={"stds": {"W_V": 1.0, "b_Q": 0.0}}))["b_in"])
    assert not torch.equal(default["W_V"], drawn(BIG, seed=1)["W_V"])


@pytest.mark.parametrize(
    "config",
    [
        OneLayer(d_model=4, d_head=4, n_heads=2, stds={"W_Q": 0.5}),
        Minimal(n_heads=2, stds={"W_V": 0.1}),
        Transformer(n_layers=2, d_mlp=3, normalization_type="LN", fixed={"W_K": "init"}),
    ],
    ids=["one layer", "minimal", "transformer"],
)
def test_the_other_models_still_draw_their_matrices_in_the_order_of_names(config: ModelConfig) -> None:
    like = lens.weights(build(config, 5, 4, torch.float64))
    found = initial_weights(config, like, torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(7)
    assert list(found) == sorted(like)
    for name, weight in found.items():
        short = name.rsplit(".", 1)[-1]
        if not short.startswith("W_"):
            assert (weight == (1.0 if short == "w" else 0.0)).all(), name
            continue
        std = getattr(config, "stds").get(short, getattr(config, "std"))  # noqa: B009
        expected = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * std
        held = config.fixed.get(short)
        assert torch.equal(weight, torch.eye(4).double().expand_as(weight) if held == "identity" else expected), name


@each_dtype
def test_weights_have_the_names_and_shapes_of_transformer_lens(dtype: torch.dtype) -> None:
    config = LearnedQuery(d_model=5, d_mlp=8)
    model = build(config, D_VOCAB, N_CTX, dtype)
    assert isinstance(model, LearnedQueryAttention)
    lens.load_weights(model, initial_weights(config, lens.weights(model), torch.Generator().manual_seed(0)))
    shapes = {
        "embed.W_E": (D_VOCAB, 5),
        "pos_embed.W_pos": (N_CTX, 5),
        "blocks.0.attn.b_Q": (1, 5),
        "blocks.0.attn.W_V": (1, 5, 5),
        "blocks.0.mlp.W_in": (5, 8),
        "blocks.0.mlp.b_in": (8,),
        "blocks.0.mlp.W_out": (8, 5),
        "blocks.0.mlp.b_out": (5,),
    }
    weights = lens.weights(model)
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes
    assert set(NAMES) == shapes.keys() == lens.trainable(model).keys()
    assert {weight.dtype for weight in weights.values()} == {dtype}
    for name, matrix in zip(NAMES, model.matrices(), strict=True):
        assert torch.equal(weights[name], matrix)
    assert LearnedQueryWeights._fields == tuple(name.rsplit(".", 1)[-1] for name in NAMES)
    assert model.W_V.shape == (1, 1, 5, 5)
    assert model.b_Q.shape == (1, 1, 5)
    assert torch.equal(model.W_pos, weights["pos_embed.W_pos"])
    cfg = model.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_head, cfg.n_ctx) == (1, 1, 5, 5, N_CTX)
    assert (cfg.d_vocab, cfg.d_vocab_out, cfg.attention_dir, cfg.attn_only) == (3, 3, "bidirectional", False)
    assert cfg.attn_scale == pytest.approx(math.sqrt(5))


def test_the_model_of_the_paper_has_198_parameters() -> None:
    model = build(LearnedQuery(), 3, 12)
    assert sum(parameter.numel() for parameter in model.parameters()) == 198


def test_a_weight_can_be_held() -> None:
    config = LearnedQuery(d_mlp=8, fixed={"W_V": "identity", "b_Q": "zero", "b_in": "zero", "W_pos": "init"})
    model = learned_query(config)
    assert torch.equal(model.W_V[0, 0], torch.eye(2).double())
    weights, free = lens.weights(model), lens.weights(learned_query(DEFAULT))
    assert weights["blocks.0.attn.b_Q"].count_nonzero() == weights["blocks.0.mlp.b_in"].count_nonzero() == 0
    for name in ("embed.W_E", "pos_embed.W_pos", "blocks.0.mlp.W_in", "blocks.0.mlp.W_out", "blocks.0.mlp.b_out"):
        assert torch.equal(weights[name], free[name])
    moved = trained(config, model)
    assert moved.keys() == {"embed.W_E", "blocks.0.mlp.W_in", "blocks.0.mlp.W_out", "blocks.0.mlp.b_out"}
    loss_of(model(TOKENS)).backward()
    assert {name for name, parameter in lens.trainable(model).items() if parameter.grad is not None} == moved.keys()
    pattern = lens.run_and_cache(model, TOKENS, "pattern").activations["blocks.0.attn.hook_pattern"]
    torch.testing.assert_close(pattern, torch.full_like(pattern, 1 / N_CTX))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 1}, "d_model: Input should be greater than or equal to 2, not 1"),
        ({"d_mlp": 0}, "d_mlp: Input should be greater than 0, not 0"),
        ({"eps": -1.0}, "eps: Input should be greater than or equal to 0, not -1.0"),
        ({"normalized": ("ln3",)}, "normalized.0: Input should be 'ln1' or 'ln2', not 'ln3'"),
        ({"fixed": {"W_K": "zero"}}, "learned_query has no weight W_K; known: W_E, W_V, W_in, W_out, W_pos, b_Q"),
        ({"fixed": {"W_U": "init"}}, "learned_query has no weight W_U; known: "),
        ({"stds": {"w_e": 1.0}}, "learned_query has no weight w_e; known: "),
        ({"stds": {"W_E": -1.0}}, "stds.W_E: Input should be greater than or equal to 0, not -1.0"),
        ({"fixed": {"b_Q": "identity"}}, "b_Q is a bias, so it can be held at zero, not at the identity"),
        ({"std": 0.5}, "LearnedQuery has no field 'std', did you mean stds"),
    ],
)
def test_a_model_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        LearnedQuery(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_embedding_is_not_square_so_not_the_identity() -> None:
    with pytest.raises(InputError, match=r"embed.W_E cannot be held at the identity: it is \(3, 2\), and not square"):
        learned_query(LearnedQuery(fixed={"W_E": "identity"}))
