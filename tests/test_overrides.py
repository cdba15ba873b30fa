import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_interp.config import InputError
from fd_interp.models.config import OneLayer, Transformer
from fd_interp.overrides import Field, fields_of, override
from fd_interp.papers import setting, settings
from fd_interp.tasks.markov import MarkovChain
from fd_interp.tasks.text import TextCorpus
from fd_interp.training.run import SGD, AdamW, Every, Given, LogSpaced, Run

RUN = setting("focus-dilution")


def changed(*arguments: str, run: Run = RUN) -> Run:
    return override(run, " ".join(arguments).split(" ") if arguments else [])


def test_no_override_changes_nothing() -> None:
    for run in settings().values():
        assert override(run, []) == run


@pytest.mark.parametrize(
    ("arguments", "found", "expected"),
    [
        ("--seed 5", lambda run: run.seed, 5),
        ("--seed=5", lambda run: run.seed, 5),
        ("--task.persistence 0.3", lambda run: run.task.persistence, 0.3),
        ("--task.persistence -0.01", lambda run: run.task.persistence, -0.01),
        ("--task.persistence=1e-3", lambda run: run.task.persistence, 1e-3),
        ("--training.batch-size 16", lambda run: run.training.batch_size, 16),
        ("--training.batch_size 16", lambda run: run.training.batch_size, 16),
        ("--training.loss-on all", lambda run: run.training.loss_on, "all"),
        ("--dtype float64", lambda run: run.dtype, "float64"),
        ("--task.pi 0.5 0.25 0.25", lambda run: run.task.pi, (0.5, 0.25, 0.25)),
        ("--keep.hooks pattern", lambda run: run.keep.hooks, ("pattern",)),
        ("--keep.hooks pattern z", lambda run: run.keep.hooks, ("pattern", "z")),
        ("--model.fixed.W_Q init", lambda run: run.model.fixed, {"W_V": "identity", "W_O": "identity", "W_Q": "init"}),
        ("--model.fixed {}", lambda run: run.model.fixed, {}),
        ('--model.stds {"W_Q":0.5}', lambda run: run.model.stds, {"W_Q": 0.5}),
        ("--training.optimizer.lrs.W_Q 0.8", lambda run: run.training.optimizer.lrs, {"W_Q": 0.8}),
        ("--training.optimizer.momentum 0.9", lambda run: run.training.optimizer, SGD(lr=0.2, momentum=0.9)),
        ("--training.optimizer.kind adamw", lambda run: run.training.optimizer, AdamW()),
        ("--training.optimizer.kind sgd", lambda run: run.training.optimizer, SGD(lr=0.2)),
        ("--training.optimizer.kind adamw --training.optimizer.betas 0.8 0.9", lambda run: run.training.optimizer,
         AdamW(betas=(0.8, 0.9))),
        ("--keep.at.kind every --keep.at.stride 7", lambda run: run.keep.at, Every(stride=7)),
        ("--keep.at.stride 7 --keep.at.kind every", lambda run: run.keep.at, Every(stride=7)),
        ("--keep.at.kind given --keep.at.steps 3", lambda run: run.keep.at, Given(steps=(3,))),
        ("--keep.at.kind given --keep.at.steps 3 5", lambda run: run.keep.at, Given(steps=(3, 5))),
        ("--keep.at.count 9", lambda run: run.keep.at, LogSpaced(count=9)),
        ("--model.kind transformer --model.n-layers 2", lambda run: run.model, Transformer(n_layers=2)),
        ("--model.n-layers 2 --model.d-mlp 8 --model.kind transformer", lambda run: run.model,
         Transformer(n_layers=2, d_mlp=8)),
        ("--task.kind text --task.source a.txt", lambda run: run.task, TextCorpus(source="a.txt")),
        ("--seed 1 --seed 2", lambda run: run.seed, 2),
    ],
)  # fmt: skip
def test_a_field_is_changed_and_no_other(arguments: str, found, expected: object) -> None:
    run = changed(arguments)
    assert found(run) == expected
    before, after = (dict(_flat(each.model_dump(mode="json"))) for each in (RUN, run))
    named = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in arguments.split() if "--" in word}
    groups = {name.rpartition(".")[0] if name.endswith(".kind") else name for name in named}
    for path in before.keys() | after.keys():
        if not any(path == group or path.startswith(f"{group}.") for group in groups):
            assert before.get(path) == after.get(path), path


def _flat(value: object, path: str = ""):
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else name)
    else:
        yield path, value


def test_none_takes_a_value_away() -> None:
    run = changed("--model.kind transformer --model.d-mlp 8 --model.normalization-type LN")
    assert (run.model.d_mlp, run.model.normalization_type) == (8, "LN")
    bare = changed("--model.d-mlp none --model.normalization-type none", run=run)
    assert (bare.model.d_mlp, bare.model.normalization_type) == (None, None)


def test_a_value_with_spaces_is_one_argument() -> None:
    run = override(setting("focus-dilution-text"), ["--task.source", "my stories.txt", "--task.vocab", "512"])
    assert (run.task.source, run.task.vocab) == ("my stories.txt", 512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sead 1", "Run has no field 'sead', did you mean seed"),
        ("--task.persistance 0.3", "MarkovChain has no field 'persistance', did you mean persistence?"),
        ("--training.optimizer.betas 0.9 0.9", "SGD has no field 'betas'"),
        ("--taks.persistence 0.3", "Run has no field 'taks', did you mean task"),
        ("--training.steps.many 3", "training: steps: Input should be a valid integer, not {'many': 3}"),
        ("--task.persistence much", "persistence: Input should be a valid number"),
        ("--task.persistence 2", "persistence must be in [-0.1429, 1) for 8 tokens, not 2.0"),
        ("--task.pi 0.5 0.6", "pi must sum to one, not 1.1"),
        ("--training.steps 0", "training: steps: Input should be greater than 0, not 0"),
        ("--training.steps 1.5", "training: steps: Input should be a valid integer"),
        ("--training.steps 1 2", "training: steps: Input should be a valid integer, not [1, 2]"),
        ("--training.optimizer.lr Infinity", "lr: Input should be a finite number"),
        ("--training.optimizer.lr NaN", "lr: Input should be a finite number"),
        ("--training.optimizer.kind adam", "'sgd', 'adamw'"),
        ("--task none", "task"),
        ("--model.fixed.W_X zero", "one_layer has no weight W_X"),
        ("--seed", "--seed needs a value"),
        ("--seed --dtype float64", "--seed needs a value"),
        ("--seed=", "--seed needs a value"),
        ("seed 5", "'seed' is not an option; fields are given as --path.to.field value"),
        ("-s 5", "'-s' is not an option"),
        ("-- 5", "'--' is not an option"),
        ("--.seed 5", "Run has no field ''"),
        ("--seed. 5", "seed"),
    ],
)
def test_what_cannot_be_overridden_is_one_sentence(arguments: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        changed(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("name", settings())
def test_every_field_of_a_setting_is_listed_with_its_value_and_can_be_given_back(name: str) -> None:
    run = setting(name)
    fields = list(fields_of(run))
    paths = [field.path for field in fields]
    assert len(set(paths)) == len(paths)
    assert {"task.kind", "model.kind", "training.optimizer.lr", "training.steps", "keep.at.kind", "seed"} <= {*paths}
    given = []
    for path, value, _ in fields:
        if (
            value != "none"
            and ", " not in value
            and not path.endswith(("fixed", "stds", "lrs", "pi", "betas", "hooks", "normalized"))
        ):
            given += [f"--{path}", value]
    assert len(given) > 20
    assert override(run, given) == run


def test_a_listed_field_has_its_meaning() -> None:
    fields = {field.path: field for field in fields_of(RUN)}
    assert fields["keep.held_out"] == Field(
        "keep.held_out", "512", "Sequences in the held-out batch, which every measurement uses."
    )
    assert fields["model.fixed"].value == "W_V identity, W_O identity"
    assert fields["keep.hooks"].value == "none"
    assert fields["task.pi"].value.startswith("0.3679 0.184")
    undescribed = {path for path, field in fields.items() if "\n\n" in field.meaning}
    assert not undescribed


@given(
    persistence=st.floats(0, 0.99, allow_nan=False),
    steps=st.integers(1, 10**6),
    seed=st.integers(0, 2**40),
    hooks=st.lists(st.sampled_from(["pattern", "z", "resid_pre"]), min_size=1, max_size=3),
)
def test_any_value_that_fits_arrives_whole(persistence: float, steps: int, seed: int, hooks: list[str]) -> None:
    run = override(
        RUN,
        [
            "--task.persistence",
            repr(persistence),
            f"--training.steps={steps}",
            "--seed",
            str(seed),
            "--keep.hooks",
            *hooks,
        ],
    )
    assert (run.task.persistence, run.training.steps, run.seed) == (persistence, steps, seed)
    assert run.keep.hooks == tuple(hooks)
    assert (run.task.pi, run.model) == (MarkovChain.zipf(8).pi, OneLayer())


def test_the_name_of_a_kind_stands_for_its_part():
    assert override(RUN, ["--training.optimizer", "adamw"]) == override(RUN, ["--training.optimizer.kind", "adamw"])


def test_several_words_are_a_tuple_of_them() -> None:
    both = override(setting("clustering"), ["--model.normalized", "ln1", "ln2"])
    assert both == setting("clustering")
    (one,) = override(both, ["--model.normalized", "ln1"]).model.normalized
    assert one == "ln1"
