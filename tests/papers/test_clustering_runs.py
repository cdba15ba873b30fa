"""Clustering heads in trained models: one that solves the task, its control, and the whole reproduction, made short."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import joblib
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import xarray as xr

from fd_interp import reproduction
from fd_interp.claims import Evidence, judge, judge_control
from fd_interp.observation import Trace, observe
from fd_interp.overrides import override
from fd_interp.papers import clustering, paper_of, probes_of, setting
from fd_interp.papers.clustering import claims
from fd_interp.papers.clustering.cases import D_2, D_8, NAMED, SHUFFLED, TOGETHER
from fd_interp.papers.clustering.circuits import CLUSTERING_HEAD, STUCK, circuit, lattice_classes
from fd_interp.papers.clustering.settings import CLUSTERING, SETTINGS, STEPS_PER_EPOCH
from fd_interp.probes.clustering import attention_on_informative, class_share
from fd_interp.report.page import Report, report_page
from fd_interp.report.sections import run_section
from fd_interp.reproduction import jobs_of, traces_of_jobs
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.loop import train
from fd_interp.training.run import Run
from fd_interp.training.series import Series, open_series

UNTIL_SOLVED = ["--training.steps", "4800", "--keep.at.stride", "192"]
"""Accuracy is 1 from step 4032 on."""


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """Workers of a few steps each would take longer to start than to train."""
    with joblib.parallel_config("sequential"):
        yield


# The real thing.


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Series:
    run = override(CLUSTERING, UNTIL_SOLVED)
    return train(run, tmp_path_factory.mktemp("runs") / "seed-12", show_progress=False)


@pytest.fixture(scope="module")
def trace(solved: Series) -> Trace:
    return observe(solved, clustering.probes(CLUSTERING))


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    run = override(SHUFFLED, ["--training.steps", "1000"])
    return observe(
        train(run, tmp_path_factory.mktemp("runs") / "shuffled", show_progress=False), clustering.probes(run)
    )


def test_the_setting_ends_in_a_clustering_head(trace: Trace) -> None:
    found = circuit(trace)
    assert found.name == CLUSTERING_HEAD
    assert found.accuracy == 1
    assert found.f_type >= 0.98
    assert found.influence_share >= 0.99
    assert tuple(map(abs, found.weights)) == (1,) * 5 + (0,) * 7
    end = trace.isel(step=-1).squeeze()
    assert (float(end.train_accuracy), float(end.unseen_accuracy)) == (1, 1)
    assert float(end.representation_accuracy) > 0.98
    assert float(end.informative_mass) < 0.9  # whereas that of the textbook's head is 1


def test_its_representation_comes_before_its_classifier(trace: Trace) -> None:
    found = circuit(trace)
    assert found.representation is not None
    assert found.classifier is not None
    assert 0 < found.representation < found.classifier
    at = trace.sel(step=found.representation).squeeze()
    assert float(at.accuracy) < 0.98
    assert [stage.start for stage in clustering.stages(trace)] == [0, found.representation, found.classifier]


def test_its_claims_hold_and_fail_where_labels_have_changed_places(trace: Trace, shuffled: Trace) -> None:
    good, bad, untrained = ([Evidence(each, {})] for each in (trace, shuffled, trace.isel(step=[0])))
    for claim in clustering.claims_about(CLUSTERING):
        assert judge(claim, good, where="clustering").holds, claim.id
        for seen in (bad, untrained):
            verdict = judge_control(claim, seen, where="clustering", control="taken away", paired=good)
            assert verdict.holds, verdict.measured
    assert circuit(shuffled).name == STUCK
    assert float(shuffled.accuracy[-1]) < 0.6
    assert float(shuffled.unseen_accuracy[-1]) < 0.6


def test_the_control_differs_in_its_labels_alone() -> None:
    assert SHUFFLED.task == CLUSTERING.task.model_copy(update={"shuffled": True})
    assert SHUFFLED.kept_steps() == [0, CLUSTERING.training.steps]
    assert (SHUFFLED.model, SHUFFLED.training) == (CLUSTERING.model, CLUSTERING.training)


def test_the_classes_of_its_lattice_are_those_of_the_task(solved: Series, trace: Trace) -> None:
    probe = class_share({"own": lattice_classes(circuit(trace).weights)}, permutations=1)
    own = observe(solved, [probe]).class_share.isel(by=0, drop=True)
    np.testing.assert_allclose(own[-1], trace.f_type_gauge[-1], atol=1e-6)
    assert circuit(trace.assign(class_share=own)).representation == circuit(trace).representation


def test_its_gauge_is_told_by_the_signs_of_its_weights(trace: Trace) -> None:
    weights = circuit(trace).weights
    renamed = sum(2 ** (4 - position) for position in range(1, 5) if weights[position] * weights[0] < 0)
    assert int(trace.gauge.isel(step=-1, form=1).squeeze()) == renamed


# Settings.

SMALL = ["--training.steps", "3", "--training.batch_size", "8", "--keep.at.stride", "1", "--keep.held_out", "256",
         "--task.length", "8", "--task.k", "3"]  # fmt: skip
RUNS: dict[str, Run] = {name: override(run, SMALL) for name, run in SETTINGS.items()}
RUNS |= {
    "three symbols": override(CLUSTERING, [*SMALL, "--task.p", "3"]),
    "new sequences": override(CLUSTERING, [*SMALL, "--task.sequences", "none"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_run_can_be_measured_judged_and_reported(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    assert paper_of(run) is clustering
    series = train(run, tmp_path / "run", show_progress=False)
    trace = observe(series, probes_of(run))
    assert trace.step.values.tolist() == [0, 1, 2, 3]
    assert np.isfinite(trace.loss).all()
    for claim in clustering.claims_about(run):
        assert not judge(claim, [Evidence(trace, {})], where=name).holds  # after three steps
    assert circuit(trace).name != CLUSTERING_HEAD
    panels = clustering.panels(series)
    titles = [panel.title for panel in panels]
    assert ("Weight of each symbol (the first 6)" in titles) == (name != "three symbols")
    by_position = next(panel for panel in panels if panel.title == "Influence of each symbol (the first 6)")
    assert [curve.label for curve in by_position.curves] == ["1", "2", "3", "4, spurious", "5, spurious", "6, spurious"]
    section = run_section(clustering, "small", "what", series, [trace, trace], clustering.predicted(run, [0]))
    assert len(section.figures) == len(panels)
    assert [stage.name for stage in section.stages] == ["I plateau", "II representation", "III classifier"]
    page = report_page(Report("t", "s", "", [], [section]))
    assert all(title.split()[0] in page for title in titles)


def test_settings_are_named_and_judged_by_what_can_hold_on_them() -> None:
    assert setting("clustering") == CLUSTERING
    three = (claims.SOLVED, claims.CLUSTERED, claims.REPRESENTATION_FIRST)
    for name, run in SETTINGS.items():
        expected = (claims.SOLVED,) if name == "clustering-transformer" else three
        assert clustering.claims_about(run) == expected
        assert run.training.loss_on == "last"
    assert set(NAMED) <= set(SETTINGS)


def test_cases_are_settings_that_last_as_long_as_they_must() -> None:
    assert SETTINGS["clustering-paper"] == D_2
    assert D_2.training.steps == 1000 * STEPS_PER_EPOCH
    assert D_8.model == CLUSTERING.model
    assert D_8.training.steps == 160 * STEPS_PER_EPOCH
    assert D_8.kept_steps()[:3] == [0, 4 * STEPS_PER_EPOCH, 8 * STEPS_PER_EPOCH]
    assert all(run.task == SparseModularAddition(data_seed=run.seed) for run in (*NAMED.values(), D_2, D_8))


# Jobs.

FEW = override(D_2, ["--training.steps", "6", "--keep.at.stride", "3", "--keep.held_out", "64", "--task.length", "6",
                     "--task.k", "3", "--task.sequences", "40", "--training.batch_size", "8"])  # fmt: skip


@pytest.mark.parametrize(
    ("seeds", "together", "groups"),
    [
        (range(5), 2, [[0, 1], [2, 3], [4]]),
        (range(3), 1, [[0], [1], [2]]),
        ([7, 3], 16, [[7, 3]]),
        ([], 4, []),
    ],
)
def test_seeds_are_divided_into_jobs(seeds: Any, together: int, groups: list[list[int]], tmp_path: Path) -> None:
    jobs = jobs_of("case", FEW, seeds, tmp_path, together=together)
    assert [[run.seed for run in job.runs] for job in jobs] == groups
    for job in jobs:
        assert job.case == "case"
        assert [run.task for run in job.runs] == [
            FEW.task.model_copy(update={"data_seed": run.seed}) for run in job.runs
        ]
        assert list(job.directories) == [tmp_path / "case" / f"seed-{run.seed}" for run in job.runs]


def test_a_task_without_a_training_set_has_no_seed_of_it(tmp_path: Path) -> None:
    endless = override(FEW, ["--task.sequences", "none"])
    jobs = jobs_of("case", endless, [3, 4], tmp_path)
    assert [run.task for job in jobs for run in job.runs] == [endless.task] * 2


def test_traces_come_in_the_order_of_the_seeds(tmp_path: Path) -> None:
    jobs = [*jobs_of("two", FEW, [5, 2, 9], tmp_path, together=2), *jobs_of("one", FEW, [4], tmp_path)]
    traces = traces_of_jobs(jobs, clustering.probes)
    assert {case: len(found) for case, found in traces.items()} == {"two": 3, "one": 1}
    for seed, found in zip([5, 2, 9], traces["two"], strict=True):
        directory = tmp_path / "two" / f"seed-{seed}"
        assert open_series(directory).run == jobs_of("two", FEW, [seed], tmp_path)[0].runs[0]
        xr.testing.assert_equal(found, observe(open_series(directory), clustering.probes(open_series(directory).run)))
        xr.testing.assert_equal(found, xr.load_dataset(directory / reproduction.TRACE_FILE))


def test_seeds_trained_together_become_what_they_become_alone(tmp_path: Path) -> None:
    alone, together = (
        traces_of_jobs(jobs_of("case", FEW, range(3), tmp_path / str(number), together=number), clustering.probes)
        for number in (1, 3)
    )
    for one, other in zip(alone["case"], together["case"], strict=True):
        for name in ("loss", "accuracy", "f_type_gauge", "influence"):
            np.testing.assert_allclose(one[name], other[name], atol=1e-4, err_msg=name)
        for claim in (*clustering.claims_about(FEW),):
            assert claim.check(Evidence(one, {})).holds == claim.check(Evidence(other, {})).holds
        assert circuit(one).name == circuit(other).name
    assert len({float(one.loss[-1]) for one in alone["case"]}) == 3


def test_what_is_there_is_not_trained_again(tmp_path: Path) -> None:
    jobs = jobs_of("case", FEW, range(3), tmp_path, together=2)
    first = traces_of_jobs(jobs, clustering.probes)
    written = weights_of(tmp_path)
    again = traces_of_jobs(jobs, clustering.probes)
    assert weights_of(tmp_path) == written
    for one, other in zip(first["case"], again["case"], strict=True):
        xr.testing.assert_equal(one, other)


def weights_of(folder: Path) -> dict[Path, int]:
    """When each snapshot was written."""
    return {file: file.stat().st_mtime_ns for file in sorted(folder.rglob("step_*.safetensors"))}


# The whole reproduction.

SHORT = ["--seeds", "2", "--training.steps", "64", "--keep.at.stride", "64", "--task.length", "8", "--task.k", "4",
         "--keep.held_out", "256"]  # fmt: skip


class Done(NamedTuple):
    """What the reproduction leaves."""

    status: int
    verdicts: dict[str, dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module")
def short(script: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("reproduction")
    return reproduced(script, folder)


def reproduced(script: Callable[[str], ModuleType], folder: Path) -> Done:
    command, printed = script("scripts/reproduce.py"), []
    with patch.object(command, "show_json", printed.append):
        status = command.main(["clustering", "--out", str(folder), *SHORT, "--json"])
    (result,) = json.loads(json.dumps(printed))
    return Done(status, {verdict["id"]: verdict for verdict in result["claims"]}, folder)


def test_too_few_steps_solve_nothing_and_the_exit_status_says_so(short: Done) -> None:
    assert short.status == 1
    assert all(verdict["measured"] for verdict in short.verdicts.values())
    of_runs = {f"{run}/{claim}" for run in NAMED for claim in ("solved", "clustering-head", "representation-first")}
    of_all = {f"{case}/{claim}" for case in ("d-2", "d-8") for claim in ("two-ways", "stuck-unclustered")}
    of_all |= {"d-2/solved-share", "d-2/two-stages", "d-8/criterion"}
    told = {identity for identity, verdict in short.verdicts.items() if verdict["control"] is None}
    assert of_runs | of_all | {"closed-form/clustering-head"} == told
    controls = {identity: verdict for identity, verdict in short.verdicts.items() if verdict["control"]}
    assert controls.keys() == {
        *(f"{case}/{claim}" for case in ("shuffled", "untrained", "stuck") for claim in ("solved", "clustering-head")),
        "d-2/criterion",
    }
    for verdict in controls.values():
        assert not verdict["holds"]
        assert "says nothing" in verdict["measured"]


def test_what_holds_without_training_is_what_needs_none(short: Done) -> None:
    assert short.verdicts["closed-form/clustering-head"]["holds"]
    holds = {identity for identity, verdict in short.verdicts.items() if verdict["holds"]}
    assert holds <= {
        "closed-form/clustering-head",
        "d-2/solved-share",
        "d-2/stuck-unclustered",
        "d-8/stuck-unclustered",
    }


def test_every_seed_is_in_the_table(short: Done) -> None:
    table = pd.read_csv(short.folder / "seeds.csv")
    assert list(table) == [
        "case", "seed", "circuit", "accuracy", "f_type", "influence_share", "weights", "representation", "classifier"
    ]  # fmt: skip
    assert list(zip(table.case, table.seed, strict=True)) == [
        ("d-2", 0), ("d-2", 1), ("clustering", 12), ("clustering-2d", 25),
        ("d-8", 0), ("d-8", 1), ("shuffled", 0), ("shuffled", 1),
    ]  # fmt: skip
    assert set(table.circuit) == {STUCK}
    for _, row in table.iterrows():
        seen = xr.load_dataset(short.folder / str(row.case) / f"seed-{row.seed}" / reproduction.TRACE_FILE)
        assert row.accuracy == pytest.approx(float(seen.accuracy[-1]))
        assert row.f_type == pytest.approx(float(seen.f_type_gauge.isel(step=-1, form=1).squeeze()))


def test_the_report_shows_runs_and_seeds(short: Done) -> None:
    page = (short.folder / "report.html").read_text(encoding="utf-8")
    for title in ("One run in eight coordinates", "One run in two coordinates", "The paper&#39;s setting",
                  "Eight coordinates", "Representation, then classifier"):  # fmt: skip
        assert f"<h2>{title}</h2>" in page, title
    assert "Of 2 seeds: 2 stuck." in page
    assert "16 random prefixes have" in page


def test_groups_are_as_large_as_the_cases_say(short: Done) -> None:
    assert TOGETHER > 2
    runs = {file.parent.relative_to(short.folder) for file in short.folder.rglob("run.json")}
    assert len(runs) == 8
    for file in short.folder.rglob("run.json"):
        run = Run(**json.loads(file.read_text(encoding="utf-8")))
        assert isinstance(run.task, SparseModularAddition)
        assert run.task.data_seed == run.seed
        assert run.task.shuffled == (file.parent.parent.name == "shuffled")


def test_a_second_call_trains_nothing(short: Done, script: Callable[[str], ModuleType]) -> None:
    written = weights_of(short.folder)
    again = reproduced(script, short.folder)
    assert weights_of(short.folder) == written
    assert again.verdicts == short.verdicts
    assert again.status == 1


def test_attention_is_drawn_where_there_is_one_query(solved: Series) -> None:
    (figure,) = clustering.wide_figures(solved)
    (heat,) = figure.data
    assert isinstance(heat, go.Heatmap)
    shown = np.asarray(heat.z)
    assert shown.shape[0] == 12
    assert shown.shape[1] == len(heat.x)
    np.testing.assert_allclose(shown.sum(0), 1, rtol=1e-4)
    mass = (
        observe(solved, [attention_on_informative(CLUSTERING.task)]).informative_mass.sel(step=list(heat.x)).squeeze()
    )
    np.testing.assert_allclose(shown[:5].sum(0), mass, atol=1e-5)
