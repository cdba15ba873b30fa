import json
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xarray as xr

from fd_interp import cli
from fd_interp.claims import Claim, Finding
from fd_interp.models.config import Transformer
from fd_interp.papers import settings
from fd_interp.papers.focus_dilution import population
from fd_interp.training import loop
from fd_interp.training.loop import train
from fd_interp.training.run import Run
from fd_interp.training.series import open_series

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--training.steps", "20", "--training.batch-size", "4", "--task.context", "6", "--keep.held-out", "8"]
HEAVY = {
    "torch",
    "transformer_lens",
    "numpy",
    "pandas",
    "xarray",
    "plotly",
    "circuitsvis",
    "datasets",
    "pydantic",
    "rich",
}
VERBS = ("list", "train", "observe", "stages", "check", "report", "view", "sandbox")


class Done(NamedTuple):
    """What a command leaves."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on stdout, by the strict rules of JSON."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(self.out, parse_constant=refuse)


Command = Callable[..., Done]


@pytest.fixture
def fd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, run in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(population, "STEPS", 100)  # the theory's curves take seconds, and are tested elsewhere

    def call(*arguments: object) -> Done:
        code = cli.main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return call


def is_refused(done: Done) -> str:
    """One sentence on stderr, exit status 2, nothing on stdout."""
    assert (done.code, done.out) == (2, ""), done
    assert re.fullmatch(r"fd-interp: [^\n]+\n", done.err), done.err
    return done.err


def test_list_names_every_setting(fd: Command) -> None:
    done = fd("list")
    assert (done.code, done.err) == (0, "")
    assert all(
        re.search(rf"^{name} .*{run.training.steps}", done.out, re.MULTILINE) for name, run in settings().items()
    )
    as_json = fd("list", "--json").json
    assert as_json.keys() == settings().keys()
    assert all(Run(**as_json[name]) == run for name, run in settings().items())


def test_list_shows_what_can_be_changed(fd: Command) -> None:
    done = fd("list", "focus-dilution")
    assert re.search(r"^--training\.batch_size +128", done.out, re.MULTILINE)
    assert "Probability (lambda in the paper) of keeping the token, in `[-1/(d_vocab - 1), 1)`." in done.out
    assert Run(**fd("list", "focus-dilution", "--json").json) == settings()["focus-dilution"]


def test_train_trains_the_setting_with_what_was_changed(fd: Command, tmp_path: Path) -> None:
    done = fd("train", "focus-dilution", *SMALL, "--seed", "3", "--task.persistence=0.25")
    assert (done.code, done.err) == (0, "")
    assert "next: fd-interp report runs/focus-dilution/seed-3" in done.out
    series = open_series(tmp_path / "runs" / "focus-dilution" / "seed-3")
    assert series.run is not None
    assert (series.run.seed, series.run.task.persistence, series.run.training.steps) == (3, 0.25, 20)
    assert f"{len(series)} snapshots up to step 20 in runs/focus-dilution/seed-3" in done.out


def test_train_takes_a_directory_and_speaks_json(fd: Command, tmp_path: Path) -> None:
    done = fd("train", "focus-dilution", *SMALL, "--out", tmp_path / "mine", "--json", "--keep.at.kind", "every")
    assert (done.code, done.err) == (0, "")
    assert done.json.keys() == {"run", "steps", "seconds"}
    assert (done.json["run"], done.json["steps"]) == (str(tmp_path / "mine"), [0, 20])


def test_options_and_fields_come_in_any_order(fd: Command, tmp_path: Path) -> None:
    done = fd("train", "focus-dilution", "--task.persistence", "-0.01", "--json", *SMALL, "--out", "a", "--seed", "2")
    assert done.json["run"] == "a"
    run = open_series(tmp_path / "a").run
    assert run is not None
    assert (run.task.persistence, run.seed) == (-0.01, 2)


def test_observe_writes_the_trace_and_says_where_each_number_went(fd: Command, own_directory: Path) -> None:
    done = fd("observe", own_directory)
    assert (done.code, done.err) == (0, "")
    trace = xr.load_dataset(own_directory / "trace.nc")
    assert trace.step.values.tolist() == [0, 10, 20, 30]
    for name, variable in trace.data_vars.items():
        assert re.search(rf"^{name} .*{re.escape(variable.attrs['long_name'])}", done.out, re.MULTILINE), name
    assert f"4 steps in {own_directory / 'trace.nc'}" in done.out

    as_json = fd("observe", own_directory, "--json").json
    assert as_json["trace"] == str(own_directory / "trace.nc")
    assert as_json["variables"].keys() == set(trace.data_vars)
    loss = as_json["variables"]["loss"]
    assert loss == {"first": trace.loss[0], "last": trace.loss[-1], "min": trace.loss.min(), "max": trace.loss.max()}
    by_token = as_json["variables"]["embedding_norm"]
    assert by_token["last"] == pytest.approx(trace.embedding_norm[-1].mean().item())


def test_a_number_that_is_missing_is_null_in_json(fd: Command, small_run: Run, tmp_path: Path) -> None:
    """One sequence of six tokens does not hold every token, and perhaps no rare query."""
    run = small_run.model_copy(update={"keep": small_run.keep.model_copy(update={"held_out": 1})})
    train(run, tmp_path / "run", show_progress=False)
    variables = fd("observe", tmp_path / "run", "--json").json["variables"]
    trace = xr.load_dataset(tmp_path / "run" / "trace.nc")
    missing = {name for name in trace.data_vars if trace[name].isnull().all()}
    assert missing
    for name, numbers in variables.items():
        assert all((value is None) == (name in missing) for value in numbers.values()), name


def test_stages_prints_the_four_of_them(fd: Command, own_directory: Path) -> None:
    done = fd("stages", own_directory)
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()[1:5]] == ["I", "II", "III", "IV"]
    stages = fd("stages", own_directory, "--json").json["stages"]
    assert [stage["name"] for stage in stages] == ["I condensation", "II focus", "III dilution", "IV new directions"]
    assert all(stage.keys() == {"name", "start", "end", "seen"} for stage in stages)


def test_check_judges_and_its_status_says_how(fd: Command, own_directory: Path, monkeypatch) -> None:
    done = fd("check", own_directory)
    assert (done.code, done.err) == (1, "")  # thirty steps from a large start show no cycle
    assert "does not hold" in done.out
    as_json = fd("check", own_directory, "--json").json
    assert as_json.keys() == {"setting", "seeds", "claims", "versions", "seconds"}
    assert (as_json["setting"], as_json["seeds"]) == (str(own_directory), [0])
    ids = [claim["id"] for claim in as_json["claims"]]
    assert {"small/condensation", "small/focus", "small/dilution", "small/order"} <= {*ids}
    for claim in as_json["claims"]:
        word = "holds" if claim["holds"] else "does not hold"
        assert re.search(rf"^{word} +{claim['id']} ", done.out, re.MULTILINE)

    always = Claim("always", "it holds", "", "", lambda evidence: Finding(True, {}))
    monkeypatch.setattr("fd_interp.papers.focus_dilution.claims_about", lambda run: (always,))
    assert fd("check", own_directory).code == 0


def test_report_writes_a_page(fd: Command, own_directory: Path, tmp_path: Path) -> None:
    done = fd("report", own_directory)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"open {own_directory / 'report.html'}\n"
    page = (own_directory / "report.html").read_text(encoding="utf-8")
    assert "IV new directions" in page
    assert "claims hold on this run of seed 0" in page
    done = fd("report", own_directory, "--out", tmp_path / "deep" / "other.html", "--json")
    assert done.json == {"page": str(tmp_path / "deep" / "other.html")}
    assert (tmp_path / "deep" / "other.html").stat().st_size > 1e6


def test_view_writes_the_patterns_of_every_step_or_of_one(fd: Command, own_directory: Path, tmp_path: Path) -> None:
    def steps(file: Path) -> list[int]:
        (data,) = re.findall(r'"steps":\[([\d,]*)\]', file.read_text(encoding="utf-8"))
        return [int(step) for step in data.split(",")]

    done = fd("view", own_directory)
    assert (done.code, done.err) == (0, "")
    assert steps(own_directory / "attention.html") == [0, 10, 20, 30]
    done = fd("view", own_directory, "--step", 20, "--sequence", 3, "--out", tmp_path / "one.html", "--json")
    assert done.json == {"page": str(tmp_path / "one.html")}
    assert steps(tmp_path / "one.html") == [20]


@pytest.mark.parametrize("verb", ["observe", "stages", "check", "report", "view"])
def test_a_transformer_of_several_heads_goes_through_every_verb(
    fd: Command, small_run: Run, tmp_path: Path, verb: str
) -> None:
    model = Transformer(n_layers=2, n_heads=2, d_model=6, d_head=4, d_mlp=5, normalization_type="LN")
    train(small_run.model_copy(update={"model": model}), tmp_path / "deep", show_progress=False)
    done = fd(verb, tmp_path / "deep", "--json")
    assert (done.code, done.err) == (1 if verb == "check" else 0, "")
    assert isinstance(done.json, dict)


@pytest.mark.parametrize("verb", ["observe", "stages", "check", "report", "view"])
def test_an_unfinished_run_goes_through_every_verb(fd: Command, own_directory: Path, verb: str) -> None:
    for step in (10, 20, 30):
        (own_directory / "weights" / f"step_{step:08d}.safetensors").unlink()
    done = fd(verb, own_directory, "--json")
    assert done.code == (1 if verb == "check" else 0)
    assert ("is unfinished, at step 0 of 30" in done.err) == (verb != "view")  # which shows steps and judges nothing
    assert isinstance(done.json, dict)


def test_names_are_printed_as_they_are(fd: Command, own_directory: Path) -> None:
    """Square brackets and colons mean colours and pictures to the library that prints tables."""
    odd = own_directory.rename(own_directory.with_name("[bold]x:smile:"))
    assert "[bold]x:smile:/focus" in fd("check", odd).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "focus-dilutoin"], "there is no setting 'focus-dilutoin', did you mean focus-dilution"),
        (["list", "zzz"], "there is no setting 'zzz', known: clustering, clustering-2d"),
        (["train", "focus-dilution", "--task.persistance", "0.3"], "has no field 'persistance', did you mean persist"),
        (["train", "focus-dilution", "--task.persistence", "3"], "persistence must be in [-0.1429, 1) for 8 tokens"),
        (["train", "focus-dilution", "--training.steps", "0"], "steps: Input should be greater than 0, not 0"),
        (["train", "focus-dilution", "--training.steps"], "--training.steps needs a value"),
        (["train", "focus-dilution", "extra"], "'extra' is not an option"),
        (["train", "focus-dilution", "--device", "cuda:99"], "device 'cuda:99' is not usable here"),
        (["train", "focus-dilution", "--keep.hooks", "patern"], "the model has no hook 'patern', did you mean pattern"),
        (["train", "focus-dilution-text", "--task.source", "gone.txt"], "gone.txt"),
        (["observe", "gone"], "gone does not exist; give a run directory or a llama2.c checkpoint"),
        (["stages", "."], "is not a run directory: it has no run.json"),
        (["report", "empty"], "empty is not a run directory: it has no run.json"),
        (["view", "file.txt"], "file.txt is neither a run directory nor a llama2.c checkpoint (.bin)"),
        (["observe", ".", "--steps", "3"], "unknown option --steps; see fd-interp observe --help"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    fd: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "file.txt").write_text("text", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    assert message in is_refused(fd(*arguments))
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["empty", "file.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["view", "--step", "13"], "keeps no step 13; the nearest one is 10"),
        (["view", "--sequence", "16"], "there are 16 held-out sequences, so sequence must be below that, not 16"),
        (["view", "--sequence", "-1"], "held-out sequences"),
        (["report", "--out", "run.json/report.html"], "could not be written"),
    ],
)
def test_a_run_that_cannot_be_looked_at_so_is_one_sentence(
    fd: Command, own_directory: Path, arguments: list[str], message: str, monkeypatch
) -> None:
    monkeypatch.chdir(own_directory)
    verb, *options = arguments
    assert message in is_refused(fd(verb, own_directory, *options))
    assert not list(own_directory.glob("*.html"))


def test_directories_that_hold_something_else_are_refused_untouched(fd: Command, own_directory: Path) -> None:
    before = {file: file.read_bytes() for file in own_directory.rglob("*") if file.is_file()}
    assert "already holds another run (it differs in " in is_refused(
        fd("train", "focus-dilution", "--out", own_directory)
    )
    assert {file: file.read_bytes() for file in own_directory.rglob("*") if file.is_file()} == before
    (own_directory / "run.json").unlink()
    sentence = is_refused(fd("train", "focus-dilution", "--out", own_directory))
    assert "is not an empty directory and holds no run; choose a new directory" in sentence
    assert "not an empty directory" in is_refused(
        fd("train", "focus-dilution", "--out", own_directory / "losses.parquet")
    )


@pytest.mark.parametrize("verb", ["observe", "stages", "check", "report", "view"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", b"{", "run.json does not hold a run: Expecting property name"),
        ("run.json", b'{"sead": 1}', "run.json does not hold a run: "),
        ("weights/step_00000020.safetensors", b"half", "step_00000020.safetensors is truncated or no safetensors file"),
    ],
)
def test_a_damaged_run_is_one_sentence(
    fd: Command, own_directory: Path, verb: str, name: str, content: bytes, message: str
) -> None:
    (own_directory / name).write_bytes(content)
    assert message in is_refused(fd(verb, own_directory))


def test_a_run_that_diverges_is_one_sentence_and_what_was_good_is_kept(fd: Command, tmp_path: Path) -> None:
    done = fd("train", "focus-dilution", *SMALL, "--training.optimizer.lr", "1e30", "--out", "run")
    assert re.search(r"at step \d+; a smaller learning rate", is_refused(done))
    assert open_series(tmp_path / "run").steps[0] == 0


def checkpoint(file: Path, *, missing: int = 0) -> Path:
    """A llama2.c file of one layer with random weights, perhaps cut short."""
    dim, hidden, layers, heads, vocab, seq = 4, 6, 1, 2, 9, 8
    count = vocab * dim + layers * (2 * dim + 4 * dim * dim + 3 * hidden * dim) + dim + seq * dim // heads
    weights = np.random.default_rng(0).normal(size=count).astype("<f4").tobytes()
    sizes = struct.pack("<7i", dim, hidden, layers, heads, heads, vocab, seq)
    file.write_bytes(sizes + weights[: len(weights) - missing])
    return file


@pytest.mark.parametrize("verb", ["observe", "stages", "check", "report", "view"])
def test_a_checkpoint_needs_a_text_and_to_be_whole(fd: Command, tmp_path: Path, verb: str) -> None:
    whole, cut = checkpoint(tmp_path / "a.bin"), checkpoint(tmp_path / "b.bin", missing=4)
    assert "a.bin brings no text to run it on; name one (--text stories.txt)" in is_refused(fd(verb, whole))
    assert "b.bin" in is_refused(fd(verb, cut, "--text", "stories.txt"))
    (tmp_path / "c.bin").write_bytes(b"no")
    assert "c.bin" in is_refused(fd(verb, tmp_path / "c.bin", "--text", "stories.txt"))
    sentence = is_refused(fd(verb, whole, "--text", "stories.txt"))
    assert "0 folders beside" in sentence
    assert "(--tokenizer FOLDER)" in sentence


@pytest.mark.parametrize("verb", ["stages", "check", "report"])
def test_a_lone_checkpoint_has_no_stages_and_that_is_said_before_any_work(
    fd: Command, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "tok").mkdir()
    done = fd(verb, checkpoint(tmp_path / "a.bin"), "--text", "not-even-looked-at.txt", "--tokenizer", tmp_path / "tok")
    assert "a.bin is one checkpoint, and stages need a run; try fd-interp observe" in is_refused(done)


def test_a_real_checkpoint_is_observed_and_viewed_in_a_folder_of_its_own(
    fd: Command, shared_data: Path, tmp_path: Path
) -> None:
    model = next((shared_data / "stories260K").glob("*.bin"))
    text = sorted((shared_data / "tinystories").glob("*.txt"))[0]
    beside = sorted(model.parent.rglob("*"))
    stories = tmp_path / "stories.txt"
    stories.write_text(
        "<|endoftext|>".join(text.read_text(encoding="utf-8")[:400_000].split("<|endoftext|>")[:-1]), "utf-8"
    )
    trace = fd("observe", model, "--text", stories, "--json").json["trace"]
    assert xr.load_dataset(trace).focus_ratio.shape == (1, 5, 8)
    page = fd("view", model, "--text", stories, "--json").json["page"]
    assert Path(trace).parent == Path(page).parent == Path("runs") / model.stem
    assert sorted(model.parent.rglob("*")) == beside


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training_exits_with_130_and_can_be_looked_at(fd: Command, monkeypatch, number: int) -> None:
    batch_loss, calls = loop.batch_loss, iter(range(1000))

    def interrupting(*arguments: Any) -> torch.Tensor:
        if next(calls) == 12:
            signal.raise_signal(number)
        return batch_loss(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "batch_loss", interrupting)
        done = fd("train", "focus-dilution", *SMALL, "--out", "run", "--json")
    assert done == (130, "", "fd-interp: interrupted; the same command goes on from here\n")
    assert fd("observe", "run", "--json").code == 0
    assert fd("train", "focus-dilution", *SMALL, "--out", "run", "--json").json["steps"][-1] == 20


def test_an_interruption_anywhere_exits_with_130(fd: Command, own_directory: Path, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fd_interp.reproduction.observed", interrupted)
    assert fd("observe", own_directory).code == 130


def test_a_reader_who_leaves_early_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    class Closed:
        def close(self) -> None:
            pass

    monkeypatch.setattr(cli, "_show", gone)
    monkeypatch.setattr(sys, "stderr", Closed())
    assert cli.main(["list"]) == 0


def test_a_defect_is_not_hidden(fd: Command, own_directory: Path, monkeypatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("fd_interp.reproduction.observed", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        fd("observe", own_directory)


@pytest.mark.parametrize("arguments", [[], ["vanish"], ["observe"], ["view", "x", "--step", "soon"], ["list", "--jso"]])
def test_what_the_parser_refuses_has_status_2(arguments: list[str], capsys) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert "fd-interp" in capsys.readouterr().err


def test_help_names_every_verb_and_imports_nothing_heavy() -> None:
    program = f"""
import sys
from fd_interp.cli import main
for arguments in (["--help"], *([verb, "--help"] for verb in {VERBS})):
    try:
        main(arguments)
    except SystemExit as exit:
        assert not exit.code
print("heavy:", sorted({HEAVY} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == ""
    assert done.stdout.endswith("heavy: []\n")
    for verb in VERBS:
        assert re.search(rf"^    {verb} +\w", done.stdout, re.MULTILINE), verb
        assert f"usage: fd-interp {verb} [-h]" in done.stdout


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "fd_interp.cli", "view"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "the following arguments are required: RUN" in done.stderr
