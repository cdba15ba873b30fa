"""Claims across runs: when heads part, where early stopping halts, and what the flow predicts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from fd_interp.claims import Claim, Evidence, Finding
from fd_interp.models.config import Transformer
from fd_interp.observation import Trace, observe
from fd_interp.papers import incremental as paper
from fd_interp.papers.incremental import laws, population
from fd_interp.papers.incremental.acquisition import acquisitions
from fd_interp.papers.incremental.cases import OF_SIZE
from fd_interp.papers.incremental.settings import INCREMENTAL, REGRESSION, changed
from fd_interp.tasks.lag_regression import LagRegression
from fd_interp.theory import incremental as theory
from fd_interp.training.loop import train
from fd_interp.training.run import SGD, AdamW, Keep, Run
from tests.papers.staged import at, off, staged

SEED = 11
STDS = (1e-2, 1e-4, 1e-6, 1e-8)


def judged(claim: Claim, traces: Mapping[Any, Trace] | Trace, axis: str = "") -> Finding:
    trace = traces if isinstance(traces, xr.Dataset) else laws.side_by_side(traces, axis)
    return claim.check(Evidence(trace, {}))


def observed(run: Run, directory: Path) -> Trace:
    return observe(train(run, directory, show_progress=False), paper.probes(run))


def shortened(run: Run, steps: int, **training: object) -> Run:
    """With the same task object, which has found its ladder already."""
    training = {"steps": steps, **training}
    changes = {"training": run.training.model_copy(update=training), "keep": Keep(at=run.keep.at, held_out=256)}
    return run.model_copy(update={"seed": SEED, **changes})


def test_traces_lie_side_by_side_with_what_all_of_them_have() -> None:
    model = staged().assign_coords(block_name=("block", ["lag 3", "lag 1", "lag 2"]))
    flow = staged((100, 400, 700)).drop_vars("teacher_kl")
    both = laws.side_by_side({"model": model, "flow": flow}, "origin")
    assert both["origin"].values.tolist() == ["model", "flow"]
    assert set(both.data_vars) == set(flow.data_vars)
    for name, trace in (("model", model), ("flow", flow)):
        xr.testing.assert_equal(both.loss.sel(origin=name, drop=True), trace.loss)
    assert acquisitions(both.sel(origin="flow")) == acquisitions(flow)


def test_a_trace_that_ends_sooner_than_those_beside_it_stays_what_it_is() -> None:
    short = halting(2, 400).sel(step=slice(0, 600))
    both = laws.side_by_side({100: short, 1000: halting(3, 700)}, "sequences")
    assert both.sizes["step"] == 101
    assert laws.stopped_at(both.sel(sequences=100)) == (400, 2)
    assert laws.stopped_at(both.sel(sequences=1000)) == (700, 3)
    assert laws.parting_step(both.sel(sequences=100)) == 200


def test_a_line_has_its_slope_and_what_it_explains() -> None:
    x = np.arange(4.0)
    assert laws.line_through(x, 3 - 2 * x) == pytest.approx((-2, 1))
    slope, r_squared = laws.line_through(x, np.array([0.0, 1, 1, 0]))
    assert (slope, r_squared) == pytest.approx((0, 0))
    assert laws.line_through(x, np.array([0.0, 1, 0, 3])) == pytest.approx((0.8, 16 / 30))


def parting(step_of: Callable[[float], float | None], stds: tuple[float, ...] = STDS) -> dict[float, Trace]:
    """Runs whose heads part at a step that depends on the decades that they start closer together."""
    steps = {std: step_of(-np.log10(std)) for std in stds}
    return {std: staged((100, None if step is None else int(step), None)) for std, step in steps.items()}


def test_heads_that_part_so_many_steps_later_each_decade_follow_the_law() -> None:
    finding = judged(laws.BREAKING, parting(lambda decades: 150 + 50 * decades), "std")
    assert finding.holds
    assert finding.numbers["steps a decade"] == pytest.approx(50)
    assert (finding.numbers["first"], finding.numbers["last"]) == (250, 550)


LAWLESS: dict[str, Callable[[float], float | None]] = {
    "with the square": lambda decades: 110 + 10 * decades**2,
    "never the last": lambda decades: None if decades > 7 else 150 + 50 * decades,
    "sooner": lambda decades: 650 - 50 * decades,
    "all at about the same": lambda decades: 300 + 10 * (decades == 4),
    "with a floor, as in single precision": lambda decades: 150 + 50 * min(decades, 6),
}


@pytest.mark.parametrize("lawless", LAWLESS)
def test_other_ways_to_part_do_not_follow_it(lawless: str) -> None:
    assert not judged(laws.BREAKING, parting(LAWLESS[lawless]), "std").holds


def test_the_square_is_not_taken_for_a_line_where_they_are_hard_to_tell_apart() -> None:
    near = (1e-6, 1e-7, 1e-8)
    assert not judged(laws.BREAKING, parting(lambda decades: 10 * decades**2, near), "std").holds
    assert judged(laws.BREAKING, parting(lambda decades: 50 * decades, near), "std").holds


def test_heads_of_trained_models_part_later_by_as_many_steps_each_decade(tmp_path: Path) -> None:
    traces = {}
    for std in (1e-2, 1e-5, 1e-8):
        model = INCREMENTAL.model.model_copy(update={"std": std})
        double = INCREMENTAL.model_copy(update={"dtype": "float64", "model": model})
        traces[std] = observed(shortened(double, 480, batch_size=128), tmp_path / f"{std}")
    finding = judged(laws.BREAKING, traces, "std")
    assert finding.holds, finding.numbers
    swapped = dict(zip(traces, reversed(traces.values()), strict=True))
    assert not judged(laws.BREAKING, swapped, "std").holds


def halting(rung: int, step: int = 500) -> Trace:
    """A run that has learned so many blocks, and overfits from a step on."""
    learned = staged(tuple(100 * (block + 1) if block < rung else None for block in range(3)))
    rising = off(learned, 0.1, step + 10)
    return off(rising, -0.01, step, step)


@pytest.mark.parametrize(
    ("rungs", "holds"),
    [
        ({30: 1, 100: 2, 200: 3, 1000: 3}, True),
        ({30: 2, 100: 2, 200: 2, 1000: 3}, True),
        ({30: 3, 100: 3, 200: 3, 1000: 3}, False),
        ({30: 1, 100: 2, 200: 2, 1000: 2}, False),
        ({30: 3, 100: 2, 200: 3, 1000: 3}, False),
        ({30: 1, 100: 2, 200: 1, 1000: 3}, False),
    ],
)
def test_early_stopping_halts_on_a_higher_rung_with_more_sequences(rungs: dict[int, int], holds: bool) -> None:
    traces = {size: halting(rung, 400 + 100 * rung) for size, rung in rungs.items()}
    assert {size: laws.stopped_at(trace) for size, trace in traces.items()} == {
        size: (400 + 100 * rung, rung) for size, rung in rungs.items()
    }
    assert judged(laws.EARLY_STOPPING, traces, "sequences").holds == holds
    backwards = dict(reversed(traces.items()))
    assert judged(laws.EARLY_STOPPING, backwards, "sequences").holds == holds


def test_models_of_few_sequences_halt_on_a_lower_rung(tmp_path: Path) -> None:
    steps = {100: 400, 1000: 700}
    traces = {size: observed(shortened(OF_SIZE[size], steps[size]), tmp_path / f"{size}") for size in steps}
    finding = judged(laws.EARLY_STOPPING, traces, "sequences")
    assert finding.holds, finding.numbers
    swapped = dict(zip(traces, reversed(traces.values()), strict=True))
    assert not judged(laws.EARLY_STOPPING, swapped, "sequences").holds
    few = traces[100]
    assert float(few.loss[-1]) > float(few.loss.min()) + 0.1  # it did halt, and did not just not get further


def beside(model: Trace, flow: Trace) -> Finding:
    return judged(laws.FLOW_PREDICTS, {"model": model, "flow": flow}, "origin")


@pytest.mark.parametrize(
    ("model", "holds"),
    [
        (staged(), True),
        (staged((110, 340, 500)), True),
        (staged((100, 370, 600)), False),
        (staged((100, 230, 600)), False),
        (staged((130, 300, 600)), False),
        (staged((100, 300, None)), False),
        (staged().isel(head=[1, 0, 2]), False),
        (at(staged(), "block_mass", 0.6, step=-1, head=2, block=2), False),
        (at(staged(), "block_mass", 0.8, step=-1, head=2, block=2), True),
    ],
    ids=[
        "equal",
        "near",
        "late",
        "early",
        "late first",
        "never",
        "other heads",
        "another mixture",
        "nearly the same mixture",
    ],
)
def test_a_flow_predicts_when_each_block_is_learned_and_by_which_head(model: Trace, holds: bool) -> None:
    assert beside(model.assign_coords(head=range(3)), staged()).holds == holds


def test_a_flow_in_which_a_block_is_never_learned_predicts_nothing() -> None:
    assert not beside(staged(), staged((100, 300, None))).holds


SHORT = shortened(REGRESSION, 1500, batch_size=128)


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return observed(SHORT, tmp_path_factory.mktemp("regression"))


def first_two(trace: Trace) -> list[int | None]:
    return [acquired.by_coefficient for acquired in acquisitions(trace)[:2]]


def test_the_flow_from_its_own_start_predicts_a_trained_model(regression: Trace) -> None:
    """Steps, loss and attention of every head, up to the second plateau."""
    (flow,) = paper.predicted(SHORT, [SEED])
    assert flow.step.equals(regression.step)
    assert first_two(regression) == pytest.approx(first_two(flow), rel=0.1)
    assert flow.loss[0] == pytest.approx(float(regression.loss[0]), rel=0.05)
    at_rest = {"step": slice(600, 1200)}
    np.testing.assert_allclose(flow.loss.sel(at_rest), regression.loss.sel(at_rest), rtol=0.1)
    np.testing.assert_allclose(flow.block_mass.sel(at_rest), regression.block_mass.sel(at_rest), atol=0.1)
    np.testing.assert_allclose(flow.value_coefficient.sel(at_rest), regression.value_coefficient.sel(at_rest), atol=0.2)


def test_the_flow_from_another_start_or_to_another_target_does_not(regression: Trace) -> None:
    others = {
        "start": paper.predicted(SHORT, [SEED + 2]),  # from which another head is the first to leave
        "strengths": paper.predicted(changed(SHORT, task=LagRegression(context=8, ratio=1.3)), [SEED]),
        "lags": paper.predicted(changed(SHORT, task=LagRegression(context=8, blocks=((1,), (3,), (2,)))), [SEED]),
        "rate": paper.predicted(_with(SGD(lr=1.0)), [SEED]),
    }
    for name, (flow,) in others.items():
        apart = float(abs(flow.block_mass - regression.block_mass).sel(step=slice(600, 1200)).max())
        off = np.array(first_two(flow)) / first_two(regression) - 1
        assert apart > 0.3 or abs(off).max() > laws.PREDICTED, name


def _with(optimizer: SGD | AdamW) -> Run:
    return changed(SHORT, training=SHORT.training.model_copy(update={"optimizer": optimizer}))


def test_the_flow_is_in_the_units_of_the_task() -> None:
    (flow,) = paper.predicted(SHORT, [SEED], steps=25)
    assert flow.step.values.tolist() == [0, 25]
    ladder = [baseline.loss for baseline in SHORT.task.baselines()]
    np.testing.assert_allclose(flow.loss - flow.excess_over_rung, np.tile(ladder, (2, 1)))
    assert float(flow.loss[0]) == pytest.approx(ladder[0])


def test_a_target_has_its_blocks_at_their_lags() -> None:
    task = LagRegression(d_vocab=4, blocks=((2, 1), (4,)), alphas=((0.7, 0.3), (1.5,)), ratio=2.0, context=5)
    strengths, alphas = population.target_of(task)
    assert strengths.tolist() == [2, 1]
    assert alphas.tolist() == [[0.3, 0.7, 0, 0, 0], [0, 0, 0, 1.5, 0]]


def test_a_start_is_what_the_run_begins_with(regression: Trace) -> None:
    start = population.start_of(SHORT, SEED)
    assert isinstance(SHORT.task, LagRegression)
    masses = start.attention[:, np.array([block[0] for block in SHORT.task.blocks]) - 1]
    np.testing.assert_allclose(masses, regression.block_mass.isel(step=0, layer=0), rtol=1e-5)
    assert len(np.unique(masses)) == masses.size
    assert not start.values.any()


NOT_PLAIN: dict[str, Run] = {
    "a chain": changed(SHORT, task=INCREMENTAL.task),
    "Adam": _with(AdamW()),
    "momentum": _with(SGD(momentum=0.9)),
    "rates that differ": _with(SGD(lrs={"W_Q": 1.0})),
    "loss on all": changed(SHORT, training=SHORT.training.model_copy(update={"loss_on": "all"})),
    "two layers": changed(SHORT, model=SHORT.model.model_copy(update={"n_layers": 2})),
    "tokens in the scores": changed(SHORT, model=SHORT.model.model_copy(update={"attends_by": "token_and_position"})),
    "weights held fixed": changed(SHORT, model=SHORT.model.model_copy(update={"fixed": {"W_Q": "init"}})),
    "values that are not zero": changed(SHORT, model=SHORT.model.model_copy(update={"stds": {"W_V": 0.1}})),
    "values like all weights": changed(SHORT, model=SHORT.model.model_copy(update={"stds": {}})),
    "a transformer": changed(SHORT, model=Transformer()),
}


@pytest.mark.parametrize("why", NOT_PLAIN)
def test_nothing_is_predicted_where_the_theory_does_not_apply(why: str) -> None:
    assert not population.applies(NOT_PLAIN[why])
    assert paper.predicted(NOT_PLAIN[why], [0, 1]) == []


def test_the_theory_applies_to_the_setting_that_is_made_for_it() -> None:
    assert population.applies(REGRESSION)
    assert population.applies(changed(SHORT, model=SHORT.model.model_copy(update={"n_heads": 2, "std": 0.1})))


@pytest.fixture(scope="module")
def flow() -> Trace:
    return laws.flow_of_fig_10(1e-6, seed=SEED, until=450)


def test_the_flow_rests_on_the_rungs_and_its_heads_cancel_each_other(flow: Trace) -> None:
    assert judged(laws.FLOW_PLATEAUS, flow).holds
    assert judged(laws.OFFSET_IDENTITY, flow).holds


@pytest.mark.parametrize(("n_heads", "delta"), [(1, 1e-6), (2, 1e-6), (3, 0.0)], ids=["one", "two", "alike"])
def test_a_flow_that_never_gets_to_the_end_has_neither(n_heads: int, delta: float) -> None:
    stuck = laws.flow_of_fig_10(delta, seed=SEED, until=300, n_heads=n_heads)
    assert laws.half_time(stuck, 2) is None
    assert not judged(laws.FLOW_PLATEAUS, stuck).holds
    assert not judged(laws.OFFSET_IDENTITY, stuck).holds


def test_a_flow_whose_plateau_is_elsewhere_is_noticed(flow: Trace) -> None:
    assert not judged(laws.FLOW_PLATEAUS, flow.assign(loss=1.02 * flow.loss)).holds
    assert not judged(laws.FLOW_PLATEAUS, flow.assign(loss=flow.loss + 0.1 * (flow.step > 400))).holds


def test_heads_that_cancel_nothing_are_noticed(flow: Trace) -> None:
    values = flow.value_coefficient
    assert not judged(laws.OFFSET_IDENTITY, flow.assign(value_coefficient=values.clip(min=0))).holds
    assert not judged(laws.OFFSET_IDENTITY, flow.assign(value_coefficient=abs(values))).holds
    larger = values.where(values < 0, 1.1 * values)
    assert not judged(laws.OFFSET_IDENTITY, flow.assign(value_coefficient=larger)).holds


def test_the_half_time_is_interpolated() -> None:
    share = xr.DataArray([[0.0], [0.4], [0.8], [1.0]], dims=("step", "block"), coords={"step": [0, 1, 2, 3]})
    assert laws.half_time(share.to_dataset(name="effective_coefficient"), 0) == pytest.approx(1.25)
    assert laws.half_time(0.5 * share.to_dataset(name="effective_coefficient"), 0) is None


def escaping(tau: Callable[[float], float], s_2: float = 0.02) -> Trace:
    """Flows that learn block 1 at time 100 and block 2 a while later, with a known attention to its lag meanwhile."""
    step = np.arange(0, 400, 0.5)

    def one(delta: float) -> Trace:
        share = np.stack([step / 200, np.clip(step - 100 - tau(delta) + 0.5, 0, 1)], axis=1)
        mass = np.full((len(step), 1, 3, 3), s_2)
        variables = {
            "effective_coefficient": (("step", "block"), share),
            "block_mass": (("step", "layer", "head", "lag"), mass),
        }
        return xr.Dataset(variables, coords={"step": step})

    return laws.side_by_side({delta: one(delta) for delta in (1e-3, 1e-5, 1e-7, 1e-9, 1e-11)}, "delta")


def escape_time(delta: float, s_2: float = 0.02) -> float:
    return theory.escape_time(laws.FIG_10, 3, delta, s_2)


def test_a_first_plateau_that_lasts_as_the_law_says_follows_it() -> None:
    assert judged(laws.ESCAPE, escaping(escape_time)).holds
    assert judged(laws.ESCAPE, escaping(lambda delta: escape_time(delta, 0.05), s_2=0.05)).holds


@pytest.mark.parametrize(
    "tau",
    [
        lambda delta: 100 + (delta == 1e-7),
        lambda delta: 10 * np.log(1 / delta),
        lambda delta: theory.plateau_length(laws.FIG_10, 3, delta),
        lambda delta: 1.5 * escape_time(delta),
        lambda delta: 500.0 if delta < 1e-10 else escape_time(delta),
    ],
    ids=["always as long", "the logarithm itself", "without the offset", "longer", "never the last"],
)
def test_a_plateau_of_another_length_does_not(tau: Callable[[float], float]) -> None:
    assert not judged(laws.ESCAPE, escaping(tau)).holds


def test_the_flow_of_the_authors_follows_the_law() -> None:
    escape = laws.escape_flows((1e-3, 1e-6, 1e-9), seed=SEED)
    assert judged(laws.ESCAPE, escape).holds
    assert not judged(laws.ESCAPE, escape.sel(step=slice(0, 50))).holds  # the last has not escaped by then
