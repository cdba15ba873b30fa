import math
from collections import Counter
from itertools import permutations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.tasks.task import Task

DEFAULT = SparseModularAddition()
TASKS = {
    "two": SparseModularAddition(length=6, k=3, sequences=40),
    "three": SparseModularAddition(p=3, length=4, k=2, sequences=30),
    "four": SparseModularAddition(p=4, length=3, k=3, least_vocab=7, sequences=None),
    "one symbol counts": SparseModularAddition(p=2, length=1, k=1, least_vocab=1),
}
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_hand(task: SparseModularAddition, sequence: list[int]) -> int:
    label = 0
    for symbol in sequence[: task.k]:
        label = (label + symbol) % task.p
    return label


def rows(tokens: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in tokens.tolist()]


def partition(classes: Tensor) -> tuple[int, ...]:
    """The classes under names that say only which came first."""
    names: dict[int, int] = {}
    return tuple(names.setdefault(name, len(names)) for name in classes.tolist())


def decides(classes: Tensor, labels: Tensor) -> bool:
    """Whether all of one class have one label."""
    return len(torch.stack([classes, labels]).unique(dim=1).T) == len(classes.unique())


@every_task
def test_it_is_a_task(task: SparseModularAddition):
    assert isinstance(task, Task)
    assert (task.n_ctx, task.d_vocab) == (task.length, max(task.p, task.least_vocab))
    assert task.token_strings() == [str(token) for token in range(task.d_vocab)]
    frequencies = task.token_frequencies()
    assert frequencies.dtype == torch.float64
    assert frequencies.tolist() == [1 / task.p] * task.p + [0] * (task.d_vocab - task.p)
    assert task.informative.tolist() == [position < task.k for position in range(task.length)]


@every_task
def test_the_label_is_the_sum_of_the_first_symbols_at_every_position(task: SparseModularAddition):
    for tokens, targets in (task.sample(50, generator()), task.held_out(50, generator(1)), task.population):
        assert tokens.shape == targets.shape
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.min() >= 0
        assert tokens.max() < task.p
        for sequence, labels in zip(tokens.tolist(), targets.tolist(), strict=True):
            assert labels == [by_hand(task, sequence)] * task.length


@every_task
def test_the_population_is_every_sequence_once_and_in_order(task: SparseModularAddition):
    assert rows(task.population.tokens) == list(product(range(task.p), repeat=task.length))


def test_symbols_are_uniform_and_independent():
    task = SparseModularAddition(p=3, length=4, k=2, sequences=None)
    tokens = task.sample(40_000, generator()).tokens
    counts = torch.bincount((tokens * 3 ** torch.arange(4)).sum(1), minlength=81)
    expected = 40_000 / 81
    assert ((counts - expected).abs() < 5 * math.sqrt(expected)).all()


@every_task
def test_what_is_held_out_is_the_population_where_it_fits(task: SparseModularAddition):
    count = task.p**task.length
    for n in (count, count + 1, 10 * count):
        assert torch.equal(task.held_out(n, generator()).tokens, task.population.tokens)
    assert len(task.held_out(count - 1, generator()).tokens) == count - 1
    if task.length > 1:
        assert not torch.equal(task.held_out(count - 1, generator()).tokens, task.population.tokens[:-1])


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("n", [1, 5, 6, 7, 24, 31])
def test_where_it_does_not_fit_a_founder_comes_with_all_that_differ_in_one_symbol(p: int, n: int):
    tokens = SparseModularAddition(p=p, length=5, k=2).held_out(n, generator()).tokens
    assert len(tokens) == n
    for family in tokens.split(6):
        assert torch.equal(family[1:] != family[0], torch.eye(5).bool()[: len(family) - 1])


def test_a_founder_is_changed_to_either_of_three_symbols_and_founders_differ():
    families = SparseModularAddition(p=3, length=5, k=2).held_out(60, generator()).tokens.view(10, 6, 5)
    changes = (families[:, 1:] - families[:, :1]).diagonal(dim1=1, dim2=2) % 3
    assert set(changes.unique().tolist()) == {1, 2}
    assert len(families[:, 0].unique(dim=0)) > 5


@pytest.mark.parametrize("task", [TASKS["two"], TASKS["three"], TASKS["four"]], ids=["two", "three", "four"])
@pytest.mark.parametrize("whole", [True, False])
def test_neighbours_differ_in_exactly_the_symbol_of_their_position(task: SparseModularAddition, whole: bool):
    n = task.p**task.length if whole else 3 * (task.length + 1)
    tokens = task.held_out(n, generator()).tokens
    pairs = task.neighbours(tokens)
    count = (task.p - 1) * task.p ** (task.length - 1) if whole else 3
    assert pairs.shape == (task.length, count, 2)
    for position, of_position in enumerate(pairs):
        one, other = tokens[of_position].unbind(1)
        assert ((one != other) == (torch.arange(task.length) == position)).all()
        assert len({frozenset(pair) for pair in of_position.tolist()}) == count


def test_the_last_family_may_be_cut_short():
    task = SparseModularAddition(length=6, k=3)
    tokens = task.held_out(7 * 3 + 4, generator()).tokens
    assert torch.equal(task.neighbours(tokens), task.neighbours(tokens[:21]))


def test_an_order_of_its_own_makes_it_another_batch_that_has_no_neighbours():
    task = TASKS["two"]
    message = "the sequences are no held-out batch of this task"
    for n in (64, 21):
        tokens = task.held_out(n, generator()).tokens
        task.neighbours(tokens)
        for other in (tokens.roll(1, 0), task.sample(n, generator()).tokens, tokens[:6]):
            with pytest.raises(InputError, match=message):
                task.neighbours(other)
    with pytest.raises(InputError, match=message):
        SparseModularAddition(length=6, k=3, p=3).neighbours(task.population.tokens)


@pytest.mark.parametrize(("p", "k", "count"), [(2, 5, 6), (3, 5, 21), (4, 5, 56), (2, 1, 2), (5, 1, 5), (3, 2, 6)])
def test_classes_are_the_multisets_of_the_first_symbols(p: int, k: int, count: int):
    task = SparseModularAddition(p=p, length=k + 1, k=k)
    assert task.n_classes == math.comb(k + p - 1, p - 1) == count
    tokens = task.population.tokens
    classes = task.classes(tokens)
    multisets = {tuple(sorted(prefix)) for prefix in product(range(p), repeat=k)}
    assert sorted(classes.unique().tolist()) == list(range(count)) == list(range(len(multisets)))
    named = {(name, tuple(sorted(row[:k]))) for name, row in zip(classes.tolist(), rows(tokens), strict=True)}
    assert len(named) == count
    frequencies = task.class_frequencies()
    assert frequencies.sum() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(frequencies, torch.bincount(classes).double() / len(tokens), atol=1e-12, rtol=0)


def test_the_classes_of_the_paper_are_counts_of_ones_with_binomial_frequencies():
    assert (DEFAULT.class_frequencies() * 32).tolist() == pytest.approx([1, 5, 10, 10, 5, 1])
    tokens = DEFAULT.population.tokens
    assert torch.equal(DEFAULT.classes(tokens), tokens[:, :5].sum(1))


@pytest.mark.parametrize(("p", "k"), [(100, 1), (70, 2), (40, 2)])
def test_many_symbols_are_told_apart(p: int, k: int):
    task = SparseModularAddition(p=p, length=k, k=k)
    assert task.gauges.shape == (p ** (k - 1), p**k)
    assert all(len(gauge.unique()) == task.n_classes for gauge in task.gauges)
    assert decides(task.gauges[-1], task.labels(task.prefix_tokens))


@every_task
def test_prefixes_are_numbered_as_they_are_listed(task: SparseModularAddition):
    assert rows(task.prefix_tokens) == list(product(range(task.p), repeat=task.k))
    tokens = task.population.tokens
    assert torch.equal(task.prefix_tokens[task.prefixes(tokens)], tokens[:, : task.k])


@pytest.mark.parametrize(("p", "k", "count"), [(2, 5, 16), (3, 5, 81), (4, 5, 256), (3, 1, 1)])
def test_gauges_are_different_partitions_and_each_class_has_one_label(p: int, k: int, count: int):
    task = SparseModularAddition(p=p, length=k, k=k)
    labels = task.labels(task.prefix_tokens)
    assert task.gauges.shape == (count, p**k)
    assert len(set(map(partition, task.gauges))) == count
    for gauge in task.gauges:
        assert decides(gauge, labels)
        assert torch.equal(gauge.bincount().sort().values, task.gauges[0].bincount().sort().values)
    assert torch.equal(task.gauges[0], task.classes(task.prefix_tokens))
    assert k == 1 or not decides(task.prefix_tokens[:, 0], labels)  # it takes all the symbols


def relabelled(task: SparseModularAddition, names: list[list[int]]) -> Tensor:
    """The multiset of each prefix's symbols after each position has given them names of its own."""
    multisets: dict[tuple[int, ...], int] = {}
    numbers = []
    for prefix in task.prefix_tokens.tolist():
        multiset = tuple(sorted(name[symbol] for name, symbol in zip(names, prefix, strict=True)))
        numbers.append(multisets.setdefault(multiset, len(multisets)))
    return torch.tensor(numbers)


@given(p=st.integers(2, 4), k=st.integers(1, 4), data=st.data())
@settings(deadline=None, max_examples=40)
def test_a_common_unit_a_common_shift_and_a_shift_of_each_position_make_a_gauge(p: int, k: int, data: Any):
    task = SparseModularAddition(p=p, length=k, k=k)
    unit = data.draw(st.sampled_from([unit for unit in range(1, p) if math.gcd(unit, p) == 1]))
    common = data.draw(st.integers(0, p - 1))
    shifts = [0, *data.draw(st.lists(st.integers(0, p - 1), min_size=k - 1, max_size=k - 1))]
    names = [[(unit * (symbol + shift) + common) % p for symbol in range(p)] for shift in shifts]
    number = sum(shift * p**place for place, shift in enumerate(reversed(shifts)))
    assert list(map(partition, task.gauges)).index(partition(relabelled(task, names))) == number


@pytest.mark.parametrize("p", [3, 4])
def test_names_that_are_no_shift_lose_the_label(p: int):
    task = SparseModularAddition(p=p, length=3, k=3)
    labels = task.labels(task.prefix_tokens)
    own = list(range(p))
    shifts = [[(symbol + shift) % p for symbol in own] for shift in range(p)]
    for names in permutations(own):
        found = relabelled(task, [list(names), own, own])
        assert decides(found, labels) == (list(names) in shifts)
        assert (partition(found) in map(partition, task.gauges)) == (list(names) in shifts)


def test_the_training_set_is_drawn_once_with_replacement():
    task = SparseModularAddition(length=6, k=3, sequences=200)
    assert torch.equal(task.training_set.tokens, task.model_copy().training_set.tokens)
    assert max(Counter(rows(task.training_set.tokens)).values()) > 1
    others = [task.test_set, task.model_copy(update={"data_seed": 1}).training_set]
    for tokens, targets in others:
        assert tokens.shape == task.training_set.tokens.shape
        assert not torch.equal(tokens, task.training_set.tokens)
        assert targets[:, 0].tolist() == [by_hand(task, row) for row in tokens.tolist()]
    assert not torch.equal(others[0].tokens, others[1].tokens)
    assert torch.equal(task.test_set.tokens, task.model_copy().test_set.tokens)


def test_a_pass_goes_through_the_training_set_in_a_new_order():
    task = SparseModularAddition(length=12, k=3, sequences=50)
    drawn = rows(task.sample(120, generator()).tokens)
    first, second, rest = drawn[:50], drawn[50:100], drawn[100:]
    whole = Counter(rows(task.training_set.tokens))
    assert Counter(first) == Counter(second) == whole
    assert first != second
    assert not Counter(rest) - whole
    assert rows(task.sample(120, generator()).tokens) == drawn
    assert rows(task.sample(120, generator(1)).tokens) != drawn


def test_without_a_training_set_every_draw_is_new():
    task = SparseModularAddition(length=40, k=3, sequences=None)
    going_on = generator()
    seen = rows(task.sample(100, going_on).tokens) + rows(task.sample(100, going_on).tokens)
    assert len(set(seen)) == 200
    for ask in (lambda: task.training_set, lambda: task.test_set, task.memorizer_accuracy):
        with pytest.raises(InputError, match="where every step draws new sequences"):
            ask()


def test_sampling_touches_no_global_generator():
    before = torch.get_rng_state()
    task = SparseModularAddition(length=6, k=3, sequences=20, shuffled=True)
    task.sample(30, generator())
    task.held_out(10, generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_shuffled_labels_change_places_and_break_the_law():
    task = SparseModularAddition(length=8, k=3, sequences=400)
    shuffled = task.model_copy(update={"shuffled": True})
    assert torch.equal(shuffled.training_set.tokens, task.training_set.tokens)
    assert torch.equal(shuffled.training_set.targets.sort(0).values, task.training_set.targets.sort(0).values)
    assert (shuffled.training_set.targets == shuffled.training_set.targets[:, :1]).all()
    agree = (shuffled.training_set.targets == task.training_set.targets)[:, 0].float().mean()
    assert abs(agree - 0.5) < 0.15
    labels_of: dict[tuple[int, ...], set[int]] = {}
    for tokens, targets in (shuffled.sample(400, generator()), shuffled.training_set):
        for row, label in zip(rows(tokens), targets[:, 0].tolist(), strict=True):
            labels_of.setdefault(row[:3], set()).add(label)
    assert all(labels == {0, 1} for labels in labels_of.values())
    for tokens, targets in (shuffled.test_set, shuffled.held_out(256, generator()), shuffled.held_out(9, generator())):
        assert torch.equal(targets[:, 0], task.labels(tokens))


def test_one_who_knows_the_training_set_by_heart_gets_seven_of_ten_right():
    assert DEFAULT.memorizer_accuracy() == pytest.approx(0.697, abs=5e-4)
    assert SparseModularAddition(p=3, length=200, k=1).memorizer_accuracy() == pytest.approx(1 / 3)
    assert SparseModularAddition(length=1, k=1, sequences=1).memorizer_accuracy() == pytest.approx(0.75)


@pytest.mark.parametrize(("p", "length", "sequences"), [(2, 8, 200), (3, 5, 100)])
def test_the_memorizers_accuracy_is_that_of_many_training_sets(p: int, length: int, sequences: int):
    task = SparseModularAddition(p=p, length=length, k=2, sequences=sequences)
    accuracies = []
    for seed in range(60):
        known = set(rows(task.model_copy(update={"data_seed": seed}).training_set.tokens))
        share = len(known) / p**length
        accuracies.append(share + (1 - share) / p)
    mean = torch.tensor(accuracies)
    assert abs(mean.mean() - task.memorizer_accuracy()) < 4 * mean.std() / math.sqrt(60)
    assert abs(mean.mean() - (sequences / p**length)) > 8 * mean.std() / math.sqrt(60)


@every_task
def test_the_best_prediction_is_the_average_over_symbols_not_yet_seen(task: SparseModularAddition):
    tokens = task.population.tokens
    said = task.bayes(tokens)
    assert said.shape == (*tokens.shape, task.d_vocab)
    assert said.dtype == torch.float64
    for position in range(task.length):
        by_start: dict[tuple[int, ...], Counter[int]] = {}
        for row in rows(tokens):
            by_start.setdefault(row[: position + 1], Counter())[by_hand(task, list(row))] += 1
        for row, law in zip(rows(tokens), said[:, position].exp().tolist(), strict=True):
            counts = by_start[row[: position + 1]]
            expected = [counts[label] / counts.total() for label in range(task.d_vocab)]
            assert law == pytest.approx(expected, abs=1e-12)
    short = tokens[:, : task.k]
    torch.testing.assert_close(task.bayes(short), said[:, : task.k])
    if task.k > 1:
        torch.testing.assert_close(task.bayes(short[:, :-1]), said[:, : task.k - 1])


@every_task
def test_baselines_are_the_losses_of_knowing_so_much(task: SparseModularAddition):
    tokens, targets = task.population
    labels = torch.full((task.d_vocab,), -math.inf).double()
    labels[: task.p] = -math.log(task.p)
    laws = {
        "uniform": torch.full((len(tokens), task.d_vocab), -math.log(task.d_vocab), dtype=torch.float64),
        "labels": labels.expand(len(tokens), -1),
        "sum": task.bayes(tokens)[:, -1],
    }
    losses = {name: -law.gather(1, targets[:, -1:]).mean().item() for name, law in laws.items()}
    assert {rung.name: rung.loss for rung in task.baselines()} == pytest.approx(losses, abs=1e-12)
    assert list(losses) == [rung.name for rung in task.baselines()]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 13}, "k: 13 informative positions need a length of 13 or more, not 12"),
        ({"k": 0}, "k: Input should be greater than 0, not 0"),
        ({"p": 1}, "p: Input should be greater than or equal to 2, not 1"),
        ({"sequences": 0}, "sequences: Input should be greater than 0, not 0"),
        ({"least_vocab": 0}, "least_vocab: Input should be greater than 0, not 0"),
        ({"shuffled": True, "sequences": None}, "shuffled is about a training set; give it a size (sequences)"),
        ({"lenght": 3}, "has no field 'lenght', did you mean length"),
    ],
)
def test_a_task_that_cannot_be_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        SparseModularAddition(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_too_much_to_go_through_is_refused_and_can_be_drawn():
    long = SparseModularAddition(p=3, length=30, k=25)
    for ask, message in (
        (lambda: long.population, r"make 205891132094649 sequences, more than the 1048576 .* draw some with held_out"),
        (lambda: long.prefix_tokens, "p = 3 and k = 25 make 847288609443 prefixes, too many to go through"),
        (lambda: long.gauges, "p = 3 and k = 25 make 282429536481 gauges, more than 4096"),
        (lambda: long.classes(torch.zeros(1, 30).long()), "gauges, more than 4096"),
    ):
        with pytest.raises(InputError, match=message):
            ask()
    tokens, targets = long.held_out(62, generator())
    assert targets[:, 0].tolist() == [by_hand(long, row) for row in tokens.tolist()]
    assert long.neighbours(tokens).shape == (30, 2, 2)
    assert long.prefixes(tokens).max() < 3**25


def test_the_largest_population_that_is_gone_through_is_a_held_out_batch():
    assert len(SparseModularAddition(length=20, k=3).population.tokens) == 2**20
    with pytest.raises(InputError, match="make 2097152 sequences"):
        _ = SparseModularAddition(length=21, k=3).population
