from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.config import Transformer

TOKENS = torch.tensor([[1, 4, 1, 0, 3], [2, 2, 6, 5, 6]])
D_VOCAB, N_CTX, LAYERS = 7, 5, 2
OF_A_LAYER = (
    "hook_resid_pre",
    "ln1.hook_scale",
    "ln1.hook_normalized",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_pattern",
    "attn.hook_z",
    "hook_attn_out",
    "hook_resid_mid",
    "mlp.hook_pre",
    "mlp.hook_post",
    "hook_mlp_out",
    "hook_resid_post",
)


class Toy(lens.HookedRootModule):
    """The embedding reaches the logits through `hook_square` and also past it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.cfg = {"d_vocab": D_VOCAB}
        self.W_E = nn.Parameter(torch.randn(D_VOCAB, 3, generator=generator, dtype=torch.float64))
        self.hook_embed = lens.HookPoint()
        self.hook_square = lens.HookPoint()
        self.hook_tokens = lens.HookPoint()
        self.hook_attn_scores = lens.HookPoint()
        self.hook_unused = lens.HookPoint()
        self.hook_idle = lens.HookPoint()
        self.setup()

    def forward(self, tokens: Tensor) -> Tensor:
        embed = self.hook_embed(self.W_E[self.hook_tokens(tokens)])
        scores = self.hook_attn_scores(embed @ embed.mT)
        self.hook_unused(embed)
        return (embed + self.hook_square(embed) ** 2 + scores.tanh() @ embed) @ self.W_E.T


def transformer(n_layers: int = LAYERS) -> lens.Model:
    config = Transformer(n_layers=n_layers, n_heads=3, d_model=6, d_head=4, d_mlp=5, normalization_type="LN")
    model = lens.build_transformer(config, D_VOCAB, N_CTX, torch.float64)
    generator = torch.Generator().manual_seed(1)
    zero = lens.weights(model)
    random = {
        name: torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        for name, weight in sorted(zero.items())
    }
    lens.load_weights(model, random | {"unembed.b_U": zero["unembed.b_U"]})
    return model


MODELS: dict[str, tuple[Callable[[], lens.Model], list[str]]] = {
    "transformer": (
        transformer,
        ["hook_embed", "hook_pos_embed", *(f"blocks.{layer}.{name}" for layer in range(LAYERS) for name in OF_A_LAYER)],
    ),
    "ours": (Toy, ["hook_embed", "hook_square", "hook_attn_scores"]),
}
"""Each kind of model -> how to make one, and hooks that lie between its weights and its logits."""

both = pytest.mark.parametrize("kind", MODELS)


def attached(model: lens.Model) -> int:
    """Hooks of any kind left on the model, as TransformerLens and as PyTorch count them."""
    points = {id(point): point for point in model.hook_dict.values()}.values()
    return sum(len(p.fwd_hooks) + len(p.bwd_hooks) + len(p._forward_hooks) + len(p._backward_hooks) for p in points)


def loss_of(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)[..., 2].mean()


@both
def test_what_is_read_is_what_transformer_lens_caches(kind: str) -> None:
    make, names = MODELS[kind]
    model = make()
    read = lens.run_and_cache(model, TOKENS, names)
    logits, cache = model.run_with_cache(TOKENS, names_filter=names)
    assert list(read.activations) == names
    assert torch.equal(read.logits, logits)
    assert all(torch.equal(value, cache[name]) for name, value in read.activations.items())


@both
def test_what_is_read_carries_no_graph(kind: str) -> None:
    make, names = MODELS[kind]
    logits, activations = lens.run_and_cache(make(), TOKENS, names)
    assert not any(value.requires_grad for value in (logits, *activations.values()))


def test_queries_and_keys_explain_the_pattern() -> None:
    model = transformer()
    _, read = lens.run_and_cache(model, TOKENS, ["q", "k", "pattern"])
    q, k = (read[f"blocks.1.attn.hook_{name}"].transpose(1, 2) for name in "qk")
    assert q.shape == (2, 3, 5, 4)
    scores = q @ k.mT / model.cfg.attn_scale
    pattern = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    torch.testing.assert_close(read["blocks.1.attn.hook_pattern"], pattern)


def test_short_names_stand_for_every_layer_in_order() -> None:
    model = transformer(n_layers=11)
    assert lens.resolve_hooks(model, "pattern") == [f"blocks.{layer}.attn.hook_pattern" for layer in range(11)]
    assert lens.resolve_hooks(model, ["resid_post", "embed"]) == [
        *(f"blocks.{layer}.hook_resid_post" for layer in range(11)),
        "hook_embed",
    ]


def test_a_hook_named_twice_is_read_once() -> None:
    assert lens.resolve_hooks(transformer(), ["blocks.1.attn.hook_z", "z"]) == [
        "blocks.1.attn.hook_z",
        "blocks.0.attn.hook_z",
    ]


@both
def test_every_listed_hook_is_its_own_full_name(kind: str) -> None:
    model = MODELS[kind][0]()
    for name in lens.hook_names(model):
        if kind == "ours" or not name.endswith("hook_attn_scores"):
            assert lens.resolve_hooks(model, [name]) == [name]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("blocks.0.attn.hook_patern", "no hook 'blocks.0.attn.hook_patern', did you mean blocks.0.attn.hook_pattern"),
        ("blocks.2.attn.hook_pattern", "no hook 'blocks.2.attn.hook_pattern', did you mean blocks"),
        ("patern", "no hook 'patern', did you mean pattern"),
        ("", "no hook ''"),
    ],
)
def test_a_hook_that_the_model_lacks_is_refused_with_the_nearest(name: str, sentence: str) -> None:
    model = transformer()
    for read in (lens.resolve_hooks, lambda model, names: lens.run_and_cache(model, TOKENS, names)):
        with pytest.raises(InputError, match=sentence):
            read(model, [name])
    assert attached(model) == 0


def test_a_hook_that_does_not_run_is_refused() -> None:
    with pytest.raises(InputError, match="hook_result but does not run it"):
        lens.run_and_cache(transformer(), TOKENS, ["blocks.0.attn.hook_result"])
    with pytest.raises(InputError, match="hook_idle but does not run it"):
        lens.run_with_gradients(Toy(), TOKENS, ["hook_idle"], loss_of)


@pytest.mark.skipif(lens.HAS_HOOKED_TRANSFORMER, reason="HookedTransformer's scores are the scores")
def test_the_scores_of_a_bridge_are_refused() -> None:
    model = transformer()
    for name in ("attn_scores", "blocks.1.attn.hook_attn_scores"):
        with pytest.raises(InputError, match="can hold the pattern instead of the scores"):
            lens.run_and_cache(model, TOKENS, [name])
        with pytest.raises(InputError, match="compute q @ k"):
            lens.run_with_gradients(model, TOKENS, [name], loss_of)


@pytest.mark.skipif(not lens.HAS_HOOKED_TRANSFORMER, reason="the scores of a bridge are refused")
def test_the_scores_of_hooked_transformer_are_read() -> None:
    _, read = lens.run_and_cache(transformer(), TOKENS, ["attn_scores", "pattern"])
    scores, pattern = (read[f"blocks.0.attn.hook_{name}"] for name in ("attn_scores", "pattern"))
    torch.testing.assert_close(scores.softmax(-1), pattern)


@both
def test_the_hooks_of_others_stay_and_their_edits_are_seen(kind: str) -> None:
    make, names = MODELS[kind]
    model = make()
    calls = []

    def zero(value: Tensor, hook: lens.HookPoint) -> Tensor:
        calls.append(hook)
        return torch.zeros_like(value)

    model.hook_dict["hook_embed"].add_hook(zero)
    before = attached(model)
    _, read = lens.run_and_cache(model, TOKENS, names)
    activations, _ = lens.run_with_gradients(model, TOKENS, names, loss_of)
    assert not read["hook_embed"].any()
    assert not activations["hook_embed"].any()
    assert attached(model) == before
    model(TOKENS)
    assert len(calls) == 3


class Broken(Exception):
    pass


@both
def test_no_hook_is_left_whatever_happens(kind: str) -> None:
    make, names = MODELS[kind]
    model = make()
    lens.run_and_cache(model, TOKENS, names)
    lens.run_with_gradients(model, TOKENS, names, loss_of)
    assert attached(model) == 0

    def fail(*_: Tensor, **__: lens.HookPoint) -> Tensor:
        raise Broken

    with pytest.raises(Broken):
        lens.run_with_gradients(model, TOKENS, names, fail)
    assert attached(model) == 0
    model.hook_dict[names[-1]].add_hook(fail)
    before = attached(model)
    with pytest.raises(Broken):
        lens.run_and_cache(model, TOKENS, names)
    with pytest.raises(Broken):
        lens.run_with_gradients(model, TOKENS, names, loss_of)
    assert attached(model) == before


@both
def test_gradients_are_finite_differences_of_the_loss(kind: str) -> None:
    make, names = MODELS[kind]
    model = make()
    activations, gradients = lens.run_with_gradients(model, TOKENS, names, loss_of)
    assert list(activations) == list(gradients) == names
    generator = torch.Generator().manual_seed(2)
    for name in names:
        direction = torch.randn(activations[name].shape, generator=generator, dtype=torch.float64)

        def loss_at(step: float, name: str = name, direction: Tensor = direction) -> Tensor:
            move = [(name, lambda value, hook: value + step * direction)]
            return loss_of(model.run_with_hooks(TOKENS, fwd_hooks=move))

        slope = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
        assert slope.abs() > 1e-6, name
        found = (gradients[name] * direction).sum().item()
        assert found == pytest.approx(slope.item(), rel=1e-4, abs=1e-9), name


@both
def test_gradients_come_with_the_activations_of_a_plain_run(kind: str) -> None:
    make, names = MODELS[kind]
    model = make()
    activations, gradients = lens.run_with_gradients(model, TOKENS, names, loss_of)
    _, plain = lens.run_and_cache(model, TOKENS, names)
    assert all(torch.equal(activations[name], plain[name]) for name in names)
    assert not any(value.requires_grad for value in (*activations.values(), *gradients.values()))


@both
def test_gradients_leave_the_parameters_alone(kind: str) -> None:
    make, names = MODELS[kind]
    model = make()
    first, *others = model.parameters()
    first.grad = torch.full_like(first, 3)
    lens.run_with_gradients(model, TOKENS, names, loss_of)
    assert torch.equal(first.grad, torch.full_like(first, 3))
    assert all(parameter.grad is None for parameter in others)


@both
def test_gradients_need_no_trained_parameter_and_no_grad_mode(kind: str) -> None:
    make, names = MODELS[kind]
    model = make()
    _, expected = lens.run_with_gradients(model, TOKENS, names, loss_of)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        _, gradients = lens.run_with_gradients(model, TOKENS, names, loss_of)
    for name in names:
        torch.testing.assert_close(gradients[name], expected[name])


def test_names_of_one_value_have_one_gradient() -> None:
    names = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_pre"]
    _, gradients = lens.run_with_gradients(transformer(), TOKENS, names, loss_of)
    torch.testing.assert_close(gradients[names[0]], gradients[names[1]])


@pytest.mark.skipif(lens.HAS_HOOKED_TRANSFORMER, reason="only bridges name a hook twice")
def test_a_bridge_answers_to_the_name_that_was_asked() -> None:
    names = ["blocks.0.attn.hook_q", "blocks.0.attn.q.hook_out"]
    model = transformer()
    _, read = lens.run_and_cache(model, TOKENS, names)
    _, gradients = lens.run_with_gradients(model, TOKENS, names, loss_of)
    assert list(read) == list(gradients) == names
    assert torch.equal(read[names[0]], read[names[1]])
    torch.testing.assert_close(gradients[names[0]], gradients[names[1]])


def test_what_has_no_gradient_is_refused() -> None:
    with pytest.raises(InputError, match="does not depend on hook_unused"):
        lens.run_with_gradients(Toy(), TOKENS, ["hook_embed", "hook_unused"], loss_of)
    with pytest.raises(InputError, match="does not depend on hook_embed"):
        lens.run_with_gradients(Toy(), TOKENS, ["hook_embed"], lambda logits: logits.detach().sum())
    with pytest.raises(InputError, match="hook_tokens holds token ids"):
        lens.run_with_gradients(Toy(), TOKENS, ["hook_tokens"], loss_of)


@both
def test_no_names_give_no_values(kind: str) -> None:
    model = MODELS[kind][0]()
    assert lens.run_and_cache(model, TOKENS, []).activations == {}
    assert lens.run_with_gradients(model, TOKENS, [], loss_of) == ({}, {})
