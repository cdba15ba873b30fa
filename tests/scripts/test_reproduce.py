import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

SHORT = ["--seeds", "1", "--training.steps", "40", "--keep.held_out", "32", "--keep.at.count", "5"]


class Done(NamedTuple):
    """What a command leaves."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def reproduce(
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    reproduction = script("scripts/reproduce.py")

    def call(*arguments: str) -> Done:
        returncode = reproduction.main(arguments)
        return Done(returncode, *capsys.readouterr())

    return call


def test_too_few_steps_show_no_cycle_and_the_exit_status_says_so(reproduce, tmp_path: Path):
    done = reproduce("focus-dilution", *SHORT, "--json")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() == {"setting", "seeds", "claims", "versions", "seconds"}
    entry = {"id", "statement", "source", "expected", "measured", "holds", "control"}
    assert all(verdict.keys() == entry for verdict in result["claims"])
    holds = {verdict["id"]: verdict["holds"] for verdict in result["claims"]}
    assert not holds["zipf-8/model/focus"]  # after 40 steps there cannot be any
    assert holds["zipf-8/population/focus"]  # the flow is always followed to its end
    controls = {verdict["id"].split("/")[0] for verdict in result["claims"] if verdict["control"]}
    assert controls == {"persistence-0", "symmetric-low", "uniform", "frozen-attention", "residual", "anti-focus"}
    page = (tmp_path / "runs" / "focus-dilution" / "report.html").read_text(encoding="utf-8")
    assert "zipf-8" in page

    again = reproduce("focus-dilution", "--seeds", "1", "--training.steps", "50")
    assert again.returncode == 2
    assert "already holds another run (it differs in" in again.stderr


def test_text_is_reproduced_from_any_file(reproduce, tmp_path: Path):
    words = "the cat saw a dog and the dog saw the cat near the old red house by the sea "
    tales = (f"tale {number}: {words * 8}" for number in range(40))
    (tmp_path / "tales.txt").write_text("<|endoftext|>".join(tales), encoding="utf-8")
    options = ["--task.vocab", "270", "--training.steps", "20", "--keep.held_out", "16", "--keep.at.count", "4"]
    done = reproduce("focus-dilution-text", "--text", "tales.txt", "--seeds", "1", *options, "--json")
    assert done.returncode == 1, done.stderr
    assert {verdict["id"] for verdict in json.loads(done.stdout)["claims"]} >= {"tales/focus", "tales-frozen/focus"}


FEW = ["--seeds", "1", "--training.steps", "20", "--keep.at.stride", "10", "--keep.held_out", "16",
       "--training.batch_size", "8", "--json"]  # fmt: skip


def test_too_few_steps_show_no_stages_and_yet_all_is_judged_and_shown(reproduce, tmp_path: Path):
    done = reproduce("incremental", *FEW, "--task.d_vocab", "4")
    assert done.returncode == 1, done.stderr
    verdicts = {verdict["id"]: verdict for verdict in json.loads(done.stdout)["claims"]}
    assert all(verdict["measured"] for verdict in verdicts.values())
    cases, staged = (
        {"m-1.7", "m-2"},
        {"order", "detectors", "competition", "plateaus", "final", "offsets", "rung-of-heads"},
    )
    of_runs = {f"{case}/{claim}" for case in cases for claim in staged} | {"m-1.7/permutation", "full/skip"}
    across = {"scale-of-start/breaking", "sequences/early-stopping", "regression/flow"}
    flows = {f"population/{law}" for law in ("flow-plateaus", "offset-identity", "escape")}
    claims = {identity for identity, verdict in verdicts.items() if verdict["control"] is None}
    assert of_runs | across | flows <= claims
    # After 20 steps nothing is learned; heads that start alike are alike all the same, and the flow needs no run.
    assert {identity for identity in claims if verdicts[identity]["holds"]} == flows | {"alike/rung-one"}
    controls = {identity.split("/")[0] for identity, verdict in verdicts.items() if verdict["control"]}
    assert controls == {"equal", "alike", "m-1.7", "heads-1", "full-without-lag-1"}
    assert "says nothing" in verdicts["equal/order"]["measured"]

    page = (tmp_path / "runs" / "incremental" / "report.html").read_text(encoding="utf-8")
    for title in ("m = 1.7", "m = 2", "Regression and its flow", "Order of importance", "Number of heads", "Laws",
                  "A full transformer", "Two layers", "Overlapping blocks"):  # fmt: skip
        assert f"<h2>{title}</h2>" in page, title
    for run in ("std-1e-08", "sequences-30", "two-layers"):
        assert (tmp_path / "runs" / "incremental" / run / "seed-0" / "run.json").exists()


def test_the_size_of_the_paper_can_be_overridden(reproduce, tmp_path: Path):
    done = reproduce("incremental-paper", *FEW, "--task.d_vocab", "3")
    assert done.returncode == 1, done.stderr
    verdicts = json.loads(done.stdout)["claims"]
    asked = ("order", "detectors", "competition", "permutation", "offsets")
    assert [verdict["id"] for verdict in verdicts] == [f"size-m-{m}/{claim}" for m in (1.7, 1.9) for claim in asked]
    assert not any(verdict["holds"] for verdict in verdicts)
    page = (tmp_path / "runs" / "incremental-paper" / "report.html").read_text(encoding="utf-8")
    assert "<h2>The paper&#39;s size, m = 1.9</h2>" in page


def test_bad_input_is_one_sentence(reproduce):
    for arguments, sentence in (
        (["focus-dilution", "--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["focus-dilution-text"], "needs --text"),
        (["focus-dilution-text", "--text", "absent.txt"], "absent.txt"),
        (["focus-dilution", "--task.pi", "0.5", "0.6"], "pi must sum to one"),
        (["incremental", "--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["incremental", "--text", "tales.txt"], "incremental takes no --text"),
        (["incremental", "--task.ratoi", "2"], "did you mean ratio?"),
        (["incremental", "--task.blocks", "[[1],[1]]"], "share lags"),
        (["incremental-paper", "--model.attends_by", "nothing"], "attends_by"),
    ):
        done = reproduce(*arguments)
        assert done.returncode == 2, done.stderr
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
