import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.training import series as series_module
from fd_interp.training.run import Run
from fd_interp.training.series import atomic, claim_directory, open_series, read_run, read_tensors, write_tensors


def listing(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def one_sentence(caught: pytest.ExceptionInfo[InputError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_trained_directory_reads_as_a_sequence_of_snapshots(small_directory: Path, small_run: Run) -> None:
    series = open_series(small_directory)
    assert (series.run, series.name, len(series)) == (small_run, str(small_directory), 4)
    assert series.steps == [snapshot.step for snapshot in series] == small_run.kept_steps() == [0, 10, 20, 30]
    assert series[-1] is series.at(30)
    assert [snapshot.step for snapshot in series[1:3]] == [10, 20]
    assert series.inputs.held_out.tokens.shape == (16, 6)
    assert torch.equal(series.inputs.frequencies, small_run.task.token_frequencies())
    assert series.inputs.token_strings == small_run.task.token_strings()
    assert series.inputs is series.inputs


def test_a_snapshot_gives_weights_a_model_and_what_training_cached(small_directory: Path) -> None:
    series = open_series(small_directory)
    snapshot = series.at(20)
    weights = snapshot.weights()
    on_disk = load_file(small_directory / "weights" / "step_00000020.safetensors")
    assert weights.keys() == on_disk.keys()
    assert all(torch.equal(weights[name], on_disk[name]) for name in weights)

    model, tokens = snapshot.model(), series.inputs.held_out.tokens
    assert all(torch.equal(weight, weights[name]) for name, weight in lens.weights(model).items())
    assert snapshot.model() is not model
    cache = snapshot.cache(["pattern", "blocks.0.attn.hook_z"], tokens)
    assert list(cache) == ["blocks.0.attn.hook_pattern", "blocks.0.attn.hook_z"]
    assert list(snapshot.activations()) == ["blocks.0.attn.hook_pattern"]
    torch.testing.assert_close(
        snapshot.activations()["blocks.0.attn.hook_pattern"], cache["blocks.0.attn.hook_pattern"]
    )


def test_the_inputs_are_read_only_when_asked_for(small_run: Run, own_directory: Path) -> None:
    text = {"task": {"kind": "text", "source": "no-such-file.txt"}}
    fields = small_run.model_dump(mode="json") | text
    (own_directory / "run.json").write_text(json.dumps(fields), encoding="utf-8")
    series = open_series(own_directory)
    assert series.at(0).weights().keys() == series.at(30).weights().keys()
    with pytest.raises(InputError, match="no-such-file"):
        _ = series.inputs


def test_nothing_cached_is_an_empty_dict(own_directory: Path) -> None:
    (own_directory / "activations" / "step_00000010.safetensors").unlink()
    assert open_series(own_directory).at(10).activations() == {}


def test_an_unfinished_series_opens_with_what_is_there(own_directory: Path) -> None:
    (own_directory / "weights" / "step_00000030.safetensors").unlink()
    (own_directory / "weights" / ".step_00000030.safetensors.17.partial").write_bytes(b"half")
    assert open_series(own_directory).steps == [0, 10, 20]


def test_a_run_trained_on_a_device_that_is_not_here_can_be_read(own_directory: Path, small_run: Run) -> None:
    elsewhere = small_run.model_copy(update={"device": "cuda:99"})
    (own_directory / "run.json").write_text(elsewhere.model_dump_json(), encoding="utf-8")
    series = open_series(own_directory)
    assert series.run == elsewhere
    assert series[-1].model()(series.inputs.held_out.tokens).device.type == "cpu"


def test_a_step_that_is_not_kept_is_refused_with_the_nearest(small_directory: Path) -> None:
    with pytest.raises(InputError) as caught:
        open_series(small_directory).at(13)
    assert one_sentence(caught) == f"{small_directory} keeps no step 13; the nearest one is 10"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "Expecting property name"),
        (b"\xff\xfe", "codec can't decode"),
        (b"[1]", "must be a mapping"),
        (b"null", "must be a mapping"),
        (b"{}", "Run needs the field 'task'; Run needs the field 'model'"),
        (b'{"task": {"kind": "markov", "pi": [0.5, 0.6]}, "model": {"kind": "one_layer"}}', "pi must sum to one"),
        (b'{"tusk": 1, "task": {"kind": "markov", "pi": [0.5, 0.5]}, "model": {"kind": "one_layer"}}', "mean task?"),
    ],
)
def test_a_run_file_that_is_none_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        open_series(tmp_path)
    assert one_sentence(caught).startswith(f"{tmp_path / 'run.json'} does not hold a run: ")
    assert reason in str(caught.value)


def test_a_directory_without_a_run_or_without_snapshots_is_refused(tmp_path: Path, small_run: Run) -> None:
    with pytest.raises(InputError, match=r"is not a run directory: it has no run\.json"):
        open_series(tmp_path)
    claim_directory(tmp_path / "new", small_run)
    with pytest.raises(InputError, match="new holds no snapshots yet"):
        open_series(tmp_path / "new")


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(file.read_bytes()[:-5]),
                                    lambda file: file.write_bytes(b""),
                                    lambda file: file.write_bytes(b"foreign" * 100),
                                    lambda file: file.unlink()])  # fmt: skip
def test_a_truncated_or_foreign_snapshot_is_named(own_directory: Path, damage) -> None:
    series = open_series(own_directory)
    file = own_directory / "weights" / "step_00000020.safetensors"
    damage(file)
    for read in (series.at(20).weights, series.at(20).model, lambda: read_tensors(file)):
        with pytest.raises(InputError) as caught:
            read()
        assert one_sentence(caught).startswith(f"{file} is truncated or no safetensors file")
    assert series.at(10).weights()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda weights: weights.pop("embed.W_E"), r"'embed\.W_E' is missing"),
        (lambda weights: weights.update({"embed.W_X": weights["embed.W_E"]}), r"has no weight 'embed\.W_X', did you"),
        (lambda weights: weights.update({"embed.W_E": weights["embed.W_E"][:, :3]}), r"shape \[4, 3\].*\[4, 5\]"),
        (lambda weights: weights["embed.W_E"].fill_(torch.nan), r"embed\.W_E holds NaN or infinity in 20 of 20"),
    ],
)
def test_a_snapshot_that_the_model_does_not_fit_is_refused(own_directory: Path, change, reason: str) -> None:
    file = own_directory / "weights" / "step_00000020.safetensors"
    weights = load_file(file)
    change(weights)
    save_file({name: weight.clone(memory_format=torch.contiguous_format) for name, weight in weights.items()}, file)
    with pytest.raises(InputError, match=reason):
        open_series(own_directory).at(20).model()


def test_a_new_directory_becomes_the_runs_own_and_stays_so(tmp_path: Path, small_run: Run) -> None:
    directory = tmp_path / "deep" / "inside"
    claim_directory(directory, small_run)
    assert read_run(directory) == small_run
    before = listing(directory)
    claim_directory(directory, small_run)
    assert listing(directory) == before
    assert list(before) == ["run.json"]


def test_an_empty_directory_or_one_that_a_kill_left_half_claimed_is_taken(tmp_path: Path, small_run: Run) -> None:
    (tmp_path / ".run.json.4711.partial").write_text('{"task"', encoding="utf-8")
    claim_directory(tmp_path, small_run)
    assert list(listing(tmp_path)) == ["run.json"]


def test_another_runs_directory_is_refused_untouched_and_the_difference_named(
    own_directory: Path, small_run: Run
) -> None:
    before = listing(own_directory)
    fields = {"seed": 1, "model": small_run.model.model_copy(update={"std": 0.4})}
    with pytest.raises(InputError) as caught:
        claim_directory(own_directory, small_run.model_copy(update=fields))
    expected = f"{own_directory} already holds another run (it differs in model.std, seed); choose a new directory"
    assert one_sentence(caught) == expected
    assert listing(own_directory) == before


@pytest.mark.parametrize("name", ["thesis.tex", ".hidden", ".thesis.tex.1.partial"])
def test_a_directory_of_something_else_is_refused_untouched(tmp_path: Path, small_run: Run, name: str) -> None:
    (tmp_path / name).write_text("years of work", encoding="utf-8")
    with pytest.raises(InputError, match="is not an empty directory and holds no run; choose a new directory"):
        claim_directory(tmp_path, small_run)
    assert listing(tmp_path) == {name: b"years of work"}


def test_a_file_is_no_directory(tmp_path: Path, small_run: Run) -> None:
    file = tmp_path / "file"
    file.write_text("content", encoding="utf-8")
    for path in (file, file / "inside"):
        with pytest.raises(InputError) as caught:
            claim_directory(path, small_run)
        assert str(path) in one_sentence(caught)
    assert file.read_text(encoding="utf-8") == "content"


def test_what_a_kill_left_half_written_is_cleared_when_the_run_goes_on(own_directory: Path, small_run: Run) -> None:
    before = listing(own_directory)
    (own_directory / "weights" / ".step_00000040.safetensors.17.partial").write_bytes(b"half")
    (own_directory / ".losses.parquet.17.partial").write_bytes(b"half")
    claim_directory(own_directory, small_run)
    assert listing(own_directory) == before


def test_a_file_takes_its_place_only_when_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "file.txt"
    with atomic(file) as partial:
        partial.write_text("first", encoding="utf-8")
        assert not file.exists()
    assert file.read_text(encoding="utf-8") == "first"

    with pytest.raises(ZeroDivisionError), atomic(file) as partial:  # noqa: PT012
        partial.write_text("sec", encoding="utf-8")
        _ = 1 / 0
    assert listing(tmp_path) == {"new/file.txt": b"first"}


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.ENOSPC, "Unable to extend file properly\n, filename = 'x'"),  # as HDF5 words it
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)\nmore"),
    ],
)
def test_a_full_disk_is_one_sentence_and_the_file_before_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    file = tmp_path / "a.safetensors"
    write_tensors(file, {"x": torch.ones(3)}, step="1")
    before = listing(tmp_path)

    def half(tensors: dict, path: Path, metadata: dict) -> None:
        path.write_bytes(b"half")
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(series_module, "save_file", half)
        with pytest.raises(InputError) as caught:
            write_tensors(file, {"x": torch.zeros(3)})
    assert one_sentence(caught).startswith(f"{file} could not be written (")
    assert "No space left on device" in str(caught.value)
    assert str(caught.value).endswith("; what was kept before is whole")
    assert listing(tmp_path) == before

    def refuse(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", refuse)
        with pytest.raises(InputError, match="No space left on device"):
            write_tensors(file, {"x": torch.zeros(3)})
    assert listing(tmp_path) == before


def test_tensors_survive_the_disk_whatever_their_layout(tmp_path: Path) -> None:
    double = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    given = {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "expanded": torch.ones(1, 2).expand(3, 2),
        "with gradient": torch.zeros(2, requires_grad=True),
        "double": double,
        "scalar": torch.tensor(3),
        "view of another": double[1:],
    }
    write_tensors(tmp_path / "x.safetensors", given)
    found = read_tensors(tmp_path / "x.safetensors")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor.detach())
        assert found[name].dtype == tensor.dtype
