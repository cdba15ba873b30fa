import math

import numpy as np
import pytest
import torch

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights, trained
from fd_interp.models.config import OneLayer, Transformer

D_VOCAB, N_CTX = 60, 5
LEARNED = OneLayer(d_model=50, d_head=40, n_heads=3, fixed={})
DEEP = Transformer(n_layers=2, n_heads=3, d_model=8, d_head=5, d_mlp=7, normalization_type="LN")
Config = OneLayer | Transformer


def drawn(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> lens.Weights:
    model = build(config, D_VOCAB, N_CTX, dtype)
    return initial_weights(config, lens.weights(model), torch.Generator().manual_seed(seed))


def same(left: lens.Weights, right: lens.Weights) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def changed(config: Config, **fields: object) -> Config:
    return config.model_copy(update=fields)


@pytest.mark.parametrize("config", [LEARNED, DEEP], ids=["one layer", "transformer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_built_model_fits_its_task_and_takes_its_initial_weights(config: Config, dtype: torch.dtype) -> None:
    model = build(config, D_VOCAB, N_CTX, dtype)
    weights = drawn(config, dtype=dtype)
    lens.load_weights(model, weights)
    assert same(lens.weights(model), weights)
    tokens = torch.arange(N_CTX).expand(2, -1)
    assert model(tokens).shape == (2, N_CTX, D_VOCAB)
    assert model(tokens).dtype == dtype
    assert (model.cfg.d_vocab, model.cfg.n_ctx) == (D_VOCAB, N_CTX)


def test_every_weight_is_normal_with_the_std_of_its_name() -> None:
    weights = drawn(changed(LEARNED, std=0.3, stds={"W_Q": 2.0, "W_U": 0.0}))
    stds = {"W_E": 0.3, "W_Q": 2.0, "W_K": 0.3, "W_V": 0.3, "W_O": 0.3, "W_U": 0.0}
    assert {name.rsplit(".", 1)[-1] for name in weights} == stds.keys()
    for name, weight in weights.items():
        std, n = stds[name.rsplit(".", 1)[-1]], weight.numel()
        assert abs(weight.mean()) <= 5 * std / math.sqrt(n), name
        assert abs(weight.std() - std) <= 5 * std / math.sqrt(2 * n), name
        assert weight.abs().max() <= 6 * std, name


def test_biases_start_at_zero_and_normalisation_at_one() -> None:
    for name, weight in drawn(DEEP).items():
        short = name.rsplit(".", 1)[-1]
        if short == "w":
            assert torch.equal(weight, torch.ones_like(weight)), name
        elif short.startswith("b"):
            assert weight.count_nonzero() == 0, name
        else:
            assert weight.count_nonzero() == weight.numel(), name
    assert {"blocks.1.ln2.w", "blocks.1.ln2.b", "ln_final.w", "blocks.0.mlp.b_in", "unembed.b_U"} <= drawn(DEEP).keys()


def test_a_held_weight_is_what_it_is_held_at() -> None:
    config = Transformer(n_heads=2, d_model=8, d_head=8, fixed={"W_V": "identity", "W_pos": "zero", "W_Q": "init"})
    weights, free = drawn(config), drawn(changed(config, fixed={}))
    assert torch.equal(weights["blocks.0.attn.W_V"], torch.eye(8).expand(2, 8, 8))
    assert weights["pos_embed.W_pos"].count_nonzero() == 0
    assert torch.equal(weights["blocks.0.attn.W_Q"], free["blocks.0.attn.W_Q"])


@pytest.mark.parametrize("name", ["W_E", "W_pos", "W_Q", "W_K", "W_V", "W_O", "W_U"])
@pytest.mark.parametrize("hold", ["zero", "init"])
def test_holding_one_weight_leaves_the_draws_of_the_others(name: str, hold: str) -> None:
    free, held = drawn(DEEP), drawn(changed(DEEP, fixed={name: hold}))
    others = {full for full in free if not full.endswith(name)}
    assert same({full: free[full] for full in others}, {full: held[full] for full in others})


def test_the_std_of_one_weight_leaves_the_draws_of_the_others_and_only_scales_its_own() -> None:
    free, wide = drawn(LEARNED), drawn(changed(LEARNED, stds={"W_K": 1.0}))
    for name, weight in free.items():
        factor = 1 / LEARNED.std if name.endswith("W_K") else 1
        torch.testing.assert_close(wide[name], weight * factor)


def test_the_order_in_which_weights_are_given_does_not_matter() -> None:
    like = lens.weights(build(DEEP, D_VOCAB, N_CTX))
    orders = [dict(sorted(like.items())), dict(sorted(like.items(), reverse=True))]
    first, second = (initial_weights(DEEP, order, torch.Generator().manual_seed(3)) for order in orders)
    assert same(first, second)


@pytest.mark.parametrize("config", [LEARNED, DEEP], ids=["one layer", "transformer"])
def test_both_precisions_draw_the_same_values(config: Config) -> None:
    single, double = drawn(config), drawn(config, dtype=torch.float64)
    assert all(weight.dtype == torch.float64 for weight in double.values())
    assert same(single, {name: weight.float() for name, weight in double.items()})
    assert any(not torch.equal(single[name].double(), double[name]) for name in single)


def test_a_seed_gives_its_own_weights_again_and_no_others() -> None:
    assert same(drawn(LEARNED, seed=1), drawn(LEARNED, seed=1))
    one, two = drawn(LEARNED, seed=1), drawn(LEARNED, seed=2)
    assert not any(torch.equal(one[name], two[name]) for name in one)
    layers = drawn(DEEP)
    assert not torch.equal(layers["blocks.0.attn.W_Q"], layers["blocks.1.attn.W_Q"])


def test_drawing_touches_no_global_generator() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    drawn(DEEP)
    drawn(LEARNED)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (OneLayer(fixed={"W_E": "identity"}), "embed.W_E"),
        (Transformer(d_model=8, d_head=5, fixed={"W_O": "identity"}), "blocks.0.attn.W_O"),
    ],
    ids=["one layer", "transformer"],
)
def test_a_weight_that_is_not_square_cannot_be_held_at_the_identity(config: Config, name: str) -> None:
    with pytest.raises(InputError, match=rf"{name} cannot be held at the identity: it is .*, and not square") as caught:
        drawn(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "held", "count"),
    [
        (OneLayer(), {"W_V", "W_O"}, 4),
        (LEARNED, set(), 6),
        (OneLayer(fixed={"W_Q": "init", "W_K": "init"}), {"W_Q", "W_K"}, 4),
        (Transformer(fixed={"W_pos": "zero"}), {"W_pos"}, 10),
        (DEEP, set(), 37),
    ],
)
def test_training_moves_what_is_not_held(config: Config, held: set[str], count: int) -> None:
    model = build(config, D_VOCAB, N_CTX)
    moved = trained(config, model)
    assert len(moved) == count
    assert not {name for name in moved if name.rsplit(".", 1)[-1] in held}
    assert "unembed.b_U" not in moved
    assert all(parameter.requires_grad for parameter in moved.values())
    for name, parameter in lens.trainable(model).items():
        assert parameter.requires_grad == (name in moved)
    lens.load_weights(model, drawn(config))
    model(torch.arange(N_CTX)[None]).square().sum().backward()
    assert {name for name, parameter in lens.trainable(model).items() if parameter.grad is not None} == moved.keys()


@pytest.mark.parametrize("make", [OneLayer, Transformer])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fixed": {"W_X": "zero"}}, "has no weight W_X; known: "),
        ({"stds": {"w_q": 1.0}}, "has no weight w_q; known: "),
        ({"fixed": {"W_V": "one"}}, "'identity', 'zero' or 'init', not 'one'"),
        ({"std": -0.1}, "std: Input should be greater than or equal to 0, not -0.1"),
        ({"std": math.inf}, "std: Input should be a finite number"),
        ({"stds": {"W_Q": -1.0}}, "stds.W_Q: Input should be greater than or equal to 0, not -1.0"),
        ({"n_heads": 0}, "n_heads: Input should be greater than 0, not 0"),
        ({"attn_scale": 0}, "attn_scale"),
        ({"d_modle": 3}, "has no field 'd_modle', did you mean d_model"),
    ],
)
def test_a_model_that_cannot_be_is_refused(make: type[Config], fields: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["W_V", "W_O"])
def test_the_identity_needs_square_heads(name: str) -> None:
    with pytest.raises(InputError, match="only where d_head equals d_model, here 8 and 16"):
        OneLayer(d_head=8, fixed={name: "identity"})
    with pytest.raises(InputError, match="has no weight W_in"):
        Transformer(fixed={"W_in": "zero"})
    assert Transformer(d_mlp=4, fixed={"W_in": "zero"}).fixed == {"W_in": "zero"}


def test_a_bias_cannot_be_held_at_the_identity():
    with pytest.raises(InputError, match="b_Q is a bias, so it can be held at zero, not at the identity"):
        Transformer(fixed={"b_Q": "identity"})
