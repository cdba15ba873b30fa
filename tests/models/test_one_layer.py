from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformer_lens import ActivationCache

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.build import initial_weights
from fd_interp.models.config import OneLayer, Transformer
from fd_interp.models.one_layer import OneLayerAttention, OneLayerWeights, one_layer_logits
from fd_interp.models.paper_model import EVERY_QUERY

LAST_QUERY = slice(-1, None)

D_VOCAB, N_CTX = 7, 5
TOKENS = torch.tensor([[1, 4, 1, 6, 0], [2, 2, 5, 3, 5], [0, 0, 0, 0, 0]])
TARGETS = torch.tensor([[4, 1, 6, 0, 2], [2, 5, 3, 5, 5], [0, 0, 0, 0, 6]])

PAPER = OneLayer(d_model=6, d_head=6, std=0.7)
SCALED = OneLayer(d_model=6, d_head=6, attn_scale=2.5, std=0.7)
THREE_HEADS = OneLayer(d_model=6, d_head=6, n_heads=3, std=0.5)
LEARNED = OneLayer(d_model=6, d_head=4, n_heads=2, attn_scale=0.5, fixed={}, std=0.6)
CONFIGS = {"paper": PAPER, "scaled": SCALED, "three heads": THREE_HEADS, "learned W_V and W_O": LEARNED}

HOOKS = {
    "hook_embed": (3, 5, 6),
    "blocks.0.hook_resid_pre": (3, 5, 6),
    "blocks.0.attn.hook_q": (3, 5, 2, 4),
    "blocks.0.attn.hook_k": (3, 5, 2, 4),
    "blocks.0.attn.hook_v": (3, 5, 2, 4),
    "blocks.0.attn.hook_attn_scores": (3, 2, 5, 5),
    "blocks.0.attn.hook_pattern": (3, 2, 5, 5),
    "blocks.0.attn.hook_z": (3, 5, 2, 4),
    "blocks.0.hook_attn_out": (3, 5, 6),
    "blocks.0.hook_resid_post": (3, 5, 6),
}
"""In the order of a forward pass: `LEARNED`'s hooks and their shapes."""

each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def one_layer(config: OneLayer, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> OneLayerAttention:
    model = OneLayerAttention(config, D_VOCAB, N_CTX, dtype)
    lens.load_weights(model, initial_weights(config, lens.weights(model), torch.Generator().manual_seed(seed)))
    return model


def without_residual(config: OneLayer, weights: lens.Weights, dtype: torch.dtype) -> lens.Model:
    """TransformerLens' own transformer with the same weights, and what its residual stream carries subtracted."""
    shape = Transformer(
        n_heads=config.n_heads, d_model=config.d_model, d_head=config.d_head, attn_scale=config.attn_scale
    )
    model = lens.build_transformer(shape, D_VOCAB, N_CTX, dtype)
    lens.load_weights(model, lens.weights(model) | weights)
    carried: list[Tensor] = []

    def store(value: Tensor, hook: object) -> None:
        carried[:] = [value]

    def subtract(value: Tensor, hook: object) -> Tensor:
        return value - carried[0]

    model.hook_dict["blocks.0.hook_resid_pre"].add_hook(store)
    model.hook_dict["blocks.0.hook_attn_out"].add_hook(subtract)
    return model


def gradients(model: lens.Model, loss: Tensor) -> lens.Weights:
    """In HookedTransformer's layout, whatever the layout of the parameters."""
    loss.backward()
    parameters = lens.trainable(model)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    found = lens.weights(model)
    return {name: found[name] for name in parameters}


def mean_loss(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())


def functional_logits(weights: OneLayerWeights, attn_scale: float, queries: slice = EVERY_QUERY) -> Tensor:
    mask = torch.full((N_CTX, N_CTX), -torch.inf, dtype=weights.W_E.dtype).triu(1)
    return one_layer_logits(
        weights, TOKENS, mask, attn_scale=attn_scale, queries=queries, tap=lambda name, value: value
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_config
def test_it_is_the_transformer_of_transformer_lens_without_residual(config: OneLayer, dtype: torch.dtype) -> None:
    ours = one_layer(config, dtype=dtype)
    theirs = without_residual(config, lens.weights(ours), dtype)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-12, "rtol": 1e-12}

    names = [f"blocks.0.attn.hook_{part}" for part in ("q", "k", "v", "pattern", "z")]
    found, expected = (lens.run_and_cache(model, TOKENS, names) for model in (ours, theirs))
    assert found.logits.dtype == dtype
    torch.testing.assert_close(found.logits, expected.logits, **close)
    for name in names:
        torch.testing.assert_close(found.activations[name], expected.activations[name], **close)

    found, expected = (gradients(model, mean_loss(model(TOKENS))) for model in (ours, theirs))
    trained = {name for name in found if name.rsplit(".", 1)[-1] not in config.fixed}
    assert len(trained) == (6 if config is LEARNED else 4)
    for name in trained:
        assert found[name].abs().max() > 1e-4, name
        torch.testing.assert_close(found[name], expected[name], **close)


def test_with_its_residual_the_transformer_is_another_model() -> None:
    ours = one_layer(PAPER)
    theirs = without_residual(PAPER, lens.weights(ours), torch.float32)
    for point in theirs.hook_dict.values():
        point.remove_hooks()
    assert (ours(TOKENS) - theirs(TOKENS)).abs().max() > 0.1


@each_config
@pytest.mark.parametrize("length", [1, 3, N_CTX])
def test_the_last_query_alone_gives_the_last_row(config: OneLayer, length: int) -> None:
    model, other = one_layer(config), one_layer(config)
    every, last = model(TOKENS[:, :length]), other(TOKENS[:, :length], queries=LAST_QUERY)
    assert last.shape == (len(TOKENS), 1, D_VOCAB)
    torch.testing.assert_close(last, every[:, -1:])
    of_every, of_last = (gradients(m, logits[:, -1].square().sum()) for m, logits in ((model, every), (other, last)))
    for name in of_every:
        torch.testing.assert_close(of_last[name], of_every[name], atol=1e-5, rtol=1e-5)


@each_config
def test_no_query_sees_a_later_token(config: OneLayer) -> None:
    model = one_layer(config)
    changed = TOKENS.clone()
    changed[:, 3:] = 5
    torch.testing.assert_close(model(TOKENS)[:, :3], model(changed)[:, :3], atol=0, rtol=0)
    pattern = lens.run_and_cache(model, TOKENS, ["pattern"]).activations["blocks.0.attn.hook_pattern"]
    assert pattern.triu(1).count_nonzero() == 0
    torch.testing.assert_close(pattern.sum(-1), torch.ones_like(pattern[..., 0]))


def test_every_hook_runs_once_with_the_shape_that_transformer_lens_gives_it() -> None:
    model = one_layer(LEARNED)
    seen: list[tuple[str, tuple[int, ...]]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda value, hook: seen.append((name, tuple(value.shape)))

    model.run_with_hooks(TOKENS, fwd_hooks=[(name, note(name)) for name in model.hook_dict])
    assert seen == list(HOOKS.items())

    theirs = without_residual(LEARNED, lens.weights(model), torch.float32)
    names = [name for name in HOOKS if not name.endswith("attn_scores")]  # which a bridge refuses to show
    cached = lens.run_and_cache(theirs, TOKENS, names).activations
    assert {name: tuple(value.shape) for name, value in cached.items()} == {name: HOOKS[name] for name in names}


@each_config
@pytest.mark.parametrize("name", HOOKS)
def test_an_edit_at_any_hook_reaches_the_output_and_goes_with_its_hook(config: OneLayer, name: str) -> None:
    model = one_layer(config)
    untouched = model(TOKENS)
    slope = torch.linspace(0.5, 1.5, N_CTX)  # along the last two axes, so that softmax does not undo it

    def edit(value: Tensor, hook: object) -> Tensor:
        return value * (slope if value.shape[-1] == N_CTX else torch.linspace(0.5, 1.5, value.shape[-1]))

    edited = model.run_with_hooks(TOKENS, fwd_hooks=[(name, edit)])
    assert edited.shape == untouched.shape
    assert not torch.allclose(edited, untouched, atol=1e-3)
    assert torch.equal(model(TOKENS), untouched)


def test_attention_made_uniform_by_a_hook_averages_what_came_before() -> None:
    model = one_layer(PAPER)
    uniform = torch.ones(N_CTX, N_CTX).tril()
    uniform /= uniform.sum(-1, keepdim=True)
    for returned in (uniform, uniform.expand(3, 1, N_CTX, N_CTX)):  # the first one broadcasts
        logits = model.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.0.attn.hook_pattern", lambda value, hook, returned=returned: returned)]
        )
        torch.testing.assert_close(logits, uniform @ model.W_E[TOKENS] @ model.W_U, atol=1e-5, rtol=1e-5)


@each_config
def test_run_with_cache_holds_every_hook_as_for_any_model_of_transformer_lens(config: OneLayer) -> None:
    model: Any = one_layer(config)
    logits, cached = model.run_with_cache(TOKENS)
    cache = ActivationCache(dict(cached), model)
    assert cached.keys() == HOOKS.keys()
    torch.testing.assert_close(logits, model(TOKENS))
    torch.testing.assert_close(cache["attn_scores", 0].softmax(-1), cache["pattern", 0])
    torch.testing.assert_close(cache["q", 0], torch.einsum("bpm,hmd->bphd", cache["embed"], model.W_Q[0]))
    torch.testing.assert_close(cache["z", 0], torch.einsum("bhqk,bkhd->bqhd", cache["pattern", 0], cache["v", 0]))
    by_head = torch.einsum("bqhd,hdm->bqm", cache["z", 0], model.W_O[0])
    torch.testing.assert_close(cache["attn_out", 0], by_head, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cache["resid_post", 0] @ model.W_U, logits)
    _, few = model.run_with_cache(TOKENS, names_filter=["blocks.0.attn.hook_z"])
    assert list(few) == ["blocks.0.attn.hook_z"]


def test_scores_are_what_attn_scale_divides() -> None:
    model = one_layer(SCALED)
    cache = lens.run_and_cache(model, TOKENS, ["q", "k", "attn_scores"]).activations
    q, k, scores = (cache[f"blocks.0.attn.hook_{part}"] for part in ("q", "k", "attn_scores"))
    future = torch.ones(N_CTX, N_CTX, dtype=torch.bool).triu(1)
    expected = torch.einsum("bqhd,bkhd->bhqk", q, k).div(2.5).masked_fill(future, -torch.inf)
    torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)
    assert model.cfg.attn_scale == 2.5


@each_config
def test_the_config_has_the_names_of_transformer_lens(config: OneLayer) -> None:
    ours: Any = one_layer(config)
    theirs: Any = without_residual(config, lens.weights(ours), torch.float32)
    for field in ("n_layers", "n_heads", "d_model", "d_head", "n_ctx", "d_vocab", "d_vocab_out", "attn_scale"):
        assert getattr(ours.cfg, field) == getattr(theirs.cfg, field), field
    assert (ours.cfg.attn_only, ours.cfg.normalization_type) == (theirs.cfg.attn_only, None)
    for name in ("W_E", "W_U", "W_Q", "W_K", "W_V", "W_O"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=0, rtol=0)


@each_config
@pytest.mark.parametrize("queries", [EVERY_QUERY, LAST_QUERY])
def test_an_ensemble_under_vmap_equals_a_loop_over_its_seeds(config: OneLayer, queries: slice) -> None:
    models = [one_layer(config, seed=seed, dtype=torch.float64) for seed in range(3)]
    each = [model.matrices() for model in models]
    stacked = OneLayerWeights(*(None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)))
    axes = OneLayerWeights(*(None if part is None else 0 for part in stacked))

    def loss(weights: OneLayerWeights) -> Tensor:
        return functional_logits(weights, config.attn_scale, queries).square().mean()

    logits = torch.func.vmap(lambda weights: functional_logits(weights, config.attn_scale, queries), in_dims=(axes,))(
        stacked
    )
    losses = torch.func.vmap(loss, in_dims=(axes,))(stacked)
    slopes = torch.func.vmap(torch.func.grad(lambda W_E, rest: loss(rest._replace(W_E=W_E))), in_dims=(0, axes))(
        stacked.W_E, stacked
    )
    for seed, model in enumerate(models):
        alone = model(TOKENS, queries=queries)
        torch.testing.assert_close(logits[seed], alone, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(losses[seed], alone.square().mean(), atol=1e-12, rtol=1e-12)
        of_alone = gradients(model, alone.square().mean())["embed.W_E"]
        torch.testing.assert_close(slopes[seed], of_alone, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["W_V", "W_O"])
@pytest.mark.parametrize("config", [PAPER, THREE_HEADS], ids=["paper", "three heads"])
def test_weights_that_are_not_the_identity_are_refused_where_it_is_held(config: OneLayer, name: str) -> None:
    model, before = one_layer(config), lens.weights(one_layer(config))
    wrong = lens.weights(one_layer(config, seed=1))
    wrong[f"blocks.0.attn.{name}"][-1, 2, 3] = 0.1
    with pytest.raises(InputError, match=rf"blocks\.0\.attn\.{name} is not the identity that this model holds it at"):
        lens.load_weights(model, wrong)
    assert all(torch.equal(weight, before[name]) for name, weight in lens.weights(model).items())
    lens.load_weights(one_layer(config.model_copy(update={"fixed": {}})), wrong)


def test_any_square_weight_can_be_held_at_the_identity() -> None:
    identities = dict.fromkeys(("W_E", "W_Q", "W_V", "W_O"), "identity")
    config = OneLayer(d_model=D_VOCAB, d_head=D_VOCAB, std=0.5, fixed=identities)
    model = one_layer(config)
    assert torch.equal(model.W_E, torch.eye(D_VOCAB))
    free = one_layer(config.model_copy(update={"fixed": {}}))
    lens.load_weights(free, lens.weights(model))
    torch.testing.assert_close(model(TOKENS), free(TOKENS))
