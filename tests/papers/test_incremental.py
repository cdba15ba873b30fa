"""Detectors, phases, stages and claims of arXiv 2602.19143, on traces made by hand."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_interp.claims import Claim, Evidence, judge
from fd_interp.observation import Trace
from fd_interp.papers.incremental import claims
from fd_interp.papers.incremental.acquisition import (
    acquisitions,
    competitive_interval,
    cooperative_interval,
    flattest_step,
    flattest_steps,
    nearest_rung,
    off_rung,
    rise_step,
    rung_loss,
    stages,
)
from tests.papers.staged import RUNGS, at, from_step, off, staged


def curve(values: object, steps: object = None) -> xr.DataArray:
    values = np.asarray(values, dtype=float)
    return xr.DataArray(values, dims="step", coords={"step": np.arange(len(values)) * 10 if steps is None else steps})


def with_loss(values: object, steps: object = None) -> Trace:
    """A trace of which only the loss matters, beside the rungs."""
    loss = curve(values, steps)
    return xr.Dataset({"loss": loss, "excess_over_rung": loss - xr.DataArray(RUNGS, dims="rung")})


def two_layers(first: Trace, last: Trace) -> Trace:
    """The second layer attends as another trace does; all else is that of the first."""
    return first.drop_dims("layer").merge(
        xr.concat([each[["block_mass", "competition"]] for each in (first, last)], "layer")
    )


def test_each_detector_sees_the_step_at_which_a_block_is_learned() -> None:
    """Loss and coefficient jump at the step; the KL to the teacher without the block is low up to the one before."""
    assert acquisitions(staged()) == [(100, 90, 100), (300, 290, 300), (600, 590, 600)]
    assert acquisitions(staged((100, 110, 400))) == [(100, 90, 100), (110, 100, 110), (400, 390, 400)]


def test_nobody_sees_a_block_that_is_not_learned() -> None:
    learned = acquisitions(staged((100, 300, None)))
    assert learned == [(100, 90, 100), (300, 290, 300), (None, None, None)]
    assert (learned[1].seen, learned[2].seen) == ([300, 290, 300], [])


@pytest.mark.parametrize(("share", "seen"), [(0.1, None), (0.24, None), (0.26, 500), (-1.0, None)])
def test_a_trace_of_a_block_is_not_a_block(share: float, seen: int | None) -> None:
    """Half of next to nothing is reached early, and says nothing."""
    leaking = at(staged((100, 300, None)), "effective_coefficient", share, step=from_step(500), block=2)
    assert acquisitions(leaking)[2].by_coefficient == seen


def test_a_detector_that_has_nothing_to_look_at_sees_nothing() -> None:
    regression = staged().drop_vars("teacher_kl")
    assert [acquired.by_kl for acquired in acquisitions(regression)] == [None] * 3
    assert [acquired.by_loss for acquired in acquisitions(regression)] == [100, 300, 600]
    deep = staged().drop_vars("effective_coefficient")
    assert [acquired.by_coefficient for acquired in acquisitions(deep)] == [None] * 3
    assert [acquired.by_kl for acquired in acquisitions(deep)] == [90, 290, 590]


def test_a_loss_is_on_the_side_of_the_rung_that_is_nearer() -> None:
    """The middle between rungs 1 and 2 is 1.25."""
    assert acquisitions(with_loss([2.8, 1.5, 1.26, 1.26]))[1].by_loss is None
    assert acquisitions(with_loss([2.8, 1.5, 1.26, 1.24]))[1].by_loss == 30


def test_a_minimum_that_is_flat_and_noisy_ends_where_the_curve_rises_for_good() -> None:
    noise = 0.02 * np.random.default_rng(0).random(31)
    flat = np.concatenate([np.linspace(2, 0.32, 10), 0.3 + noise, np.linspace(0.4, 1.3, 20)])
    flat[12] = 0.29  # the least of all, early on the flat part
    kl = curve(flat)
    assert int(kl.step[flat.argmin()]) == 120
    assert rise_step(kl) == 400  # 0.1 of the rise of 1 is not reached there, and is one snapshot later


def test_a_passing_bump_is_no_rise() -> None:
    kl = curve([2, 0.3, 0.3, 0.9, 0.3, 0.3, 0.8, 1.3])
    assert rise_step(kl) == 50


@pytest.mark.parametrize("values", [[3, 2, 1], [1, 1, 1], [2, 1, 1.04], [1]])
def test_what_does_not_rise_has_no_end(values: list[float]) -> None:
    assert rise_step(curve(values)) is None


def test_what_only_rises_ends_at_its_start() -> None:
    assert rise_step(curve([1, 1.5, 2, 3])) == 0
    assert rise_step(curve([1, 1.06], steps=[0, 7])) == 0


@given(st.integers(0, 1000), st.floats(1, 100), st.floats(-10, 10))
@settings(deadline=None, max_examples=25)
def test_the_end_of_a_minimum_ignores_offset_and_any_larger_scale(seed: int, scale: float, offset: float) -> None:
    walk = np.cumsum(np.random.default_rng(seed).normal(size=40))
    values = np.append(walk, walk.min() + 1)
    assert rise_step(curve(scale * values + offset)) == rise_step(curve(values)) is not None


def test_distances_from_a_rung_are_in_units_of_its_loss() -> None:
    trace = off(staged(), 0.02, 100, 290)
    np.testing.assert_allclose(rung_loss(trace, 1), 1.5)
    np.testing.assert_allclose(off_rung(trace, 1).sel(step=[0, 100, 290, 300]), [1.3 / 1.5, 0.02, 0.02, -0.5 / 1.5])
    np.testing.assert_allclose(off_rung(off(trace, -0.5), 3)[-1], -0.5)


def test_the_nearest_rung_is_that_of_the_teachers_and_else_of_the_loss() -> None:
    """A model of few sequences may know two blocks and have the loss of one."""
    overfitted = off(staged((100, 300, None)), 0.5)  # 1.5, the loss of rung 1
    assert nearest_rung(overfitted).sel(step=[0, 100, 1000]).values.tolist() == [0, 1, 2]
    assert nearest_rung(overfitted.drop_vars("teacher_kl")).sel(step=[1000]).values.tolist() == [1]
    assert nearest_rung(staged().drop_vars("teacher_kl")).sel(step=[0, 100, 300, 600]).values.tolist() == [0, 1, 2, 3]


def test_the_flattest_step_is_where_the_loss_changes_least() -> None:
    steps = np.arange(0, 105, 5)
    inflected = with_loss(1 - ((steps - 50) / 50.0) ** 3, steps)
    assert flattest_step(inflected, 0, 100) == 50
    assert flattest_step(inflected, 60, 100) == 75  # two snapshots after the first that lies between
    assert flattest_step(inflected, 0, 40) == 25


def test_a_dent_on_a_slope_is_no_plateau() -> None:
    """By chance the loss on the slope is the same two snapshots later; on the plateau it falls a little."""
    falling = np.concatenate([np.linspace(2.8, 1.5, 14), np.linspace(1.499, 1.48, 10)])
    falling[6] = falling[4]
    assert flattest_step(with_loss(falling), 0, 240) in range(150, 230)


@pytest.mark.parametrize(("between", "found"), [(0, None), (2, None), (3, 20), (4, 20), (5, 30)])
def test_a_plateau_needs_three_snapshots_between_its_ends(between: int, found: int | None) -> None:
    falling = with_loss(2.0 ** -np.arange(20.0)[::-1])  # steeper and steeper
    assert flattest_step(falling, 0, 10 * (between + 1)) == found


def test_each_plateau_has_its_flattest_step_and_lies_on_its_rung() -> None:
    first, second = flattest_steps(staged())
    assert first in range(120, 290)
    assert second in range(320, 590)
    assert flattest_steps(staged((100, 300, None))) == [first, None]
    assert flattest_steps(staged((None, None, None))) == [None, None]


def test_a_rung_that_is_passed_without_rest_has_no_flat_step_or_one_far_from_it() -> None:
    assert flattest_steps(staged((100, 110, 600)))[0] is None
    straight = with_loss(np.linspace(2.8, 0.8, 101))
    (step, _) = flattest_steps(straight)
    assert step is not None
    assert competitive_interval(staged((100, 100, 600))) is None


def test_the_competitive_phase_is_the_stay_on_the_first_rung_of_heads_that_attend_alike() -> None:
    assert competitive_interval(staged()) == (100, 290)
    assert competitive_interval(off(staged(), 0.05, 200, 250)) == (100, 190)  # the longer one of two stays
    assert competitive_interval(off(staged(), 0.04)) is None
    assert competitive_interval(off(staged(), -0.02)) == (100, 290)
    assert competitive_interval(staged((100, None, None))) == (100, 1000)


def test_heads_that_differ_do_not_compete() -> None:
    parted = at(staged(), "block_mass", 0.9, step=from_step(200), head=2, block=1)
    assert competitive_interval(parted) == (100, 190)
    assert competitive_interval(at(staged(), "block_mass", 0.9, head=2, block=1)) is None
    assert competitive_interval(staged().isel(head=[0])) is None  # one head has nobody to compete with


def test_phases_are_those_of_the_first_layer() -> None:
    parted = at(staged(), "block_mass", 0.9, head=2, block=1)
    assert competitive_interval(two_layers(staged(), parted)) == (100, 290)
    assert competitive_interval(two_layers(parted, staged())) is None
    assert cooperative_interval(two_layers(staged(), parted)) == (300, 1000)
    assert cooperative_interval(two_layers(parted, staged())) == (0, 1000)


def test_the_cooperative_phase_begins_when_heads_part_for_good() -> None:
    assert cooperative_interval(staged()) == (300, 1000)
    assert cooperative_interval(staged((100, None, None))) is None
    assert cooperative_interval(staged().isel(head=[1])) is None
    apart = at(staged(), "block_mass", 0.9, step=slice(0, 20), head=2, block=1)
    assert cooperative_interval(apart) == (300, 1000)  # together again, from step 200 to 290
    assert cooperative_interval(at(staged(), "block_mass", 0.9, head=2, block=1)) == (0, 1000)
    rejoined = at(staged(), "block_mass", [0.9, 0.0, 0.0], step=-1)
    assert cooperative_interval(rejoined) is None


def test_stages_follow_the_blocks_and_say_what_was_seen() -> None:
    none, one, two, three = stages(off(staged(), 0.01, 100, 290))
    assert [(stage.start, stage.end) for stage in (none, one, two, three)] == [
        (0, 100), (100, 300), (300, 600), (600, 1000)
    ]  # fmt: skip
    assert [stage.name for stage in (none, one, two, three)] == [
        "0 blocks known", "1 block known", "2 blocks known", "3 blocks known"
    ]  # fmt: skip
    assert none.seen == "before any block"
    assert "1.0% above rung 1; learned at 100 by loss, 90 by KL, 100 by coefficient" in one.seen
    assert one.seen.endswith("heads on one block, on the rung from step 100 to 290")
    assert two.seen.endswith("learned at 300 by loss, 290 by KL, 300 by coefficient; heads on different blocks "
                             "from step 300 to 1000")  # fmt: skip
    assert "rung 3; learned at 600" in three.seen


def test_a_stage_that_is_not_reached_says_how_far_the_loss_stays() -> None:
    *_, two, three = stages(staged((100, 300, None)))
    assert (two.start, two.end) == (300, 1000)
    assert (three.start, three.end) == (None, None)
    assert three.seen == "not reached: the loss stays 25.0% or more from rung 3"
    assert [stage.start for stage in stages(staged((None, None, None)))] == [0, None, None, None]


def test_a_stage_without_rest_has_no_length() -> None:
    _, one, two, _ = stages(staged((100, 100, 600)))
    assert (one.start, one.end) == (100, 100)
    assert one.seen.startswith("learned at 100 by loss")
    assert (two.start, two.end) == (100, 600)


def test_stages_can_be_told_without_teachers_or_coefficients() -> None:
    bare = staged().drop_vars(["teacher_kl", "effective_coefficient"])
    assert [(stage.start, stage.end) for stage in stages(bare)] == [(0, 100), (100, 300), (300, 600), (600, 1000)]
    assert "learned at 300 by loss;" in stages(bare)[2].seen


NEVER = staged((100, 300, None))
LACKING: dict[Claim, dict[str, Trace]] = {
    claims.ORDER: {
        "another order": staged((300, 100, 600)),
        "two at once": staged((100, 300, 300)),
        "one never": NEVER,
        "nothing": staged((None, None, None)),
    },
    claims.DETECTORS: {
        "one never": NEVER,
        "coefficient 200 steps late": at(staged(), "effective_coefficient", 0, step=slice(30, 50), block=1),
        "KL 350 steps late": at(staged(), "teacher_kl", 0.1, step=slice(60, 94), rung=2),
        "KL that does not rise": at(staged(), "teacher_kl", 0.1, rung=2),
    },
    claims.COMPETITION: {
        "too short": staged((100, 120, 600)),
        "on the second block": at(at(staged(), "block_mass", 0.95, block=1), "block_mass", 0.0, block=[0, 2]),
        "on different blocks": at(staged(), "block_mass", 0.95, head=1, block=2),
        "off the rung": off(staged(), 0.05),
        "one head": staged().isel(head=[0]),
        "nothing": staged((None, None, None)),
    },
    claims.PLATEAUS: {
        "first one off": off(staged(), 0.04, 100, 290),
        "second one below": off(staged(), -0.04, 300, 590),
        "one never": NEVER,
        "no rest": staged((100, 110, 600)),
    },
    claims.FINAL: {"a block short": NEVER, "a little above": off(staged(), 0.02, 990)},
    claims.SOLVED: {"staged": staged(), "nearly": at(staged(), "loss", 0.03, step=-1)},
    claims.PERMUTATION: {
        "two heads on one block": NEVER,
        "one head": staged().isel(head=[0]),
        "only in the first layer": two_layers(staged(), NEVER),
        "a head without a majority": at(staged(), "block_mass", [0.3, 0.1, 0.45], step=-1, head=2),
        "at all steps but the last": at(staged(), "block_mass", 0.95, step=-1, head=2, block=1),
    },
    claims.OFFSETS: {
        "all alike": at(staged(), "cooperative_offset", 10.0),
        "small": at(staged(), "cooperative_offset", -0.5),
        "nobody owns": at(staged(), "cooperative_offset", np.nan),
        "of what is not learned": at(
            at(at(staged(), "cooperative_offset", [10, 10, -2]), "value_coefficient", 0.1, block=2),
            "effective_coefficient", 0.01, block=2,
        ),
        "not to the end": at(staged(), "cooperative_offset", 0.0, step=-1),
    },
    claims.RUNG_OF_HEADS: {
        "a block short": NEVER,
        "a block too many": staged().isel(head=[0, 1]),
        "off the rung": off(staged(), 0.06, 990),
        "below the rung": off(staged(), -0.06, 990),
        "nearer to another teacher": at(staged(), "teacher_kl", 0.0, step=-1, rung=1),
    },
    claims.RUNG_ONE: {
        "heads differ": staged((100, None, None)).pipe(at, "block_mass", 0.851, step=50, head=1, block=0),
        "loss below": off(staged((100, None, None)), -0.06, 500, 500),
        "beyond the first block": staged(),
    },
    claims.SKIP: {
        "none": at(staged(), "skip_cosine", 0.1, block=1),
        "two": at(staged(), "skip_cosine", 0.3, block=0),
        "two negative": at(staged(), "skip_cosine", -0.3, block=0),
        "the wrong sign": at(staged(), "skip_cosine", -0.9, block=1),
        "another lag": at(at(staged(), "skip_cosine", 0.05, block=1), "skip_cosine", 0.9, block=2),
        "not to the end": at(staged(), "skip_cosine", 0.4, step=-1, block=1),
    },
}  # fmt: skip
HAVING: dict[Claim, list[Trace]] = {
    claims.SOLVED: [at(staged(), "loss", 0.02, step=-1)],
    claims.RUNG_ONE: [staged((100, None, None)), off(staged((100, None, None)), -0.04)],
    claims.RUNG_OF_HEADS: [
        staged(),
        NEVER.isel(head=[0, 1]),
        staged((100, None, None)).isel(head=[0]),
        staged().isel(head=[0, 1, 2, 2]),
    ],
    claims.PLATEAUS: [staged(), off(staged(), 0.02), off(staged(), -0.02)],
    claims.DETECTORS: [
        staged(),
        at(staged(), "teacher_kl", 0.1, step=slice(60, 66), rung=2),
        at(staged(), "effective_coefficient", 0, step=slice(10, 25), block=0),  # of the first block nobody asks
    ],
    claims.SKIP: [staged(), staged().assign_coords(block_name=("block", ["lag 3", "lags 1-2", "lag 4"]))],
    claims.FINAL: [staged(), off(staged(), 0.005), off(staged(), -0.1)],
}
"""What a claim holds on, where that is not a trace with every stage, or is more."""
EVERY_CLAIM = {value.id: value for value in vars(claims).values() if isinstance(value, Claim)}


def found(claim: Claim, trace: Trace) -> bool:
    verdict = judge(claim, [Evidence(trace, {})], where="by hand")
    assert verdict.measured.endswith("seeds)")
    finding = claim.check(Evidence(trace, {}))
    assert type(finding.holds) is bool
    assert {type(number) for number in finding.numbers.values()} <= {float, int, type(None)}
    return verdict.holds


@pytest.mark.parametrize("claim", EVERY_CLAIM.values(), ids=EVERY_CLAIM)
def test_a_claim_holds_where_a_trace_has_what_it_says(claim: Claim) -> None:
    for trace in HAVING.get(claim, [staged()]):
        assert found(claim, trace), claim.check(Evidence(trace, {}))


@pytest.mark.parametrize(
    ("claim", "lacking"),
    [pytest.param(claim, lacking, id=f"{claim.id}-{lacking}") for claim in LACKING for lacking in LACKING[claim]],
)
def test_a_claim_fails_where_a_trace_lacks_what_it_says(claim: Claim, lacking: str) -> None:
    assert not found(claim, LACKING[claim][lacking]), claim.check(Evidence(LACKING[claim][lacking], {}))


def test_every_claim_has_traces_that_lack_it() -> None:
    assert {claim.id for claim in LACKING} == EVERY_CLAIM.keys()
