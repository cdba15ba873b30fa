"""The paper's claims and controls, on seeds that the demo does not use."""

from itertools import pairwise

import pytest

from fd_interp.claims import Claim, Evidence, judge, judge_control
from fd_interp.observation import Trace, observe
from fd_interp.papers import focus_dilution as paper
from fd_interp.papers import paper_of, setting, settings
from fd_interp.papers.focus_dilution import claims, population
from fd_interp.papers.focus_dilution.settings import PAPER_PI, TRANSFORMER, ZIPF, controls
from fd_interp.tasks.markov import MarkovChain
from fd_interp.theory import focus_dilution as theory
from fd_interp.training.loop import train
from fd_interp.training.run import Run

SEEDS = (11, 12)
BASES = {"zipf": ZIPF, "paper": PAPER_PI}
CONTROLS = {control.name: control for control in controls(ZIPF)}


def evidence(traces: list[Trace], run: Run) -> list[Evidence]:
    return [Evidence.of(trace, run.task.baselines()) for trace in traces]


@pytest.fixture(scope="module")
def trace_of_model(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    run = PAPER_PI.model_copy(update={"seed": SEEDS[0]})
    return observe(train(run, tmp_path_factory.mktemp("paper"), show_progress=False), paper.probes(run))


@pytest.fixture(scope="module", params=BASES)
def flow(request: pytest.FixtureRequest) -> tuple[Run, list[Evidence]]:
    run = BASES[request.param]
    return run, evidence(population.predicted(run, SEEDS), run)


@pytest.mark.parametrize("claim", claims.ON_CHAINS, ids=lambda claim: claim.id)
def test_claim_holds_on_the_model(claim: Claim, trace_of_model: Trace):
    verdict = judge(claim, evidence([trace_of_model], PAPER_PI), where="model")
    assert verdict.holds, verdict.measured


@pytest.mark.parametrize("claim", claims.ON_CHAINS, ids=lambda claim: claim.id)
def test_claim_holds_in_the_population_flow(claim: Claim, flow: tuple[Run, list[Evidence]]):
    verdict = judge(claim, flow[1], where="population")
    assert verdict.holds, verdict.measured


@pytest.mark.parametrize("base", BASES)
def test_rates_are_the_closed_forms(base: str):
    flows = evidence(population.flows(BASES[base], SEEDS), BASES[base])
    for claim in population.rate_claims(BASES[base]):
        verdict = judge(claim, flows, where="population")
        assert verdict.holds, verdict.measured


def test_a_wrong_rate_is_not_confirmed():
    flows = evidence(population.flows(ZIPF, SEEDS[:1]), ZIPF)
    other = ZIPF.model_copy(update={"task": MarkovChain.zipf(8, persistence=0.4)})
    for claim in population.rate_claims(other):
        assert judge(claim, flows, where="population").holds == (claim.id == "condensation-rate")


@pytest.fixture(scope="module")
def paired_flow() -> list[Evidence]:
    return evidence(population.predicted(ZIPF, SEEDS), ZIPF)


@pytest.mark.parametrize("name", [name for name, control in CONTROLS.items() if control.in_population])
def test_control_fails_in_the_population_flow(name: str, paired_flow: list[Evidence]):
    control = CONTROLS[name]
    traces = evidence(population.predicted(control.run, SEEDS), control.run)
    for claim in control.in_population:
        verdict = judge_control(claim, traces, where=name, control=control.taken_away, paired=paired_flow)
        assert verdict.holds, verdict.measured


@pytest.mark.parametrize("name", ["persistence-0", "frozen-attention", "anti-focus"])
def test_control_fails_on_the_model(name: str, tmp_path):
    control = CONTROLS[name]
    run = control.run.model_copy(
        update={"seed": SEEDS[0], "training": control.run.training.model_copy(update={"steps": 1200})}
    )
    traces = [observe(train(run, tmp_path / name, show_progress=False), paper.probes(run))]
    for claim in control.in_model:
        verdict = judge(claim, evidence(traces, run), where=name)
        assert not verdict.holds, verdict.measured
    # That the claim fails says something only because the run did condense, as it must before it can focus.
    assert judge(claims.CONDENSATION, evidence(traces, run), where=name).holds


def test_equal_rare_tokens_end_at_the_degenerate_loss():
    run = CONTROLS["symmetric-low"].run
    (trace,) = population.predicted(run, SEEDS[:1])
    assert float(trace.loss[-1]) == pytest.approx(theory.degenerate_loss(run.task), abs=2e-3)


def test_anti_focus_is_downwards():
    run = CONTROLS["anti-focus"].run
    assert theory.sign_criterion(run.task) < 0 < theory.sign_criterion(ZIPF.task)
    (trace,) = population.predicted(run, SEEDS[:1])
    departed = paper.cycle(trace).departed
    assert departed is not None
    assert departed[1] == -1


def test_stages_cover_training_in_order(trace_of_model: Trace):
    stages = paper.stages(trace_of_model)
    assert [stage.name.split()[0] for stage in stages] == ["I", "II", "III", "IV"]
    assert stages[0].start == 0
    assert stages[-1].end == PAPER_PI.training.steps
    for before, after in pairwise(stages):
        assert before.end == after.start


def test_the_theory_is_offered_only_where_it_applies():
    assert population.descent_of(TRANSFORMER) is None
    momentum = ZIPF.training.optimizer.model_copy(update={"momentum": 0.9})
    heavy = ZIPF.model_copy(update={"training": ZIPF.training.model_copy(update={"optimizer": momentum})})
    assert population.predicted(heavy, [0]) == population.flows(heavy, [0]) == population.rate_claims(heavy) == []
    assert population.descent_of(ZIPF) == (ZIPF.task, 0.2, 1.0)


def test_every_setting_has_a_paper_probes_and_claims():
    for name, run in settings().items():
        assert setting(name) == run
        assert paper_of(run).claims_about(run)
        assert paper_of(run).probes(run)
