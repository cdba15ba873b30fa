import math
from itertools import pairwise

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_interp.stages import (
    Dwell,
    Stage,
    Stretch,
    change_points,
    dwells,
    first_departure,
    first_step,
    longest_stay,
    step_of_maximum,
    stretches,
    table,
)

NAN = math.nan


def curve(values, steps=None) -> xr.DataArray:
    values = np.asarray(values, dtype=float)
    return xr.DataArray(values, dims="step", coords={"step": 10 * np.arange(len(values)) if steps is None else steps})


def noise(seed: int, length: int = 100) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=length)


def test_first_step_is_that_of_a_snapshot_and_later_than_asked():
    measured = curve([0, 2, 1, 3], steps=[0, 5, 20, 21])
    assert first_step(measured > 1.5) == 5
    assert first_step(measured > 1.5, after=5) == 21
    assert first_step(measured >= 0) == 0
    assert first_step(measured >= 0, after=0) == 5
    assert first_step(measured > 9) is None
    assert first_step(measured > 1.5, after=21) is None


def test_nothing_comes_after_what_never_happened():
    measured = curve([0, 1, 2])
    assert first_step(measured >= 0, after=None) is None
    assert first_departure(measured, -1.0, 0.5, after=None) is None
    assert step_of_maximum(measured, after=None) is None
    assert first_departure(measured, -1.0, 0.5, after=first_step(measured > 5)) is None


def test_nan_is_on_neither_side():
    measured = curve([NAN, NAN, 3, NAN])
    assert first_step(measured > 1) == 20
    assert first_step(measured < 1) is None
    assert first_departure(measured, 0.0, 1.0) == (20, 1)
    assert longest_stay(measured, 3.0, 0.1) == (20, 20)


def test_departure_knows_its_side():
    assert first_departure(curve([1, 1.05, 1.2, 0.5]), 0.9, 1.1) == (20, 1)
    assert first_departure(curve([1, 0.95, 0.8, 1.5]), 0.9, 1.1) == (20, -1)
    assert first_departure(curve([1, 0.9, 1.1, 1]), 0.9, 1.1) is None
    assert first_departure(curve([2, 1, 0.5, 2]), 0.9, 1.1, after=0) == (20, -1)


def test_the_maximum_lies_strictly_between_its_bounds():
    measured = curve([9, 1, 5, 4, 8])
    assert step_of_maximum(measured) == 0
    assert step_of_maximum(measured, after=0) == 40
    assert step_of_maximum(measured, after=0, before=40) == 20
    assert step_of_maximum(measured, after=10, before=20) is None
    assert step_of_maximum(measured, after=40) is None


def test_the_maximum_passes_over_nan():
    assert step_of_maximum(curve([NAN, 1, NAN, 3, 2])) == 30
    assert step_of_maximum(curve([1, NAN, NAN]), after=0) is None
    assert step_of_maximum(curve([2, 2, 1])) == 0


def test_the_longest_stay_is_in_ratio_of_steps():
    # 100 to 400 is four times; 1000 to 1900 is longer in steps but not in ratio.
    measured = curve([5, 0, 0, 5, 0.05, 0], steps=[0, 100, 400, 500, 1000, 1900])
    assert longest_stay(measured, 0.0, 0.1) == (100, 400)
    assert longest_stay(measured, 0.0, 0.01) == (100, 400)
    assert longest_stay(measured, 5.0, 0.1) == (500, 500)
    assert longest_stay(measured, 3.0, 0.1) is None


def test_a_stay_may_last_from_the_start_or_to_the_end():
    assert longest_stay(curve([1, 1, 1]), 1.0, 0.1) == (0, 20)
    assert longest_stay(curve([0, 1, 1]), 1.0, 0.1) == (10, 20)
    assert longest_stay(curve([1, 1, 0]), 1.0, 0.1) == (0, 10)


def test_stretches_are_from_the_first_to_the_last_snapshot_without_a_break():
    steps = [0, 1, 5, 20, 21, 40, 50]
    measured = curve([1, 0, 1, 1, 0, NAN, 1], steps=steps)
    assert stretches(measured > 0.5) == [(0, 0), (5, 20), (50, 50)]
    assert stretches(measured < 0.5) == [(1, 1), (21, 21)]
    assert stretches(measured > 2) == []
    assert stretches(curve([1, 1, 1], steps=[3, 4, 9]) > 0) == [Stretch(start=3, end=9)]


@given(st.lists(st.booleans(), min_size=1, max_size=30))
@settings(deadline=None, max_examples=30)
def test_stretches_hold_each_step_of_the_condition_once_and_no_other(holds: list[bool]):
    condition = curve(holds) > 0.5
    found = stretches(condition)
    inside = [step for start, end in found for step in range(start, end + 1, 10)]
    assert inside == [10 * index for index, one in enumerate(holds) if one]
    assert all(after.start - before.end > 10 for before, after in pairwise(found))


def mass(*blocks: list[float]) -> xr.DataArray:
    return xr.DataArray(np.array(blocks).T, dims=("step", "block"), coords={"step": 10 * np.arange(len(blocks[0]))})


def test_a_head_dwells_where_it_has_half_of_its_attention():
    moving = mass([0.9, 0.6, 0.3, 0.2, 0.1], [0.1, 0.4, 0.49, 0.5, 0.8])
    assert dwells(moving) == [Dwell(block=0, start=0, end=10), Dwell(block=1, start=30, end=40)]
    assert dwells(moving, least=0.45) == [(0, 0, 10), (1, 20, 40)]
    assert dwells(moving, least=0.95) == []


def test_a_head_may_come_back_and_stays_are_in_the_order_of_their_start():
    assert dwells(mass([0.1, 0.6, 0.2, 0.7], [0.8, 0.1, 0.7, 0.1])) == [
        (1, 0, 0),
        (0, 10, 10),
        (1, 20, 20),
        (0, 30, 30),
    ]


def test_blocks_that_overlap_can_both_be_dwelt_on():
    assert dwells(mass([0.1, 0.9, 0.1], [0.9, 0.9, 0.9])) == [(1, 0, 20), (0, 10, 10)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("breaks", [(50,), (35, 70), (20, 45, 75)])
def test_known_breaks_are_found_within_a_snapshot_at_five_times_the_noise(breaks: tuple[int, ...], seed: int):
    levels = np.zeros(100)
    for index, place in enumerate(breaks):
        levels[place:] += 5 if index % 2 == 0 else -5
    found = np.array(change_points(curve(levels + noise(seed)))) / 10
    assert len(found) == len(breaks)
    assert np.abs(found - breaks).max() <= 1


def test_a_break_without_noise_is_found_exactly():
    assert change_points(curve([1.0] * 12 + [2.0] * 12)) == [120]
    assert change_points(curve([1.0] * 12 + [2.0] * 12, steps=2 ** np.arange(24))) == [2**12]
    kink = change_points(curve([*[0.0] * 20, *np.arange(20.0)]))
    assert len(kink) == 1
    assert abs(kink[0] - 200) <= 10


@pytest.mark.parametrize("slope", [0.0, 0.1, -7.3 / 99, 1e-9, 1e6])
@pytest.mark.parametrize("start", [0.0, 1.0, 3.7])
def test_a_straight_line_has_no_change(slope: float, start: float):
    assert change_points(curve(start + slope * np.arange(100))) == []
    assert change_points(curve(start + slope * np.arange(7))) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_alone_has_no_change_level_or_on_a_slope(seed: int):
    assert change_points(curve(noise(seed))) == []
    assert change_points(curve(noise(seed) + 0.5 * np.arange(100))) == []


def test_smooth_curves_have_few_changes():
    x = np.arange(100)
    for smooth in (np.exp(-x / 10), (x / 100) ** 2, 1 / (1 + np.exp(-(x - 50) / 5))):
        assert 1 <= len(change_points(curve(smooth))) <= 2


@given(st.integers(0, 1000), st.floats(1e-3, 1e3), st.floats(-10, 10), st.floats(-10, 10))
@settings(deadline=None, max_examples=10)
def test_changes_ignore_scale_offset_and_trend(seed: int, scale: float, offset: float, trend: float):
    values = np.where(np.arange(60) < 30, 0, 8) + noise(seed, 60)
    moved = scale * (values + offset + trend * np.arange(60))
    assert change_points(curve(moved)) == change_points(curve(values))


def test_a_higher_penalty_asks_for_more():
    values = np.where(np.arange(100) < 50, 0, 5) + noise(1)
    assert change_points(curve(values)) == [500]
    assert change_points(curve(values), penalty=100.0) == []


def test_changes_pass_over_nan_and_short_curves():
    values = [NAN, 1, 1, NAN, 1, 1, 1, 2, 2, NAN, 2, 2, 2, 2]
    assert change_points(curve(values)) == [70]
    for length in range(6):
        assert change_points(curve([0, 5, 0, 5, 0][:length])) == []
    assert change_points(curve([NAN] * 20)) == []


def test_table_has_a_row_for_each_stage():
    assert table([Stage("I", 0, 10, "seen"), Stage("II", None, None, "not seen")]) == [
        {"name": "I", "start": 0, "end": 10, "seen": "seen"},
        {"name": "II", "start": None, "end": None, "seen": "not seen"},
    ]
