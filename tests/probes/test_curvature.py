"""Curvature, halving and movement on weights set by hand and on a run that keeps Adam's second moment."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights, trained
from fd_interp.models.config import LearnedQuery, ModelConfig, Transformer
from fd_interp.models.curvature import top_eigenpair
from fd_interp.observation import observe
from fd_interp.probes.curvature import SECOND_MOMENT, halving, loss_curvature, movement, stability_limit
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.loop import batch_loss, train
from fd_interp.training.run import SGD, AdamW, Every, Keep, Run, Start, Training
from fd_interp.training.series import Inputs, Series, Snapshot, open_series

TASK = SparseModularAddition(length=4, k=2, sequences=64)
QUERY = LearnedQuery(d_model=2, d_mlp=6)
ADAM = AdamW(lr=0.03, betas=(0.9, 0.99), eps=1e-6)
RUN = Run(
    task=TASK,
    model=QUERY,
    training=Training(optimizer=ADAM, steps=30, batch_size=8, loss_on="last"),
    keep=Keep(at=Every(stride=10), moments=(SECOND_MOMENT,), held_out=16),
)
W_V = "blocks.0.attn.W_V"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, trained."""
    folder = tmp_path_factory.mktemp("runs") / "modular"
    train(RUN, folder, show_progress=False)
    return folder


def with_model(model: ModelConfig) -> Run:
    return RUN.model_copy(update={"model": model, "keep": Keep(held_out=16)})


def at_start(run: Run, seed: int = 0, **factors: float) -> lens.Weights:
    """Random weights, some of them multiplied, by the last word of their name."""
    like = lens.weights(build(run.model, TASK.d_vocab, TASK.n_ctx, torch.float64))
    drawn = initial_weights(run.model, like, torch.Generator().manual_seed(seed))
    return {name: factors.get(name.rsplit(".", 1)[-1], 1.0) * weight for name, weight in drawn.items()}


def by_hand(run: Run, *snapshots: Mapping[str, Tensor]) -> Series:
    def model() -> lens.Model:
        return build(run.model, TASK.d_vocab, TASK.n_ctx, torch.float64)

    def inputs() -> Inputs:
        return Inputs(TASK.population, TASK.token_frequencies(), TASK.token_strings())

    weights = [dict(each) for each in snapshots]
    return Series("by hand", tuple(Snapshot(10 * i, lambda i=i: weights[i], model) for i in range(len(weights))),
                  model, inputs, run)  # fmt: skip


def dense_hessian(run: Run, weights: lens.Weights) -> tuple[Tensor, list[str]]:
    """Row by row."""
    model = build(run.model, TASK.d_vocab, TASK.n_ctx, torch.float64)
    parameters = trained(run.model, model)
    lens.load_weights(model, weights)
    tensors = list(parameters.values())
    gradients = torch.autograd.grad(batch_loss(run, model, TASK.population), tensors, create_graph=True)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    rows = [torch.autograd.grad(each, tensors, retain_graph=True, materialize_grads=True) for each in flat]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]), list(parameters)


def test_curvature_is_that_of_the_loss_on_the_sequences_observed(directory: Path):
    series = open_series(directory)
    trace = observe(series, [loss_curvature(RUN)])
    assert trace.step.values.tolist() == [0, 10, 20, 30]
    for snapshot in series:
        model, here = snapshot.model(), trace.sel(step=snapshot.step)
        parameters = trained(RUN.model, model)
        loss = batch_loss(RUN, model, TASK.population)
        top = top_eigenpair(loss, parameters)
        loss.backward()
        squares = {name: parameter.grad.square().sum().item() for name, parameter in parameters.items()}
        assert here.weight_name.values.tolist() == list(parameters)
        assert here.gradient_norm.item() == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-4)
        shares = [square / sum(squares.values()) for square in squares.values()]
        np.testing.assert_allclose(here.gradient_share, shares, atol=1e-4)
        assert here.sharpness.item() == pytest.approx(top.value, rel=1e-4)
        masses = [mass.item() for mass in top.masses().values()]
        np.testing.assert_allclose(here.sharpness_mass, masses, atol=1e-3)
        assert here.sharpness_mass.sum().item() == pytest.approx(1)
        assert here.gradient_share.sum().item() == pytest.approx(1)


def test_another_batch_has_another_curvature(directory: Path):
    series = open_series(directory)
    few = TASK.labelled(TASK.population.tokens[:3])
    whole, part = (observe(series, [loss_curvature(RUN)], batch) for batch in (None, few))
    assert not np.allclose(whole.sharpness, part.sharpness, rtol=0.05)


def test_preconditioned_sharpness_is_that_of_the_hessian_divided_by_adams_steps(directory: Path):
    series = open_series(directory)
    found = observe(series, [loss_curvature(RUN)]).preconditioned_sharpness
    assert np.isnan(found.sel(step=0))  # Adam has seen no gradient yet
    for snapshot in series[1:]:
        H, names = dense_hessian(RUN, snapshot.weights())
        stored = snapshot.activations()
        v = torch.cat([stored[f"exp_avg_sq.{name}"].flatten() for name in names]).double()
        D = (v / (1 - 0.99**snapshot.step)).sqrt() + 1e-6
        expected = torch.linalg.eigvals(H / D[:, None]).real.max().item()
        assert found.sel(step=snapshot.step).item() == pytest.approx(expected, rel=1e-5)
        assert torch.linalg.eigvals(H / (v.sqrt() + 1e-6)[:, None]).real.max() > 1.5 * expected  # uncorrected


def test_moments_that_a_run_has_taken_over_are_corrected_by_their_own_age(directory: Path, tmp_path: Path):
    snapshot = directory / "weights" / "step_00000020.safetensors"
    start = Start(snapshot=str(snapshot), moments=("exp_avg", SECOND_MOMENT))
    moments = RUN.keep.model_copy(update={"moments": ("exp_avg", SECOND_MOMENT)})
    with pytest.raises(InputError, match="keeps no exp_avg"):
        train(RUN.model_copy(update={"start": start}), tmp_path / "refused", show_progress=False)
    first = RUN.model_copy(update={"keep": moments})
    train(first, tmp_path / "first", show_progress=False)
    again = start.model_copy(update={"snapshot": str(tmp_path / "first" / "weights" / snapshot.name)})
    later = first.model_copy(update={"start": again, "training": RUN.training.model_copy(update={"steps": 10})})
    series = train(later, tmp_path / "later", show_progress=False)
    sharpness = observe(series, [loss_curvature(later)]).preconditioned_sharpness
    before = observe(open_series(tmp_path / "first"), [loss_curvature(first)]).preconditioned_sharpness
    assert sharpness.sel(step=0).item() == pytest.approx(before.sel(step=20).item(), rel=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"keep": Keep(held_out=16)},
        {"keep": Keep(held_out=16, moments=("exp_avg",))},
        {"training": RUN.training.model_copy(update={"optimizer": SGD()}), "keep": Keep(held_out=16)},
    ],
    ids=["nothing kept", "another moment kept", "no Adam"],
)
def test_without_adams_second_moment_there_is_no_preconditioned_sharpness(changes: dict):
    probe = loss_curvature(RUN.model_copy(update=changes))
    assert "preconditioned_sharpness" not in probe.variables
    assert "sharpness" in observe(by_hand(RUN, at_start(RUN)), [probe])


def test_the_limit_of_stability_is_that_of_the_paper():
    assert stability_limit(AdamW(lr=1e-3)) == pytest.approx(38_000)
    assert stability_limit(AdamW(lr=0.1, betas=(0.0, 0.9))) == pytest.approx(20)  # 2 / lr, as without momentum


def test_adam_grows_beyond_its_limit_and_settles_below():
    """On a parabola so close to its bottom that Adam divides by its eps of 1 alone."""
    ends = []
    for factor in (0.98, 1.02):
        x = torch.full((1,), 1e-12, dtype=torch.float64, requires_grad=True)
        adam = torch.optim.AdamW([x], lr=ADAM.lr, betas=ADAM.betas, eps=1.0, weight_decay=0.0)
        for step in range(420):  # at rest until Adam no longer corrects for a short memory
            x.grad = (0 if step < 300 else factor * stability_limit(ADAM)) * x.detach()
            adam.step()
        ends.append(x.abs().item())
    assert ends[0] < 1e-12
    assert ends[1] > 1e-9


MOSTLY_THE_NORM = {"W_V": 1e-3, "W_out": 20.0}
"""What is gathered is so short that it hardly reaches the logits except through the norm, and the MLP is steep."""


@pytest.mark.parametrize("seed", range(3))
def test_halving_what_is_normalised_quadruples_the_sharpness(seed: int):
    run = with_model(QUERY.model_copy(update={"eps": 1e-12}))
    trace = observe(by_hand(run, at_start(run, seed, **MOSTLY_THE_NORM)), [halving(run), loss_curvature(run)])
    assert trace.halved_sharpness_ratio.item() == pytest.approx(4, abs=0.05)
    assert trace.halved_loss_ratio.item() == pytest.approx(1, abs=0.01)
    assert trace.sharpness_mass[0, list(trace.weight_name.values).index(W_V)] > 0.9


@pytest.mark.parametrize("seed", range(3))
def test_where_nothing_is_normalised_halving_does_not(seed: int):
    run = with_model(QUERY.model_copy(update={"normalized": ("ln1",)}))
    trace = observe(by_hand(run, at_start(run, seed, **MOSTLY_THE_NORM)), [halving(run)])
    assert trace.halved_sharpness_ratio.item() < 1.2


def test_where_other_weights_are_curved_halving_does_not():
    run = with_model(QUERY)
    trace = observe(by_hand(run, at_start(run, W_V=50.0)), [halving(run), loss_curvature(run)])
    assert trace.sharpness_mass[0, list(trace.weight_name.values).index(W_V)] < 0.1
    assert trace.halved_sharpness_ratio.item() < 2


def test_any_weight_can_be_halved_and_one_that_is_not_there_is_refused():
    weights = at_start(RUN)
    run = with_model(QUERY)
    trace = observe(by_hand(run, weights), [halving(run, "blocks.0.mlp.W_out")])
    halved = {**weights, "blocks.0.mlp.W_out": weights["blocks.0.mlp.W_out"] / 2}
    sharpness = observe(by_hand(run, weights, halved), [loss_curvature(run)]).sharpness
    assert trace.halved_sharpness_ratio.item() == pytest.approx((sharpness[1] / sharpness[0]).item())
    with pytest.raises(InputError, match=r"the model has no weight 'blocks\.0\.attn\.W_v', did you mean"):
        halving(run, "blocks.0.attn.W_v")


def turned(weights: lens.Weights, angle: float, factor: float = 1.0) -> lens.Weights:
    c, s = math.cos(angle), math.sin(angle)
    rotation = torch.tensor([[c, s], [-s, c]], dtype=torch.float64)
    return {**weights, W_V: factor * weights[W_V] @ rotation}


def test_vectors_turn_and_shrink_as_the_weight_that_writes_them():
    start = at_start(RUN)
    snapshots = [start, turned(start, 0.3), turned(start, 0.3, 0.25), turned(start, -0.1, 0.25)]
    trace = observe(by_hand(RUN, *snapshots), [movement()])
    assert trace.angle_change.dims == ("step", "layer")
    assert trace.angle_change.values.ravel() == pytest.approx([0, 0.3, 0, 0.4])
    lengths = trace.smallest_norm.values.ravel()
    assert lengths / lengths[0] == pytest.approx([1, 1, 0.25, 0.25])
    xi = by_hand(RUN, start)[0].cache(["blocks.0.hook_attn_out"], TASK.population.tokens)["blocks.0.hook_attn_out"]
    assert lengths[0] == pytest.approx(xi.norm(dim=-1).min().item())


def test_each_time_movement_is_observed_it_starts_at_rest():
    start, probe = at_start(RUN), movement()
    series = by_hand(RUN, start, turned(start, 0.3))
    first, again = (observe(series, [probe]).angle_change.values.ravel().tolist() for _ in range(2))
    assert first == again == pytest.approx([0, 0.3])


def test_a_hook_is_meant_in_every_layer_or_by_its_full_name():
    run = with_model(Transformer(n_layers=2, d_model=4, d_head=3, std=0.5))
    series = by_hand(run, at_start(run), at_start(run, 1))
    every, one = (observe(series, [movement(hook)]) for hook in ("attn_out", "blocks.1.hook_attn_out"))
    assert every.sizes["layer"] == 2
    assert one.sizes["layer"] == 1
    np.testing.assert_allclose(every.angle_change[:, 1], one.angle_change[:, 0])
    assert not np.allclose(every.angle_change[1, 0], one.angle_change[1, 0])


def test_observing_leaves_the_weights_as_they_were():
    weights = at_start(RUN)
    copies = {name: weight.clone() for name, weight in weights.items()}
    run = with_model(QUERY)
    observe(by_hand(run, weights), [halving(run), loss_curvature(run), movement()])
    assert all(torch.equal(weight, copies[name]) for name, weight in weights.items())


def test_a_transformers_curvature_is_that_of_all_its_positions():
    run = with_model(Transformer(d_model=4, d_head=3, d_mlp=5, std=0.5)).model_copy(
        update={"training": Training(loss_on="all")}
    )
    weights = at_start(run)
    H, names = dense_hessian(run, weights)
    trace = observe(by_hand(run, weights), [loss_curvature(run)])
    assert trace.sharpness.item() == pytest.approx(torch.linalg.eigvalsh(H)[-1].item(), rel=1e-5)
    assert trace.weight_name.values.tolist() == names
