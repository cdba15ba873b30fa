import math
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.config import OneLayer, Transformer
from fd_interp.tasks.text import TextCorpus
from fd_interp.training import loop, state
from fd_interp.training.loop import BATCHES_PER_DRAW, DivergedError, batches, new_model, train
from fd_interp.training.run import SGD, AdamW, Given, Keep, Run, Training
from fd_interp.training.series import open_series
from tests.training.test_series import listing, one_sentence

DEEP = Transformer(n_layers=2, n_heads=2, d_model=6, d_head=4, d_mlp=5, normalization_type="LN", std=0.3)
MULTI_HEAD = OneLayer(d_model=5, d_head=3, n_heads=2, attn_scale=1.7, fixed={"W_K": "init"}, std=0.3)
ADAMW = AdamW(lr=1e-2, weight_decay=0.1)
MOMENTUM = SGD(lr=0.2, momentum=0.9)


def changed(run: Run, **fields: object) -> Run:
    """The run with other fields of its own, or of its training or what it keeps."""
    own = {name: fields.pop(name) for name in list(fields) if name in Run.model_fields}
    training = {name: fields.pop(name) for name in list(fields) if name in Training.model_fields}
    own["training"] = run.training.model_copy(update=training)
    own["keep"] = run.keep.model_copy(update=fields)
    return run.model_copy(update=own)


def quietly(run: Run, directory: Path) -> dict[str, bytes]:
    train(run, directory, show_progress=False)
    return listing(directory)


def of(files: dict[str, bytes], folder: str) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.startswith(folder)}


def stream(run: Run, start: int, count: int) -> list[tuple[Tensor, Tensor]]:
    return list(islice(batches(run, start), count))


@pytest.mark.parametrize("start", [0, 1, 30, 63, 64, 65, 127, 128, 150])
def test_batches_from_the_middle_are_those_of_the_unbroken_sequence(small_run: Run, start: int) -> None:
    run = changed(small_run, steps=200, batch_size=3)
    every, rest = stream(run, 0, 170), stream(run, start, 170 - start)
    assert len(every) == 170
    assert BATCHES_PER_DRAW == 64  # else the starts above are not the interesting ones
    for (tokens, targets), (again, targets_again) in zip(every[start:], rest, strict=True):
        assert tokens.shape == targets.shape == (3, 6)
        assert torch.equal(tokens, again)
        assert torch.equal(targets, targets_again)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_batches_depend_on_nothing_but_task_size_and_seed(small_run: Run) -> None:
    first = stream(small_run, 0, 20)
    for run in (
        changed(small_run, steps=20, model=DEEP, dtype="float64", optimizer=ADAMW),
        changed(small_run, steps=999),
    ):
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first, stream(run, 0, 20), strict=True))
    other_seed = stream(changed(small_run, seed=1), 0, 20)
    assert not any(torch.equal(a, b) for (a, _), (b, _) in zip(first, other_seed, strict=True))


def test_there_are_enough_batches_and_no_two_are_alike(small_run: Run) -> None:
    for steps in (1, 63, 64, 65, 130):
        assert len(stream(changed(small_run, steps=steps, batch_size=2), 0, steps)) == steps
    seen = {tuple(tokens.flatten().tolist()) for tokens, _ in stream(changed(small_run, steps=200), 0, 200)}
    assert len(seen) == 200
    held_out = small_run.task.held_out(8, small_run.generator("held_out")).tokens
    assert tuple(held_out.flatten().tolist()) not in seen


@pytest.mark.parametrize("loss_on", ["last", "all"])
@pytest.mark.parametrize("model", [OneLayer(d_model=5, d_head=5, std=0.3), DEEP], ids=["one layer", "transformer"])
def test_a_step_is_gradient_descent_on_the_batch(small_run: Run, loss_on: str, model: OneLayer | Transformer) -> None:
    run = changed(small_run, model=model, steps=3, loss_on=loss_on, dtype="float64", optimizer=SGD(lr=0.5))
    trained, by_hand = new_model(run), new_model(run)
    live = lens.trainable(trained)
    steps = loop.training_steps(run, trained, loop.make_optimizer(run, live))
    for number, (tokens, targets) in enumerate(stream(run, 0, 3), start=1):
        log_probs = by_hand(tokens).log_softmax(-1).gather(-1, targets[..., None])
        loss = -(log_probs[:, -1] if loss_on == "last" else log_probs).mean()
        by_hand.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in lens.trainable(by_hand).values():
                parameter -= 0 if parameter.grad is None else 0.5 * parameter.grad
        step, value = next(steps)
        assert (step, value) == (number, pytest.approx(loss.item(), abs=1e-12))
        for name, weight in lens.weights(trained).items():
            torch.testing.assert_close(weight, lens.weights(by_hand)[name], atol=1e-12, rtol=1e-12)
    with pytest.raises(StopIteration):
        next(steps)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_the_optimizer_is_torchs_own(small_run: Run, optimizer: SGD | AdamW) -> None:
    run = changed(small_run, steps=12, optimizer=optimizer, dtype="float64")
    ours, reference = new_model(run), new_model(run)
    for _ in loop.training_steps(run, ours, loop.make_optimizer(run, lens.trainable(ours))):
        pass
    parameters = list(lens.trainable(reference).values())
    theirs = (
        torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
        if optimizer is MOMENTUM
        else torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    )
    for tokens, targets in stream(run, 0, 12):
        theirs.zero_grad()
        functional.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten()).backward()
        theirs.step()
    for name, weight in lens.weights(ours).items():
        torch.testing.assert_close(weight, lens.weights(reference)[name], atol=1e-12, rtol=1e-10)


def test_a_weights_own_rate_moves_it_that_much(small_run: Run) -> None:
    run = changed(small_run, steps=1, model=MULTI_HEAD, dtype="float64", optimizer=SGD(lr=0.5))
    slow = changed(run, optimizer=SGD(lr=0.5, lrs={"W_E": 1e-6, "W_O": 2.0}))
    moved = {}
    for each in (run, slow):
        model = new_model(each)
        before = lens.weights(model)
        next(loop.training_steps(each, model, loop.make_optimizer(each, lens.trainable(model))))
        moved[each is slow] = {name: weight - before[name] for name, weight in lens.weights(model).items()}
    for name, usual in moved[False].items():
        factor = {"W_E": 2e-6, "W_O": 4.0}.get(name.rsplit(".", 1)[-1], 1.0)
        assert usual.abs().max() > 1e-5, name
        torch.testing.assert_close(moved[True][name], factor * usual, atol=1e-14, rtol=1e-7)


def test_a_rate_of_one_layers_weight_is_that_of_every_layer(small_run: Run, tmp_path: Path) -> None:
    run = changed(small_run, model=DEEP, steps=5, optimizer=AdamW(lr=1e-2, lrs={"W_Q": 1e-8}))
    series = train(run, tmp_path / "slow", show_progress=False)
    first, last = series[0].weights(), series[-1].weights()
    moved = {name: (last[name] - first[name]).abs().max().item() for name in first}
    assert all(moved[f"blocks.{layer}.attn.W_Q"] < 1e-6 < 1e-3 < moved[f"blocks.{layer}.attn.W_K"] for layer in (0, 1))


def test_training_lowers_the_loss(small_run: Run, tmp_path: Path) -> None:
    for name, model in (("one layer", small_run.model), ("transformer", DEEP)):
        train(changed(small_run, model=model, steps=60), tmp_path / name, show_progress=False)
        losses = pd.read_parquet(tmp_path / name / "losses.parquet").loss
        assert losses[-10:].mean() < losses[:10].mean() - 0.05


def test_a_run_leaves_these_files(small_directory: Path, small_run: Run) -> None:
    names = {f"step_{step:08d}.safetensors" for step in (0, 10, 20, 30)}
    expected = {"run.json", "losses.parquet", "state/latest.safetensors"}
    expected |= {f"weights/{name}" for name in names} | {f"activations/{name}" for name in names}
    assert listing(small_directory).keys() == expected

    losses = pd.read_parquet(small_directory / "losses.parquet")
    assert list(losses.columns) == ["step", "loss"]
    assert losses.step.tolist() == list(range(1, 31))
    model = new_model(small_run)
    optimizer = loop.make_optimizer(small_run, loop.trained(small_run.model, model))
    assert losses.loss.tolist() == [loss for _, loss in loop.training_steps(small_run, model, optimizer)]

    series = open_series(small_directory)
    started, ended = lens.weights(new_model(small_run)), lens.weights(model)
    assert all(torch.equal(weight, started[name]) for name, weight in series[0].weights().items())
    assert all(torch.equal(weight, ended[name]) for name, weight in series[-1].weights().items())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"optimizer": MOMENTUM, "dtype": "float64"},
        {"optimizer": ADAMW, "loss_on": "last"},
        {"model": MULTI_HEAD, "gradients": ("pattern", "q")},
        {"model": DEEP, "optimizer": ADAMW, "gradients": ("resid_post",)},
    ],
    ids=["sgd", "momentum", "adamw", "several heads", "transformer"],
)
def test_training_twice_writes_the_same_bytes(small_run: Run, tmp_path: Path, fields: dict) -> None:
    run = changed(small_run, **fields)
    torch.manual_seed(1)
    first = quietly(run, tmp_path / "first")
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = quietly(run, tmp_path / "second")
    assert torch.equal(torch.get_rng_state(), state)
    assert first == second
    assert len(first) == 11
    other_seed = quietly(changed(run, seed=1), tmp_path / "other")
    differing = {name for name in first if first[name] != other_seed[name]}
    assert differing == first.keys()


@pytest.mark.parametrize("model", [OneLayer(d_model=5, d_head=5, std=0.3), DEEP], ids=["one layer", "transformer"])
def test_looking_does_not_change_what_is_looked_at(
    small_run: Run, tmp_path: Path, model: OneLayer | Transformer
) -> None:
    run = changed(small_run, model=model, optimizer=ADAMW)
    much = {"hooks": ("pattern", "resid_pre", "embed"), "gradients": ("pattern", "z", "resid_post"), "held_out": 5}
    plain = quietly(changed(run, hooks=(), at=Given(steps=(20,))), tmp_path / "plain")
    watched = quietly(changed(run, **much, at=Given(steps=tuple(range(31)))), tmp_path / "watched")
    assert len(of(watched, "weights")) == len(of(watched, "activations")) == 31
    assert not of(plain, "activations")
    for name in [*of(plain, "weights"), *of(plain, "state"), "losses.parquet"]:
        assert plain[name] == watched[name], name


def test_a_finished_run_is_not_trained_again(own_directory: Path, small_run: Run, monkeypatch) -> None:
    before = listing(own_directory)

    def unused(*_: object) -> None:
        raise AssertionError("a batch of a finished run was used")

    monkeypatch.setattr(loop, "batch_loss", unused)
    series = train(small_run, own_directory, show_progress=False)
    assert series.steps == [0, 10, 20, 30]
    assert listing(own_directory) == before


@pytest.mark.parametrize("model", [MULTI_HEAD, DEEP], ids=["one layer", "transformer"])
@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_what_is_cached_is_what_the_snapshot_gives(
    small_run: Run, tmp_path: Path, model: OneLayer | Transformer, loss_on: str
) -> None:
    names = ("pattern", "blocks.0.hook_attn_out")
    run = changed(small_run, model=model, steps=4, loss_on=loss_on, dtype="float64", hooks=names, gradients=names)
    series = train(run, tmp_path / "run", show_progress=False)
    tokens, targets = series.inputs.held_out
    assert len(tokens) == 16
    for snapshot in (series[0], series[-1]):
        model_then: Any = snapshot.model()
        hooks = lens.resolve_hooks(model_then, list(names))
        cached = snapshot.activations()
        assert cached.keys() == {*hooks, *(f"grad.{hook}" for hook in hooks)}
        for hook in hooks:
            leaf = cached[hook].clone().requires_grad_()
            given = lens.run_and_cache(model_then, tokens, [hook]).activations[hook]
            torch.testing.assert_close(given, leaf.detach(), atol=0, rtol=0)

            def put(value: Tensor, hook: object, leaf: Tensor = leaf) -> Tensor:
                return leaf

            logits = model_then.run_with_hooks(tokens, fwd_hooks=[(hook, put)])
            losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
            (losses[:, -1] if loss_on == "last" else losses).mean().backward()
            assert leaf.grad is not None
            assert leaf.grad.abs().max() > 1e-6
            torch.testing.assert_close(cached[f"grad.{hook}"], leaf.grad, atol=1e-12, rtol=1e-9)


def test_everything_is_computed_with_the_runs_own_number_of_threads(
    small_run: Run, tmp_path: Path, monkeypatch
) -> None:
    seen: list[int] = []
    run_and_cache, batch_loss = loop.lens.run_and_cache, loop.batch_loss

    def noting(function: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            seen.append(torch.get_num_threads())
            return function(*arguments)

        return noted

    monkeypatch.setattr(loop.lens, "run_and_cache", noting(run_and_cache))
    monkeypatch.setattr(loop, "batch_loss", noting(batch_loss))
    before = torch.get_num_threads()
    quietly(changed(small_run, steps=2, threads=2, at=Given()), tmp_path / "run")
    assert (seen, torch.get_num_threads()) == ([2, 2, 2, 2], before)


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated:DeprecationWarning")
@pytest.mark.parametrize("config", [DEEP, Transformer(d_model=6, d_head=6, fixed={"W_pos": "zero"}, std=0.3)])
def test_a_transformers_snapshot_opens_in_plain_transformer_lens(
    small_run: Run, tmp_path: Path, config: Transformer
) -> None:
    run = changed(small_run, model=config, steps=10, optimizer=ADAMW)
    snapshot = train(run, tmp_path / "run", show_progress=False)[-1]
    settings = {
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "d_model": 6,
        "d_head": config.d_head,
        "d_mlp": config.d_mlp,
        "act_fn": "gelu",
        "attn_only": config.d_mlp is None,
        "normalization_type": config.normalization_type,
        "d_vocab": 4,
        "n_ctx": 6,
    }
    plain = hooked_transformer(settings, snapshot.weights()) if lens.HAS_HOOKED_TRANSFORMER else bridge(
        settings, snapshot.weights()
    )  # fmt: skip
    tokens = torch.tensor([[0, 1, 2, 3, 0, 0], [3, 3, 1, 2, 2, 0]])
    expected = snapshot.model()(tokens)
    assert expected.std() > 1e-2
    torch.testing.assert_close(plain(tokens), expected, atol=1e-6, rtol=1e-5)


def hooked_transformer(settings: dict, weights: lens.Weights) -> Any:
    transformer_lens: Any = import_module("transformer_lens")  # type checkers see one version only
    model = transformer_lens.HookedTransformer(transformer_lens.HookedTransformerConfig(**settings, device="cpu"))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.rsplit(".", 1)[-1] in ("mask", "IGNORE") for name in missing)
    return model


def bridge(settings: dict, weights: lens.Weights) -> Any:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot
    from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint

    model = boot(TransformerBridgeConfig(**settings))
    model.load_state_dict(convert_tl_checkpoint(weights, model.cfg))
    return model


def test_a_text_can_be_trained_on(small_run: Run, tmp_path: Path) -> None:
    text = tmp_path / "stories.txt"
    text.write_text("<|endoftext|>".join(f"Once there was a cat {n}. It sat on a mat. " * 9 for n in range(9)), "utf-8")
    task = TextCorpus(source=str(text), vocab=270, context=6)
    run = changed(small_run, task=task, steps=12, loss_on="all")
    first, second = (quietly(run, tmp_path / name) for name in ("a", "b"))
    assert first == second
    series = open_series(tmp_path / "a")
    assert series[-1].weights()["embed.W_E"].shape == (270, 5)


def test_progress_is_silent_when_told_or_not_on_a_terminal(small_run: Run, tmp_path: Path, capfd) -> None:
    train(small_run, tmp_path / "a", show_progress=False)
    train(small_run, tmp_path / "b", show_progress=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hooks": ("patern",)}, "the model has no hook 'patern', did you mean pattern"),
        ({"gradients": ("blocks.1.attn.hook_z",)}, "no hook 'blocks.1.attn.hook_z', did you mean blocks.0.attn.hook_z"),
        ({"optimizer": SGD(lrs={"W_V": 0.1})}, "lrs names W_V, which is not trained; trained: W_E, W_K, W_Q, W_U"),
        ({"optimizer": AdamW(lrs={"w_e": 0.1})}, "lrs names w_e, which is not trained; trained: W_E, W_K, W_Q, W_U"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not usable here"),
        ({"task": TextCorpus(source="no-such-file.txt")}, "no-such-file.txt"),
        ({"model": OneLayer(fixed={"W_E": "identity"})}, "embed.W_E cannot be held at the identity"),
    ],
)
def test_a_run_that_cannot_be_trained_leaves_no_directory(
    small_run: Run, tmp_path: Path, fields: dict, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        train(changed(small_run, **fields), tmp_path / "run", show_progress=False)
    assert message in one_sentence(caught)
    assert not (tmp_path / "run").exists()


def test_a_directory_of_another_run_or_of_something_else_is_refused_untouched(
    own_directory: Path, small_run: Run, tmp_path: Path
) -> None:
    before = listing(own_directory)
    with pytest.raises(InputError, match=r"already holds another run \(it differs in training\.steps\)"):
        train(changed(small_run, steps=31), own_directory)
    assert listing(own_directory) == before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(InputError, match="holds no run; choose a new directory"):
        train(small_run, foreign)
    assert listing(foreign) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("state/latest.safetensors", lambda content: content[:-7], "is truncated or no safetensors file"),
        ("losses.parquet", lambda content: content[:-7], "cannot be read"),
        ("losses.parquet", lambda content: None, "cannot be read"),
    ],
)
def test_a_damaged_state_is_named_and_nothing_else_touched(
    own_directory: Path, small_run: Run, name: str, damage, message: str
) -> None:
    file = own_directory / name
    damaged = damage(file.read_bytes())
    file.unlink() if damaged is None else file.write_bytes(damaged)
    before = listing(own_directory)
    with pytest.raises(InputError) as caught:
        train(small_run, own_directory)
    assert one_sentence(caught).startswith(f"{file} ")
    assert message in str(caught.value)
    assert listing(own_directory) == before


def test_losses_that_end_before_the_state_are_refused(own_directory: Path, small_run: Run) -> None:
    file = own_directory / "losses.parquet"
    pd.read_parquet(file)[:20].to_parquet(file, index=False)
    with pytest.raises(InputError, match=r"losses\.parquet ends at step 20, before step 30 of state/latest"):
        train(small_run, own_directory)


def test_a_loss_that_is_no_number_stops_training_and_keeps_what_was_good(small_run: Run, tmp_path: Path) -> None:
    run = changed(small_run, optimizer=SGD(lr=1e15), steps=200, at=Given(steps=tuple(range(200))))
    with pytest.raises(DivergedError) as caught:
        train(run, tmp_path / "run", show_progress=False)
    assert isinstance(caught.value, InputError)
    message = one_sentence(caught)
    assert "may help" in message
    series = open_series(tmp_path / "run")
    assert f"at step {series.steps[-1] + 1};" in message
    assert series.steps == list(range(len(series)))
    for snapshot in series:
        assert all(weight.isfinite().all() for weight in snapshot.weights().values())
        assert snapshot.model()(series.inputs.held_out.tokens).shape == (16, 6, 4)


def test_the_message_names_the_very_step(small_run: Run, tmp_path: Path, monkeypatch) -> None:
    batch_loss, calls = loop.batch_loss, iter(range(1, 100))

    def spoiled(run: Run, model: lens.Model, batch: Any) -> Tensor:
        return batch_loss(run, model, batch) * (math.nan if next(calls) == 14 else 1)

    monkeypatch.setattr(loop, "batch_loss", spoiled)
    with pytest.raises(DivergedError, match="the loss became nan at step 14; a smaller learning rate"):
        train(small_run, tmp_path / "run", show_progress=False)
    assert open_series(tmp_path / "run").steps == [0, 10]


def test_weights_that_are_no_numbers_are_not_kept(small_run: Run, tmp_path: Path, monkeypatch) -> None:
    training_steps = loop.training_steps

    def spoiled(run: Run, model: lens.Model, *rest: Any, **more: Any) -> Iterator[loop.Step]:
        for step in training_steps(run, model, *rest, **more):
            if step.step == 20:
                with torch.no_grad():
                    lens.trainable(model)["embed.W_E"][1, 2] = torch.nan
            yield step

    monkeypatch.setattr(loop, "training_steps", spoiled)
    with pytest.raises(DivergedError, match=r"embed\.W_E is no longer finite at step 20; a smaller learning rate"):
        train(small_run, tmp_path / "run", show_progress=False)
    assert open_series(tmp_path / "run").steps == [0, 10]


@pytest.mark.parametrize("folder", ["weights", "activations", "state"])
def test_a_full_disk_leaves_what_was_kept_and_training_goes_on_from_there(
    small_run: Run, small_directory: Path, tmp_path: Path, monkeypatch, folder: str
) -> None:
    directory, reference = tmp_path / "run", listing(small_directory)
    write_tensors, written = state.write_tensors, []

    def full(file: Path, *tensors: Any, **metadata: str) -> None:
        written.append(file)
        if file.parent.name == folder and (folder == "state" or file.stem == "step_00000020"):
            raise InputError(f"{file} could not be written")
        write_tensors(file, *tensors, **metadata)

    with monkeypatch.context() as patched:
        patched.setattr(state, "write_tensors", full)
        with pytest.raises(InputError, match="could not be written"):
            train(small_run, directory, show_progress=False)
    left = listing(directory)
    assert {name: reference[name] for name in left} == left
    assert open_series(directory).steps == ([0, 10, 20, 30] if folder == "state" else [0, 10])
    assert quietly(small_run, directory) == reference


def test_lost_snapshots_are_named_and_not_passed_over(own_directory: Path, small_run: Run):
    (own_directory / "weights" / "step_00000020.safetensors").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"has lost the snapshots of steps 20; remove .* to train it anew"):
        train(small_run, own_directory, show_progress=False)
    (own_directory / "state" / "latest.safetensors").unlink()
    assert train(small_run, own_directory, show_progress=False).steps == [0, 10, 20, 30]


def test_a_series_without_its_start_is_refused(own_directory: Path):
    (own_directory / "weights" / "step_00000000.safetensors").unlink()
    with pytest.raises(InputError, match="has lost its snapshot of step 0"):
        open_series(own_directory)


def test_another_text_under_the_same_name_is_refused(tmp_path: Path):
    text = tmp_path / "tales.txt"
    tales = [
        f"tale {number}: the cat saw a dog and the dog saw the cat near the old red house " for number in range(60)
    ]
    text.write_text("<|endoftext|>".join(tales), encoding="utf-8")
    run = Run(
        task=TextCorpus(source=str(text), vocab=262, context=8),
        model=OneLayer(d_model=4, d_head=4),
        training=Training(steps=2, batch_size=2),
        keep=Keep(held_out=4),
    )
    train(run, tmp_path / "run", show_progress=False)
    text.write_text("<|endoftext|>".join(tales[:50]), encoding="utf-8")
    with pytest.raises(InputError, match="no longer holds the text that"):
        train(Run(**run.model_dump()), tmp_path / "run", show_progress=False)  # reads its text anew
