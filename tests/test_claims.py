import math

import pytest
import xarray as xr

from fd_interp.claims import Claim, Evidence, Finding, judge, judge_control
from fd_interp.tasks.markov import MarkovChain


def seed(value: float | int | None, **baselines: float) -> Evidence:
    return Evidence(xr.Dataset(attrs={"value": value}), baselines)


def claim(check) -> Claim:
    return Claim("rise", "It rises", "arXiv 0000.00000", "more than 1", check)


def of_value(evidence: Evidence) -> Finding:
    value = evidence.trace.attrs["value"]
    return Finding(value is not None and value > 1, {"value": value})


RISE = claim(of_value)


@pytest.mark.parametrize(
    ("values", "holds", "does_its_work"),
    [
        ([2, 3], True, False),
        ([0, 1], False, True),
        ([0, 3], False, False),
        ([2], True, False),
        ([0], False, True),
        ([None], False, True),
        ([], False, False),
    ],
)
def test_a_claim_holds_on_every_seed_and_a_control_fails_on_every_seed(values, holds: bool, does_its_work: bool):
    seeds = [seed(value) for value in values]
    assert judge(RISE, seeds, where="run").holds is holds
    assert judge_control(RISE, seeds, where="run", control="nothing", paired=[seed(2)]).holds is does_its_work


@pytest.mark.parametrize("paired", [[], [0], [2, 0]])
def test_a_control_says_nothing_where_the_claim_fails_without_it_too(paired: list[int]):
    verdict = judge_control(RISE, [seed(0)], where="run", control="nothing", paired=[seed(value) for value in paired])
    assert not verdict.holds
    assert "says nothing, because the claim fails on its own run too" in verdict.measured


def test_a_verdict_says_what_was_claimed_and_where():
    verdict = judge(RISE, [seed(2)], where="zipf")
    assert verdict == ("zipf/rise", "It rises", "arXiv 0000.00000", "more than 1", verdict.measured, True, None)
    control = judge_control(RISE, [seed(0)], where="zipf-flat", control="no slope", paired=[seed(2)])
    assert (control.id, control.expected, control.control) == ("zipf-flat/rise", "not: more than 1", "no slope")


@pytest.mark.parametrize(
    ("values", "measured"),
    [
        ([2, 2], "value 2 (2 of 2 seeds)"),
        ([3, 0, 2], "value 0 to 3 (2 of 3 seeds)"),
        ([None, None], "value never (0 of 2 seeds)"),
        ([4, None, 3], "value 3 to 4 on 2 (2 of 3 seeds)"),
        ([None, 3], "value 3 on 1 (1 of 2 seeds)"),
        ([0.12345, 12.34567], "value 0.123 to 12.346 (1 of 2 seeds)"),
        ([1234.5], "value 1234.5 (1 of 1 seeds)"),
        ([-0.00012345], "value -0.000123 (0 of 1 seeds)"),
        ([2.0], "value 2 (1 of 1 seeds)"),
        ([0.5, math.nan], "value nan (0 of 2 seeds)"),
        ([math.nan, 0.5], "value nan (0 of 2 seeds)"),
        ([], "nothing measured"),
    ],
)
def test_numbers_are_summed_up_over_the_seeds(values, measured: str):
    assert judge(RISE, [seed(value) for value in values], where="run").measured == measured


def test_numbers_keep_their_order_and_may_be_missing_on_a_seed():
    findings = iter([Finding(True, {"b": 1, "a": 2}), Finding(True, {"a": 3, "c": None})])
    verdict = judge(claim(lambda _: next(findings)), [seed(0), seed(0)], where="run")
    assert verdict.measured == "b 1 on 1; a 2 to 3; c never (2 of 2 seeds)"


def test_a_claim_may_use_the_baselines():
    chain = MarkovChain.zipf(4)
    evidence = Evidence.of(xr.Dataset(), chain.baselines())
    assert list(evidence.baselines) == ["uniform", "unigram", "bigram"]
    below = claim(lambda e: Finding(e.baselines["bigram"] < e.baselines["unigram"], {}))
    assert judge(below, [evidence], where="run").measured == " (1 of 1 seeds)"
