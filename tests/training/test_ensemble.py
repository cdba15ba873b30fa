import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fd_interp.config import InputError
from fd_interp.models.config import LearnedQuery, OneLayer
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training import ensemble, loop
from fd_interp.training.ensemble import train_together
from fd_interp.training.loop import BATCHES_PER_DRAW, DivergedError, train
from fd_interp.training.run import SGD, AdamW, Every, Given, Keep, Run, Start, Training
from fd_interp.training.series import Series, open_series
from fd_interp.training.state import losses_of, read_state
from tests.training.test_resume import before_step
from tests.training.test_series import listing, one_sentence

STEPS = 70
ADAMW = AdamW(lr=1e-2, lrs={"W_V": 3e-3}, weight_decay=0.01)
MOMENTUM = SGD(lr=0.1, momentum=0.9)
HELD = LearnedQuery(d_model=4, d_mlp=8, fixed={"W_V": "init", "b_Q": "zero"})


def a_run(optimizer: SGD | AdamW = ADAMW, steps: int = STEPS, seed: int = 0, **fields: Any) -> Run:
    run = Run(
        task=SparseModularAddition(length=6, k=3, sequences=60, data_seed=seed),
        model=LearnedQuery(d_mlp=8),
        training=Training(optimizer=optimizer, steps=steps, batch_size=8, loss_on="last"),
        keep=Keep(at=Every(stride=25), held_out=64),
        seed=seed,
    )
    return run.model_copy(update=fields)


def members(count: int = 2, **fields: Any) -> list[Run]:
    return [a_run(seed=seed, **fields) for seed in range(count)]


def folders(parent: Path, count: int = 2) -> list[Path]:
    return [parent / str(number) for number in range(count)]


def together(runs: list[Run], parent: Path) -> list[Series]:
    return train_together(runs, folders(parent, len(runs)), show_progress=False)


def assert_alike(found: Path, expected: Path, within: float = 1e-5) -> None:
    """Weights and what else is kept at every step, the losses, and the state to go on from."""
    one, other = open_series(found), open_series(expected)
    assert one.steps == other.steps
    for snapshot, alone in zip(one, other, strict=True):
        torch.testing.assert_close(snapshot.weights(), alone.weights(), atol=within, rtol=within)
        torch.testing.assert_close(snapshot.activations(), alone.activations(), atol=within, rtol=1e-3)
    assert losses_of(found) == pytest.approx(losses_of(expected), abs=within)
    ended, ended_alone = read_state(found), read_state(expected)
    assert ended is not None
    assert ended_alone is not None
    torch.testing.assert_close(ended.weights, ended_alone.weights, atol=within, rtol=within)
    torch.testing.assert_close(ended.moments, ended_alone.moments, atol=within, rtol=1e-3)


def at_step(number: int, act: Callable[[Any], object]) -> Callable[..., None]:
    """A step of an ensemble, before the `number`th of which something happens to it."""
    step, taken = ensemble._Stacked.step, iter(range(1, 10_000))

    def stepping(stacked: Any, batch: Any) -> None:
        if next(taken) == number:
            act(stacked)
        step(stacked, batch)

    return stepping


def interrupt(stacked: Any) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("fields", "within"),
    [
        ({"dtype": "float32"}, 1e-5),
        ({"optimizer": MOMENTUM}, 1e-9),
        ({"optimizer": SGD(lr=0.3)}, 1e-9),
        ({"optimizer": AdamW(lr=1e-2), "model": HELD}, 1e-9),
        ({"optimizer": SGD(lr=0.02), "model": LearnedQuery(d_mlp=8, normalized=())}, 1e-9),
    ],
    ids=["adamw in single precision", "momentum", "sgd", "held weights", "not normalised"],
)
def test_each_becomes_what_it_becomes_alone(tmp_path: Path, fields: dict[str, Any], within: float) -> None:
    assert BATCHES_PER_DRAW < 130 / 2  # else no draw ends on the way
    runs = members(2, steps=130, **{"dtype": "float64"} | fields)
    found = together(runs, tmp_path / "together")
    for run, series, directory in zip(runs, found, folders(tmp_path / "together"), strict=True):
        alone = tmp_path / "alone" / directory.name
        train(run, alone, show_progress=False)
        assert_alike(directory, alone, within)
        assert listing(directory).keys() == listing(alone).keys()
        assert series.run == run
        assert series.steps == [0, 25, 50, 75, 100, 125, 130]
        first, last = series[0].weights(), series[-1].weights()
        moved = {name: (last[name] - first[name]).abs().max() for name in first}
        held = {name for name in moved if name.rsplit(".", 1)[-1] in run.model.fixed}
        assert all((move > 1e-3) == (name not in held) for name, move in moved.items())
    ends = [series[-1].weights()["embed.W_E"] for series in found]
    assert (ends[0] - ends[1]).abs().max() > 1e-2


def test_a_number_of_runs_is_no_limit_and_their_order_does_not_matter(tmp_path: Path) -> None:
    runs = members(3, dtype="float64")
    together(runs, tmp_path / "all")
    train_together(runs[::-1], folders(tmp_path / "reversed", 3)[::-1], show_progress=False)
    train_together(runs[:1], [tmp_path / "one"], show_progress=False)
    assert_alike(tmp_path / "one", tmp_path / "all" / "0", 1e-9)
    for number in range(3):
        assert_alike(tmp_path / "reversed" / str(number), tmp_path / "all" / str(number), 1e-9)


@pytest.mark.parametrize(
    ("optimizer", "at"),
    [(ADAMW, 1), (ADAMW, 66), (MOMENTUM, 64), (SGD(lr=0.1), 20)],
    ids=["adamw at once", "adamw", "momentum", "sgd"],
)
def test_interrupted_it_finishes_the_step_and_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: SGD | AdamW, at: int
) -> None:
    runs = members(2, optimizer=optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(ensemble._Stacked, "step", at_step(at, interrupt))
        with pytest.raises(KeyboardInterrupt):
            together(runs, tmp_path / "interrupted")
    for run, directory in zip(runs, folders(tmp_path / "interrupted", 2), strict=True):
        assert len(losses_of(directory)) == at
        assert open_series(directory).steps == [step for step in run.kept_steps() if step <= at]
    together(runs, tmp_path / "interrupted")
    together(runs, tmp_path / "unbroken")
    assert listing(tmp_path / "interrupted") == listing(tmp_path / "unbroken")


def test_killed_it_goes_on_from_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(stacked: Any) -> None:
        raise SystemError

    runs = members(2, steps=40)
    with monkeypatch.context() as patched:
        patched.setattr(ensemble, "SECONDS_BETWEEN_STATES", 0.0)
        patched.setattr(ensemble._Stacked, "step", at_step(20, die))
        with pytest.raises(SystemError):
            together(runs, tmp_path / "killed")
    assert [len(losses_of(directory)) for directory in folders(tmp_path / "killed", 2)] == [19, 19]
    together(runs, tmp_path / "killed")
    together(runs, tmp_path / "unbroken")
    assert listing(tmp_path / "killed") == listing(tmp_path / "unbroken")


def interrupted_alone(run: Run, directory: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(loop, "training_steps", before_step(at, lambda: signal.raise_signal(signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            train(run, directory, show_progress=False)


def test_members_that_stand_at_different_steps_all_get_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = members(4, dtype="float64")
    directories = folders(tmp_path / "together", 4)
    interrupted_alone(runs[1], directories[1], 50, monkeypatch)
    interrupted_alone(runs[3], directories[3], 50, monkeypatch)
    train(runs[2], directories[2], show_progress=False)
    finished = listing(directories[2])
    together(runs, tmp_path / "together")
    assert listing(directories[2]) == finished
    for run, directory in zip(runs, directories, strict=True):
        train(run, tmp_path / "alone" / directory.name, show_progress=False)
        assert_alike(directory, tmp_path / "alone" / directory.name, 1e-9)


def test_what_was_begun_together_can_be_finished_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = members(2, dtype="float64")
    with monkeypatch.context() as patched:
        patched.setattr(ensemble._Stacked, "step", at_step(50, interrupt))
        with pytest.raises(KeyboardInterrupt):
            together(runs, tmp_path / "begun")
    for run, directory in zip(runs, folders(tmp_path / "begun", 2), strict=True):
        train(run, directory, show_progress=False)
        train(run, tmp_path / "alone" / directory.name, show_progress=False)
        assert_alike(directory, tmp_path / "alone" / directory.name, 1e-9)


def test_what_is_finished_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unused(*_: object) -> None:
        raise AssertionError("a finished ensemble took a step")

    runs = members(2, steps=20)
    together(runs, tmp_path)
    before = listing(tmp_path)
    monkeypatch.setattr(ensemble._Stacked, "step", unused)
    assert [series.steps for series in together(runs, tmp_path)] == [[0, 20], [0, 20]]
    assert listing(tmp_path) == before


def planting_nan(member: int) -> Callable[[Any], None]:
    def plant(stacked: Any) -> None:
        with torch.no_grad():
            stacked.parameters["embed.W_E"][member, 0, 0] = torch.nan

    return plant


def test_one_that_diverges_keeps_what_it_had_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = members(3)
    together(runs, tmp_path / "well")
    with monkeypatch.context() as patched:
        patched.setattr(ensemble._Stacked, "step", at_step(36, planting_nan(1)))
        series = together(runs, tmp_path / "broken")
    assert [each.steps for each in series] == [[0, 25, 50, STEPS], [0, 25], [0, 25, 50, STEPS]]
    well, broken = listing(tmp_path / "well"), listing(tmp_path / "broken")
    lost = {f"1/weights/step_{step:08d}.safetensors" for step in (50, STEPS)}
    lost |= {"1/losses.parquet", "1/state/latest.safetensors"}  # it has nothing to go on from
    assert well.keys() - broken.keys() == lost
    assert broken == {name: content for name, content in well.items() if name not in lost}
    together(runs, tmp_path / "broken")  # the NaN was not its own
    for name in ("0", "1", "2"):
        assert_alike(tmp_path / "broken" / name, tmp_path / "well" / name)


def test_a_weight_that_is_not_finite_is_not_kept_though_the_loss_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = ensemble._Stacked.keep

    def keeping(stacked: Any, step: int) -> None:
        if step == 25:
            planting_nan(0)(stacked)
        keep(stacked, step)

    monkeypatch.setattr(ensemble._Stacked, "keep", keeping)
    assert [series.steps for series in together(members(2), tmp_path)] == [[0], [0, 25, 50, STEPS]]
    assert read_state(tmp_path / "0") is None


def test_where_all_diverge_each_stops_where_it_would_alone(tmp_path: Path) -> None:
    every_step = Keep(at=Every(stride=1))
    runs = members(2, optimizer=SGD(lr=1e30), steps=10, keep=every_step)
    found = together(runs, tmp_path / "together")
    for run, series in zip(runs, found, strict=True):
        alone = tmp_path / "alone" / str(run.seed)
        with pytest.raises(DivergedError):
            train(run, alone, show_progress=False)
        assert series.steps == open_series(alone).steps != run.kept_steps()


def test_moments_are_kept_as_alone(tmp_path: Path) -> None:
    keep = Keep(at=Every(stride=35), moments=("exp_avg_sq", "exp_avg"))
    runs = members(2, keep=keep, dtype="float64")
    found = together(runs, tmp_path / "together")
    for run, series in zip(runs, found, strict=True):
        alone = train(run, tmp_path / "alone" / str(run.seed), show_progress=False)
        assert series[0].activations() == alone[0].activations() == {}
        for snapshot, other in zip(series[1:], alone[1:], strict=True):
            kept, weights = snapshot.activations(), snapshot.weights()
            assert kept.keys() == {f"{moment}.{name}" for moment in keep.moments for name in weights}
            for name, moment in kept.items():
                assert moment.shape == weights[name.split(".", 1)[1]].shape
            torch.testing.assert_close(kept, other.activations(), atol=1e-12, rtol=1e-6)
        assert all((kept["exp_avg_sq." + name] >= 0).all() for name in weights)


MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("model", [LearnedQuery(d_mlp=8), HELD], ids=["all trained", "held weights"])
def test_runs_that_start_from_snapshots_are_what_they_are_alone(tmp_path: Path, model: LearnedQuery) -> None:
    """From snapshots of different steps too, whose averages Adam has to correct differently."""
    same: dict[str, Any] = {"dtype": "float64", "model": model, "optimizer": AdamW(lr=1e-2)}
    series = train(
        a_run(**same, keep=Keep(at=Every(stride=5), moments=MOMENTS), steps=10), tmp_path / "first", show_progress=False
    )
    files = [str(tmp_path / "first" / "weights" / f"step_{step:08d}.safetensors") for step in (5, 5, 10)]
    for moments in ((), MOMENTS):
        runs = [
            run.model_copy(update={"start": Start(snapshot=file, moments=moments)})
            for run, file in zip(members(3, **same, steps=20), files, strict=True)
        ]
        found = together(runs, tmp_path / f"together {len(moments)}")
        for number, (run, each) in enumerate(zip(runs, found, strict=True)):
            alone = tmp_path / f"alone {len(moments)}" / str(number)
            train(run, alone, show_progress=False)
            assert_alike(Path(each.name), alone, 1e-9)
            torch.testing.assert_close(each[0].weights(), series.at(5 if number < 2 else 10).weights())
            ended = read_state(alone)
            assert ended is not None
            counted = ended.moments["embed.W_E"]["step"].item() - (0 if not moments else 5 if number < 2 else 10)
            assert counted == 20
    fresh, taken_over = (read_state(tmp_path / f"together {count}" / "0") for count in (0, 2))
    assert fresh is not None
    assert taken_over is not None
    assert (fresh.weights["embed.W_E"] - taken_over.weights["embed.W_E"]).abs().max() > 1e-4


def test_a_snapshot_of_another_shape_or_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    train(a_run(steps=5, keep=Keep(at=Given())), tmp_path / "first", show_progress=False)
    snapshot = str(tmp_path / "first" / "weights" / "step_00000005.safetensors")
    for update, message in (
        ({"start": Start(snapshot=snapshot), "model": LearnedQuery(d_mlp=9)}, "W_in has shape .* where the model has"),
        ({"start": Start(snapshot=str(tmp_path / "none"))}, "start.snapshot: there is no file .*/none"),
        ({"start": Start(snapshot=snapshot, moments=MOMENTS)}, "keeps no exp_avg, exp_avg_sq; train it with keep.mom"),
    ):
        with pytest.raises(InputError, match=message):
            together([a_run(seed=seed, **update) for seed in range(2)], tmp_path / "next")
        assert not (tmp_path / "next").exists()
    single = a_run(steps=5, dtype="float64", start=Start(snapshot=snapshot))
    assert together([single], tmp_path / "double")[-1][-1].weights()["embed.W_E"].dtype == torch.float64


def unlike(**fields: Any) -> list[Run]:
    one, other = members(2)
    return [one, other.model_copy(update=fields)]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "an ensemble needs at least one run"),
        (unlike(dtype="float64"), "may differ in seed, task.data_seed and start.snapshot, and not in more"),
        (unlike(model=LearnedQuery(d_mlp=9)), "runs of an ensemble may differ in seed"),
        (unlike(task=SparseModularAddition(length=6, k=2, sequences=60)), "runs of an ensemble may differ in seed"),
        (unlike(keep=Keep(at=Every(stride=7), held_out=64)), "runs of an ensemble may differ in seed"),
        (unlike(training=a_run(MOMENTUM).training), "runs of an ensemble may differ in seed"),
        ([a_run(model=OneLayer())], "a model of kind one_layer cannot be trained in an ensemble; learned_query can"),
        ([a_run(keep=Keep(hooks=("pattern",)))], "keeps no activations; leave keep.hooks and keep.gradients empty"),
        ([a_run(keep=Keep(gradients=("pattern",)))], "keeps no activations"),
        ([a_run(device="cuda:99")], "device 'cuda:99' is not usable here"),
    ],
)
def test_what_cannot_be_trained_together_is_refused_before_anything_is_written(
    tmp_path: Path, runs: list[Run], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        together(runs, tmp_path)
    assert message in one_sentence(caught)
    assert not list(tmp_path.iterdir())


def test_every_run_has_a_directory_of_its_own(tmp_path: Path) -> None:
    runs = members(2, steps=5)
    with pytest.raises(InputError, match="every run needs a directory of its own, and there are 2 and 3"):
        train_together(runs, folders(tmp_path, 3), show_progress=False)
    with pytest.raises(InputError, match="already holds another run"):
        train_together(runs, [tmp_path / "same"] * 2, show_progress=False)
    together(runs, tmp_path / "one")
    with pytest.raises(InputError, match="already holds another run"):
        together(runs[::-1], tmp_path / "one")


def test_a_lost_snapshot_is_missed(tmp_path: Path) -> None:
    runs = members(2)
    together(runs, tmp_path)
    (tmp_path / "1" / "weights" / "step_00000025.safetensors").unlink()
    with pytest.raises(InputError, match="has lost the snapshots of steps 25"):
        together(runs, tmp_path)
