"""A paper's claims as data, judged on the traces of several seeds, and controls on which they must fail."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fd_interp.observation import Trace
from fd_interp.tasks.task import Baseline


class Evidence(NamedTuple):
    """What a claim is judged on: one seed's trace, and the exact losses of the predictors that know less."""

    trace: Trace
    baselines: dict[str, float]

    @classmethod
    def of(cls, trace: Trace, baselines: Sequence[Baseline]) -> "Evidence":
        return cls(trace, {baseline.name: baseline.loss for baseline in baselines})


class Finding(NamedTuple):
    """What one seed shows."""

    holds: bool
    numbers: Mapping[str, float | int | None]
    """What was measured, by what it is; None for what did not happen."""


@dataclass(frozen=True)
class Claim:
    """One statement of a paper and how to tell whether it holds on one seed."""

    id: str
    statement: str
    source: str
    expected: str
    check: Callable[[Evidence], Finding]


class Verdict(NamedTuple):
    """A claim over all seeds, or its failure on a control."""

    id: str
    statement: str
    source: str
    expected: str
    measured: str
    holds: bool
    """The claim holds on every seed; for a control, it fails on every seed, as it must, and holds without it."""
    control: str | None
    """What was taken away, for a control."""


def judge(claim: Claim, seeds: Sequence[Evidence], *, where: str) -> Verdict:
    """The claim holds where it holds on every seed."""
    findings = [claim.check(evidence) for evidence in seeds]
    holds = bool(findings) and all(finding.holds for finding in findings)
    return Verdict(
        f"{where}/{claim.id}", claim.statement, claim.source, claim.expected, _summary(findings), holds, None
    )


def judge_control(
    claim: Claim, seeds: Sequence[Evidence], *, where: str, control: str, paired: Sequence[Evidence]
) -> Verdict:
    """A control does its work where the claim fails on every seed, and holds on those of the run that it was made from.

    Without the second a claim that nothing fulfils, after too few steps say, would make every control look good.
    """
    findings = [claim.check(evidence) for evidence in seeds]
    found = bool(paired) and all(claim.check(evidence).holds for evidence in paired)
    holds = found and bool(findings) and not any(finding.holds for finding in findings)
    measured = _summary(findings) + ("" if found else "; says nothing, because the claim fails on its own run too")
    return Verdict(
        f"{where}/{claim.id}", claim.statement, claim.source, f"not: {claim.expected}", measured, holds, control
    )


def _summary(findings: Sequence[Finding]) -> str:
    """`name low … high` for each number over the seeds, and on how many of them the claim holds."""
    if not findings:
        return "nothing measured"
    names = {name: None for finding in findings for name in finding.numbers}
    parts = [_range(name, [finding.numbers.get(name) for finding in findings]) for name in names]
    return f"{'; '.join(parts)} ({sum(f.holds for f in findings)} of {len(findings)} seeds)"


def _range(name: str, values: Sequence[float | int | None]) -> str:
    happened = [value for value in values if value is not None]
    if not happened:
        return f"{name} never"
    low, high = _short(np.min(happened).item()), _short(np.max(happened).item())  # unlike min, NaN where one is NaN
    sometimes = "" if len(happened) == len(values) else f" on {len(happened)}"
    return f"{name} {low}{sometimes}" if low == high else f"{name} {low} to {high}{sometimes}"


def _short(value: float | int) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.3f}".rstrip("0").rstrip(".")
