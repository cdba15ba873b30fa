"""What is reproduced of this paper: the named runs, all seeds of two settings, controls, verdicts and the report."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch

from fd_interp.claims import Claim, Evidence, Verdict, judge, judge_control
from fd_interp.measures.clustering import chance_type
from fd_interp.models.config import LearnedQuery
from fd_interp.observation import Trace, observe
from fd_interp.overrides import override
from fd_interp.papers import clustering as paper
from fd_interp.papers.clustering import claims, sections
from fd_interp.papers.clustering.cases import (
    D_2,
    D_8,
    NAMED,
    SHUFFLED,
    SHUFFLED_SEEDS,
    TOGETHER,
    WIDE_SEEDS,
)
from fd_interp.papers.clustering.circuits import STUCK, Circuit, circuit, lattice_classes, of_model
from fd_interp.papers.clustering.ideal import ideal_series
from fd_interp.papers.clustering.settings import probes_of_many
from fd_interp.probes.clustering import class_share
from fd_interp.report.page import Report
from fd_interp.report.sandbox import recorded, sandbox_page
from fd_interp.reproduction import (
    Job,
    Results,
    evidence_of,
    in_parallel,
    jobs_of,
    judged,
    summary,
    traces_of_jobs,
    versions,
)
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.run import Run
from fd_interp.training.series import atomic, open_series
from fd_interp.training.state import losses_of

DRAWS_OF_CHANCE = 2000
SEEDS_FILE = "seeds.csv"


def on_seeds(seeds: Sequence[int], out: Path, overrides: Sequence[str]) -> Results:
    """The two named runs; the paper's setting on all seeds, a wider model and shuffled labels on the first of them."""
    out = out.resolve()  # a worker that is used again may have another working directory
    named = {name: override(run, overrides) for name, run in NAMED.items()}
    settings = {"d-2": override(D_2, overrides), "d-8": override(D_8, overrides)}
    control = override(SHUFFLED, overrides)
    jobs = jobs_of("d-2", settings["d-2"], seeds, out, together=TOGETHER)
    jobs += [job for name, run in named.items() for job in jobs_of(name, run, [run.seed], out)]
    jobs += jobs_of("d-8", settings["d-8"], seeds[:WIDE_SEEDS], out, together=TOGETHER)
    jobs += jobs_of("shuffled", control, seeds[:SHUFFLED_SEEDS], out, together=TOGETHER)
    traces = traces_of_jobs(jobs, lambda run: paper.probes(run) if run in named.values() else probes_of_many(run))

    verdicts = [
        verdict for name, run in named.items() for verdict in judged(paper.claims_about(run), run, traces[name], name)
    ]
    for name, claimed in (("d-2", claims.TWO_WAYS), ("d-8", claims.TWO_WAYS_WIDE)):
        traces[name] = _with_own_classes(traces[name], out / name, seeds)
        verdicts += _of_all(name, traces[name], seeds, claimed)
    verdicts += _controls(traces, named["clustering"], seeds)

    by_seed = {case: dict(zip(_seeds_of(jobs, case), seen, strict=True)) for case, seen in traces.items()}
    circuits = {case: {seed: circuit(trace) for seed, trace in seen.items()} for case, seen in by_seed.items()}
    _write_table(circuits, out)
    mass = {case: {seed: _mass(trace) for seed, trace in by_seed[case].items()} for case in settings}
    chance = {case: _chance(run) for case, run in settings.items()}
    filmed = [(name, run.seed, traces[name][0]) for name, run in named.items()]
    sandboxes = in_parallel(_write_sandbox, filmed, out=out)
    shown = [
        *(
            sections.of_run(out / name / f"seed-{run.seed}", name, traces[name], page)
            for (name, run), page in zip(named.items(), sandboxes, strict=True)
        ),
        sections.of_seeds("The paper's setting", sections.D_2_TEXT, circuits["d-2"], mass["d-2"], chance["d-2"]),
        sections.of_stages(circuits["d-2"], circuits["d-8"]),
        sections.of_seeds("Eight coordinates", sections.D_8_TEXT, circuits["d-8"], mass["d-8"], chance["d-8"]),
    ]
    report = Report(paper.TITLE, paper.PAPER, summary(verdicts, _over(jobs)), verdicts, shown, versions())
    return Results(verdicts, report)


def _write_sandbox(filmed: tuple[str, int, Trace], *, out: Path) -> str:
    """Writes the sandbox of a named run beside the report, and returns the name of its file."""
    name, seed, trace = filmed
    directory, page = out / name / f"seed-{seed}", f"sandbox-{name}.html"
    shown = recorded(open_series(directory))._replace(trace=trace, losses=tuple(losses_of(directory)))
    with atomic(out / page) as partial:
        partial.write_text(sandbox_page(shown), encoding="utf-8")
    return page


def _over(jobs: Sequence[Job]) -> str:
    """`seeds: clustering 1, d-2 32, ...`."""
    counts = {case: len(_seeds_of(jobs, case)) for case in dict.fromkeys(job.case for job in jobs)}
    return "seeds: " + ", ".join(f"{case} {count}" for case, count in counts.items())


def _of_all(name: str, traces: Sequence[Trace], seeds: Sequence[int], two_ways: Claim) -> list[Verdict]:
    """The claims about all seeds of a setting; in more coordinates the order of the stages is only reported."""
    trace = claims.together(traces, seeds[: len(traces)])
    asked = (two_ways, claims.STUCK_UNCLUSTERED)
    if name == "d-2":
        asked = (claims.SOLVED_SHARE, *asked, claims.TWO_STAGES)
    verdicts = [_judge(claim, trace, name) for claim in asked]
    by_type = claims.with_criterion(trace, "f_type_gauge")
    return [*verdicts, _judge(claims.SEPARATES, by_type, name)]


def _mass(trace: Trace) -> float:
    """Attention on informative positions in the end."""
    return float(of_model(trace).informative_mass[-1])


def _seeds_of(jobs: Sequence[Job], case: str) -> list[int]:
    return [run.seed for job in jobs if job.case == case for run in job.runs]


def _judge(claim: Claim, trace: Trace, where: str) -> Verdict:
    return judge(claim, [Evidence(trace, {})], where=where)


def _controls(traces: dict[str, list[Trace]], run: Run, seeds: Sequence[int]) -> list[Verdict]:
    """Where the claims about one run must fail, and where attention is asked instead."""
    paired = evidence_of(traces["clustering"], run)
    of_run = (claims.SOLVED, claims.CLUSTERED)
    stuck = [trace for trace in traces["d-2"] if circuit(trace).name == STUCK]
    untrained = [trace.isel(step=[0]) for trace in traces["d-8"]]
    verdicts = []
    for where, seen, taken_away in (
        ("shuffled", traces["shuffled"], "labels of the training set change places"),
        ("untrained", untrained, "nothing is trained"),
        ("stuck", stuck, "the seed never leaves the plateau"),
    ):
        evidence = [Evidence(trace, {}) for trace in seen]
        verdicts += [judge_control(claim, evidence, where=where, control=taken_away, paired=paired) for claim in of_run]
    trace = claims.together(traces["d-2"], seeds)
    by_mass, by_type = (claims.with_criterion(trace, each) for each in ("informative_mass", "f_type_gauge"))
    verdicts.append(
        judge_control(
            claims.SEPARATES,
            [Evidence(by_mass, {})],
            where="d-2",
            control="attention on informative positions is the criterion",
            paired=[Evidence(by_type, {})],
        )
    )
    ideal = observe(ideal_series(_task(run)), paper.probes(run))
    return [*verdicts, judge(claims.CLUSTERED, [Evidence(ideal, {})], where="closed-form")]


def _with_own_classes(traces: Sequence[Trace], folder: Path, seeds: Sequence[int]) -> list[Trace]:
    """Where a seed has come to rest on a lattice, how clustered its head was by the classes of that lattice."""
    return in_parallel(_by_own_classes, zip(traces, seeds, strict=False), folder=folder)


def _by_own_classes(of_seed: tuple[Trace, int], *, folder: Path) -> Trace:
    trace, seed = of_seed
    found = circuit(trace)
    if not found.solved or not any(found.weights):
        return trace.assign(class_share=trace.f_type_gauge)
    probe = class_share({"its own lattice": lattice_classes(found.weights)}, permutations=1)
    return trace.assign(
        class_share=observe(open_series(folder / f"seed-{seed}"), [probe]).class_share.isel(by=0, drop=True)
    )


def _chance(run: Run) -> str:
    """What the best gauge finds in random points, in a sentence."""
    assert isinstance(run.model, LearnedQuery)
    gauges = _task(run).gauges
    drawn = chance_type(gauges.shape[1], run.model.d_model, gauges, DRAWS_OF_CHANCE, torch.Generator().manual_seed(0))
    mean, high, most = drawn.mean().item(), drawn.quantile(0.95).item(), drawn.max().item()
    return (
        f"By chance: {gauges.shape[1]} random prefixes have {mean:.3f} of their variance between classes in the best "
        f"gauge, {high:.3f} in one case of twenty, {most:.3f} at most in {DRAWS_OF_CHANCE}."
    )


def _task(run: Run) -> SparseModularAddition:
    assert isinstance(run.task, SparseModularAddition)
    return run.task


def _write_table(circuits: Mapping[str, Mapping[int, Circuit]], out: Path) -> None:
    tables = [sections.table(seen, case) for case, seen in circuits.items()]
    with atomic(out / SEEDS_FILE) as partial:
        pd.concat(tables).to_csv(partial, index=False)
