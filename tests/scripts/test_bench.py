import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from math import isfinite
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def bench(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("scripts/bench.py")


@pytest.fixture(scope="module")
def results(bench: ModuleType) -> dict[str, Any]:
    """The whole benchmark once, with the fewest rounds: its times mean nothing here."""
    printed = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", ["bench.py", "--rounds", "1", "--json"])
        assert bench.main() == 0
    return json.loads(printed.getvalue())


def test_every_row_says_what_is_compared_with_what(results: dict[str, Any]):
    names = [row["name"] for row in results["rows"]]
    assert len(names) == len(set(names))
    for ours in ("training step, loss on last", "training step, loss on all"):
        for theirs in ("plain PyTorch", "TransformerLens' own model"):
            assert f"{ours} / {theirs}" in names
    for form in ("position", "token and position"):
        assert f"minimal model by {form}, training step / plain PyTorch" in names
    others = {"observe": 2, "keep a snapshot": 1, "load a snapshot": 1, "import fd_interp": 1, "fd-interp --help": 1}
    for other, times in others.items():
        assert sum(name.startswith(other) for name in names) == times


def test_every_row_has_a_ratio_and_the_verdict_on_it(results: dict[str, Any]):
    for row in results["rows"]:
        assert row.keys() == {"name", "seconds", "ratio", "target", "verdict"}
        assert isfinite(row["ratio"])
        assert min(row["ratio"], row["seconds"]) > 0
        met = {True: "ok", False: "missed"}
        assert row["verdict"] == ("" if row["target"] is None else met[row["ratio"] <= row["target"]])


def test_it_says_with_what_it_was_measured(results: dict[str, Any]):
    assert results["rounds"] == 1
    assert {"python", "torch", "transformer-lens"} <= results["versions"].keys()
    before, after = results["peak_memory_MiB"].values()
    assert 50 < before <= after


def test_the_table_has_a_line_for_each_row(bench: ModuleType, results: dict[str, Any], capsys: pytest.CaptureFixture):
    bench.print_table(results)
    lines = capsys.readouterr().out.splitlines()
    table = lines[1 : lines.index("")]
    for row, line in zip(results["rows"], table, strict=True):
        assert line.startswith(row["name"])
        assert f" {row['ratio']:.2f} " in line
    assert len({len(line) for line in table}) == 1


@pytest.mark.parametrize(("ratio", "target", "verdict"), [(0.8, 0.8, "ok"), (0.81, 0.8, "missed"), (9.0, None, "")])
def test_a_target_is_met_at_or_below_it(bench: ModuleType, ratio: float, target: float | None, verdict: str):
    assert bench.Row("a / b", 1.0, ratio, target).verdict == verdict


def test_contestants_take_turns_and_the_median_counts(bench: ModuleType):
    now, called = [0.0], []
    durations = {"slow": iter([100, 4, 4, 50, 2, 2]), "quick": iter([100, 1, 1, 1, 1, 70])}

    def contestant(name: str):
        def call() -> None:
            called.append(name)
            now[0] += next(durations[name])

        return call

    taken = bench.times({name: contestant(name) for name in durations}, 5, clock=lambda: now[0])
    assert taken == {"slow": 4, "quick": 1}
    assert called == ["slow", "quick"] * 6


def test_several_calls_of_a_turn_are_divided(bench: ModuleType):
    now = [0.0]

    def call() -> None:
        now[0] += 3

    assert bench.times({"it": call}, 2, calls=7, clock=lambda: now[0]) == {"it": 3}


def test_no_rounds_are_refused(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--rounds", "0"])
    with pytest.raises(SystemExit) as refused:
        bench.main()
    assert refused.value.code == 2
    assert "--rounds must be at least 1, not 0" in capsys.readouterr().err


def share_weights(ours: Any, plain: Any) -> None:
    """Gives our model the weights of the one in plain PyTorch."""
    attn = ours.blocks[0].attn
    if hasattr(plain, "query"):
        mlp = ours.blocks[0].mlp
        ours.embed.W_E.data, ours.pos_embed.W_pos.data = plain.embed.weight.data, plain.pos_embed.data
        attn.b_Q.data, attn.W_V.data = plain.query.data[None], plain.value.weight.data.T[None]
        mlp.W_in.data, mlp.b_in.data = plain.first.weight.data.T, plain.first.bias.data
        mlp.W_out.data, mlp.b_out.data = plain.second.weight.data.T, plain.second.bias.data
    elif hasattr(ours, "unembed"):
        ours.embed.W_E.data, ours.unembed.W_U.data = plain.embed.weight.data, plain.W_U.data
        attn.W_Q.data, attn.W_K.data = plain.W_Q.data[None], plain.W_K.data[None]
    else:
        attn.W_Q.data, attn.W_V.data = plain.W_Q.data, plain.W_V.data


def test_both_implementations_compute_the_same_loss(bench: ModuleType):
    for run in bench.TRAINED.values():
        batch = next(bench.batches(run))
        plain, ours = bench.plain_model(run), bench.new_model(run)
        for parameter in plain.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        share_weights(ours, plain)
        ratio = bench.batch_loss(run, ours, batch) / bench.loss_of(plain(batch.tokens), batch.targets[:, run.queries])
        assert ratio.item() == pytest.approx(1, abs=1e-6)
