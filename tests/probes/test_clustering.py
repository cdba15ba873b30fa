"""Probes of clustering heads, on heads set by hand, on vectors made by hand and against their measures."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.measures import clustering
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights
from fd_interp.models.config import LearnedQuery, ModelConfig, Transformer
from fd_interp.observation import LOGITS, Observation, Probe, Trace, observe
from fd_interp.papers.clustering import probes as probes_of_run
from fd_interp.papers.clustering.circuits import CLUSTERING_HEAD, circuit
from fd_interp.papers.clustering.ideal import ideal_series, ideal_weights
from fd_interp.papers.clustering.settings import CLUSTERING, TRANSFORMER
from fd_interp.probes.clustering import (
    attention_on_informative,
    class_of_sum,
    class_share,
    classifier_of_head,
    clustering_head,
    lattice_of_head,
    memorization,
    token_at_lag,
)
from fd_interp.probes.prediction import accuracy, held_out_loss
from fd_interp.tasks.high_order import HighOrderMarkov
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.tasks.task import Batch
from fd_interp.training.series import Inputs, Series, Snapshot
from tests.probes.test_specialization import looking_at, minimal

TASK = SparseModularAddition()
SMALL = SparseModularAddition(length=6, k=3)
THREE = SparseModularAddition(p=3)
LAST = slice(-1, None)
IDEAL = 12.0
SHARP = 60.0
"""A query that leaves a softmax nothing to hesitate about."""


def by_hand(
    task: SparseModularAddition, config: ModelConfig, weights: lens.Weights, n: int = 4096, dtype=torch.float64
) -> Series:
    def model() -> lens.Model:
        return build(config, task.d_vocab, task.n_ctx, dtype)

    inputs = Inputs(task.held_out(n, generator()), task.token_frequencies(), task.token_strings())
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return Series("by hand", (Snapshot(0, lambda: weights, model),), model, lambda: inputs)


def drawn(task: SparseModularAddition, config: ModelConfig, seed: int = 0, n: int = 4096) -> Series:
    """A model with the weights that training begins with."""
    like = lens.weights(build(config, task.d_vocab, task.n_ctx))
    return by_hand(task, config, initial_weights(config, like, generator(seed)), n)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def every_probe(task: SparseModularAddition) -> list[Probe]:
    return [
        held_out_loss(LAST),
        accuracy(LAST),
        clustering_head(task),
        classifier_of_head(task),
        attention_on_informative(task),
        lattice_of_head(task),
        memorization(task),
        class_share({"sum": class_of_sum(task)}),
    ]


def one_head(trace: Trace) -> Trace:
    """Of a lone snapshot of a model with one head."""
    return trace.isel({dim: 0 for dim in ("step", "layer", "head", "by") if dim in trace.dims})


def copying(position: int, task: SparseModularAddition = TASK) -> lens.Weights:
    """A head that attends to one position alone."""
    weights = ideal_weights(task, SHARP)
    weights["pos_embed.W_pos"][:, 1] = -1.0
    weights["pos_embed.W_pos"][position, 1] = 1.0
    return weights


def of_vectors(z: Tensor, probe: Probe, batch: Batch) -> dict[str, Tensor]:
    """What a probe says of heads that write these vectors, one for each sequence."""
    cache = {"blocks.0.attn.hook_z": z[:, None, None]}
    measured = probe.measure(Observation({}, {}, {}, cache, batch, torch.ones(3) / 3))
    assert measured.keys() == probe.variables.keys()
    return {name: value[0, 0] for name, value in measured.items()}


def adding(*weights: float) -> Tensor:
    """A head that adds its symbols up with these weights along one direction of the plane."""
    tokens = TASK.population.tokens.double()
    return (tokens @ torch.tensor(weights, dtype=torch.float64))[:, None] * torch.tensor([0.6, -0.8]) + 1


def renamed(z: Tensor, position: int) -> Tensor:
    """The same head after the two symbols of a position have changed names."""
    flip = 2 ** (TASK.length - 1 - position)
    return z[torch.arange(len(z)) ^ flip]


@pytest.fixture(scope="module")
def ideal() -> Trace:
    return one_head(observe(ideal_series(TASK), every_probe(TASK)))


# The head in closed form.


def test_the_closed_form_head_is_a_clustering_head(ideal: Trace) -> None:
    for form in ideal.transpose("form", ...).form:
        shares = [float(ideal[f"f_{name}"].sel(form=form)) for name in ("suffix", "permutation", "type", "type_gauge")]
        assert shares == pytest.approx([0, 0, 1, 1], abs=1e-5)
        assert ideal.gauge.sel(form=form) == 0
        assert ideal.class_share.sel(form=form) == pytest.approx(1, abs=1e-5)
    assert (ideal.class_share_permuted < 0.02).all()
    assert float(ideal.influence_share) == pytest.approx(1, abs=1e-5)
    assert float(ideal.influence[:5].std()) < 1e-4
    assert (ideal.influence[5:] < 1e-5).all()
    assert (ideal.influence[:5] > 0.2).all()
    assert ideal.form_name.values.tolist() == ["xi", "normalized"]


def test_the_closed_form_head_counts_informative_symbols_alone(ideal: Trace) -> None:
    np.testing.assert_allclose(ideal.lattice_weight, [1] * 5 + [0] * 7, atol=1e-4)
    assert float(ideal.lattice_r_squared) == pytest.approx(1, abs=1e-4)
    assert float(ideal.off_integers) < 1e-4
    assert ideal.parity_holds == 1
    assert float(ideal.representation_accuracy) == 1
    assert float(ideal.separability) > 100
    assert float(ideal.informative_mass) == pytest.approx(1, abs=1e-5)
    assert float(ideal.informative_entropy) == pytest.approx(1, abs=1e-5)


def test_the_closed_form_head_is_named_but_for_its_answers(ideal: Trace) -> None:
    """Without an MLP it answers with the majority of the informative symbols, and not with their parity."""
    tokens, targets = TASK.population
    ones = tokens[:, :5].sum(1)
    majority = (ones >= 3).long()
    assert float(ideal.accuracy) == pytest.approx((majority == targets[:, -1]).double().mean().item())
    assert circuit(ideal.expand_dims("step")).name != CLUSTERING_HEAD
    right = ideal.assign(accuracy=1.0).expand_dims("step").assign_coords(step=[0])
    assert circuit(right).name == CLUSTERING_HEAD
    assert circuit(right).weights == (1,) * 5 + (0,) * 7


@pytest.mark.parametrize(("strength", "mass"), [(1.0, 0.75), (3.0, 0.98), (6.0, 0.9997), (12.0, 1.0)])
def test_attention_of_the_closed_form_head_grows_with_its_query(strength: float, mass: float) -> None:
    series = by_hand(TASK, LearnedQuery(), ideal_weights(TASK, strength), n=64)
    trace = one_head(observe(series, [attention_on_informative(TASK)], TASK.labelled(TASK.population.tokens[::64])))
    assert float(trace.informative_mass) == pytest.approx(mass, abs=0.005 if strength < 6 else 5e-5)
    expected = 5 / (5 + 7 * math.exp(-strength * math.sqrt(2)))
    assert float(trace.informative_mass) == pytest.approx(expected, abs=1e-4)


def test_the_closed_form_head_exists_for_other_sizes() -> None:
    task = SparseModularAddition(length=7, k=3, least_vocab=2, sequences=None)
    trace = one_head(observe(ideal_series(task), [clustering_head(task), lattice_of_head(task)]))
    assert (trace.f_type > 0.9999).all()
    np.testing.assert_allclose(trace.lattice_weight, [1] * 3 + [0] * 4, atol=1e-4)


# Heads that are none.


@pytest.mark.parametrize("position", [0, 4])
def test_a_head_that_copies_an_informative_symbol_is_not_clustered(position: int) -> None:
    """One of five bits has a fifth of the variance of their sum, in any gauge."""
    trace = one_head(observe(by_hand(TASK, LearnedQuery(), copying(position)), every_probe(TASK)))
    for name, share in {"suffix": 0, "permutation": 0.8, "type": 0.2, "type_gauge": 0.2}.items():
        np.testing.assert_allclose(trace[f"f_{name}"], [share] * 2, atol=1e-6, err_msg=name)
    assert float(trace.influence_share) == pytest.approx(1)
    assert (trace.influence > 1e-6).values.nonzero()[0].tolist() == [position]
    assert float(trace.informative_mass) == pytest.approx(1)
    assert float(trace.informative_entropy) == pytest.approx(0, abs=1e-6)
    assert np.isnan(trace.lattice_weight).all()  # most informative symbols have no step
    assert trace.parity_holds == 0
    assert float(trace.representation_accuracy) == 0.5
    assert float(trace.accuracy) == 0.5


def test_a_head_that_copies_a_spurious_symbol_says_nothing_of_the_classes() -> None:
    trace = one_head(observe(by_hand(TASK, LearnedQuery(), copying(7)), every_probe(TASK)))
    for name, share in {"suffix": 1, "permutation": 0, "type": 0, "type_gauge": 0}.items():
        np.testing.assert_allclose(trace[f"f_{name}"], [share] * 2, atol=1e-6, err_msg=name)
    assert float(trace.influence_share) == pytest.approx(0, abs=1e-6)
    assert (trace.influence > 1e-6).values.nonzero()[0].tolist() == [7]
    assert float(trace.informative_mass) == pytest.approx(0, abs=1e-6)
    assert (trace.class_share < trace.class_share_permuted).all()


def test_attention_does_not_tell_a_clustering_head() -> None:
    """A spurious position whose two symbols lie on one ray through the norm is attended to and says nothing."""
    weights = ideal_weights(TASK, 0.0)
    weights["pos_embed.W_pos"][5:] = torch.tensor([1e6, 0.0])
    trace = one_head(observe(by_hand(TASK, LearnedQuery(), weights), [clustering_head(TASK), *every_probe(TASK)[4:5]]))
    assert float(trace.informative_mass) == pytest.approx(5 / 12)
    assert (trace.f_type_gauge > 0.999).all()
    assert float(trace.influence_share) > 0.999


def test_a_head_that_counts_all_symbols_alike_has_its_share_of_positions_between_classes() -> None:
    """Which is what heads are close to before training, and why a share of .4 or so says nothing."""
    weights = ideal_weights(TASK)
    weights["pos_embed.W_pos"][:, 1] = 1.0
    trace = one_head(observe(by_hand(TASK, LearnedQuery(), weights), every_probe(TASK)))
    shares = [float(trace[f"f_{name}"].isel(form=0)) for name in ("suffix", "permutation", "type", "type_gauge")]
    assert shares == pytest.approx([7 / 12, 0, 5 / 12, 5 / 12], abs=1e-6)
    assert float(trace.influence_share) == pytest.approx(5 / 12)
    assert float(trace.informative_mass) == pytest.approx(5 / 12)
    np.testing.assert_allclose(trace.lattice_weight, np.ones(12), atol=1e-6)
    assert trace.parity_holds == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("d_model", [2, 8])
def test_random_weights_have_no_clustering_head(d_model: int, seed: int) -> None:
    series = drawn(TASK, LearnedQuery(d_model=d_model), seed)
    trace = one_head(observe(series, [clustering_head(TASK), classifier_of_head(TASK)]))
    assert (trace.f_type_gauge < 0.5).all()
    assert (trace.f_type <= trace.f_type_gauge + 1e-6).all()
    assert float(trace.influence_share) < 0.9
    assert float(trace.representation_accuracy) < 0.7


# Names of symbols.


@pytest.mark.parametrize("position", [1, 4])
def test_another_name_for_the_symbols_of_a_position_is_another_gauge(position: int) -> None:
    head = observe_z(by_hand(TASK, LearnedQuery(), ideal_weights(TASK)))
    before, after = (of_vectors(z, clustering_head(TASK), TASK.population) for z in (head, renamed(head, position)))
    torch.testing.assert_close(after["f_type_gauge"], before["f_type_gauge"])
    assert (after["f_type"] < 0.5).all()
    assert (before["f_type"] > 0.999).all()
    torch.testing.assert_close(after["f_suffix"], before["f_suffix"])
    torch.testing.assert_close(after["influence"], before["influence"])
    assert after["gauge"].tolist() == [2 ** (4 - position)] * 2
    for name in ("representation_accuracy", "separability"):
        said = [of_vectors(z, classifier_of_head(TASK), TASK.population)[name] for z in (head, renamed(head, position))]
        torch.testing.assert_close(*said, rtol=1e-6, atol=1e-6)
    weights = of_vectors(renamed(head, position), lattice_of_head(TASK), TASK.population)["lattice_weight"]
    expected = torch.tensor([-1.0 if other == position else 1.0 for other in range(5)] + [0.0] * 7).double()
    torch.testing.assert_close(weights, expected, atol=1e-4, rtol=0)


def test_other_names_of_a_spurious_position_change_nothing() -> None:
    head = observe_z(by_hand(TASK, LearnedQuery(), ideal_weights(TASK)))
    before, after = (of_vectors(z, clustering_head(TASK), TASK.population) for z in (head, renamed(head, 9)))
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, atol=1e-6, rtol=1e-6)


def observe_z(series: Series) -> Tensor:
    """What the one head writes after the last position, from a pass of its own."""
    cached = lens.run_and_cache(series[0].model(), series.inputs.held_out.tokens, ["z"]).activations
    return cached["blocks.0.attn.hook_z"][:, -1, 0]


# Sums with other weights.


@pytest.mark.parametrize(
    ("weights", "off", "parity"),
    [
        ((1, -1, 3, 1, 1, 2, 0, -2, 0, 0, 0, 0), 0.0, 1),
        ((1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0), 0.0, 0),  # a spurious symbol too
        ((1, 1, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0), 0.0, 0),
        ((1, 1, 1, 1, 1.3, 0, 0, 0, 0, 0, 0.1, 0), 0.3, 1),
    ],
)
def test_other_lattices_are_told_from_clustering_heads(weights: tuple[float, ...], off: float, parity: int) -> None:
    z = adding(*weights)
    found = of_vectors(z, lattice_of_head(TASK), TASK.population)
    np.testing.assert_allclose(found["lattice_weight"], weights, atol=1e-9)
    assert float(found["off_integers"]) == pytest.approx(off)
    assert float(found["parity_holds"]) == parity
    assert float(found["lattice_r_squared"]) == pytest.approx(1)
    squares = np.square(weights)
    spread = of_vectors(z, clustering_head(TASK), TASK.population)
    spurious = squares[5:].sum() / squares.sum()
    assert float(spread["f_suffix"][0]) == pytest.approx(spurious)  # of independent symbols, variances add up
    sizes = np.abs(weights[:5])
    assert float(spread["f_type_gauge"][0]) == pytest.approx(sizes.sum() ** 2 / 5 / squares.sum(), abs=1e-6)


# Against the measures, in models of any shape.


@pytest.mark.parametrize("seed", range(2))
def test_probes_of_the_papers_model_are_the_measures_of_what_it_writes(seed: int) -> None:
    series = drawn(TASK, LearnedQuery(d_model=4), seed)
    trace = observe(series, every_probe(TASK)).isel(step=0)
    assert trace.sizes["layer"] == trace.sizes["head"] == 1
    _agrees(TASK, trace.isel(layer=0, head=0), observe_z(series), series.inputs.held_out)


def test_every_head_of_every_layer_of_a_transformer_is_measured() -> None:
    config = Transformer(n_layers=2, n_heads=3, d_model=6, d_head=4, d_mlp=5, std=0.8)
    series = drawn(SMALL, config, n=64)
    trace = observe(series, every_probe(SMALL)).isel(step=0)
    assert trace.sizes["layer"] == 2
    assert trace.sizes["head"] == 3
    batch = series.inputs.held_out
    cached = lens.run_and_cache(series[0].model(), batch.tokens, ["z", "pattern"]).activations
    for layer in range(2):
        for head in range(3):
            z = cached[f"blocks.{layer}.attn.hook_z"][:, -1, head]
            of_head = trace.isel(layer=layer, head=head)
            _agrees(SMALL, of_head, z, batch)
            pattern = cached[f"blocks.{layer}.attn.hook_pattern"][:, head, -1]
            mass = clustering.informative_attention(pattern, SMALL.informative).mass.mean()
            assert float(of_head.informative_mass) == pytest.approx(mass.item())
    assert len(np.unique(trace.f_type_gauge)) == trace.f_type_gauge.size


def _agrees(task: SparseModularAddition, trace: Trace, z: Tensor, batch: Batch) -> None:
    prefixes, labels = task.prefixes(batch.tokens), task.labels(batch.tokens)
    direction = z / z.norm(dim=-1, keepdim=True)
    for form, vectors in enumerate((z, direction)):
        of_form = trace.isel(form=form)
        shares = clustering.nested_shares(vectors, prefixes, task.gauges[0])
        best = clustering.best_gauge(vectors, prefixes, task.gauges)
        seen = [float(of_form[name]) for name in ("f_suffix", "f_permutation", "f_type", "f_type_gauge", "gauge")]
        assert seen == pytest.approx([float(value) for value in (*shares, best.type, best.gauge)])
        by_class = clustering.between_class_share(vectors, task.classes(batch.tokens))
        assert float(of_form.class_share.squeeze()) == pytest.approx(by_class.item())
    influence = clustering.token_influence(direction, task.neighbours(batch.tokens))
    np.testing.assert_allclose(trace.influence, influence)
    share = clustering.influence_share(influence, task.informative)
    assert float(trace.influence_share) == pytest.approx(share.item())
    classes = task.gauges[int(trace.gauge.isel(form=1))][prefixes]
    said = clustering.representation_accuracy(direction, classes, labels)
    assert float(trace.representation_accuracy) == pytest.approx(said.item())
    apart = clustering.separability(direction, classes)
    assert float(trace.separability) == pytest.approx(apart.item())
    found = clustering.lattice(z, batch.tokens, task.informative)
    np.testing.assert_allclose(trace.lattice_weight, found.weights)
    assert float(trace.lattice_r_squared) == pytest.approx(found.r_squared.item())


# Sequences that are drawn.


def test_a_sample_of_many_symbols_can_be_measured() -> None:
    """3^12 sequences are not gone through; 31 families of a sequence and its neighbours are, the last one in part."""
    series = drawn(THREE, LearnedQuery(d_model=3), n=400)
    assert len(series.inputs.held_out.tokens) == 400
    trace = one_head(observe(series, [*every_probe(THREE)[:5], *every_probe(THREE)[-1:]]))
    assert trace.sizes["position"] == 12
    for name in ("f_type", "f_type_gauge", "influence", "influence_share", "class_share", "separability"):
        assert np.isfinite(trace[name]).all(), name
    total = trace.f_suffix + trace.f_permutation + trace.f_type
    np.testing.assert_allclose(total, 1)
    assert (trace.gauge < 81).all()


@pytest.mark.parametrize("p", [2, 3])
def test_a_sample_agrees_with_the_population(p: int) -> None:
    task = SparseModularAddition(p=p, length=10 if p == 2 else 6, k=3)
    population = p**task.length
    every, some = (
        one_head(observe(drawn(task, LearnedQuery(d_model=4), n=n), [clustering_head(task), *every_probe(task)[3:5]]))
        for n in (population, population - 1)
    )
    assert not task.enumerated(population - 1)
    np.testing.assert_allclose(some.influence, every.influence, rtol=0.25)
    assert float(some.influence_share) == pytest.approx(float(every.influence_share), abs=0.1)
    assert float(some.informative_mass) == pytest.approx(float(every.informative_mass), abs=0.02)
    for name in ("f_suffix", "f_permutation", "f_type", "f_type_gauge"):
        np.testing.assert_allclose(some[name], every[name], atol=0.1, err_msg=name)


def test_a_batch_without_neighbours_is_refused() -> None:
    series = drawn(SMALL, LearnedQuery(), n=64)
    alone = SMALL.labelled(SMALL.population.tokens[:20])
    with pytest.raises(InputError, match="no held-out batch of this task"):
        observe(series, [clustering_head(SMALL)], alone)


# Classes of any model.

CHAIN = HighOrderMarkov(d_vocab=4, context=8)


def previous_and_own() -> Series:
    """Two heads that write the token before and the query's own, one direction for each token."""
    W_V = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    return minimal(CHAIN, (looking_at(8, [2], [1]), W_V))


def test_heads_that_copy_write_one_thing_for_each_token_at_their_lag() -> None:
    """The first query has no token before it, and is left out where that is asked for."""
    lags = {f"lag {lag}": token_at_lag(lag) for lag in (1, 2, 3)}
    trace = observe(previous_and_own(), [class_share(lags)]).isel(step=0, layer=0)
    assert trace.by_name.values.tolist() == list(lags)
    assert trace.form_name.values.tolist() == ["xi", "normalized"]
    previous, own = (trace.isel(head=head, form=0) for head in range(2))
    assert [float(previous.class_share[1]), float(own.class_share[0])] == pytest.approx([1, 1])
    for head, lag in ((previous, 2), (own, 1)):
        others = head.class_share.isel(by=[by for by in range(3) if by != lag - 1])
        assert (others < 0.5).all()
        assert (head.class_share_permuted < 0.1).all()
        assert float(head.class_share_permuted[lag - 1]) > 0


def test_the_token_at_a_lag_is_counted_from_what_is_predicted() -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 1]])
    batch = Batch(tokens, tokens)
    assert token_at_lag(1)(batch).tolist() == tokens.tolist()
    assert token_at_lag(2)(batch).tolist() == [[-1, 5, 6], [-1, 8, 9]]
    assert token_at_lag(3)(batch).tolist() == [[-1, -1, 5], [-1, -1, 8]]


def test_the_classes_of_a_sum_are_those_of_the_last_query() -> None:
    batch = SMALL.population
    assert class_of_sum(SMALL)(batch).tolist() == SMALL.classes(batch.tokens)[:, None].tolist()


@pytest.mark.parametrize(("position", "lag"), [(11, 1), (0, 12), (7, 5)])
def test_a_query_behind_the_sequence_has_the_lags_of_the_last_one(position: int, lag: int) -> None:
    lags = {str(lag): token_at_lag(lag) for lag in range(1, 13)}
    series = by_hand(TASK, LearnedQuery(), copying(position))
    share = one_head(observe(series, [class_share(lags)]).isel(form=0, step=0, layer=0, head=0).rename(by="lag"))
    assert float(share.class_share[lag - 1]) == pytest.approx(1)
    np.testing.assert_allclose(np.delete(share.class_share, lag - 1), 0, atol=1e-9)


def test_classes_are_permuted_as_often_as_asked_and_from_the_seed() -> None:
    series = drawn(SMALL, LearnedQuery(d_model=4), n=64)

    def permuted(**options: int) -> np.ndarray:
        probe = class_share({"sum": class_of_sum(SMALL)}, **options)
        assert f"of {options.get('permutations', 20)} with" in probe.variables["class_share_permuted"].long_name
        return observe(series, [probe]).class_share_permuted.values

    np.testing.assert_array_equal(permuted(), permuted(seed=0))
    assert (permuted(seed=1) != permuted()).all()
    assert (permuted(permutations=1) < permuted()).all()
    z, classes = observe_z(series), SMALL.classes(series.inputs.held_out.tokens)
    forms = torch.stack([z, z / z.norm(dim=-1, keepdim=True)])
    drawn_anew = clustering.permuted_shares(forms, classes, 20, generator()).amax(-1)
    np.testing.assert_allclose(permuted().squeeze(), drawn_anew)


@pytest.mark.parametrize(
    "classes",
    [lambda batch: torch.zeros_like(batch.tokens), lambda batch: torch.full_like(batch.tokens, -1)],
    ids=["one", "none"],
)
def test_fewer_than_two_classes_are_refused(classes: Callable[[Batch], Tensor]) -> None:
    with pytest.raises(InputError, match=r"^there must be at least two classes, not [01]$"):
        observe(previous_and_own(), [class_share({"all alike": classes})])


# What is known by heart, and what is right.


def answers(labels: Tensor, d_vocab: int = 3) -> Tensor:
    return torch.nn.functional.one_hot(labels, d_vocab)[:, None].double()


def says(task: SparseModularAddition, labels: Tensor, probe: Probe) -> dict[str, float]:
    """What a probe measures of a model that gives these labels to the sequences of the population."""
    seen = Observation({}, {}, {}, {LOGITS: answers(labels)}, task.population, task.token_frequencies())
    return {name: float(value) for name, value in probe.measure(seen).items()}


def test_a_memoriser_is_right_on_its_training_set_alone() -> None:
    task = SparseModularAddition(length=8, k=3, sequences=100)
    truth = task.labels(task.population.tokens)
    known = (task.population.tokens[:, None] == task.training_set.tokens).all(-1).any(1)
    assert 50 < int(known.sum()) < 100  # some were drawn twice
    memoriser = torch.where(known, truth, 1 - truth)
    assert says(task, memoriser, memorization(task)) == {"train_accuracy": 1, "unseen_accuracy": 0}
    assert says(task, truth, memorization(task)) == {"train_accuracy": 1, "unseen_accuracy": 1}
    assert says(task, 1 - truth, memorization(task)) == {"train_accuracy": 0, "unseen_accuracy": 0}
    ones = says(task, torch.ones_like(truth), memorization(task))
    assert ones["train_accuracy"] == pytest.approx(task.training_set.targets[:, -1].double().mean().item())
    assert ones["unseen_accuracy"] == pytest.approx(truth[~known].double().mean().item())
    share = int(known.sum()) / len(truth)
    assert says(task, memoriser, accuracy(LAST))["accuracy"] == pytest.approx(share)


def test_labels_that_have_changed_places_are_what_is_to_be_known() -> None:
    task = SparseModularAddition(p=3, length=5, k=2, sequences=40, shuffled=True)
    numbers = task.training_set.tokens @ 3 ** torch.arange(5).flip(0)
    truth = task.labels(task.population.tokens)
    taught = truth.clone().index_put((numbers,), task.training_set.targets[:, -1])
    seen = says(task, taught, memorization(task))
    twice = len(numbers) - len(numbers.unique())
    assert seen["train_accuracy"] >= 1 - twice / len(numbers)
    assert seen["unseen_accuracy"] == 1
    agree = (task.labels(task.training_set.tokens) == task.training_set.targets[:, -1]).double().mean()
    assert says(task, truth, memorization(task))["train_accuracy"] == pytest.approx(agree.item())
    assert agree < 0.7


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (SparseModularAddition(p=3, length=13), "make 1594323 sequences, more than"),
        (SparseModularAddition(sequences=None), "there is no training set"),
    ],
)
def test_what_cannot_be_known_by_heart_is_refused(task: SparseModularAddition, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        memorization(task)


def test_accuracy_is_how_often_the_target_comes_first() -> None:
    logits = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 1.0, 2.0]], [[0.0, 0.1, 0.2], [-1.0, -3.0, -2.0]]])
    targets = torch.tensor([[1, 2], [2, 0]])
    seen = Observation({}, {}, {}, {LOGITS: logits}, Batch(targets, targets), torch.ones(3) / 3)
    for queries, share in ((slice(None), 0.75), (LAST, 0.5), (slice(0, 1), 1.0)):
        assert accuracy(queries).measure(seen)["accuracy"].item() == share
    assert accuracy(LAST).variables["accuracy"].long_name == "accuracy on held-out sequences"
    assert accuracy(LAST, "all 8").variables["accuracy"].long_name == "accuracy on all 8"


# What is measured on a run.

EVERYTHING = {
    "held_out_loss",
    "accuracy",
    "clustering_head",
    "classifier_of_head",
    "attention_on_informative",
    "lattice_of_head",
    "memorization",
}


@pytest.mark.parametrize(
    ("changes", "held_out", "absent", "sequences"),
    [
        ({}, 4096, set(), "all 4096 sequences"),
        ({}, 5000, set(), "all 4096 sequences"),
        ({}, 4095, {"memorization"}, "4095 sequences drawn from 4096"),
        ({"sequences": None}, 4096, {"memorization"}, "all 4096 sequences"),
        ({"p": 3, "length": 6, "k": 2}, 729, {"lattice_of_head"}, "all 729 sequences"),
        ({"p": 3}, 400, {"lattice_of_head", "memorization"}, "400 sequences drawn from 531441"),
    ],
)
def test_what_is_measured_of_a_run_is_what_its_task_can_tell(
    changes: dict[str, Any], held_out: int, absent: set[str], sequences: str
) -> None:
    run = CLUSTERING.model_copy(
        update={
            "task": SparseModularAddition(**changes),
            "keep": CLUSTERING.keep.model_copy(update={"held_out": held_out}),
        }
    )
    asked = {probe.name: probe for probe in probes_of_run(run)}
    assert asked.keys() == EVERYTHING - absent
    assert asked["accuracy"].variables["accuracy"].long_name == f"accuracy on {sequences}"


def test_a_transformer_is_measured_as_the_papers_model_is() -> None:
    names = {probe.name for probe in probes_of_run(TRANSFORMER)}
    assert names == EVERYTHING - {"memorization"}


def test_no_probe_writes_to_what_it_sees() -> None:
    series = drawn(SMALL, LearnedQuery(d_model=3), n=64)
    batch = series.inputs.held_out
    logits, cache = lens.run_and_cache(series[0].model(), batch.tokens, ["z", "pattern"])
    cache = cache | {LOGITS: logits}
    kept = {name: value.clone() for name, value in cache.items()}
    seen = Observation({}, {}, {}, cache, batch, SMALL.token_frequencies())
    for probe in every_probe(SMALL):
        first = probe.measure(seen)
        again = probe.measure(replace(seen, kept={}))
        for name in probe.variables:
            torch.testing.assert_close(first[name], again[name], equal_nan=True)
    for name, value in kept.items():
        assert torch.equal(cache[name], value), name
    assert torch.equal(batch.tokens, SMALL.population.tokens)
