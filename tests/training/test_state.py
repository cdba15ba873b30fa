from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.config import LearnedQuery
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.loop import batch_loss, batches, train
from fd_interp.training.run import SGD, AdamW, Given, Keep, Run, Start, Training
from fd_interp.training.state import (
    LOSSES_FILE,
    STATE_FILE,
    DivergedError,
    State,
    kept_moments,
    losses_of,
    moments_of,
    read_state,
    snapshot_name,
    state_at,
    write_snapshot,
    write_state,
)
from tests.training.test_series import listing, one_sentence

WEIGHTS = {"embed.W_E": torch.randn(3, 2), "blocks.0.attn.b_Q": torch.randn(1, 2)}
MOMENTS = {
    "embed.W_E": {"step": torch.tensor(5.0), "exp_avg": torch.randn(3, 2), "exp_avg_sq": torch.rand(3, 2)},
    "blocks.0.attn.b_Q": {"step": torch.tensor(5.0), "exp_avg": torch.randn(1, 2), "exp_avg_sq": torch.rand(1, 2)},
}


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    written = State(WEIGHTS, MOMENTS, [0.5, 0.25, 0.1 + 0.2])
    write_state(tmp_path, written)
    assert listing(tmp_path).keys() == {LOSSES_FILE, STATE_FILE}
    found = read_state(tmp_path)
    assert found is not None
    torch.testing.assert_close(found.weights, WEIGHTS, atol=0, rtol=0)
    torch.testing.assert_close(found.moments, MOMENTS, atol=0, rtol=0)
    assert found.losses == losses_of(tmp_path) == written.losses
    assert pd.read_parquet(tmp_path / LOSSES_FILE).step.tolist() == [1, 2, 3]


def test_a_state_without_moments_has_none(tmp_path: Path) -> None:
    write_state(tmp_path, State(WEIGHTS, {"embed.W_E": {}}, [1.0]))
    found = read_state(tmp_path)
    assert found is not None
    assert found.moments == {}


def test_losses_written_after_the_state_do_not_count_and_missing_ones_are_missed(tmp_path: Path) -> None:
    write_state(tmp_path, State(WEIGHTS, {}, [1.0, 2.0]))
    file = tmp_path / LOSSES_FILE
    pd.DataFrame({"step": [1, 2, 3], "loss": [1.0, 2.0, 3.0]}).to_parquet(file)
    found = read_state(tmp_path)
    assert found is not None
    assert found.losses == [1.0, 2.0]
    assert losses_of(tmp_path) == [1.0, 2.0, 3.0]
    pd.DataFrame({"step": [1], "loss": [1.0]}).to_parquet(file)
    with pytest.raises(InputError, match=r"losses.parquet ends at step 1, before step 2 of state/latest.safetensors"):
        read_state(tmp_path)
    for broken in (b"no parquet", None):
        file.unlink()
        if broken:
            file.write_bytes(broken)
        with pytest.raises(InputError, match=r"losses.parquet cannot be read") as caught:
            losses_of(tmp_path)
        one_sentence(caught)


def test_names_of_snapshots_sort_as_their_steps() -> None:
    steps = [0, 9, 10, 99, 100, 12_345_678]
    assert sorted(map(snapshot_name, steps)) == [snapshot_name(step) for step in steps]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_leaves_nothing_behind(tmp_path: Path, wrong: float) -> None:
    kept = {"exp_avg.embed.W_E": torch.zeros(2)}
    broken = WEIGHTS | {"embed.W_E": torch.tensor([[0.0, wrong]])}
    with pytest.raises(DivergedError, match=r"embed.W_E is no longer finite at step 7; a smaller learning rate"):
        write_snapshot(tmp_path, 7, broken, kept)
    assert not listing(tmp_path)
    write_snapshot(tmp_path, 7, WEIGHTS, kept)
    write_snapshot(tmp_path, 8, WEIGHTS, {})
    names = {"activations/step_00000007.safetensors"} | {f"weights/{snapshot_name(step)}" for step in (7, 8)}
    assert listing(tmp_path).keys() == names


def test_what_an_optimizer_has_not_begun_to_remember_is_not_there() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert moments_of(optimizer, {"w": parameter}) == {"w": {}}
    optimizer.state[parameter]["momentum_buffer"] = None  # as older versions of torch leave it
    assert moments_of(optimizer, {"w": parameter}) == {"w": {}}
    optimizer.state[parameter]["momentum_buffer"] = torch.ones(2)
    assert moments_of(optimizer, {"w": parameter})["w"]["momentum_buffer"].tolist() == [1, 1]


def test_moments_are_kept_by_name_and_there_are_none_before_the_first_step() -> None:
    kept = kept_moments(MOMENTS, ("exp_avg_sq",))
    assert kept.keys() == {"exp_avg_sq.embed.W_E", "exp_avg_sq.blocks.0.attn.b_Q"}
    assert torch.equal(kept["exp_avg_sq.embed.W_E"], MOMENTS["embed.W_E"]["exp_avg_sq"])
    assert kept_moments(MOMENTS, ()) == kept_moments({"w": {}}, ("exp_avg_sq",)) == {}


def a_run(**fields: Any) -> Run:
    run = Run(
        task=SparseModularAddition(length=6, k=3, sequences=60),
        model=LearnedQuery(d_mlp=8),
        training=Training(optimizer=AdamW(lr=1e-2), steps=2, batch_size=8, loss_on="last"),
        keep=Keep(at=Given(steps=(1,)), moments=("exp_avg", "exp_avg_sq"), held_out=8),
        dtype="float64",
    )
    return run.model_copy(update=fields)


def test_what_is_kept_are_averages_of_the_gradients(tmp_path: Path) -> None:
    run = a_run()
    series = train(run, tmp_path, show_progress=False)
    mean: dict[str, torch.Tensor] = {}
    square: dict[str, torch.Tensor] = {}
    assert series[0].activations() == {}
    for snapshot, before, batch in zip(series[1:], series, batches(run), strict=False):
        model = before.model()
        batch_loss(run, model, batch).backward()
        for name, parameter in lens.trainable(model).items():
            assert parameter.grad is not None
            mean[name] = 0.9 * mean.get(name, 0) + 0.1 * parameter.grad
            square[name] = 0.999 * square.get(name, 0) + 0.001 * parameter.grad.square()
        expected = {f"exp_avg.{name}": value for name, value in mean.items()}
        expected |= {f"exp_avg_sq.{name}": value for name, value in square.items()}
        torch.testing.assert_close(snapshot.activations(), expected, atol=1e-14, rtol=1e-9)
    assert series.steps == [0, 1, 2]


def test_weights_that_are_held_have_no_moments_and_hooks_are_kept_beside(tmp_path: Path) -> None:
    keep = Keep(at=Given(), moments=("exp_avg",), hooks=("pattern",), held_out=8)
    run = a_run(model=LearnedQuery(d_mlp=8, fixed={"W_V": "init"}), keep=keep)
    kept = train(run, tmp_path, show_progress=False)[-1].activations()
    assert "exp_avg.blocks.0.attn.W_V" not in kept
    assert {"exp_avg.embed.W_E", "blocks.0.attn.hook_pattern"} < kept.keys()
    assert len(kept) == 8


def test_keeping_moments_changes_nothing_else(tmp_path: Path) -> None:
    kept, plain = tmp_path / "kept", tmp_path / "plain"
    train(a_run(), kept, show_progress=False)
    train(a_run(keep=Keep(at=Given(steps=(1,)), held_out=8)), plain, show_progress=False)
    found, expected = listing(kept), listing(plain)
    found = {name: content for name, content in found.items() if not name.startswith("activations")}
    assert found.keys() == expected.keys()
    assert all(found[name] == expected[name] for name in found if name != "run.json")


def test_momentum_is_a_moment_and_plain_descent_has_none(tmp_path: Path) -> None:
    keep, optimizer = Keep(at=Given(), moments=("momentum_buffer",)), SGD(lr=0.1, momentum=0.9)
    training = a_run().training.model_copy(update={"optimizer": optimizer})
    kept = train(a_run(keep=keep, training=training), tmp_path / "momentum", show_progress=False)[-1].activations()
    assert kept["momentum_buffer.embed.W_E"].shape == (3, 2)
    plain = training.model_copy(update={"optimizer": SGD(lr=0.1)})
    with pytest.raises(InputError, match="no average 'momentum_buffer'; sgd has none"):
        a_run(keep=keep, training=plain)


def test_a_moment_that_the_optimizer_has_not_is_named() -> None:
    with pytest.raises(InputError, match="no average 'momentum_buffer'; adamw has exp_avg, exp_avg_sq") as caught:
        a_run(keep=Keep(at=Given(), moments=("momentum_buffer",)))
    one_sentence(caught)


def test_a_start_takes_over_all_moments_or_none() -> None:
    with pytest.raises(InputError, match=r"start\.moments: give all averages of the optimizer or none") as caught:
        a_run(start=Start(snapshot="somewhere", moments=("exp_avg_sq",)))
    one_sentence(caught)
    assert a_run(start=Start(snapshot="somewhere", moments=("exp_avg_sq", "exp_avg"))).start is not None


def test_a_start_is_a_snapshot_with_what_was_kept_there(tmp_path: Path) -> None:
    file = tmp_path / "weights" / snapshot_name(5)
    held = WEIGHTS | {"a_weight_that_is_held": torch.ones(2)}  # the first by name, and without averages
    write_snapshot(tmp_path, 5, held, kept_moments(MOMENTS, ("exp_avg", "exp_avg_sq")))
    plain = state_at(Start(snapshot=str(file)))
    torch.testing.assert_close(plain.weights, held, atol=0, rtol=0)
    assert (plain.moments, plain.losses) == ({}, [])
    whole = state_at(Start(snapshot=str(file), moments=("exp_avg", "exp_avg_sq")))
    torch.testing.assert_close(whole.moments, MOMENTS, atol=0, rtol=0)
    whole.moments["embed.W_E"]["step"] += 1  # as an optimizer does, for each weight
    assert whole.moments["blocks.0.attn.b_Q"]["step"] == 5


def test_a_start_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*nowhere; give one like RUN/weights/step_00000064"):
        state_at(Start(snapshot=str(tmp_path / "nowhere")))
    file = tmp_path / "weights" / snapshot_name(5)
    for kept, absent in (({}, "exp_avg, exp_avg_sq"), (kept_moments(MOMENTS, ("exp_avg_sq",)), "exp_avg")):
        write_snapshot(tmp_path, 5, WEIGHTS, kept)
        with pytest.raises(
            InputError, match=f"step_00000005.safetensors keeps no {absent}; train it with keep.moments"
        ):
            state_at(Start(snapshot=str(file), moments=("exp_avg", "exp_avg_sq")))


def test_a_run_goes_on_from_a_snapshot_as_adam_would(tmp_path: Path) -> None:
    """The next step of a run is that of one that starts there, on the same batch."""
    keep = Keep(at=Given(steps=(0, 1, 2)), moments=("exp_avg", "exp_avg_sq"), held_out=8)
    first = train(a_run(keep=keep), tmp_path / "first", show_progress=False)
    again = {}
    for moments in ((), keep.moments):
        start = Start(snapshot=str(tmp_path / "first" / "weights" / snapshot_name(1)), moments=moments)
        run = a_run(keep=keep, start=start)
        series = train(run, tmp_path / f"from {len(moments)}", show_progress=False)
        torch.testing.assert_close(series[0].weights(), first[1].weights(), atol=0, rtol=0)
        again[moments] = series
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in first[1].weights().items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.0)
    kept = first[1].activations()
    for name, parameter in parameters.items():
        averages = {moment: kept[f"{moment}.{name}"].clone() for moment in keep.moments}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **averages}
    model = first[1].model()
    batch_loss(run, model, next(batches(run))).backward()
    for name, parameter in lens.trainable(model).items():
        parameters[name].grad = parameter.grad
    optimizer.step()
    expected = {name: parameter.detach() for name, parameter in parameters.items()}
    torch.testing.assert_close(again[keep.moments][1].weights(), expected, atol=1e-12, rtol=1e-9)
    assert (again[()][1].weights()["embed.W_E"] - expected["embed.W_E"]).abs().max() > 1e-4
