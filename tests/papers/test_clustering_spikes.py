import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from fd_interp.claims import Claim, Evidence, Finding
from fd_interp.config import InputError
from fd_interp.overrides import override
from fd_interp.papers.clustering import arms, spikes
from fd_interp.papers.clustering.arms import ARMS, BASE, UNCHANGED, W_V, arm_run, effect_of, effects, scaled_snapshot
from fd_interp.probes.spikes import LossSpike
from fd_interp.training.loop import train
from fd_interp.training.series import Series, read_tensors
from fd_interp.training.state import snapshot_name

SHORT = override(BASE, ["--training.steps", "640", "--keep.held_out", "4096"])
"""Ten epochs: arms go on from the sixth, for three."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Series:
    return train(SHORT, tmp_path_factory.mktemp("base") / "seed-0", show_progress=False)


def test_arms_fork_where_the_docstring_says() -> None:
    assert [arms.epochs(BASE, share) for share in (arms.FORK, arms.LASTING, arms.SETTLING)] == [600, 300, 100]
    assert [arms.epochs(SHORT, share) for share in (arms.FORK, arms.LASTING, arms.SETTLING)] == [6, 3, 1]


def test_an_arm_starts_where_its_seed_was_and_with_its_averages(base: Series, tmp_path: Path) -> None:
    run = arm_run(ARMS[UNCHANGED], SHORT, base, tmp_path / "start")
    arm = train(run, tmp_path / "arm", show_progress=False)
    for name, weight in base.at(384).weights().items():
        assert torch.equal(arm[0].weights()[name], weight)
    assert run.start is not None
    assert run.start.moments == arms.MOMENTS
    assert run.training.steps == 192
    assert not (tmp_path / "start").exists()  # nothing is changed, so nothing is copied


def test_a_larger_w_v_turns_nothing_and_its_averages_fit(base: Series, tmp_path: Path) -> None:
    file = scaled_snapshot(base, 384, 2.0, tmp_path)
    before, after = base.at(384).weights(), read_tensors(file)
    assert torch.equal(after[W_V], 2 * before[W_V])
    assert all(torch.equal(after[name], before[name]) for name in before if name != W_V)
    kept = base.at(384).activations()
    moved = read_tensors(tmp_path / "activations" / snapshot_name(384))
    assert torch.allclose(moved[f"exp_avg.{W_V}"], kept[f"exp_avg.{W_V}"] / 2)
    assert torch.allclose(moved[f"exp_avg_sq.{W_V}"], kept[f"exp_avg_sq.{W_V}"] / 4)
    assert torch.equal(moved["exp_avg.embed.W_E"], kept["exp_avg.embed.W_E"])
    tokens = SHORT.task.held_out(4096, torch.Generator()).tokens
    xi = []
    for weights in (before, after):
        model = base.build()
        model.load_state_dict(weights, strict=False)
        xi.append(model.run_with_cache(tokens)[1]["blocks.0.ln2.hook_normalized"])
    assert torch.allclose(*xi, atol=1e-2)
    assert not torch.equal(*xi)


def test_what_an_arm_changes_is_all_that_it_changes(base: Series, tmp_path: Path) -> None:
    unchanged = arm_run(ARMS[UNCHANGED], SHORT, base, tmp_path / "start")
    differing = {}
    for name, arm in ARMS.items():
        run = arm_run(arm, SHORT, base, tmp_path / name)
        pairs = zip(_flat(unchanged.model_dump()), _flat(run.model_dump()), strict=False)
        differing[name] = {path for (path, a), (_, b) in pairs if a != b} if name != "sgd" else {"optimizer"}
    assert differing.pop(UNCHANGED) == set()
    assert differing["w-v-doubled"] == differing["w-v-halved"] == {"start.snapshot"}
    assert differing["adam-eps-1e-4"] == {"training.optimizer.eps"}
    assert differing["norm-eps"] == {"model.eps"}
    assert all(differing.values())


def _flat(value: object, path: str = "") -> list[tuple[str, object]]:
    if isinstance(value, dict) and value:
        return [pair for key in sorted(value) for pair in _flat(value[key], f"{path}.{key}".lstrip("."))]
    return [(path, value)]


def test_effects_are_paired_over_seeds() -> None:
    unchanged = [1.0, 2.0, 0.5, 3.0, 1.5, 2.5]
    assert effect_of(unchanged, unchanged) == pytest.approx((1.75, 0, 0, 0, np.nan), nan_ok=True)
    fewer = effect_of([value - 0.5 - 0.1 * (seed % 2) for seed, value in enumerate(unchanged)], unchanged)
    assert fewer.difference == pytest.approx(-0.55)
    assert fewer.low < -0.55 < fewer.high < 0  # although seeds differ by more than that
    assert fewer.standardized < -5
    found = effects({UNCHANGED: unchanged, "more": [2 * value for value in unchanged]})
    assert found["more"].rate == pytest.approx(2 * found[UNCHANGED].rate)
    assert found["more"].low > 0


def test_spikes_are_counted_once_the_change_has_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = np.full(64 * 40, 1e-3)
    for epoch in (12, 25, 30):
        losses[64 * epoch : 64 * (epoch + 1)] = 0.1
    monkeypatch.setattr(arms, "training_losses", lambda _: losses)
    series = Series("nothing", (), lambda: None, lambda: None)  # type: ignore[arg-type]
    assert arms.spikes_per_100_epochs(series, 20) == pytest.approx(10)
    assert arms.spikes_per_100_epochs(series, 10) == pytest.approx(10)
    assert arms.spikes_per_100_epochs(series, 35) == 0


def table(**columns: list[float]) -> xr.Dataset:
    return xr.Dataset.from_dataframe(pd.DataFrame(columns))


def judged(claim: Claim, trace: xr.Dataset) -> Finding:
    return claim.check(Evidence(trace, {}))


@pytest.mark.parametrize(
    ("ratios", "holds"),
    [([10, 3, 1], True), ([10, 2.9, 1], False), ([10, 1], False), ([np.nan, 5], True), ([np.nan], False)],
)
def test_sharpness_has_shot_up_where_it_has_in_most_spikes(ratios: list[float], holds: bool) -> None:
    assert judged(spikes.SHARPNESS_UP, table(sharpness_ratio=ratios)).holds == holds


@pytest.mark.parametrize(
    ("ratios", "mass", "holds"),
    [
        ([4, 3.2, 9], [1, 1, 1], True),
        ([2.9, 4, 5.1], [1, 1, 1], False),
        ([1, 1.1, 4], [0.5, 0.9, 0.95], True),
        ([4, 4, 1], [0.5, 0.9, 0.95], False),
        ([4, 4], [0.1, 0.9], False),
    ],
)
def test_halving_quadruples_the_sharpness_where_it_lies_along_w_v(ratios: list, mass: list, holds: bool) -> None:
    trace = table(halved_sharpness_ratio_before=ratios, sharpness_mass_before=mass)
    assert judged(spikes.FOURFOLD_WHEN_HALVED, trace).holds == holds


def test_the_sharpest_direction_is_that_of_w_v_where_it_has_most_of_it() -> None:
    assert judged(spikes.ON_W_V, table(sharpness_mass_at=[0.9, 0.6, 0.1])).holds
    assert not judged(spikes.ON_W_V, table(sharpness_mass_at=[0.9, 0.4, 0.1])).holds


def test_an_arm_counts_by_its_interval() -> None:
    def of(arm: str, low: float, high: float) -> xr.Dataset:
        numbers = {"rate": [1.0], "difference": [(low + high) / 2], "low": [low], "high": [high]}
        return xr.Dataset.from_dataframe(pd.DataFrame(numbers, index=pd.Index([arm], name="arm")))

    assert judged(spikes.FEWER_WHEN_HELD, of("w-v-held", -1, -0.1)).holds
    assert not judged(spikes.FEWER_WHEN_HELD, of("w-v-held", -1, 0.1)).holds


def test_a_reproduction_too_short_for_spikes_says_so(
    script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["clustering-spikes", "--seeds", "2", "--out", str(tmp_path), "--json", "--training.steps", "640"]
    assert script("scripts/reproduce.py").main(arguments) == 2
    told = capsys.readouterr()
    assert "no seed's loss spikes, so there is nothing to look at; train for longer" in told.err
    assert told.out == ""


def test_a_short_reproduction_with_spikes_leaves_tables_and_a_report(
    script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    """Every window is a spike, so that there are some; workers that share this process's memory know of it."""
    monkeypatch.setattr(spikes, "_spikes", lambda series: [LossSpike(320, 384, 0.7, 1.0, 256, 384, 448)])
    monkeypatch.setattr(spikes, "_quiet", lambda series: [LossSpike(448, 512, 0.7, 1.0, 384, 512, 576)])
    with joblib.parallel_config(backend="sequential"):
        monkeypatch.setattr(spikes, "in_parallel", lambda function, each, **more: [function(x, **more) for x in each])
        arguments = ["clustering-spikes", "--seeds", "2", "--out", str(tmp_path), "--json", "--training.steps", "640"]
        assert script("scripts/reproduce.py").main(arguments) == 1
    told = json.loads(capsys.readouterr().out)
    assert {claim["id"].split("/")[0] for claim in told["claims"]} == {"spikes", "arms"}
    assert not told["claims"][0]["holds"]  # nothing has been learned, and nothing has risen
    of_arms = pd.read_csv(tmp_path / "arms.csv")
    assert len(of_arms) == 2 * len(ARMS)
    assert set(of_arms.arm) == set(ARMS)
    assert len(pd.read_csv(tmp_path / "spikes.csv")) == 2
    assert (tmp_path / "report.html").exists()


def test_more_seeds_than_solve_the_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="19 seeds are known to solve the task, so there are no 20"):
        spikes.on_spikes(range(20), tmp_path, [])
