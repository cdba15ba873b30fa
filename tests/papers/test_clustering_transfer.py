"""From p = 2 to a larger p: what starts from what, and what counts as a gain."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from fd_interp.claims import Evidence
from fd_interp.observation import Trace
from fd_interp.papers.clustering import transfer
from fd_interp.papers.clustering.transfer import (
    BASE,
    DIRECT,
    FIRST_SEED,
    LEVELS,
    SHUFFLED,
    SOONER,
    TUNED,
    beside_direct,
    on_transfer,
    paired,
    shares,
    table,
    transfer_to,
)
from fd_interp.training.series import open_series, read_run

STEPS = 100
NEVER = np.nan
TINY = ["--task.length", "4", "--task.k", "2", "--model.d_model", "4", "--training.steps", "4", "--keep.held_out", "20",
        "--keep.at.stride", "2"]  # fmt: skip


def found(
    tuned: Sequence[float], direct: Sequence[float], shuffled: Sequence[float] | None = None, learned: int | None = None
) -> Trace:
    """Seeds whose accuracies pass .98 at these steps, the first so many of which have learned p = 2."""
    shuffled = direct if shuffled is None else shuffled
    first = np.array([direct, tuned, shuffled], dtype=float)
    solved = np.arange(len(tuned)) < (len(tuned) if learned is None else learned)
    return xr.Dataset(
        {
            "first": (("start", "seed", "level"), np.stack([first - 10, first], -1)),
            "accuracy": (("start", "seed"), np.where(np.isnan(first), 0.3, 1.0)),
            "source": ("seed", np.where(solved, "clustering head", "stuck")),
            "source_solved": ("seed", solved),
        },
        coords={"start": [DIRECT, TUNED, SHUFFLED], "seed": range(len(tuned)), "level": list(LEVELS)},
        attrs={"steps": STEPS},
    )


def array(*steps: float) -> np.ndarray:
    return np.array(steps, dtype=float)


def test_a_seed_is_sooner_where_it_is_earlier_or_alone():
    seen = paired(array(10, 10, NEVER, 10, NEVER, 20), array(20, NEVER, 5, 10, NEVER, 10))
    assert (seen.sooner, seen.later) == (2, 2)
    assert seen.superiority == 0.5
    assert seen.p_value == pytest.approx(11 / 16)  # two or more heads of four coins


def test_what_is_reached_after_the_compared_steps_is_not_reached():
    assert paired(array(150), array(120), steps=100)[:2] == (0, 0)
    assert paired(array(150), array(120))[:2] == (0, 1)
    assert paired(array(90), array(120), steps=100)[:2] == (1, 0)


def test_a_gain_of_five_seeds_in_five_is_one_in_32_by_chance():
    seen = paired(array(*[10] * 5), array(*[20] * 5))
    assert seen.p_value == 1 / 32
    assert seen.superiority == 1
    assert paired(array(*[20] * 5), array(*[10] * 5)).superiority == 0


def test_only_ties_show_nothing():
    assert paired(array(NEVER, 5), array(NEVER, 5)) == (0, 0, 1.0, 0.5)


def holds(trace: Trace, start: str = TUNED, *, solved: bool = True) -> bool:
    return SOONER.check(Evidence(beside_direct(trace, start, solved=solved), {})).holds


def test_a_start_that_helps_is_claimed_and_one_that_does_not_is_not():
    helped = found(tuned=[10] * 6, direct=[NEVER, 50, 50, 50, 50, NEVER])
    assert holds(helped)
    assert not holds(helped, SHUFFLED)
    assert not holds(found(tuned=[50] * 6, direct=[10] * 6))
    assert not holds(found(tuned=[10, 10, 10, 60, 60, 60], direct=[30] * 6))
    assert not holds(found(tuned=[10] * 4, direct=[50] * 4))  # too few
    assert not holds(found(tuned=[STEPS + 1] * 6, direct=[NEVER] * 6))  # too late to compare


def test_seeds_that_have_not_learned_p_2_do_not_help_the_claim_and_are_its_control():
    mixed = found(tuned=[50] * 6 + [10] * 6, direct=[50] * 12, learned=6)
    assert not holds(mixed)
    assert holds(mixed, solved=False)
    verdicts = {verdict.id: verdict for verdict in transfer._verdicts(mixed, "p-3")}
    assert not any(verdict.holds for verdict in verdicts.values())
    good = found(tuned=[10] * 6 + [50] * 6, direct=[50] * 12, learned=6)
    assert all(verdict.holds for verdict in transfer._verdicts(good, "p-3"))
    assert [verdict.control is None for verdict in transfer._verdicts(good, "p-3")] == [True, False, False]
    every = found(tuned=[10] * 12, direct=[50] * 12, shuffled=[10] * 12, learned=6)
    assert [verdict.holds for verdict in transfer._verdicts(every, "p-3")] == [True, False, False]


def test_where_every_seed_has_learned_p_2_the_others_are_no_control():
    verdicts = {verdict.id: verdict for verdict in transfer._verdicts(found(tuned=[10] * 6, direct=[50] * 6), "p-3")}
    assert verdicts["p-3/sooner"].holds
    assert not verdicts["p-3/unsolved/sooner"].holds
    assert "nothing measured" in verdicts["p-3/unsolved/sooner"].measured


def test_shares_are_of_equal_steps():
    trace = found(tuned=[10, 20, NEVER, 10], direct=[STEPS + 20, 20, NEVER, NEVER], learned=3)
    rows = shares(trace).set_index(["p = 2", "start"])
    assert rows.loc[("learned", TUNED), ["n", "solved"]].tolist() == [3, 2]
    assert rows.loc[("learned", DIRECT), ["n", "solved"]].tolist() == [3, 1]
    assert rows.loc[("not learned", TUNED), ["n", "solved"]].tolist() == [1, 1]
    assert len(table(trace)) == 12


def test_the_steps_on_p_2_are_counted_at_equal_totals():
    seen = transfer.at_equal_totals(found(tuned=[10, 10, 10], direct=[105, 115, NEVER]))
    assert (seen.sooner, seen.later) == (2, 1)


def test_runs_of_one_transfer_differ_as_they_should():
    each = transfer_to(4, BASE)
    assert [getattr(run.task, "p", None) for run in each[1:]] == [2, 2, 4, 4]
    assert {run.task.d_vocab for run in each[1:]} == {4}
    assert getattr(each.shuffled.task, "shuffled", False)
    assert each.shuffled.training == each.source.training == each.tuned.training
    assert each.direct.training.steps == 2 * each.tuned.training.steps
    assert transfer_to(3, BASE).source.task.d_vocab == 3


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("transfer")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.cpu_count", lambda: 1)
        return folder, on_transfer(range(2), folder, TINY)


def test_fine_tuning_starts_with_the_weights_that_p_2_ended_with(reproduced):
    folder, _ = reproduced
    for p in (3, 4):
        for source, tuned in (("source", "tuned"), ("shuffled", "control")):
            for seed in (FIRST_SEED, FIRST_SEED + 1):
                before = open_series(folder / f"p-{p}-{source}" / f"seed-{seed}")
                after = open_series(folder / f"p-{p}-{tuned}" / f"seed-{seed}")
                ended, began = before[-1].weights(), after[0].weights()
                assert before.steps == [0, 4]
                assert all(torch.equal(ended[name], began[name]) for name in ended)
                direct = read_run(folder / f"p-{p}-direct" / f"seed-{seed}")
                assert after.run is not None
                assert direct.task == after.run.task
                assert direct.training.steps == 8


def test_everything_is_judged_tabulated_and_shown(reproduced):
    folder, results = reproduced
    assert [verdict.id for verdict in results.verdicts] == [
        f"p-3/{claim}" for claim in ("sooner", "shuffled/sooner", "unsolved/sooner")
    ]
    assert not any(verdict.holds for verdict in results.verdicts)
    rows = pd.read_csv(folder / transfer.TABLE_FILE)
    assert len(rows) == 2 * 2 * 3
    assert set(rows.start) == {DIRECT, TUNED, SHUFFLED}
    assert "not claimed" in results.report.sections[1].text
    assert [section.title for section in results.report.sections] == ["From p = 2 to p = 3", "From p = 2 to p = 4"]
