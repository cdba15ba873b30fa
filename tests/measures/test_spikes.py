import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_interp.config import InputError
from fd_interp.measures.spikes import Spike, spikes

seeds = st.integers(0, 10_000)
several = settings(deadline=None, max_examples=40)


def decay(seed: int = 0, steps: int = 200) -> np.ndarray:
    """A loss that falls from 1 to 0.03, with a tenth of noise."""
    noise = np.random.default_rng(seed).normal(size=steps)
    return np.geomspace(1, 0.03, steps) * np.exp(0.1 * noise)


def planted(losses: np.ndarray, start: int, *factors: float) -> np.ndarray:
    losses = losses.copy()
    losses[start : start + len(factors)] *= factors
    return losses


def test_a_spike_by_hand():
    losses = np.array([2.0, 1.0, 3.0, 2.0, 11.0, 30.0, 12.0, 2.0])
    # The medians of the four losses before are 2 at index 4, then 2.5 and 7: of the three only two are five times that.
    assert spikes(losses, window=4) == [Spike(4, 5, 5, 30.0, 15.0)]
    assert spikes(losses, window=4, factor=5.6) == [Spike(5, 5, 5, 30.0, 12.0)]
    assert spikes(losses, window=4, factor=1.7) == [Spike(4, 6, 5, 30.0, 15.0)]


@given(seeds, st.integers(8, 199), st.floats(8, 1e6))
@several
def test_a_planted_spike_is_found_at_its_place(seed: int, at: int, times: float):
    losses = planted(decay(seed), at, times)
    (spike,) = spikes(losses)
    assert (spike.start, spike.end, spike.highest, spike.height) == (at, at, at, losses[at])
    assert spike.ratio == pytest.approx(losses[at] / np.median(losses[at - 8 : at]))


def test_a_loss_must_exceed_the_multiple_and_the_floor():
    losses = np.array([*[1.0] * 8, 5.0])
    assert spikes(losses) == []
    assert spikes(losses * [*[1] * 8, 1.01])[0].start == 8
    assert spikes(losses * [*[1] * 8, 1.01], floor=5.05) == []


def test_neighbours_make_one_spike_and_others_several():
    losses = planted(planted(decay(), 60, 10, 30, 20), 120, 50)
    first, second = spikes(losses)
    assert first[:3] == (60, 62, 61)
    assert first.ratio == losses[61] / np.median(losses[52:60])  # what was before it began, and not within
    assert second[:3] == (120, 120, 120)
    apart = spikes(planted(decay(), 60, 10, 1, 10))
    assert [spike[:3] for spike in apart] == [(60, 60, 60), (62, 62, 62)]


@given(seeds)
@several
def test_a_loss_that_falls_or_rests_has_no_spike(seed: int):
    assert spikes(decay(seed)) == []
    assert spikes(decay(seed) * 0 + 0.7) == []
    assert spikes(np.zeros(50), floor=0.0) == []
    assert spikes(decay(seed)[::-1].copy()) == []  # nor one that rises slowly


def test_a_factor_below_the_noise_finds_noise():
    assert len(spikes(decay(), factor=1.05)) > 3


@pytest.mark.parametrize(("window", "flagged"), [(1, 1), (2, 1), (3, 2), (7, 4), (8, 4), (9, 5)])
def test_of_a_rise_that_lasts_half_a_window_is_flagged(window: int, flagged: int):
    losses = np.where(np.arange(100) < 50, 0.1, 2.0)
    assert spikes(losses, window=window) == [Spike(50, 49 + flagged, 50, 2.0, 20.0)]


def test_losses_up_to_the_floor_do_not_count():
    losses = planted(np.full(50, 1e-6), 30, 4000)
    assert spikes(losses) == []
    (spike,) = spikes(losses, floor=0.0)
    assert spike[:3] == (30, 30, 30)
    assert spike.ratio == pytest.approx(4000)
    assert [spike[:3] for spike in spikes(losses, floor=3.9e-3)] == [(30, 30, 30)]


def test_losses_that_have_vanished_spike_by_an_infinite_ratio():
    losses = np.zeros(20)
    losses[12] = 0.3
    assert spikes(losses) == [Spike(12, 12, 12, 0.3, math.inf)]


def test_an_infinite_loss_is_a_spike():
    losses = np.full(20, 0.5)
    losses[12] = math.inf
    assert spikes(losses) == [Spike(12, 12, 12, math.inf, math.inf)]


@given(seeds, st.integers(-30, 30))
@several
def test_without_a_floor_the_unit_does_not_matter(seed: int, power: int):
    losses, unit = planted(decay(seed), 100, 9, 40), 2.0**power
    expected = [spike._replace(height=spike.height * unit) for spike in spikes(losses, floor=0.0)]
    assert len(expected) == 1
    assert spikes(losses * unit, floor=0.0) == expected


def test_what_comes_later_does_not_matter():
    losses = planted(planted(decay(), 60, 10), 150, 10)
    assert spikes(losses[:100]) == spikes(losses)[:1]


def test_the_first_window_is_never_flagged():
    losses = planted(decay(), 7, 100)
    assert spikes(losses) == []
    assert [spike.start for spike in spikes(losses, window=7)] == [7]
    for steps in range(9):
        assert spikes(losses[:steps]) == []


def test_single_precision_finds_the_same():
    losses = planted(decay(), 60, 10, 30)
    assert [spike[:3] for spike in spikes(losses.astype(np.float32))] == [spike[:3] for spike in spikes(losses)]


def test_wrong_input_is_named():
    with pytest.raises(InputError, match="index 3 is NaN"):
        spikes(np.array([1.0, 1.0, 1.0, math.nan, 1.0]))
    with pytest.raises(InputError, match="at least one loss, not 0"):
        spikes(decay(), window=0)
    with pytest.raises(InputError, match="above 1, not 1"):
        spikes(decay(), factor=1.0)
