import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from fd_interp.config import InputError
from fd_interp.theory import incremental as theory
from fd_interp.theory.incremental import Form, Heads, Target

STRENGTHS = (2.89, 1.7, 1.0)
PAPER = Target.of_lags(STRENGTHS, (1, 2, 3), 40)
SHORT = Target.of_lags(STRENGTHS, (3, 1, 2), 6)
EQUAL = Target.of_lags((1.7, 1.7, 1.7), (1, 2, 3), 40)
BLOCKS = Target(np.array([2.0, 0.7]), np.array([[0, 0.7, 0.3, 0, 0], [1.0, 0, 0, 1.0, 0]]))
FORMS: tuple[Form, ...] = ("fisher", "gradient")
every_form = pytest.mark.parametrize("form", FORMS)
every_target = pytest.mark.parametrize("target", [SHORT, BLOCKS], ids=["lags", "blocks"])


def random_heads(n_heads: int, target: Target, seed: int = 0) -> Heads:
    draw = np.random.default_rng(seed).normal
    n_blocks, n_lags = target.alphas.shape
    return Heads(draw(size=(n_heads, n_lags)), draw(size=(n_heads, n_blocks)))


def small_flow(
    target: Target, end: float, *, delta: float, form: Form = "fisher", n_heads: int = 3, seed: int = 0
) -> xr.Dataset:
    start = Heads.small(n_heads, target, delta, np.random.default_rng(seed))
    return theory.flow(start, target, steps=np.linspace(0, end, 501), form=form)


def half_times(trace: xr.Dataset) -> np.ndarray:
    """When half of each block is predicted; NaN for never."""

    def crossing(learned: np.ndarray) -> float:
        after = (learned > 0.5).argmax()
        around = slice(after - 1, after + 1)
        return float(np.interp(0.5, learned[around], trace.step[around])) if after else np.nan

    return np.array([crossing(learned) for learned in trace.effective_coefficient.values.T])


def plateaus(trace: xr.Dataset) -> np.ndarray:
    """The loss where it is flattest after each half-time and before the next, or the end."""
    losses, steps = trace.loss.values, trace.step.values
    slope = np.abs(np.gradient(losses, steps))
    bounds = [*half_times(trace), steps[-1]]
    between = [(steps > a) & (steps < b) for a, b in pairwise(bounds)]
    return np.array([losses[inside][slope[inside].argmin()] for inside in between])


def orthonormal_features(n_blocks: int, d: int) -> torch.Tensor:
    columns = np.linalg.qr(np.random.default_rng(7).normal(size=(d * d, n_blocks))).Q
    return torch.tensor(columns.T.reshape(n_blocks, d, d))


@every_target
def test_velocity_is_minus_the_gradient_in_full_matrices(target: Target):
    heads = random_heads(3, target)
    U = orthonormal_features(len(target.strengths), d=4)
    G = torch.einsum("j,jab,jl->abl", torch.tensor(target.strengths), U, torch.tensor(target.alphas))
    logits = torch.tensor(heads.logits, requires_grad=True)
    V = torch.einsum("kj,jab->kab", torch.tensor(heads.values), U).requires_grad_()
    attention = logits.softmax(-1)
    loss = (G - torch.einsum("kab,kl->abl", V, attention)).square().sum() / 2
    by_attention, by_logits, by_values = torch.autograd.grad(loss, (attention, logits, V))

    assert theory.loss(heads, target) == pytest.approx(loss.item())
    fisher, gradient = (theory.velocity(heads, target, form=form) for form in FORMS)
    np.testing.assert_allclose(gradient.logits, -by_logits, atol=1e-13)
    np.testing.assert_allclose(fisher.logits, -by_attention, atol=1e-13)
    assert np.abs(fisher.logits - gradient.logits).max() > 0.1
    for moves in (fisher, gradient):
        np.testing.assert_allclose(torch.einsum("kj,jab->kab", torch.tensor(moves.values), U), -by_values, atol=1e-13)


@every_form
def test_attn_rate_is_the_rate_of_the_logits_alone(form: Form):
    heads = random_heads(2, SHORT)
    plain, slow = (theory.velocity(heads, SHORT, form=form, attn_rate=rate) for rate in (1.0, 0.25))
    np.testing.assert_allclose(slow.logits, plain.logits / 4)
    np.testing.assert_array_equal(slow.values, plain.values)


@every_form
def test_heads_and_lags_have_no_order(form: Form):
    heads, swapped, lags = random_heads(3, SHORT), [2, 0, 1], [5, 0, 3, 1, 4, 2]
    moves = theory.velocity(heads, SHORT, form=form)
    of_heads = theory.velocity(Heads(heads.logits[swapped], heads.values[swapped]), SHORT, form=form)
    of_lags = theory.velocity(
        Heads(heads.logits[:, lags], heads.values), SHORT._replace(alphas=SHORT.alphas[:, lags]), form=form
    )
    for a, b in zip(of_heads, (moves.logits[swapped], moves.values[swapped]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-13)
    np.testing.assert_allclose(of_lags.logits, moves.logits[:, lags], atol=1e-13)
    np.testing.assert_allclose(of_lags.values, moves.values, atol=1e-13)


def test_steps_are_independent():
    members = [random_heads(3, SHORT, seed) for seed in range(4)]
    together = Heads(*(np.stack(parts) for parts in zip(*members, strict=True)))
    np.testing.assert_allclose(theory.loss(together, SHORT), [theory.loss(member, SHORT) for member in members])
    for form in FORMS:
        moves = theory.velocity(together, SHORT, form=form)
        for index, member in enumerate(members):
            np.testing.assert_allclose(moves.logits[index], theory.velocity(member, SHORT, form=form).logits)


def test_loss_is_half_the_squared_error_on_isotropic_inputs():
    heads, d, n = random_heads(3, BLOCKS), 3, 40_000
    U = orthonormal_features(2, d).numpy()
    difference = np.einsum("jl,jab->abl", BLOCKS.tensor - heads.values.T @ heads.attention, U)
    draw = np.random.default_rng(0).normal(size=(n, d, BLOCKS.alphas.shape[1]))

    def deviation(inputs: np.ndarray) -> float:
        """Of the mean from the prediction, in standard errors."""
        errors = np.square(np.einsum("abl,nbl->na", difference, inputs)).sum(-1) / 2
        return abs(errors.mean() - theory.loss(heads, BLOCKS)) / (errors.std() / np.sqrt(n))

    assert deviation(draw) < 4
    assert deviation(np.repeat(draw[:, :, :1], 5, axis=2)) > 20  # inputs that are the same at all lags


def aligned(target: Target, learned: int, n_heads: int) -> Heads:
    """Each of the first heads has learned one block exactly, and those left over share the first block."""
    owned = np.array([head if head < learned else 0 for head in range(n_heads)])
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(target.alphas[owned]), -800)  # beyond the smallest double: attention is exactly 0
    return Heads(logits, np.eye(len(target.strengths))[owned] * target.tensor.sum(-1) / np.bincount(owned)[owned, None])


@every_target
@every_form
def test_every_rung_but_the_lowest_is_a_fixed_point(target: Target, form: Form):
    rungs = theory.ladder(target)
    for learned in range(1, len(rungs)):
        heads = aligned(target, learned, n_heads=4)
        assert theory.loss(heads, target) == pytest.approx(rungs[learned], abs=1e-14)
        for moves in theory.velocity(heads, target, form=form):
            np.testing.assert_allclose(moves, 0, atol=1e-13)
    beside = Heads(heads.logits, 1.1 * heads.values)
    assert np.abs(theory.velocity(beside, target, form=form).values).max() > 0.01
    nothing = Heads(heads.logits, 0 * heads.values)
    assert theory.loss(nothing, target) == pytest.approx(rungs[0])
    assert np.abs(theory.velocity(nothing, target, form=form).values).max() > 0.1


def test_ladder_by_hand():
    np.testing.assert_allclose(theory.ladder(PAPER), [(2.89**2 + 2.89 + 1) / 2, (2.89 + 1) / 2, 0.5, 0])
    np.testing.assert_allclose(theory.ladder(BLOCKS), [(4 * 0.58 + 0.49 * 2) / 2, 0.49, 0])


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_ladder_descends_to_zero(strengths: list[float]):
    rungs = theory.ladder(Target.of_lags(sorted(strengths, reverse=True), range(1, len(strengths) + 1), 8))
    assert len(rungs) == len(strengths) + 1
    assert (np.diff(rungs) < 0).all()
    assert rungs[-1] == 0


@every_form
def test_loss_dissipates_as_the_speeds_say(form: Form):
    for seed in range(3):
        heads = random_heads(3, SHORT, seed)
        fisher, gradient = (theory.velocity(heads, SHORT, form=each).logits for each in FORMS)
        moves = theory.velocity(heads, SHORT, form=form, attn_rate=0.5)
        small = 1e-5
        ahead, behind = (
            theory.loss(Heads(*(x + sign * small * v for x, v in zip(heads, moves, strict=True))), SHORT)
            for sign in (1, -1)
        )
        of_attention = (fisher * gradient if form == "fisher" else gradient**2).sum()
        expected = -0.5 * of_attention - np.square(moves.values).sum()
        assert (ahead - behind) / (2 * small) == pytest.approx(expected, rel=1e-6)
        assert expected < -0.1


@every_target
@every_form
def test_loss_never_rises(target: Target, form: Form):
    for seed in range(2):
        trace = theory.flow(random_heads(3, target, seed), target, steps=np.linspace(0, 20, 201), form=form)
        assert (np.diff(trace.loss) <= 1e-9).all()
        assert float(trace.loss[-1]) < 0.5 * float(trace.loss[0])


@every_form
def test_values_of_a_head_that_hardly_moves_its_attention_relax_exponentially(form: Form):
    start = Heads(np.array([[0.5, 0.0, -1.0, 0.0, 0.0, 0.0]]), np.zeros((1, 3)))
    steps = [0, 3, 10, 40]
    trace = theory.flow(start, SHORT, steps=steps, rate=0.5, form=form, attn_rate=1e-9, rtol=1e-9)
    s = start.attention[0]
    relaxed = 1 - np.exp(-s @ s * 0.5 * np.array(steps))
    np.testing.assert_allclose(
        trace.value_coefficient[:, 0, 0], np.outer(relaxed, SHORT.tensor @ s / (s @ s)), rtol=1e-6, atol=1e-8
    )


@every_form
def test_heads_that_start_equal_are_one_head_of_other_speeds(form: Form):
    H, steps = 3, np.linspace(0, 20, 21)
    one = random_heads(1, SHORT)
    equal = Heads(*(np.repeat(part, H, axis=0) for part in one))
    together = theory.flow(equal, SHORT, steps=steps, form=form, rtol=1e-7)
    sum_of_values = one._replace(values=H * one.values)

    def alone(**speeds: float) -> xr.Dataset:
        return theory.flow(sum_of_values, SHORT, steps=steps, form=form, rtol=1e-7, **speeds)

    assert (np.ptp(together.block_mass.values, axis=2) == 0).all()
    same = alone(rate=float(H), attn_rate=1 / H**2)
    np.testing.assert_allclose(together.block_mass[:, 0, 0], same.block_mass[:, 0, 0], atol=1e-5)
    np.testing.assert_allclose(H * together.value_coefficient[:, 0, 0], same.value_coefficient[:, 0, 0], atol=1e-5)
    np.testing.assert_allclose(together.loss, same.loss, atol=1e-5)
    for other in (alone(rate=float(H)), alone(attn_rate=1 / H**2)):
        assert np.abs(together.loss - other.loss).max() > 0.05


@every_form
@every_target
def test_reduced_velocity_descends_the_reduced_loss(target: Target, form: Form):
    for seed in range(3):
        s = np.random.default_rng(seed).dirichlet(np.ones(target.alphas.shape[1]))
        leaf, G = torch.tensor(s, requires_grad=True), torch.tensor(target.tensor)
        # The best values, found by least squares and not by the formula.
        best = np.linalg.lstsq(s[:, None], target.tensor.T, rcond=None)[0]
        loss = (G - torch.outer(torch.tensor(best[0]), leaf)).square().sum() / 2
        g = -torch.autograd.grad(loss, leaf)[0].numpy() / 4
        J = np.diag(s) - np.outer(s, s)
        moves = theory.reduced_velocity(s, target, 4, form=form)
        np.testing.assert_allclose(moves, (J if form == "fisher" else J @ J) @ g, atol=1e-14)
        assert theory.reduced_loss(s, target) == pytest.approx(loss.item())
        assert moves.sum() == pytest.approx(0, abs=1e-15)


def test_reduced_velocity_is_the_replicator_of_squared_strengths():
    s, H = np.array([0.1, 0.2, 0.3, 0.05, 0.15, 0.2]), 3
    m_squared = np.square([1.7, 1, 2.89, 0, 0, 0])  # by lag
    rho = m_squared @ s**2 / (s @ s)
    fitness = s * (m_squared - rho) / (H * s @ s)
    assert s @ fitness == pytest.approx(0)
    np.testing.assert_allclose(theory.reduced_velocity(s, SHORT, H, form="fisher"), s * fitness, atol=1e-15)


simplex = st.lists(st.floats(0.01, 1), min_size=4, max_size=4).map(lambda weights: np.array(weights) / sum(weights))
decreasing = st.lists(st.floats(0.1, 3), min_size=2, max_size=3).map(lambda m: sorted(m, reverse=True))


@given(simplex, decreasing, st.floats(0.05, 1))
def test_the_strongest_lag_gains_on_all_that_have_no_more_attention(s: np.ndarray, m: list[float], lead: float):
    target = Target.of_lags([m[0] + lead, *m], range(1, len(m) + 2), 4)
    s = np.append(s.max(), np.delete(s, s.argmax()))
    for form in FORMS:
        growth = theory.reduced_velocity(s, target, 2, form=form) / s
        assert (growth[0] > growth[1:]).all()


@every_form
def test_without_more_strength_or_as_much_attention_it_need_not_gain(form: Form):
    equal = Target.of_lags((1.0, 1.0), (1, 2), 3)
    growth = theory.reduced_velocity(np.array([0.4, 0.4, 0.2]), equal, 2, form=form)
    assert growth[0] == pytest.approx(growth[1], abs=1e-15)
    behind = np.array([0.1, 0.6, 0.3])
    growth = theory.reduced_velocity(behind, Target.of_lags((1.1, 1.0), (1, 2), 3), 2, form=form) / behind
    assert growth[0] < growth[1]


@every_form
def test_reduced_flow_climbs_to_the_strongest_lag(form: Form):
    start = np.array([0.25, 0.25, 0.15, 0.1, 0.1, 0.15])
    path = theory.reduced_flow(start, SHORT, 2, times=np.linspace(0, 400, 201), form=form)
    np.testing.assert_allclose(path.sum(-1), 1, atol=1e-12)
    assert (path > 0).all()
    assert (np.diff(theory.reduced_loss(path, SHORT)) < 0).all()
    assert theory.reduced_loss(path[-1], SHORT) == pytest.approx(theory.ladder(SHORT)[1], abs=0.02)
    assert path[-1].argmax() == 2  # where lag 3 is
    never = theory.reduced_flow(np.array([0.5, 0.5, 0, 0, 0, 0]), SHORT, 2, times=[400], form=form)
    assert never[0, 2] == 0


def test_lost_lags_fade_at_the_rate_kappa():
    start = np.full(6, 1 / 6)
    path = theory.reduced_flow(start, SHORT, 2, times=[2000, 4000], form="fisher", rtol=1e-9)
    kappa = (2.89**2 - np.array([1.7, 1.0, 0.0]) ** 2) / 2
    np.testing.assert_allclose(np.diff(1 / path[:, [0, 1, 5]], axis=0)[0] / 2000, kappa, rtol=0.01)


@every_form
def test_reduced_flow_is_the_limit_of_fast_values(form: Form):
    H, times = 2, np.array([0.0, 2.0, 5.0, 10.0])
    logits = np.random.default_rng(0).normal(scale=0.3, size=6)
    s = np.exp(logits) / np.exp(logits).sum()
    start = Heads(np.tile(logits, (H, 1)), np.tile(SHORT.tensor @ s / (s @ s) / H, (H, 1)))
    limit = theory.reduced_flow(s, SHORT, H, times=times, form=form)

    def distance(slow: float) -> float:
        trace = theory.flow(start, SHORT, steps=times, rate=1 / slow, form=form, attn_rate=slow)
        return np.abs(trace.block_mass.values[:, 0, 0] - limit[:, [2, 0, 1]]).max()

    by_slowness = [distance(slow) for slow in (0.1, 0.01)]
    assert by_slowness[1] < 0.005
    assert by_slowness[0] / by_slowness[1] == pytest.approx(10, rel=0.2)  # to first order


@pytest.fixture(scope="module")
def staged() -> dict[int, xr.Dataset]:
    """Seeds of the paper's figure 10."""
    return {seed: small_flow(PAPER, 360, delta=1e-6, seed=seed) for seed in range(3)}


def test_features_are_learned_one_at_a_time_in_order_of_strength(staged: dict[int, xr.Dataset]):
    for trace in staged.values():
        times, rungs = half_times(trace), theory.ladder(PAPER)
        assert (times[1:] > 2 * times[:-1]).all()
        np.testing.assert_allclose(plateaus(trace), rungs[1:], rtol=0.01, atol=0.002)
        at_half = np.interp(times[1:], trace.step, trace.loss)
        assert np.abs(at_half[:, None] / rungs[:-1] - 1).min() > 0.05  # the rungs are not met everywhere


def test_gradient_form_has_the_same_stages():
    trace = small_flow(SHORT, 400, delta=1e-4, form="gradient")
    times = half_times(trace)
    assert (times[1:] > 2 * times[:-1]).all()
    np.testing.assert_allclose(plateaus(trace), theory.ladder(SHORT)[1:], rtol=0.01, atol=0.005)


def test_heads_compete_before_they_cooperate(staged: dict[int, xr.Dataset]):
    for trace in staged.values():
        first, second, _ = half_times(trace)
        together = trace.sel(step=(first + second) / 2, method="nearest").isel(layer=0)
        assert float(together.competition) > 0.8
        assert np.ptp(together.block_mass.values, axis=0).max() < 0.05
        last = trace.isel(step=-1, layer=0)
        assert float(last.competition) < 0.4
        assert float(last.cooperation) > 0.6 > float(together.cooperation)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5])
def test_as_many_stages_as_heads_or_features(n_heads: int):
    trace = small_flow(SHORT, 150, delta=1e-4, n_heads=n_heads)
    rungs = theory.ladder(SHORT)
    stop = min(n_heads, 3)
    assert float(trace.loss[-1]) == pytest.approx(rungs[stop], rel=0.01, abs=0.005)
    np.testing.assert_allclose(trace.effective_coefficient[-1], np.arange(3) < stop, atol=0.02)


def test_heads_that_start_equal_never_leave_the_first_rung():
    equal, almost = (small_flow(PAPER, 100, delta=delta, n_heads=5) for delta in (0.0, 1e-4))
    # Equal in every bit, or rounding would part them as any other difference does.
    assert (np.ptp(equal.block_mass.values, axis=2) == 0).all()
    assert (np.ptp(equal.value_coefficient.values, axis=2) == 0).all()
    assert float(equal.loss[-1]) == pytest.approx(theory.ladder(PAPER)[1], rel=0.01)
    assert float(almost.loss[-1]) < 1.05 * theory.ladder(PAPER)[2]


def test_equal_strengths_have_no_stages(staged: dict[int, xr.Dataset]):
    for seed, trace in staged.items():
        times = half_times(small_flow(EQUAL, 50, delta=1e-12, seed=seed))
        assert times.max() / times.min() < 1.15
        assert np.nanmax(half_times(trace)) / half_times(trace)[0] > 20


def test_blocks_of_several_lags_are_learned_in_order():
    trace = small_flow(BLOCKS, 150, delta=1e-4)
    np.testing.assert_allclose(plateaus(trace), theory.ladder(BLOCKS)[1:], rtol=0.02, atol=0.005)
    np.testing.assert_allclose(trace.effective_coefficient[-1], 1, atol=0.02)


@every_form
@pytest.mark.parametrize("block", [1, 2])
def test_heads_drift_apart_at_the_escape_rate(form: Form, block: int):
    """The fastest of all differences that add up to zero, when only this block has attention to escape by."""

    def error(mass: float) -> float:
        s = np.full(6, 1e-9)
        lag = SHORT.alphas[block].argmax()
        s[[2, lag]] = 1 - mass, mass
        s /= s.sum()
        values = SHORT.tensor @ s / (s @ s) / 3
        together = Heads(np.tile(np.log(s), (3, 1)), np.tile(values, (3, 1)))
        opposite, small = np.array([[1.0], [-1.0], [0.0]]), 1e-6

        def response(index: int) -> np.ndarray:
            change = np.zeros(9)
            change[index] = small
            moved = Heads(together.logits + opposite * change[:6], together.values + opposite * change[6:])
            moves = theory.velocity(moved, SHORT, form=form)
            return np.append(moves.logits[0] - moves.logits[1], moves.values[0] - moves.values[1]) / (2 * small)

        jacobian = np.stack([response(index) for index in range(9)], axis=1)
        fastest = np.linalg.eigvals(jacobian).real.max()
        return abs(theory.escape_rate(SHORT, s, block, form=form) / fastest - 1)

    assert error(1e-2) < 0.03
    assert error(1e-4) < 0.003


def test_escape_rate_by_hand():
    s = np.array([0.0, 1e-4, 0.9999, 0.0, 0.0, 0.0])
    assert theory.escape_rate(SHORT, s, 2, form="fisher") == pytest.approx(1.0 * 1e-2, rel=1e-3)
    assert theory.escape_rate(SHORT, s, 2, form="gradient") == pytest.approx(np.sqrt(2) * 1e-4, rel=1e-3)
    assert theory.escape_rate(SHORT, s, 1, form="fisher") == 0  # nothing attends to lag 1


@pytest.mark.parametrize(("H", "n_lags", "seed"), [(3, 40, 0), (3, 40, 1), (2, 12, 0)])
def test_the_first_plateau_lasts_as_the_escape_law_says(H: int, n_lags: int, seed: int):
    target = Target.of_lags(STRENGTHS, (1, 2, 3), n_lags)
    deltas = np.array([1e-3, 1e-5, 1e-7, 1e-9, 1e-11])
    lasted, masses = [], []
    for delta in deltas:
        end = 1.1 * theory.escape_time(target, H, float(delta), 0.03) + 20
        trace = small_flow(target, end, delta=float(delta), n_heads=H, seed=seed)
        first, second, *_ = half_times(trace)
        lasted.append(second - first)
        masses.append(np.interp(first, trace.step, trace.block_mass[:, 0, :, 1].mean("head")))
    tau, s_2, log = np.array(lasted), np.array(masses), np.log(1 / deltas)

    def line(lengths: np.ndarray) -> tuple[float, float]:
        """Slope against log(1 / delta), and the share of the variance that is not on the line."""
        return np.polyfit(log, lengths, 1)[0], 1 - np.corrcoef(log, lengths)[0, 1] ** 2

    predicted = [theory.escape_time(target, H, float(d), float(s)) for d, s in zip(deltas, s_2, strict=True)]
    kappa = (2.89**2 - 1.7**2) / H
    slope, off = line(np.sqrt(1 / s_2 + kappa * tau))
    assert slope == pytest.approx(line(np.sqrt(1 / s_2 + kappa * np.array(predicted)))[0], rel=0.1)
    assert off < 1e-4
    assert line(tau)[1] > 50 * off  # it does not go with log(1 / delta)
    assert line(np.sqrt(tau))[1] > 10 * off  # nor with its square alone, without the attention at the start


def test_escape_time_is_when_the_differences_have_grown():
    H, delta, start_mass = 3, 1e-6, 0.03
    tau = theory.escape_time(PAPER, H, delta, start_mass)
    times = np.linspace(0, tau, 20_001)
    mass = 1 / (1 / start_mass + (2.89**2 - 1.7**2) / H * times)
    assert np.trapezoid(1.7 * np.sqrt(mass), times) == pytest.approx(np.log(1 / delta), rel=1e-6)
    tiny = 1e-300
    assert theory.plateau_length(PAPER, H, tiny) == pytest.approx(theory.escape_time(PAPER, H, tiny, 0.03), rel=0.05)
    assert theory.plateau_length(PAPER, H, delta) < 0.75 * tau
    assert theory.plateau_length(EQUAL, H, delta) == 0
    assert theory.escape_time(EQUAL, H, delta, 0.25) == pytest.approx(np.log(1e6) / (1.7 * 0.5))


def test_offsets_cancel_what_the_owner_writes(staged: dict[int, xr.Dataset]):
    for trace in staged.values():
        first, second, third = half_times(trace)
        together, apart, end = (
            trace.sel(step=time, method="nearest").isel(layer=0)
            for time in ((first + second) / 2, (second + third) / 2, trace.step[-1])
        )
        owner = int(apart.block_mass.values[:, 1].argmax())

        def offset(at: xr.Dataset, owner: int = owner) -> theory.Offset:
            return theory.offset(at.block_mass.values, at.value_coefficient.values, block=0, feature=1, owner=owner)

        for learned in (apart, end):
            assert offset(learned).measured < -0.2
            assert offset(learned).measured == pytest.approx(offset(learned).predicted, rel=0.02)
        of_others = np.delete(apart.value_coefficient.values[:, 1], owner)
        assert of_others.sum() == pytest.approx(offset(apart).predicted, rel=0.02)  # they attend alike
        assert offset(together).measured > 0 > offset(together).predicted  # nothing to cancel yet


def test_offset_by_hand():
    mass, values = np.array([[0.5, 0.25], [0.25, 0.75], [0.75, 0.5]]), np.array([[2.0, -0.5], [0.0, 3.0], [1.0, -0.7]])
    # The owner writes 3 * 0.25, the others -0.5 * 0.5 and -0.7 * 0.75, with a mean attention of 0.625.
    assert theory.offset(mass, values, block=0, feature=1, owner=1) == pytest.approx((-1.2, -1.24))


def test_a_trace_has_the_dims_of_the_measurements():
    start = random_heads(4, BLOCKS)
    before = [part.copy() for part in start]
    trace = theory.flow(start, BLOCKS, steps=[20, 0, 5], rate=0.1, form="fisher")
    assert all((part == copy).all() for part, copy in zip(start, before, strict=True))
    per_head = ("step", "layer", "head", "block")
    assert {name: variable.dims for name, variable in trace.items()} == {
        "loss": ("step",),
        "excess_over_rung": ("step", "rung"),
        "block_mass": per_head,
        "value_coefficient": per_head,
        "effective_coefficient": ("step", "block"),
        "competition": ("step", "layer"),
        "cooperation": ("step", "layer"),
    }
    assert dict(trace.sizes) == {"step": 3, "layer": 1, "head": 4, "block": 2, "rung": 3}
    assert trace.step.values.tolist() == [0, 5, 20]
    for variable in trace.values():
        assert {"long_name", "units", "source"} <= set(variable.attrs)
    at_time_two = theory.flow(start, BLOCKS, steps=[2.0], form="fisher")
    xr.testing.assert_allclose(trace.sel(step=[20]), at_time_two.assign_coords(step=[20]), rtol=1e-4)


def test_a_trace_starts_at_the_start():
    start = random_heads(3, BLOCKS)
    at = theory.flow(start, BLOCKS, steps=[0], form="fisher").isel(step=0, layer=0)
    s, v = start.attention, start.values
    mass = np.stack([s[:, 1] + s[:, 2], s[:, 0] + s[:, 3]], axis=1)
    np.testing.assert_allclose(at.block_mass, mass)
    np.testing.assert_allclose(at.value_coefficient, v)
    np.testing.assert_allclose(at.effective_coefficient, (v * mass).sum(0) / [2.0, 1.4])
    assert float(at.competition) == pytest.approx(mass.min(0).max())
    np.testing.assert_allclose(at.excess_over_rung, theory.loss(start, BLOCKS) - theory.ladder(BLOCKS))


def test_a_small_start_is_uniform_attention_and_no_values():
    rng = np.random.default_rng(0)
    start = Heads.small(2000, PAPER, 1e-3, rng)
    assert start.logits.std() == pytest.approx(1e-3, rel=0.02)
    assert (start.values == 0).all()
    assert not (start.logits == Heads.small(2000, PAPER, 1e-3, rng).logits).any()
    np.testing.assert_allclose(start.attention, 1 / 40, rtol=0.01)
    assert theory.loss(start, PAPER) == pytest.approx(np.full((), theory.ladder(PAPER)[0]))


def test_lag_one_is_the_first_index():
    target = Target.of_lags((2.0, 1.0), (3, 1), 4)
    np.testing.assert_array_equal(target.tensor, [[0, 0, 2, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (), 3), "each block has a strength and a lag, but there are 0 and 0"),
        (((2.0, 1.0), (1,), 3), "each block has a strength and a lag, but there are 2 and 1"),
        (((2.0, 0.0), (1, 2), 3), "strengths must be positive, the largest first, not [2.0, 0.0]"),
        (((1.0, 2.0), (1, 2), 3), "strengths must be positive, the largest first, not [1.0, 2.0]"),
        (((2.0, 1.0), (1, 4), 3), "lags must be different and from 1 to 3, not [1, 4]"),
        (((2.0, 1.0), (0, 1), 3), "lags must be different and from 1 to 3, not [0, 1]"),
        (((2.0, 1.0), (2, 2), 3), "lags must be different and from 1 to 3, not [2, 2]"),
    ],
)
def test_a_bad_target_is_named(arguments: tuple, message: str):
    with pytest.raises(InputError, match=re.escape(message)):
        Target.of_lags(*arguments)


def test_a_bad_flow_is_named():
    start = random_heads(2, SHORT)
    with pytest.raises(InputError, match="the heads have 6 lags and 3 blocks, but the target has 5 and 2"):
        theory.flow(start, BLOCKS, steps=[1], form="fisher")
    for steps in ([], [-1, 2]):
        with pytest.raises(InputError, match="there must be at least one step, and none before 0, not"):
            theory.flow(start, SHORT, steps=steps, form="fisher")
    with pytest.raises(InputError, match=re.escape("rate and attn_rate must be positive, not -1.0 and 1.0")):
        theory.flow(start, SHORT, steps=[1], rate=-1.0, form="fisher")
    with pytest.raises(InputError, match="the flow must start from finite numbers"):
        theory.flow(start._replace(values=np.full((2, 3), np.nan)), SHORT, steps=[1], form="fisher")
    with pytest.raises(InputError, match="attention must not be negative and must sum to one, not to 3"):
        theory.reduced_flow(np.full(6, 0.5), SHORT, 2, times=[1], form="fisher")
    with pytest.raises(InputError, match="there must be a head, and delta must not be negative: not 0 and"):
        Heads.small(0, SHORT, 0.1, np.random.default_rng(0))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_flow_that_cannot_be_followed_says_so():
    wild = Heads(np.zeros((1, 6)), np.full((1, 3), 1e200))
    with pytest.raises(InputError, match="the flow cannot be followed to time 5: "):
        theory.flow(wild, SHORT, steps=[5], form="fisher")


def test_a_bad_question_about_escape_is_named():
    with pytest.raises(InputError, match="to part takes two heads and two blocks, not 1 and 3"):
        theory.plateau_length(PAPER, 1, 1e-6)
    with pytest.raises(InputError, match="the time to part is known for blocks of a single lag"):
        theory.escape_time(BLOCKS, 2, 1e-6, 0.1)
    with pytest.raises(InputError, match=re.escape("delta must be between 0 and 1, not 0.0: equal heads never part")):
        theory.plateau_length(PAPER, 2, 0.0)
    with pytest.raises(InputError, match=re.escape("start_mass is attention to a lag, between 0 and 1, not 0.0")):
        theory.escape_time(PAPER, 2, 1e-6, 0.0)
    with pytest.raises(InputError, match="an offset is between two heads"):
        theory.offset(np.eye(2), np.eye(2), block=1, feature=1, owner=0)
