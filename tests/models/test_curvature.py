"""The steepest curvature of a loss, beside Hessians that are known or computed whole."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn import functional

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights, trained
from fd_interp.models.config import LearnedQuery, Minimal, ModelConfig, OneLayer, Transformer
from fd_interp.models.curvature import loss_gradient, top_eigenpair

VOCAB, LENGTH = 3, 4
TOKENS = torch.cartesian_prod(*[torch.arange(2)] * LENGTH)
LABELS = TOKENS[:, :2].sum(1) % 2
ATTENTION = OneLayer(d_model=4, d_head=4, std=0.5)
NORMED = Transformer(n_heads=2, d_model=3, d_head=2, d_mlp=3, normalization_type="LN", std=0.5)
BY_POSITION = Minimal(n_heads=2, std=0.5, stds={"W_V": 0.5})
seeds = st.integers(0, 10_000)
several = settings(deadline=None, max_examples=25)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotated(seed: int, eigenvalues: list[float]) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    axes = torch.linalg.qr(normal(seed, len(eigenvalues), len(eigenvalues))).Q
    return axes @ torch.diag(torch.tensor(eigenvalues).double()) @ axes.mT


def quadratic(H: Tensor, at: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`x H x / 2` where x is made of a vector of two and a matrix of the rest, `[2, *]`."""
    a, b = at[:2].clone().requires_grad_(), at[2:].view(2, -1).clone().requires_grad_()
    x = torch.cat([a, b.flatten()])
    return x @ H @ x / 2, {"a": a, "b": b}


def whole(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()])


def a_model(config: ModelConfig, seed: int = 0) -> tuple[lens.Model, dict[str, nn.Parameter]]:
    model = build(config, VOCAB, LENGTH, torch.float64)
    lens.load_weights(model, initial_weights(config, lens.weights(model), torch.Generator().manual_seed(seed)))
    return model, trained(config, model)


def loss_of(model: lens.Model) -> Tensor:
    return functional.cross_entropy(model(TOKENS)[:, -1], LABELS)


def dense_hessian(model: lens.Model, parameters: dict[str, nn.Parameter]) -> Tensor:
    """The whole Hessian, by central differences of the gradient."""
    rows, step = [], 1e-5
    for parameter in parameters.values():
        flat = parameter.detach().view(-1)
        for place in range(len(flat)):
            value, ends = flat[place].item(), []
            for end in (value + step, value - step):
                flat[place] = end
                ends.append(whole(loss_gradient(loss_of(model), parameters)))
            flat[place] = value
            rows.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(rows)


@given(seeds, st.lists(st.floats(-5, 5), min_size=2, max_size=2), st.floats(6, 50))
@several
def test_the_top_of_a_quadratic_is_its_largest_eigenvalue(seed: int, middle: list[float], top: float):
    H = rotated(seed, [-100.0, *middle, *middle, top])  # the largest in size is another one, and negative
    loss, parameters = quadratic(H, normal(seed, 6))
    value, vector = top_eigenpair(loss, parameters)
    assert value == pytest.approx(top, rel=1e-6)
    assert {name: part.shape for name, part in vector.items()} == {"a": (2,), "b": (2, 2)}
    assert whole(vector).norm().item() == pytest.approx(1)
    torch.testing.assert_close(H @ whole(vector), top * whole(vector), atol=1e-3 * top, rtol=0)


def test_the_top_of_a_negative_hessian_is_next_to_zero():
    loss, parameters = quadratic(rotated(0, [-1.0, -2.0, -3.0, -40.0]), normal(0, 4))
    assert top_eigenpair(loss, parameters).value == pytest.approx(-1)


def test_masses_say_which_weights_the_vector_moves():
    along = torch.tensor([0.6, 0.0, 0.0, 0.8, 0.0, 0.0]).double()
    loss, parameters = quadratic(9 * torch.outer(along, along), normal(0, 6))
    masses = top_eigenpair(loss, parameters).masses()
    assert {name: mass.item() for name, mass in masses.items()} == pytest.approx({"a": 0.36, "b": 0.64})


@given(seeds, seeds)
@several
def test_where_the_weights_are_does_not_matter_to_a_quadratic(seed: int, other: int):
    H = rotated(seed, [-1.0, 2.0, 3.0, 8.0])
    here, there = (top_eigenpair(*quadratic(H, normal(at, 4))).value for at in (seed, other))
    assert here == pytest.approx(there, rel=1e-6)


@given(seeds)
@several
def test_a_scale_divides_rows_and_columns(seed: int):
    H, scale = rotated(seed, [-1.0, 2.0, 3.0, 8.0]), normal(seed + 1, 4).exp()
    loss, parameters = quadratic(H, normal(seed, 4))
    found = top_eigenpair(loss, parameters, {"b": scale[2:].view(2, 1), "a": scale[:2]})
    dense = torch.linalg.eigvalsh(scale.rsqrt()[:, None] * H * scale.rsqrt())
    assert found.value == pytest.approx(dense[-1].item(), rel=1e-6)
    unsymmetric = torch.linalg.eigvals(H / scale[:, None]).real.max()
    assert found.value == pytest.approx(unsymmetric.item(), rel=1e-6)
    assert sum(found.masses().values()).item() == pytest.approx(1)


def test_a_scale_of_one_number_divides_the_sharpness_by_it():
    loss, parameters = quadratic(rotated(0, [1.0, 2.0, 3.0, 8.0]), normal(0, 4))
    alike = {"a": torch.tensor(0.25), "b": torch.tensor(0.25)}
    assert top_eigenpair(loss, parameters, alike).value == pytest.approx(32)


@pytest.mark.parametrize("seed", range(3))
def test_the_sharpness_of_a_learned_query_is_that_of_its_whole_hessian(seed: int):
    model, parameters = a_model(LearnedQuery(d_model=2, d_mlp=6), seed)
    detached = {name: parameter.detach() for name, parameter in parameters.items()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(functional_call(model, weights, (TOKENS,))[:, -1], LABELS)

    blocks = hessian(loss)(detached)
    rows = [torch.cat([blocks[i][j].flatten(-detached[j].ndim).flatten(0, -2) for j in detached], 1) for i in detached]
    H = torch.cat(rows)
    values, vectors = torch.linalg.eigh(H)
    found = top_eigenpair(loss_of(model), parameters)
    assert found.value == pytest.approx(values[-1].item(), rel=1e-4)
    assert (whole(found.vector) @ vectors[:, -1]).abs().item() == pytest.approx(1, abs=1e-4)
    assert sum(found.masses().values()).item() == pytest.approx(1)

    scale = {name: normal(seed, *parameter.shape).exp() for name, parameter in parameters.items()}
    divided = whole(scale).rsqrt()
    dense = torch.linalg.eigvalsh(divided[:, None] * H * divided)[-1].item()
    assert top_eigenpair(loss_of(model), parameters, scale).value == pytest.approx(dense, rel=1e-4)
    assert dense != pytest.approx(values[-1].item(), rel=1e-3)


@pytest.mark.parametrize("config", [ATTENTION, BY_POSITION, NORMED], ids=["one layer", "minimal", "transformer"])
def test_the_sharpness_of_other_models_is_that_of_differences_of_their_gradient(config: ModelConfig):
    model, parameters = a_model(config)
    H = dense_hessian(model, parameters)
    torch.testing.assert_close(H, H.mT, atol=1e-7, rtol=1e-5)
    found = top_eigenpair(loss_of(model), parameters)
    assert found.value == pytest.approx(torch.linalg.eigvalsh(H)[-1].item(), rel=1e-4)
    assert found.vector.keys() == parameters.keys()


def test_a_weight_held_fixed_is_no_direction():
    config = LearnedQuery(d_model=2, d_mlp=6)
    free, fixed = (a_model(c) for c in (config, config.model_copy(update={"fixed": {"W_V": "init"}})))
    tops = [top_eigenpair(loss_of(model), parameters) for model, parameters in (free, fixed)]
    assert "blocks.0.attn.W_V" in tops[0].vector
    assert "blocks.0.attn.W_V" not in tops[1].vector
    assert tops[1].value < tops[0].value  # of a block of a matrix it is never larger


def test_the_gradient_is_that_of_backward_and_parameters_are_left_alone():
    model, parameters = a_model(LearnedQuery(d_model=2, d_mlp=6))
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    loss = loss_of(model)
    gradient = loss_gradient(loss, parameters)
    first, again = top_eigenpair(loss, parameters), top_eigenpair(loss_of(model), parameters)
    assert first.value == again.value
    assert all(torch.equal(part, again.vector[name]) for name, part in first.vector.items())
    assert all(parameter.grad is None for parameter in parameters.values())
    assert all(torch.equal(parameter, before[name]) for name, parameter in parameters.items())
    loss.backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(gradient[name], parameter.grad)


def test_a_weight_that_the_loss_ignores_has_no_gradient_and_no_mass():
    loss, parameters = quadratic(rotated(0, [1.0, 2.0, 3.0, 8.0]), normal(0, 4))
    parameters["idle"] = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert loss_gradient(loss, parameters)["idle"].tolist() == [0, 0, 0]
    top = top_eigenpair(loss, parameters)
    assert top.value == pytest.approx(8)
    assert top.masses()["idle"].item() == pytest.approx(0, abs=1e-12)


def test_single_precision_is_enough_for_a_few_digits():
    loss, parameters = quadratic(rotated(0, [1.0, 2.0, 3.0, 8.0]).float(), normal(0, 4).float())
    found = top_eigenpair(loss, parameters)
    assert found.value == pytest.approx(8, rel=1e-5)
    assert found.vector["a"].dtype == torch.float32


def test_a_loss_without_curvature_has_none():
    loss, parameters = quadratic(torch.zeros(4, 4).double(), normal(0, 4))
    top = top_eigenpair(loss, parameters)
    assert top.value == 0
    assert sum(top.masses().values()).item() == pytest.approx(1)


def test_what_has_no_curvature_is_refused():
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for ask in (loss_gradient, top_eigenpair):
        with pytest.raises(InputError, match="the gradient of the loss, which is 0, is not finite here"):
            ask(x.square().sum().sqrt(), {"x": x})


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        ({"a": torch.ones(2)}, "there is no scale for b; give one for each parameter"),
        ({"a": torch.ones(2), "b": torch.tensor([[1.0], [0.0]])}, "a scale is not positive"),
        ({"a": torch.full((2,), np.nan), "b": torch.ones(2, 1)}, "a scale is not positive"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(scale: dict[str, Tensor], sentence: str):
    loss, parameters = quadratic(rotated(0, [1.0, 2.0, 3.0, 8.0]), normal(0, 4))
    with pytest.raises(InputError, match=sentence):
        top_eigenpair(loss, parameters, scale)
