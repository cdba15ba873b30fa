import math
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformer_lens import ActivationCache

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights, trained
from fd_interp.models.config import Minimal, Transformer
from fd_interp.models.minimal import MinimalAttention, attention_by_position, attention_by_token_and_position
from fd_interp.models.paper_model import silent
from fd_interp.tasks.high_order import HighOrderMarkov
from fd_interp.training import loop
from fd_interp.training.loop import make_optimizer, new_model, train, training_steps
from fd_interp.training.run import SGD, AdamW, Every, Keep, Run, Training
from fd_interp.training.series import open_series
from tests.training.test_resume import before_step, unbroken

D_VOCAB, N_CTX = 5, 4
D_BOTH = D_VOCAB + N_CTX
TOKENS = torch.tensor([[1, 4, 1, 0], [2, 2, 3, 4], [0, 0, 0, 0]])
N_SEQUENCES = len(TOKENS)

BY_POSITION = Minimal(n_heads=2, std=1.0, stds={"W_V": 0.7})
BY_BOTH = BY_POSITION.model_copy(update={"attends_by": "token_and_position", "attn_scale": 1.5})
CONFIGS = {
    "position": BY_POSITION,
    "position, one head": BY_POSITION.model_copy(update={"n_heads": 1}),
    "position, two layers": BY_POSITION.model_copy(update={"n_layers": 2, "n_heads": 3, "attn_scale": 0.8}),
    "both": BY_BOTH,
    "both, one head": BY_BOTH.model_copy(update={"n_heads": 1, "attn_scale": None}),
    "both, two layers": BY_BOTH.model_copy(update={"n_layers": 2, "n_heads": 3}),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
each_form = pytest.mark.parametrize("config", [BY_POSITION, BY_BOTH], ids=["position", "both"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def minimal(config: Minimal, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> MinimalAttention:
    model = MinimalAttention(config, D_VOCAB, N_CTX, dtype)
    lens.load_weights(model, initial_weights(config, lens.weights(model), torch.Generator().manual_seed(seed)))
    return model


def close(dtype: torch.dtype) -> dict[str, Any]:
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-12, "rtol": 1e-12}


def names_of(config: Minimal) -> list[str]:
    """Every hook in the order of a forward pass."""
    by_position = config.attends_by == "position"
    of_heads = ("v", "attn_scores", "pattern", "z") if by_position else ("q", "k", "v", "attn_scores", "pattern", "z")
    of_attention = [f"attn.hook_{part}" for part in of_heads]
    of_block = ["hook_resid_pre", *of_attention, "hook_attn_out", "hook_resid_post"]
    embedding = ["hook_embed"] if by_position else ["hook_embed", "hook_pos_embed"]
    return embedding + [f"blocks.{layer}.{name}" for layer in range(config.n_layers) for name in of_block]


each_hook = pytest.mark.parametrize(
    ("config", "name"),
    [pytest.param(config, name, id=f"{id}: {name}") for id, config in CONFIGS.items() for name in names_of(config)],
)


def coordinates(config: Minimal) -> tuple[list[slice], list[slice]]:
    """Where in a residual stream [token | position | output | output ...] each layer reads values and writes."""
    d_written = D_VOCAB if config.attends_by == "position" else D_BOTH
    outputs = [slice(D_BOTH + layer * d_written, D_BOTH + (layer + 1) * d_written) for layer in range(config.n_layers)]
    return [slice(0, d_written), *outputs[:-1]], outputs


def by_coordinates(
    model: MinimalAttention, config: Minimal, reads: Sequence[slice], writes: Sequence[slice], dtype: torch.dtype
) -> lens.Model:
    """TransformerLens' own transformer, whose skip connection carries every part in coordinates of its own."""
    shape = Transformer(
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        d_model=D_BOTH * (config.n_layers + 1),
        d_head=D_BOTH,
        attn_scale=model.cfg.attn_scale,
    )
    theirs = lens.build_transformer(shape, D_VOCAB, N_CTX, dtype)
    weights = lens.weights(theirs)
    weights["embed.W_E"][:, :D_VOCAB] = torch.eye(D_VOCAB)
    weights["pos_embed.W_pos"][:, D_VOCAB:D_BOTH] = torch.eye(N_CTX)
    for layer, (read, write) in enumerate(zip(reads, writes, strict=True)):
        attn = f"blocks.{layer}.attn."
        of_pairs = slice(D_VOCAB, D_BOTH) if config.attends_by == "position" else read
        paired, written = of_pairs.stop - of_pairs.start, write.stop - write.start
        weights[f"{attn}W_Q"][:, of_pairs, :paired] = model.W_Q[layer].detach()
        weights[f"{attn}W_K"][:, of_pairs, :paired] = torch.eye(paired)
        weights[f"{attn}W_V"][:, read, :written] = model.W_V[layer].detach()
        weights[f"{attn}W_O"][:, :written, write] = torch.eye(written)
    weights["unembed.W_U"][writes[-1]][:D_VOCAB] = torch.eye(D_VOCAB)
    lens.load_weights(theirs, weights)
    return theirs


def gradients(model: lens.Model, logits: Tensor) -> lens.Weights:
    """Of a loss, in HookedTransformer's layout, whatever the layout of the parameters."""
    loss_of(logits).backward()
    parameters = lens.trainable(model)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return lens.weights(model)


def loss_of(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(1, 1)[:, : logits.shape[1]].flatten())


@each_dtype
@each_config
def test_it_is_a_transformer_of_transformer_lens_that_writes_where_its_skip_carries_nothing(
    config: Minimal, dtype: torch.dtype
) -> None:
    ours = minimal(config, dtype=dtype)
    reads, writes = coordinates(config)
    theirs = by_coordinates(ours, config, reads, writes, dtype)
    found, expected = (lens.run_and_cache(model, TOKENS, ["pattern"]) for model in (ours, theirs))
    assert found.logits.dtype == dtype
    assert found.logits.abs().max() > 0.1
    torch.testing.assert_close(ours(TOKENS), expected.logits, **close(dtype))
    torch.testing.assert_close(found.logits, expected.logits, **close(dtype))
    assert len(found.activations) == config.n_layers
    for name, pattern in found.activations.items():
        torch.testing.assert_close(pattern, expected.activations[name], **close(dtype))

    found, expected = (gradients(model, model(TOKENS)) for model in (ours, theirs))
    for layer, (read, write) in enumerate(zip(reads, writes, strict=True)):
        of_pairs = slice(D_VOCAB, D_BOTH) if config.attends_by == "position" else read
        for name, rows, columns in (("W_Q", of_pairs, of_pairs), ("W_V", read, write)):
            full = f"blocks.{layer}.attn.{name}"
            assert found[full].abs().max() > 1e-4
            width = columns.stop - columns.start
            torch.testing.assert_close(found[full], expected[full][:, rows, :width], **close(dtype))


@each_config
def test_written_onto_the_tokens_the_skip_makes_it_another_model(config: Minimal) -> None:
    ours = minimal(config)
    reads, _ = coordinates(config)
    onto_tokens = [slice(0, reads[0].stop)] * config.n_layers
    theirs = by_coordinates(ours, config, onto_tokens, onto_tokens, torch.float32)
    assert (ours(TOKENS) - theirs(TOKENS)).abs().max() > 0.1


def transcribed(
    W_Q: np.ndarray, W_V: np.ndarray, tokens: list[int], attn_scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and patterns of one sequence, in the words of `Minimal`."""
    by_position = W_V.shape[-1] == D_VOCAB
    n_layers, n_heads, d_model, _ = W_V.shape
    one_hot = np.eye(D_BOTH)
    positions = [one_hot[D_VOCAB + q] for q in range(len(tokens))]
    x = [(one_hot[token] + position)[:d_model] for token, position in zip(tokens, positions, strict=True)]
    patterns = np.zeros((n_layers, n_heads, len(tokens), len(tokens)))
    for layer in range(n_layers):
        written = [np.zeros(d_model) for _ in tokens]
        for q in range(len(tokens)):
            for head in range(n_heads):
                scores = []
                for k in range(q + 1):
                    score = W_Q[layer, head, q, k] if by_position else x[q] @ W_Q[layer, head] @ x[k]
                    scores.append(score / attn_scale)
                weights = [math.exp(score) for score in scores]
                for k in range(q + 1):
                    patterns[layer, head, q, k] = weights[k] / sum(weights)
                    written[q] = written[q] + patterns[layer, head, q, k] * (x[k] @ W_V[layer, head])
        x = written
    return np.array([written[:D_VOCAB] for written in x]), patterns


@each_dtype
@each_config
def test_it_is_the_slow_transcription_of_its_definition(config: Minimal, dtype: torch.dtype) -> None:
    model = minimal(config, dtype=dtype)
    W_Q, W_V = (weight.detach().double().numpy() for weight in (model.W_Q, model.W_V))
    assert W_Q.shape[:2] == W_V.shape[:2] == (config.n_layers, config.n_heads)
    scale = config.attn_scale or math.sqrt(D_VOCAB + N_CTX)
    cached = lens.run_and_cache(model, TOKENS, "pattern").activations
    for row, tokens in enumerate(TOKENS.tolist()):
        logits, patterns = transcribed(W_Q, W_V, tokens, scale)
        np.testing.assert_allclose(model(TOKENS)[row].detach(), logits, **close(dtype))
        for layer in range(config.n_layers):
            pattern = cached[f"blocks.{layer}.attn.hook_pattern"][row]
            np.testing.assert_allclose(pattern, patterns[layer], **close(dtype))


def embedded(by_position: MinimalAttention) -> MinimalAttention:
    """The model that attends by both whose other blocks of weights are zero."""
    config = BY_BOTH.model_copy(update={"attn_scale": by_position.cfg.attn_scale})
    model = minimal(config)
    weights = {name: torch.zeros_like(weight) for name, weight in lens.weights(model).items()}
    weights["blocks.0.attn.W_Q"][:, D_VOCAB:, D_VOCAB:] = by_position.W_Q[0].detach()
    weights["blocks.0.attn.W_V"][:, :D_VOCAB, :D_VOCAB] = by_position.W_V[0].detach()
    lens.load_weights(model, weights)
    return model


def test_to_attend_by_position_is_to_attend_by_both_with_the_other_blocks_at_zero() -> None:
    by_position = minimal(BY_POSITION)
    by_both = embedded(by_position)
    torch.testing.assert_close(by_position(TOKENS), by_both(TOKENS))
    found, expected = (lens.run_and_cache(m, TOKENS, "pattern").activations for m in (by_position, by_both))
    torch.testing.assert_close(found, expected)
    for name in ("W_Q", "W_V"):
        other = embedded(by_position)
        with torch.no_grad():
            getattr(other.blocks[0].attn, name)[:, 0, 0] += 2.0 if name == "W_V" else 20.0
            getattr(other.blocks[0].attn, name)[:, :D_VOCAB, D_VOCAB:] += 1.0
        assert (by_position(TOKENS) - other(TOKENS)).abs().max() > 0.1


@pytest.mark.parametrize("attends_by", ["position", "token_and_position"])
def test_scores_are_divided_by_the_root_of_the_input_size_unless_told_otherwise(attends_by: Any) -> None:
    config = Minimal(attends_by=attends_by, std=1.0, stds={})
    model, scaled = minimal(config), minimal(config.model_copy(update={"attn_scale": 1.0}))
    assert (model.cfg.attn_scale, scaled.cfg.attn_scale) == (3.0, 1.0)  # the root of 5 tokens and 4 positions
    scores = [lens.run_and_cache(m, TOKENS, "attn_scores").activations.popitem()[1] for m in (model, scaled)]
    torch.testing.assert_close(scores[0] * 3, scores[1])


@each_config
def test_every_hook_runs_once_with_the_shape_that_transformer_lens_gives_it(config: Minimal) -> None:
    model = minimal(config)
    seen: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Callable[..., None]:
        def keep(value: Tensor, hook: object) -> None:
            assert name not in seen
            seen[name] = tuple(value.shape)

        return keep

    model.run_with_hooks(TOKENS, fwd_hooks=[(name, note(name)) for name in model.hook_dict])
    assert list(seen) == names_of(config)
    assert model.hook_dict.keys() == seen.keys()
    pairs = {name for name in seen if name.endswith(("attn_scores", "pattern"))}
    assert {seen[name] for name in pairs} == {(N_SEQUENCES, config.n_heads, N_CTX, N_CTX)}

    d_model = D_VOCAB if config.attends_by == "position" else D_BOTH
    shape = Transformer(n_layers=config.n_layers, n_heads=config.n_heads, d_model=d_model, d_head=d_model)
    theirs = lens.build_transformer(shape, D_VOCAB, N_CTX)
    names = [name for name in seen if not name.endswith("attn_scores")]  # which a bridge refuses to show
    cached = lens.run_and_cache(theirs, TOKENS, names).activations
    assert {name: tuple(value.shape) for name, value in cached.items()} == {name: seen[name] for name in names}


def sloped(value: Tensor) -> Tensor:
    """Changed along the last two axes, so that softmax does not undo it."""
    along = [torch.linspace(0.5, 1.5, size) for size in value.shape[-2:]]
    return value * along[0][:, None] * along[1]


@each_hook
def test_an_edit_of_one_sequence_at_any_hook_reaches_its_logits_alone_and_goes_with_its_hook(
    config: Minimal, name: str
) -> None:
    model = minimal(config)
    untouched = model(TOKENS)

    def edit(value: Tensor, hook: object) -> Tensor:
        return torch.cat([value[:1], sloped(value[1:2]), value[2:]])

    edited = model.run_with_hooks(TOKENS, fwd_hooks=[(name, edit)])
    torch.testing.assert_close(edited[::2], untouched[::2])
    assert (edited[1] - untouched[1]).abs().max() > 1e-3
    assert torch.equal(model(TOKENS), untouched)


@each_hook
def test_an_edit_in_place_counts_as_one_that_is_returned_and_spares_the_model(config: Minimal, name: str) -> None:
    model = minimal(config)
    untouched = model(TOKENS[:1])

    def in_place(value: Tensor, hook: object) -> None:
        value.copy_(sloped(value))

    returned = model.run_with_hooks(TOKENS[:1], fwd_hooks=[(name, lambda value, hook: sloped(value))])
    with torch.no_grad():
        torch.testing.assert_close(model.run_with_hooks(TOKENS[:1], fwd_hooks=[(name, in_place)]), returned)
    assert torch.equal(model(TOKENS[:1]), untouched)


@each_config
def test_looking_at_hooks_changes_nothing(config: Minimal) -> None:
    model = minimal(config, dtype=torch.float64)
    untouched = model(TOKENS)
    looked: list[str] = []

    def look(value: Tensor, hook: Any) -> None:
        looked.append(hook.name)

    for name in names_of(config):
        seen = model.run_with_hooks(TOKENS, fwd_hooks=[(name, look)])
        torch.testing.assert_close(seen, untouched, **close(torch.float64))
    assert looked == names_of(config)
    assert torch.equal(model(TOKENS), untouched)


@each_form
def test_attention_given_by_a_hook_mixes_what_heads_write(config: Minimal) -> None:
    model = minimal(config)
    uniform = torch.ones(N_CTX, N_CTX).tril()
    uniform /= uniform.sum(-1, keepdim=True)
    x = torch.eye(D_BOTH)[TOKENS]
    x[..., D_VOCAB:] += torch.eye(N_CTX)
    expected = (uniform @ x[..., : model.cfg.d_model] @ model.W_V[0].sum(0))[..., :D_VOCAB]
    scores = torch.zeros(N_CTX, N_CTX).masked_fill(uniform == 0, -torch.inf)
    edits = {"pattern": [uniform, uniform.expand(N_SEQUENCES, config.n_heads, -1, -1)], "attn_scores": [scores]}
    for part, given in edits.items():
        for returned in given:  # the first of the patterns broadcasts
            hook = (f"blocks.0.attn.hook_{part}", lambda value, hook, returned=returned: returned)
            torch.testing.assert_close(model.run_with_hooks(TOKENS, fwd_hooks=[hook]), expected, atol=1e-5, rtol=1e-5)


@each_form
@pytest.mark.parametrize("part", ["v", "z"])
def test_a_head_silenced_by_a_hook_is_a_head_without_values(config: Minimal, part: str) -> None:
    model, without = minimal(config), minimal(config)
    with torch.no_grad():
        without.blocks[0].attn.W_V[1] = 0

    def silence(value: Tensor, hook: object) -> Tensor:
        return value * torch.tensor([1.0, 0.0])[:, None]

    silenced = model.run_with_hooks(TOKENS, fwd_hooks=[(f"blocks.0.attn.hook_{part}", silence)])
    torch.testing.assert_close(silenced, without(TOKENS))


@each_form
def test_nothing_but_attention_reaches_the_logits(config: Minimal) -> None:
    model = minimal(config)
    silence = ("blocks.0.hook_attn_out", lambda value, hook: torch.zeros_like(value))
    assert model.run_with_hooks(TOKENS, fwd_hooks=[silence]).count_nonzero() == 0


@each_config
def test_the_cache_holds_every_hook_as_for_any_model_of_transformer_lens(config: Minimal) -> None:
    model: Any = minimal(config)
    logits, cached = model.run_with_cache(TOKENS)
    cache = ActivationCache(dict(cached), model)
    assert list(cached) == names_of(config)
    torch.testing.assert_close(logits, model(TOKENS))
    x = cache["embed"] if config.attends_by == "position" else cache["embed"] + cache["pos_embed"]
    future = torch.ones(N_CTX, N_CTX, dtype=torch.bool).triu(1)
    for layer in range(config.n_layers):
        torch.testing.assert_close(cache["resid_pre", layer], x)
        if config.attends_by == "position":
            products = model.W_Q[layer].expand(N_SEQUENCES, -1, -1, -1)
        else:
            torch.testing.assert_close(cache["q", layer], torch.einsum("bpm,hmd->bphd", x, model.W_Q[layer]))
            torch.testing.assert_close(cache["k", layer], x[:, :, None].expand_as(cache["q", layer]))
            products = torch.einsum("bqhd,bkhd->bhqk", cache["q", layer], cache["k", layer])
        scores = (products / model.cfg.attn_scale).masked_fill(future, -torch.inf)
        torch.testing.assert_close(cache["attn_scores", layer], scores, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(cache["pattern", layer], scores.softmax(-1))
        torch.testing.assert_close(cache["v", layer], torch.einsum("bpm,hmd->bphd", x, model.W_V[layer]))
        z = torch.einsum("bhqk,bkhd->bqhd", cache["pattern", layer], cache["v", layer])
        torch.testing.assert_close(cache["z", layer], z)
        torch.testing.assert_close(cache["attn_out", layer], z.sum(2))
        torch.testing.assert_close(cache["resid_post", layer], cache["attn_out", layer])
        x = cache["resid_post", layer]
    torch.testing.assert_close(x @ model.W_U, logits)
    assert torch.equal(lens.run_and_cache(model, TOKENS, "z").logits, logits)


@each_config
def test_gradients_at_hooks_are_those_of_autograd(config: Minimal) -> None:
    model = minimal(config, dtype=torch.float64)
    kept: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> Tensor:
        kept[hook.name] = value.requires_grad_() if value.is_leaf else value
        kept[hook.name].retain_grad()
        return value

    names = names_of(config)
    loss_of(model.run_with_hooks(TOKENS, fwd_hooks=[(name, keep) for name in names])).backward()
    found = lens.run_with_gradients(model, TOKENS, names, loss_of)
    for name in names:
        assert found.gradients[name].count_nonzero(), name
        torch.testing.assert_close(found.gradients[name], kept[name].grad, **close(torch.float64))


@each_form
def test_the_gradient_of_a_pattern_that_sequences_share_is_the_own_one_of_each(config: Minimal) -> None:
    """Where the pattern stands in the logits it stands linearly, so its gradient can be written down."""
    model = minimal(config, dtype=torch.float64)
    name = "blocks.0.attn.hook_pattern"
    found = lens.run_with_gradients(model, TOKENS, name, loss_of).gradients[name]
    values = torch.einsum("bkm,hmv->bhkv", lens.run_and_cache(model, TOKENS, "resid_pre")[1].popitem()[1], model.W_V[0])
    slope = model(TOKENS).softmax(-1) - functional.one_hot(TOKENS.roll(1, 1), D_VOCAB)
    expected = torch.einsum("bqv,bhkv->bhqk", slope / TOKENS.numel(), values[..., :D_VOCAB])
    torch.testing.assert_close(found, expected, **close(torch.float64))
    assert not torch.allclose(found[0], found[1])

    seen: list[Tensor] = []

    def back(gradient: Tensor, hook: object) -> None:
        seen.append(gradient)

    with model.hooks(bwd_hooks=[(name, back)]):
        loss_of(model(TOKENS)).backward()
    torch.testing.assert_close(seen[0], expected, **close(torch.float64))


def test_weights_of_positions_get_the_gradients_of_all_sequences_at_their_scores() -> None:
    model = minimal(BY_POSITION, dtype=torch.float64)
    name = "blocks.0.attn.hook_attn_scores"
    at_scores = lens.run_with_gradients(model, TOKENS, name, loss_of).gradients[name]
    expected = at_scores.sum(0) / model.cfg.attn_scale
    torch.testing.assert_close(gradients(model, model(TOKENS))["blocks.0.attn.W_Q"], expected, **close(torch.float64))


@each_config
@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("queries", [slice(-1, None), slice(1, 3), slice(2, None), slice(None, None, 2)], ids=str)
def test_some_queries_give_their_rows_of_the_logits(config: Minimal, heard: bool, queries: slice) -> None:
    model, other = minimal(config, dtype=torch.float64), minimal(config, dtype=torch.float64)
    hooks: list[Any] = [("hook_embed", lambda value, hook: None)] if heard else []
    every, some = model(TOKENS), other.run_with_hooks(TOKENS, queries=queries, fwd_hooks=hooks)
    torch.testing.assert_close(some, every[:, queries])
    of_every, of_some = gradients_of_square(model, every[:, queries]), gradients_of_square(other, some)
    torch.testing.assert_close(of_some, of_every)


def gradients_of_square(model: MinimalAttention, logits: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(logits.square().sum(), list(model.parameters())))


@each_config
@pytest.mark.parametrize("length", [1, 3])
def test_a_shorter_sequence_gives_the_first_rows_of_a_longer_one(config: Minimal, length: int) -> None:
    model = minimal(config)
    torch.testing.assert_close(model(TOKENS[:, :length]), model(TOKENS)[:, :length])
    looked = lens.run_and_cache(model, TOKENS[:, :length], "pattern")
    torch.testing.assert_close(looked.logits, model(TOKENS)[:, :length])
    assert next(iter(looked.activations.values())).shape[2:] == (length, length)


@each_config
def test_no_query_sees_a_later_token(config: Minimal) -> None:
    model = minimal(config)
    changed = TOKENS.clone()
    changed[:, 2:] = 3
    torch.testing.assert_close(model(TOKENS)[:, :2], model(changed)[:, :2], atol=0, rtol=0)
    assert (model(TOKENS)[:, 2:] - model(changed)[:, 2:]).abs().max() > 0.1
    for pattern in lens.run_and_cache(model, TOKENS, "pattern").activations.values():
        assert pattern.triu(1).count_nonzero() == 0
        torch.testing.assert_close(pattern.sum(-1), torch.ones_like(pattern[..., 0]))


@each_config
def test_a_token_that_is_none_is_refused(config: Minimal) -> None:
    with pytest.raises(IndexError):
        minimal(config)(torch.full((1, 2), D_VOCAB))  # a position's coordinate, where heads attend by both


@each_form
def test_an_ensemble_under_vmap_equals_a_loop_over_its_seeds(config: Minimal) -> None:
    models = [minimal(config, seed=seed, dtype=torch.float64) for seed in range(3)]
    W_Q, W_V = (torch.stack([getattr(model, name)[0].detach() for model in models]) for name in ("W_Q", "W_V"))
    attend = attention_by_position if config.attends_by == "position" else attention_by_token_and_position
    x = lens.run_and_cache(models[0], TOKENS, "resid_pre").activations["blocks.0.hook_resid_pre"]
    mask = torch.full((N_CTX, N_CTX), -torch.inf, dtype=torch.float64).triu(1)

    def logits(W_Q: Tensor, W_V: Tensor) -> Tensor:
        written = attend(W_Q, W_V, x, mask, attn_scale=models[0].cfg.attn_scale, queries=slice(1, None), tap=silent)
        return written[..., :D_VOCAB]

    def loss(W_Q: Tensor, W_V: Tensor) -> Tensor:
        return logits(W_Q, W_V).square().sum()

    together = torch.func.vmap(logits)(W_Q, W_V)
    slopes = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(W_Q, W_V)
    for seed, model in enumerate(models):
        alone = model(TOKENS, queries=slice(1, None))
        torch.testing.assert_close(together[seed], alone, **close(torch.float64))
        for found, expected in zip(slopes, gradients_of_square(model, alone), strict=True):
            torch.testing.assert_close(found[seed], expected, **close(torch.float64))


def small_run(
    model: Minimal, optimizer: SGD | AdamW, steps: int, *, d_vocab: int = 4, context: int = 5, dtype: Any = "float32"
) -> Run:
    return Run(
        task=HighOrderMarkov(d_vocab=d_vocab, blocks=((2,), (1,)), context=context),
        model=model,
        training=Training(optimizer=optimizer, steps=steps, batch_size=16, loss_on="full_context"),
        keep=Keep(at=Every(stride=6), hooks=("pattern", "z"), gradients=("pattern",), held_out=8),
        dtype=dtype,
    )


def after_training(run: Run, initial: lens.Weights) -> MinimalAttention:
    model = new_model(run)
    assert isinstance(model, MinimalAttention)
    lens.load_weights(model, initial)
    for _ in training_steps(run, model, make_optimizer(run, trained(run.model, model))):
        pass
    return model


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n_heads", [3, 5])
@pytest.mark.parametrize("attends_by", ["position", "token_and_position"])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.5, momentum=0.9), AdamW(lr=0.05)], ids=["sgd", "adamw"])
def test_heads_that_start_alike_stay_alike(attends_by: Any, n_heads: int, dtype: str, optimizer: SGD | AdamW) -> None:
    """To the last bit, since what rounding sets apart grows exponentially and ends a plateau.

    With sizes that fill the processor's vectors: elsewhere it treats the ends of rows in another way.
    """
    config = Minimal(attends_by=attends_by, n_heads=n_heads, std=0.5)
    run = small_run(config, optimizer, 60, d_vocab=16, context=12, dtype=dtype)
    different = lens.weights(new_model(run))
    alike = {name: weight[:1].expand_as(weight).clone() for name, weight in different.items()}
    model = after_training(run, alike)
    for weights, initial in ((model.W_Q[0], alike["blocks.0.attn.W_Q"]), (model.W_V[0], alike["blocks.0.attn.W_V"])):
        assert (weights - initial).abs().max() > 0.05
        assert all(torch.equal(weight, weights[0]) for weight in weights)
    apart = after_training(run, different)
    assert (apart.W_V[0, 0] - apart.W_V[0, 1]).abs().max() > 1e-3


@each_form
def test_attention_is_not_learned_before_there_are_values(config: Minimal) -> None:
    without = config.model_copy(update={"stds": {"W_V": 0.0}})
    (of_queries, of_values), (of_others, _) = (
        torch.autograd.grad(loss_of(model(TOKENS)), list(model.parameters()))
        for model in map(minimal, (without, config))
    )
    assert of_queries.count_nonzero() == 0
    assert of_values.abs().max() > 1e-3
    assert of_others.abs().max() > 1e-3


def drawn(**fields: Any) -> dict[str, Tensor]:
    """Initial weights of a model of two layers, by the end of their names."""
    config = Minimal(n_heads=4, n_layers=2, **fields)
    weights = lens.weights(build(config, 20, 20, torch.float64))
    drawn = initial_weights(config, weights, torch.Generator().manual_seed(0))
    return {short: torch.stack([drawn[name] for name in drawn if name.endswith(short)]) for short in ("W_Q", "W_V")}


def assert_normal(weight: Tensor, std: float) -> None:
    assert abs(weight.mean()) <= 5 * std / math.sqrt(weight.numel())
    assert abs(weight.std() - std) <= 5 * std / math.sqrt(2 * weight.numel())


@pytest.mark.parametrize("attends_by", ["position", "token_and_position"])
def test_values_start_at_zero_and_queries_are_normal(attends_by: Any) -> None:
    default = drawn(attends_by=attends_by)
    assert default["W_V"].count_nonzero() == 0
    assert_normal(default["W_Q"], 1e-3)
    assert drawn(attends_by=attends_by, std=0.0)["W_Q"].count_nonzero() == 0
    torch.testing.assert_close(drawn(attends_by=attends_by, std=1e-9)["W_Q"] * 1e6, default["W_Q"])
    both = drawn(attends_by=attends_by, std=0.5, stds={"W_V": 2.0})
    assert_normal(both["W_Q"], 0.5)
    assert_normal(both["W_V"], 2.0)
    values_alone = drawn(attends_by=attends_by, std=0.5, stds={"W_Q": 0.0})
    assert values_alone["W_Q"].count_nonzero() == 0
    assert_normal(values_alone["W_V"], 0.5)


@pytest.mark.parametrize("name", ["W_K", "W_O", "W_E", "W_U", "w_v", "b_Q"])
def test_a_weight_that_the_model_has_not_is_refused(name: str) -> None:
    wrong: list[dict[str, Any]] = [{"fixed": {name: "init"}}, {"stds": {name: 1.0}}]
    for fields in wrong:
        with pytest.raises(InputError, match=f"minimal has no weight {name}; known: W_Q, W_V"):
            Minimal(**fields)
    model = minimal(BY_POSITION)
    with pytest.raises(InputError, match=f"the model has no weight 'blocks.0.attn.{name}'"):
        lens.load_weights(model, lens.weights(model) | {f"blocks.0.attn.{name}": torch.zeros(2, 4, 4)})


def test_heads_of_no_other_kind_are_known() -> None:
    unknown: Any = "token"
    with pytest.raises(InputError, match="attends_by: Input should be 'position' or 'token_and_position', not 'token'"):
        Minimal(attends_by=unknown)


@each_form
def test_a_weight_can_be_held(config: Minimal) -> None:
    held = config.model_copy(update={"fixed": {"W_V": "identity", "W_Q": "zero"}})
    model = minimal(held)
    assert torch.equal(model.W_V[0], torch.eye(model.cfg.d_model).expand(2, -1, -1))
    assert trained(held, model) == {}
    uniform = torch.ones(N_CTX, N_CTX).tril()
    uniform /= uniform.sum(-1, keepdim=True)
    torch.testing.assert_close(model(TOKENS), 2 * uniform @ torch.eye(D_VOCAB)[TOKENS])


@each_config
def test_weights_have_the_names_and_shapes_of_transformer_lens(config: Minimal) -> None:
    model = minimal(config)
    d_model = model.cfg.d_model
    of_pairs = N_CTX if config.attends_by == "position" else d_model
    shapes = {"W_Q": (config.n_heads, of_pairs, of_pairs), "W_V": (config.n_heads, d_model, d_model)}
    weights = lens.weights(model)
    expected = {f"blocks.{layer}.attn.{n}": shape for layer in range(config.n_layers) for n, shape in shapes.items()}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected
    assert lens.trainable(model).keys() == expected.keys()
    for name in shapes:
        stacked = torch.stack([weights[f"blocks.{layer}.attn.{name}"] for layer in range(config.n_layers)])
        assert torch.equal(getattr(model, name), stacked)
    assert torch.equal(model.W_E, torch.eye(D_VOCAB, d_model))
    assert torch.equal(model.W_U, torch.eye(d_model, D_VOCAB))
    cached = lens.run_and_cache(model, TOKENS, ["hook_embed", "resid_post"]).activations
    assert torch.equal(cached["hook_embed"], model.W_E[TOKENS])
    torch.testing.assert_close(cached[f"blocks.{config.n_layers - 1}.hook_resid_post"] @ model.W_U, model(TOKENS))


@each_config
def test_the_config_has_the_names_of_transformer_lens(config: Minimal) -> None:
    model = minimal(config)
    d_model = D_VOCAB if config.attends_by == "position" else D_BOTH
    shape = Transformer(
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        d_model=d_model,
        d_head=d_model,
        attn_scale=config.attn_scale or math.sqrt(D_BOTH),
    )
    theirs: Any = lens.build_transformer(shape, D_VOCAB, N_CTX)
    fields = ("n_layers", "n_heads", "d_model", "d_head", "n_ctx", "d_vocab", "d_vocab_out", "attn_scale", "attn_only")
    for field in (*fields, "normalization_type", "attention_dir"):
        assert getattr(model.cfg, field) == getattr(theirs.cfg, field), field


TWO_LAYERS = Minimal(attends_by="token_and_position", n_layers=2, std=0.5, stds={})
RUNS = {
    "position": small_run(Minimal(std=0.1), AdamW(lr=0.05, lrs={"W_Q": 0.1}), 25),
    "both, two layers": small_run(TWO_LAYERS, SGD(lr=0.2, momentum=0.9), 25, dtype="float64"),
}
each_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@each_run
def test_a_run_interrupted_at_any_step_goes_on_to_the_same_bytes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "interrupted"
    for at in (4, 12, 13):
        with monkeypatch.context() as patched:
            patched.setattr(loop, "training_steps", before_step(at, lambda: signal.raise_signal(signal.SIGINT)))
            with pytest.raises(KeyboardInterrupt):
                train(run, directory, show_progress=False)
    assert unbroken(run, directory) == unbroken(run, tmp_path / "unbroken")


@each_run
def test_a_trained_series_opens_again(run: Run, tmp_path: Path) -> None:
    left = train(run, tmp_path / "run", show_progress=False)
    series = open_series(tmp_path / "run")
    assert series.run == run
    assert series.steps == left.steps == [0, 6, 12, 18, 24, 25]
    first, last = series[0].weights(), series[-1].weights()
    assert all(torch.equal(weight, lens.weights(new_model(run))[name]) for name, weight in first.items())
    assert not any(torch.equal(first[name], last[name]) for name in first)

    model, tokens = series[-1].model(), series.inputs.held_out.tokens
    assert isinstance(model, MinimalAttention)
    assert all(torch.equal(weight, last[name]) for name, weight in lens.weights(model).items())
    cached = lens.run_and_cache(model, tokens, ["pattern", "z"]).activations
    kept = series[-1].activations()
    torch.testing.assert_close({name: kept[name] for name in cached}, cached)
    assert len(kept) == len(cached) + model.cfg.n_layers  # gradients at patterns
    losses = [loop.batch_loss(run, snapshot.model(), series.inputs.held_out) for snapshot in (series[0], series[-1])]
    assert losses[1] < losses[0] - 0.05
