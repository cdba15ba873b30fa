"""What a run of arXiv 2410.24050 has become, its stages and the claims about it, on traces made by hand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import xarray as xr

from fd_interp.claims import Claim, Evidence, judge
from fd_interp.observation import Trace
from fd_interp.papers.clustering import claims, sections
from fd_interp.papers.clustering.circuits import (
    CLUSTERING_HEAD,
    OTHER_LATTICE,
    OTHER_WAY,
    PARTIAL,
    STUCK,
    circuit,
    classifier_step,
    lattice_classes,
    of_model,
    representation_step,
    stages,
)
from fd_interp.tasks.modular import SparseModularAddition

STEPS = np.arange(0, 1001, 100)
PLAIN = (1, 1, 1, 1, 1, *[0] * 7)
ODD = (1, -1, 3, 1, 1, 2, 0, 0, -2, 0, 0, 0)


def staged(
    *,
    representation: int | None = 400,
    classifier: int | None = 700,
    accuracy: float = 1.0,
    share: float = 0.99,
    influence: float = 0.995,
    weights: Sequence[float] = PLAIN,
    mass: float = 0.6,
) -> Trace:
    """A head that has its share between classes all at once, and then its accuracy; before that both are of chance.

    The share is that of the direction; of xi itself it is half as large.
    """
    represented, classified = ((np.inf if step is None else step) <= STEPS for step in (representation, classifier))
    share_of_step = np.where(represented, share, 0.2)
    lattice = np.where(represented[:, None], weights, 0.3)
    rounded = lattice.round()
    parity = ((rounded % 2 == 1) == (np.arange(len(weights)) < 5)).all(1)
    head, form = ("step", "layer", "head"), ("step", "layer", "head", "form")

    def of_head(values: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
        return head, values[:, None, None]

    return xr.Dataset(
        {
            "loss": ("step", np.where(classified, 0.001, 0.7)),
            "accuracy": ("step", np.where(classified, accuracy, 0.5)),
            "f_type_gauge": (form, np.stack([share_of_step / 2, share_of_step], 1)[:, None, None]),
            "influence_share": of_head(np.where(represented, influence, 0.4)),
            "informative_mass": of_head(np.full(len(STEPS), mass)),
            "representation_accuracy": of_head(np.where(represented, 0.97, 0.5)),
            "lattice_weight": ((*head, "position"), lattice[:, None, None]),
            "off_integers": of_head(abs(lattice - rounded).max(1)),
            "parity_holds": of_head(parity.astype(float)),
        },
        coords={
            "step": STEPS,
            "layer": [0],
            "head": [0],
            "form": [0, 1],
            "form_name": ("form", ["xi", "normalized"]),
            "position": range(len(weights)),
        },
    )


def with_own_classes(trace: Trace, step: int | None, share: float = 0.95) -> Trace:
    """The same with the share between the classes that the head has in the end: so much from a step on."""
    reached = trace.step >= (np.inf if step is None else step)
    shares = xr.where(reached, share, 0.1) * xr.ones_like(trace.f_type_gauge)
    return trace.assign(class_share=shares * xr.DataArray([0.5, 1.0], dims="form"))


HEAD = staged()
LATTICE = staged(share=0.5, influence=0.8, weights=ODD)
WAY = staged(share=0.5, influence=0.8, weights=[1.4, *PLAIN[1:]])
PARTLY = staged(accuracy=0.9, share=0.5)
PLATEAU = staged(representation=None, classifier=None)


@pytest.mark.parametrize(
    ("trace", "name", "weights"),
    [
        (HEAD, CLUSTERING_HEAD, PLAIN),
        (staged(share=0.1, influence=0.1), CLUSTERING_HEAD, PLAIN),  # by its weights, whatever is measured of it
        (staged(weights=[1, 1, -1, -1, 1, *[0] * 7]), CLUSTERING_HEAD, (1, 1, -1, -1, 1, *[0] * 7)),
        (staged(weights=[1.4, *PLAIN[1:]]), OTHER_WAY, ()),  # although it has the classes
        (LATTICE, OTHER_LATTICE, ODD),
        (staged(weights=[*PLAIN[:-1], 2]), OTHER_LATTICE, (*PLAIN[:-1], 2)),
        (staged(weights=[3, *PLAIN[1:]]), OTHER_LATTICE, (3, *PLAIN[1:])),
        (staged(weights=[1.24, *PLAIN[1:]]), CLUSTERING_HEAD, PLAIN),
        (WAY, OTHER_WAY, ()),
        (staged(share=0.5, weights=[1.25, *PLAIN[1:]]), OTHER_WAY, ()),  # far from the integers
        (staged(share=0.5, weights=[2, *PLAIN[1:]]), OTHER_WAY, ()),  # even where it must be odd
        (staged(share=0.5, weights=[*PLAIN[:-1], 1]), OTHER_WAY, ()),  # odd where it must be even
        (staged(share=0.5, weights=[np.nan] * 12), OTHER_WAY, ()),
        (PARTLY, PARTIAL, PLAIN),
        (staged(accuracy=0.98), PARTIAL, PLAIN),
        (staged(accuracy=0.981), CLUSTERING_HEAD, PLAIN),
        (staged(accuracy=0.6), PARTIAL, PLAIN),
        (staged(accuracy=0.59), STUCK, PLAIN),
        (PLATEAU, STUCK, ()),
    ],
)
def test_what_a_seed_has_become_has_a_name(trace: Trace, name: str, weights: tuple[int, ...]) -> None:
    found = circuit(trace)
    assert (found.name, found.weights) == (name, weights)
    assert found.solved == (name in {CLUSTERING_HEAD, OTHER_LATTICE, OTHER_WAY})


def test_a_circuit_is_that_of_the_end_and_of_the_direction() -> None:
    found = circuit(HEAD)
    assert (found.accuracy, found.f_type, found.influence_share) == (1.0, 0.99, 0.995)
    assert (found.representation, found.classifier) == (400, 700)
    assert circuit(HEAD.sel(step=slice(0, 600))).name == STUCK
    assert circuit(HEAD.isel(form=[1, 0])).f_type < 0.9


def test_other_heads_do_not_matter() -> None:
    of_heads = [name for name in HEAD if "head" in HEAD[name].dims]
    two = HEAD.drop_dims("head").merge(xr.concat([HEAD[of_heads], PLATEAU[of_heads]], "head"))
    assert two.sizes["head"] == 2
    assert circuit(two) == circuit(HEAD)
    assert stages(two) == stages(HEAD)


def test_with_three_symbols_there_is_no_lattice() -> None:
    """A trace of such a run has no weights, and a head that is not clustered has another way."""
    bare = ["lattice_weight", "off_integers", "parity_holds"]
    assert (circuit(HEAD.drop_vars(bare)).name, circuit(HEAD.drop_vars(bare)).weights) == (CLUSTERING_HEAD, ())
    assert circuit(LATTICE.drop_vars(bare)).name == OTHER_WAY


def test_the_steps_are_the_first_above_the_thresholds() -> None:
    assert (representation_step(HEAD), classifier_step(HEAD)) == (400, 700)
    assert representation_step(staged(share=0.9)) is None
    assert representation_step(staged(share=0.901)) == 400
    assert classifier_step(staged(accuracy=0.98)) is None
    assert classifier_step(staged(accuracy=0.981)) == 700
    assert (representation_step(PLATEAU), classifier_step(PLATEAU)) == (None, None)
    assert representation_step(staged(representation=0)) == 0


def test_what_is_reached_and_lost_again_was_reached() -> None:
    passing = HEAD.assign(accuracy=HEAD.accuracy.where(HEAD.step != 1000, 0.5))
    assert classifier_step(passing) == 700
    assert circuit(passing).name == STUCK


def test_the_classes_that_a_head_ends_with_take_precedence() -> None:
    assert representation_step(with_own_classes(HEAD, 200)) == 200
    assert representation_step(with_own_classes(HEAD, 900)) == 900
    assert representation_step(with_own_classes(HEAD, None)) is None
    assert representation_step(with_own_classes(LATTICE, 300)) == 300
    assert representation_step(with_own_classes(LATTICE, 300, share=0.9)) is None
    assert representation_step(LATTICE) is None
    by_two = xr.concat([with_own_classes(HEAD, step).class_share for step in (200, 900)], "by")
    assert representation_step(HEAD.assign(class_share=by_two)) == 200
    assert circuit(with_own_classes(HEAD, None)).name == CLUSTERING_HEAD  # the name does not ask for them


def test_the_one_head_of_a_trace_has_no_axes_but_steps_and_positions() -> None:
    assert of_model(HEAD).sizes == {"step": 11, "position": 12}
    assert of_model(of_model(HEAD)).identical(of_model(HEAD))


def spans(trace: Trace) -> list[tuple[int | None, int | None]]:
    return [(stage.start, stage.end) for stage in stages(trace)]


def test_stages_follow_each_other() -> None:
    assert [stage.name for stage in stages(HEAD)] == ["I plateau", "II representation", "III classifier"]
    assert spans(HEAD) == [(0, 400), (400, 700), (700, 1000)]
    plateau, representation, classifier = stages(HEAD)
    assert plateau.seen == "loss 0.70 to 0.7"
    assert representation.seen == "share between classes 0.99, accuracy 0.500, of the nearest class 0.970"
    assert classifier.seen == "share between classes 0.99, accuracy 1.000, of the nearest class 0.970"


def test_stages_need_not_come_in_order_or_at_all() -> None:
    assert spans(staged(representation=700, classifier=400)) == [(0, 400), (700, 1000), (400, 1000)]
    assert spans(staged(representation=400, classifier=400)) == [(0, 400), (400, 400), (400, 1000)]
    assert spans(staged(representation=400, classifier=None)) == [(0, 400), (400, 1000), (None, None)]
    assert spans(staged(representation=None)) == [(0, 700), (None, None), (700, 1000)]
    assert spans(staged(representation=0, classifier=0)) == [(0, 0), (0, 0), (0, 1000)]
    assert spans(PLATEAU) == [(0, 1000), (None, None), (None, None)]
    assert stages(PLATEAU)[1].seen == "not reached: share between classes at most 0.20, accuracy at most 0.500"
    assert stages(PLATEAU.isel(step=[0]))[0].end == 0


def test_classes_of_a_lattice_are_its_sums() -> None:
    task = SparseModularAddition(length=4, k=2, sequences=None)
    tokens = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    classes = lattice_classes((1, -3, 2, 0))(task.labelled(tokens))
    assert classes.T.tolist() == [[3, 4, 0, 3, 5, 3]]
    counted = lattice_classes((1, 1, 0, 0))(task.population)[:, 0]
    assert counted.tolist() == task.classes(task.population.tokens).tolist()
    negative = lattice_classes((-1, -1, 0, 0))(task.population)[:, 0]
    assert (counted + negative == 2).all()


# Claims about one run.


def found(claim: Claim, trace: Trace) -> bool:
    verdict = judge(claim, [Evidence(trace, {})], where="by hand")
    assert verdict.measured.endswith("seeds)")
    finding = claim.check(Evidence(trace, {}))
    assert type(finding.holds) is bool
    assert {type(number) for number in finding.numbers.values()} <= {float, int, type(None)}
    return verdict.holds


def together(*traces: Trace) -> Trace:
    return claims.together(traces, range(len(traces)))


def by_type(*traces: Trace) -> Trace:
    return claims.with_criterion(together(*traces), "f_type_gauge")


def by_mass(*traces: Trace) -> Trace:
    return claims.with_criterion(together(*traces), "informative_mass")


def solved(count: int, of: int = 16) -> Trace:
    return together(*[HEAD] * count, *[PLATEAU] * (of - count))


OF_LATTICE = with_own_classes(LATTICE, 300)
OF_HEAD = with_own_classes(HEAD, 400)
HAVING: dict[Claim, dict[str, Trace]] = {
    claims.SOLVED: {"staged": HEAD, "on a lattice": LATTICE},
    claims.CLUSTERED: {
        "staged": HEAD,
        "just so": staged(share=0.98, influence=0.99),
        "with any attention": staged(mass=0.01),
        "with any accuracy": staged(classifier=None),
    },
    claims.REPRESENTATION_FIRST: {
        "staged": HEAD,
        "by one snapshot": staged(representation=600),
        "of its own classes": OF_LATTICE,
    },
    claims.SOLVED_SHARE: {"few": solved(1), "half": solved(8), "many": solved(11)},
    claims.TWO_WAYS: {
        "heads alone": together(HEAD, PLATEAU),
        "both": together(HEAD, LATTICE, PLATEAU, PARTLY),
        "just so": together(staged(share=0.98, influence=0.99)),
    },
    claims.TWO_WAYS_WIDE: {"both": together(HEAD, LATTICE), "just so": together(staged(share=0.91, influence=0.95))},
    claims.STUCK_UNCLUSTERED: {
        "one stuck": together(HEAD, PLATEAU),
        "just below": together(staged(accuracy=0.5, share=0.49)),
        "clustered but not stuck": together(PLATEAU, staged(accuracy=0.7)),
    },
    claims.TWO_STAGES: {
        "heads": together(HEAD, HEAD, PLATEAU),
        "by one snapshot": together(staged(representation=600)),
        "of their own classes": together(OF_HEAD, OF_LATTICE),
        "not of those that do not solve it": together(HEAD, staged(representation=900, accuracy=0.9)),
    },
    claims.SEPARATES: {
        "the share": by_type(HEAD, PLATEAU),
        "a mass that happens to": by_mass(staged(mass=0.61), staged(representation=None, classifier=None, mass=0.6)),
        "whatever other seeds have": by_type(HEAD, PLATEAU, LATTICE, PARTLY),
    },
}
LACKING: dict[Claim, dict[str, Trace]] = {
    claims.SOLVED: {
        "all but one sequence": staged(accuracy=4095 / 4096),
        "not to the end": HEAD.assign(accuracy=HEAD.accuracy.where(HEAD.step != 1000, 0.99)),
        "stuck": PLATEAU,
    },
    claims.CLUSTERED: {
        "share": staged(share=0.979),
        "influence": staged(influence=0.989),
        "not to the end": HEAD.sel(step=slice(0, 300)),
        "in xi but not in its direction": HEAD.isel(form=[1, 0]),
        "stuck": PLATEAU,
    },
    claims.REPRESENTATION_FIRST: {
        "at once": staged(representation=700),
        "later": staged(representation=800),
        "no representation": staged(representation=None),
        "no classifier": staged(classifier=None),
        "of its own classes too late": with_own_classes(HEAD, 700),
    },
    claims.SOLVED_SHARE: {"none": solved(0), "nearly all": solved(12), "all": solved(16)},
    claims.TWO_WAYS: {
        "no head": together(LATTICE, PLATEAU),
        "a third way": together(HEAD, WAY),
        "a head of less share": together(HEAD, staged(share=0.979)),
        "a head of less influence": together(HEAD, staged(influence=0.989)),
        "nobody solves it": together(PLATEAU, PARTLY),
    },
    claims.TWO_WAYS_WIDE: {
        "no head": together(LATTICE),
        "a third way": together(HEAD, WAY),
        "a head of less influence": together(HEAD, staged(influence=0.949)),
    },
    claims.STUCK_UNCLUSTERED: {
        "nobody stuck": together(HEAD, PARTLY),
        "just clustered": together(PLATEAU, staged(accuracy=0.5, share=0.5)),
    },
    claims.TWO_STAGES: {
        "one at once": together(HEAD, staged(representation=700)),
        "one later": together(HEAD, staged(representation=800)),
        "a lattice by the classes of the task": together(HEAD, LATTICE),
        "a lattice too late": together(OF_HEAD, with_own_classes(LATTICE, 700)),
        "nobody solves it": together(PLATEAU, PARTLY),
    },
    claims.SEPARATES: {
        "the same": by_mass(HEAD, PLATEAU),
        "the other way round": by_mass(staged(mass=0.3), PLATEAU),
        "one head below": by_mass(staged(mass=0.9), staged(mass=0.3), PLATEAU),
        "one stuck above": by_type(HEAD, PLATEAU, staged(accuracy=0.5)),
        "no head": by_type(PLATEAU, LATTICE),
        "nobody stuck": by_type(HEAD, LATTICE),
    },
}
EVERY_CLAIM = {
    (value.id, name): value for name, value in vars(claims).items() if isinstance(value, Claim)
}  # by both, since two settings have a claim each of the same name


def cases(table: dict[Claim, dict[str, Trace]]) -> list:
    return [
        pytest.param(claim, trace, id=f"{claim.id}-{name}") for claim in table for name, trace in table[claim].items()
    ]


@pytest.mark.parametrize(("claim", "trace"), cases(HAVING))
def test_a_claim_holds_where_a_trace_has_what_it_says(claim: Claim, trace: Trace) -> None:
    assert found(claim, trace), claim.check(Evidence(trace, {}))


@pytest.mark.parametrize(("claim", "trace"), cases(LACKING))
def test_a_claim_fails_where_a_trace_lacks_what_it_says(claim: Claim, trace: Trace) -> None:
    assert not found(claim, trace), claim.check(Evidence(trace, {}))


def test_every_claim_has_traces_that_have_and_that_lack_it() -> None:
    assert set(HAVING) == set(LACKING) == set(EVERY_CLAIM.values())
    assert len({claim for claim in EVERY_CLAIM.values() if claim.id == "two-ways"}) == 2


def test_a_finding_says_what_was_seen() -> None:
    numbers = claims.TWO_WAYS.check(Evidence(together(HEAD, staged(share=0.985), LATTICE, WAY, PLATEAU), {})).numbers
    assert numbers == {
        "clustering heads": 2,
        "least share": 0.985,
        "least influence": 0.995,
        "other lattices": 1,
        "their most share": 0.5,
        "unnamed": 1,
    }
    gaps = [staged(representation=representation) for representation in (100, 400, 500)]
    assert claims.TWO_STAGES.check(Evidence(together(*gaps, PLATEAU), {})).numbers == {
        "solved": 3,
        "representation first": 3,
        "median steps between": 300.0,
        "least": 200,
    }
    assert claims.REPRESENTATION_FIRST.check(Evidence(HEAD, {})).numbers == {
        "representation": 400,
        "classifier": 700,
        "accuracy at first": 0.5,
        "of the nearest class": 0.97,
    }
    assert claims.SOLVED_SHARE.check(Evidence(solved(8), {})).numbers["solved"] == 8


def test_a_share_has_wilsons_interval() -> None:
    """(p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), with z = 1.96."""
    for hits, of in ((14, 32), (0, 8), (8, 8), (1, 3)):
        p, z = hits / of, 1.959964
        middle, half = p + z**2 / (2 * of), z * math.sqrt(p * (1 - p) / of + z**2 / (4 * of**2))
        interval = [(middle + side * half) / (1 + z**2 / of) for side in (-1, 1)]
        assert claims.share_of(hits, of) == pytest.approx(interval, abs=1e-6)
    assert claims.share_of(14, 32) == pytest.approx((0.2817, 0.6067), abs=1e-4)
    assert claims.share_of(15, 48) == pytest.approx(claims.EARLIER, abs=0.005)


# Seeds together.


def test_seeds_can_be_taken_apart_again() -> None:
    traces = [HEAD, LATTICE, PLATEAU]
    whole = claims.together(traces, [3, 5, 8])
    assert whole.seed.values.tolist() == [3, 5, 8]
    apart = claims.by_seed(whole)
    assert [circuit(trace) for trace in apart] == [circuit(trace) for trace in traces]
    for trace, original in zip(apart, traces, strict=True):
        xr.testing.assert_equal(trace.drop_vars("seed"), original)


def test_a_seed_that_ended_early_is_judged_by_its_own_end() -> None:
    """One has diverged on the plateau, and one after it had solved the task."""
    short, late = HEAD.sel(step=slice(0, 500)), HEAD.sel(step=slice(0, 800))
    whole = together(short, HEAD, late)
    assert whole.sizes["step"] == len(STEPS)
    apart = claims.by_seed(whole)
    assert [trace.sizes["step"] for trace in apart] == [6, 11, 9]
    assert [circuit(trace).name for trace in apart] == [STUCK, CLUSTERING_HEAD, CLUSTERING_HEAD]
    assert [circuit(trace) for trace in apart] == [circuit(trace) for trace in (short, HEAD, late)]
    assert claims.TWO_STAGES.check(Evidence(whole, {})).numbers["solved"] == 2
    assert not found(claims.STUCK_UNCLUSTERED, whole)  # it was clustered and had no classifier yet
    assert found(claims.SEPARATES, by_type(HEAD, PLATEAU.sel(step=slice(0, 300))))


def test_seeds_have_together_what_all_of_them_have() -> None:
    assert "class_share" in together(OF_HEAD, OF_LATTICE)
    assert "class_share" not in together(OF_HEAD, LATTICE)


def test_a_criterion_is_a_variable_by_another_name() -> None:
    trace = together(HEAD, PLATEAU)
    again = claims.with_criterion(trace, "influence_share")
    xr.testing.assert_equal(again.criterion.rename("influence_share"), trace.influence_share)
    assert "criterion" not in trace


# What a report shows of them.


def test_seeds_are_counted_drawn_and_listed_by_what_they_have_become() -> None:
    circuits = {3: circuit(HEAD), 5: circuit(LATTICE), 8: circuit(PLATEAU), 9: circuit(HEAD)}
    section = sections.of_seeds("Seeds", "Text.", circuits, {3: 0.1, 5: 0.2, 8: 0.7, 9: 0.4}, "By chance.")
    assert section.text == "Text. Of 4 seeds: 2 clustering head, 1 another lattice, 1 stuck. By chance."
    become, attended = section.figures
    names = ["clustering head", "another lattice", "stuck"]
    assert [kind.name for kind in become.data] == [kind.name for kind in attended.data] == names
    head, lattice, stuck = become.data
    assert (head.x, head.y) == ((0.99, 0.99), (1.0, 1.0))
    assert head.text[1] == "seed 9: clustering head, weights 1 1 1 1 1 0 0 0 0 0 0 0"
    assert lattice.text[0].startswith("seed 5: another lattice, weights 1 -1 3 1 1 2 0")
    assert stuck.text == ("seed 8: stuck",)
    assert (attended.data[0].x, attended.data[0].y) == ((0.1, 0.4), (0.99, 0.99))

    frame = sections.table(circuits, "d-2")
    assert list(frame) == [
        "case", "seed", "circuit", "accuracy", "f_type", "influence_share", "weights", "representation", "classifier"
    ]  # fmt: skip
    assert frame.seed.tolist() == [3, 5, 8, 9]
    assert set(frame.case) == {"d-2"}
    assert frame.circuit.tolist() == ["clustering head", "another lattice", "stuck", "clustering head"]
    assert frame.weights[1] == "1 -1 3 1 1 2 0 0 -2 0 0 0"


def test_stages_are_drawn_of_seeds_that_have_both() -> None:
    paper = {0: circuit(OF_HEAD), 1: circuit(OF_LATTICE), 2: circuit(LATTICE), 3: circuit(PARTLY)}
    late = staged(representation=800)
    section = sections.of_stages(paper, {0: circuit(late), 1: circuit(HEAD)})
    assert "first in 2 of 3 solved seeds in the paper's setting and 1 of 2 solved seeds in eight" in section.text
    figure, wide = section.figures
    assert {kind.name: (kind.x, kind.y) for kind in figure.data} == {
        "clustering head": ((400,), (700,)),
        "another lattice": ((300,), (700,)),
    }
    (line,) = figure.layout.shapes
    assert (line.x0, line.y0, line.x1, line.y1) == (300, 300, 700, 700)
    assert [(kind.x, kind.y) for kind in wide.data] == [((800, 400), (700, 700))]
    nothing = sections.of_stages({0: circuit(PLATEAU)}, {})
    assert not any(figure.data for figure in nothing.figures)
    assert "0 of 0 solved seeds in eight" in nothing.text
