import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fd_interp.config import InputError
from fd_interp.models.config import LearnedQuery, Transformer
from fd_interp.papers import setting, settings
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.run import SGD, AdamW, Every, Given, Keep, LogSpaced, Run, Training


def kept(at: Given | Every | LogSpaced, steps: int) -> list[int]:
    run = setting("focus-dilution")
    return run.model_copy(update={"keep": Keep(at=at), "training": Training(steps=steps)}).kept_steps()


def draws(run: Run, *purpose: object) -> list[float]:
    return torch.rand(8, generator=run.generator(*purpose)).tolist()


@pytest.mark.parametrize("name", settings())
def test_every_setting_survives_json(name: str) -> None:
    run = setting(name)
    text = run.model_dump_json(indent=2)
    again = Run(**json.loads(text))
    assert again == run
    assert again.model_dump_json(indent=2) == text
    assert Run(**json.loads(json.dumps(run.model_dump(mode="json")))) == run


def test_what_is_not_default_survives_json_too(small_run: Run) -> None:
    optimizer = AdamW(lr=3e-3, lrs={"W_Q": 0.1}, betas=(0.8, 0.99), weight_decay=0.1)
    run = small_run.model_copy(
        update={
            "model": Transformer(n_layers=3, d_mlp=4, normalization_type="LNPre", attn_scale=1.5, stds={"W_E": 0.5}),
            "training": Training(optimizer=optimizer, steps=7, loss_on="last"),
            "keep": Keep(at=Given(steps=(3, 5)), hooks=("pattern", "blocks.0.hook_attn_out"), gradients=("z",)),
            "seed": 2**40,
            "dtype": "float64",
        }
    )
    again = Run(**json.loads(run.model_dump_json()))
    assert again == run != small_run
    assert again.training.optimizer.betas == (0.8, 0.99)
    assert again.keep.gradients == ("z",)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("sead",), "Run has no field 'sead', did you mean seed"),
        (("task", "persistance"), "has no field 'persistance', did you mean persistence?"),
        (("model", "d_modle"), "has no field 'd_modle', did you mean d_model"),
        (("training", "step"), "has no field 'step', did you mean steps?"),
        (("training", "optimizer", "learning_rate"), "has no field 'learning_rate'"),
        (("keep", "at", "counts"), "has no field 'counts', did you mean count?"),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest_right_one(path: tuple[str, ...], message: str) -> None:
    fields = json.loads(setting("focus-dilution").model_dump_json())
    inner = fields
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = 1
    with pytest.raises(InputError) as caught:
        Run(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(lr=0), "lr: Input should be greater than 0, not 0"),
        (lambda: SGD(lr=math.inf), "lr: Input should be a finite number"),
        (lambda: SGD(lr=math.nan), "lr: Input should be a finite number"),
        (lambda: SGD(momentum=1), "momentum: Input should be less than 1, not 1"),
        (lambda: SGD(lrs={"W_Q": -1}), "lrs.W_Q: Input should be greater than 0, not -1"),
        (lambda: AdamW(betas=(1.0, 0.9)), "betas.0: Input should be less than 1, not 1.0"),
        (lambda: AdamW(betas=(0.9, -0.1)), "betas.1: Input should be greater than or equal to 0, not -0.1"),
        (lambda: AdamW(weight_decay=-1), "weight_decay: Input should be greater than or equal to 0, not -1"),
        (lambda: Training(steps=0), "steps: Input should be greater than 0, not 0"),
        (lambda: Training(batch_size=0), "batch_size: Input should be greater than 0, not 0"),
        (lambda: Training(loss_on="first"), "loss_on: Input should be 'last', 'all' or 'full_context', not 'first'"),
        (lambda: Every(stride=0), "stride: Input should be greater than 0, not 0"),
        (lambda: LogSpaced(count=0), "count: Input should be greater than 0, not 0"),
        (lambda: Given(steps=(-1,)), "steps.0: Input should be greater than or equal to 0, not -1"),
        (lambda: Keep(held_out=0), "held_out: Input should be greater than 0, not 0"),
        (lambda: setting("focus-dilution").model_copy(update={"seed": -1}), "seed: Input should be greater than"),
        (lambda: setting("focus-dilution").model_copy(update={"dtype": "float16"}), "dtype: Input should be 'float32'"),
    ],
)
def test_what_cannot_be_trained_is_refused(make, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loss_on", ["all", "full_context"])
def test_a_learned_query_predicts_at_the_last_position_alone(loss_on: str) -> None:
    task, model = SparseModularAddition(), LearnedQuery(normalized=("ln2",), stds={"W_E": 0.5})
    run = Run(task=task, model=model, training=Training(loss_on="last"), keep=Keep(held_out=64))
    assert run.queries == slice(-1, None)
    assert Run(**json.loads(run.model_dump_json())) == run
    with pytest.raises(InputError) as caught:
        run.model_copy(update={"training": run.training.model_copy(update={"loss_on": loss_on})})
    message = {
        "all": "training.loss_on: a learned query predicts once, at the last, not all",
        "full_context": "training.loss_on: full_context needs a task of lags, and modular has none",
    }
    assert message[loss_on] in str(caught.value)
    with pytest.raises(InputError, match="a learned query predicts once, at the last, not full_context"):
        setting("incremental").model_copy(update={"model": model, "training": Training(loss_on="full_context")})
    assert Run(task=task, model=Transformer(), training=Training(loss_on="all")).queries == slice(None)


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "", "meta"])
def test_a_device_that_cannot_be_used_is_named(device: str) -> None:
    run = setting("focus-dilution").model_copy(update={"device": device})  # its series can still be looked at
    with pytest.raises(InputError, match=f"device '{device}' is not usable here .*; cpu always is") as caught:
        run.check_device()
    assert "\n" not in str(caught.value)
    setting("focus-dilution").check_device()


@pytest.mark.parametrize(
    ("at", "steps", "expected"),
    [
        (Given(), 7, [0, 7]),
        (Given(steps=(5, 2, 2, 7, 8, 1000)), 7, [0, 2, 5, 7]),
        (Every(stride=3), 9, [0, 3, 6, 9]),
        (Every(stride=3), 10, [0, 3, 6, 9, 10]),
        (Every(stride=100), 10, [0, 10]),
        (LogSpaced(count=4), 1000, [0, 1, 10, 100, 1000]),
        (LogSpaced(count=1), 1000, [0, 1, 1000]),
        (LogSpaced(count=60), 1, [0, 1]),
        (LogSpaced(count=60), 3, [0, 1, 2, 3]),
    ],
)
def test_kept_steps(at: Given | Every | LogSpaced, steps: int, expected: list[int]) -> None:
    assert kept(at, steps) == expected


@given(
    at=st.builds(Every, stride=st.integers(1, 60))
    | st.builds(LogSpaced, count=st.integers(1, 90))
    | st.builds(Given, steps=st.lists(st.integers(0, 300)).map(tuple)),
    steps=st.integers(1, 200),
)
def test_step_0_and_the_last_are_always_kept_and_none_beyond(at: Given | Every | LogSpaced, steps: int) -> None:
    steps_kept = kept(at, steps)
    assert steps_kept == sorted(set(steps_kept))
    assert (steps_kept[0], steps_kept[-1]) == (0, steps)
    assert all(type(step) is int for step in steps_kept)


def test_log_spaced_steps_are_as_fine_early_as_late() -> None:
    steps = kept(LogSpaced(count=50), 10_000)
    assert len(steps) > 40
    assert max(later / earlier for earlier, later in pairwise(steps[20:])) < 1.3


def test_a_generator_depends_on_seed_purpose_and_index_and_on_nothing_else(small_run: Run) -> None:
    purposes = [("init",), ("held_out",), ("train", 0), ("train", 1), ("train", 2**33)]
    runs = [small_run.model_copy(update={"seed": seed}) for seed in (0, 1, 2**32, 2**40)]
    streams = [tuple(draws(run, *purpose)) for run in runs for purpose in purposes]
    assert len(set(streams)) == len(streams)

    other = small_run.model_copy(
        update={"model": Transformer(), "training": Training(steps=3), "dtype": "float64", "keep": Keep()}
    )
    for purpose in purposes:
        used = small_run.generator("train")
        torch.rand(5, generator=used)
        assert draws(small_run, *purpose) == draws(small_run, *purpose) == draws(other, *purpose)


def test_a_generator_has_nothing_to_do_with_the_global_one(small_run: Run) -> None:
    before = torch.get_rng_state()
    first = draws(small_run, "init")
    torch.rand(3)
    assert draws(small_run, "init") == first
    torch.set_rng_state(before)
    small_run.generator("train", 5)
    assert torch.equal(torch.get_rng_state(), before)
