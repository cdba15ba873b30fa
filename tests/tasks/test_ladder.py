import math
from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_interp.config import InputError
from fd_interp.tasks import ladder
from fd_interp.tasks.ladder import Additive, Windows

some = settings(deadline=None, max_examples=30)
EXACT = 1e-9


def random_law(d_vocab: int, lookback: int, seed: int, sharpness: float = 1.5) -> np.ndarray:
    scores = np.random.default_rng(seed).normal(size=(d_vocab,) * (lookback + 1)) * sharpness
    return np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)


def random_windows(d_vocab: int = 3, lookback: int = 3, seed: int = 0, sharpness: float = 1.5) -> Windows:
    return ladder.every_window(random_law(d_vocab, lookback, seed, sharpness), burn_in=3, queries=2)


def slow_windows(next_token: np.ndarray, burn_in: int, queries: int) -> dict[tuple[int, ...], float]:
    """How probable each window (lag 1 first) is, by powers of the matrix that leads from window to window."""
    shape = next_token.shape[:-1]
    every = list(np.ndindex(shape))
    step = np.zeros((len(every), len(every)))
    for i, window in enumerate(every):
        for token in range(shape[0]):
            step[i, every.index((token, *window[:-1]))] += next_token[(*window, token)]
    law = np.full(len(every), 1 / len(every)) @ np.linalg.matrix_power(step, burn_in)
    mean = np.mean([law @ np.linalg.matrix_power(step, query) for query in range(queries)], axis=0)
    return dict(zip(every, mean, strict=True))


@pytest.mark.parametrize(
    ("d_vocab", "lookback", "burn_in", "queries"), [(3, 3, 0, 1), (3, 3, 2, 4), (2, 4, 7, 1), (4, 1, 1, 2)]
)
def test_windows_are_those_of_the_chain_of_windows(d_vocab: int, lookback: int, burn_in: int, queries: int):
    next_token = random_law(d_vocab, lookback, seed=lookback)
    windows = ladder.every_window(next_token, burn_in=burn_in, queries=queries)
    expected = slow_windows(next_token, burn_in, queries)
    assert windows.lags == tuple(range(1, lookback + 1))
    assert len(windows.tokens) == len(expected)
    for tokens, weight, law in zip(windows.tokens.tolist(), windows.weights, windows.next_token, strict=True):
        assert weight == pytest.approx(expected[tuple(tokens)], abs=1e-13)
        np.testing.assert_array_equal(law, next_token[tuple(tokens)])
    other = slow_windows(next_token, burn_in + 1, queries)
    assert max(abs(other[window] - expected[window]) for window in expected) > 1e-4


def test_the_first_window_is_uniform():
    windows = ladder.every_window(random_law(3, 2, seed=0), burn_in=0, queries=1)
    np.testing.assert_allclose(windows.weights, 1 / 9)


def joint_by_hand(windows: Windows, lags: tuple[int, ...]) -> dict[tuple[int, ...], list[float]]:
    joint: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0] * windows.next_token.shape[1])
    for tokens, weight, law in zip(windows.tokens, windows.weights, windows.next_token, strict=True):
        seen = tuple(int(tokens[windows.lags.index(lag)]) for lag in lags)
        for v, p in enumerate(law):
            joint[seen][v] += float(weight * p)
    return joint


def entropy_by_hand(windows: Windows, lags: tuple[int, ...]) -> float:
    return -sum(p * math.log(p / sum(row)) for row in joint_by_hand(windows, lags).values() for p in row)


every_choice = pytest.mark.parametrize("lags", [c for n in range(4) for c in combinations((3, 1, 2), n)])


@every_choice
def test_what_is_given_by_some_lags_is_the_mean_over_the_others(lags: tuple[int, ...]):
    windows = random_windows()
    before = [part.copy() for part in windows[1:]]
    seen, joint = ladder.given(windows, lags), joint_by_hand(windows, lags)
    assert seen.lags == lags
    assert sorted(map(tuple, seen.tokens.tolist())) == sorted(joint)
    assert seen.weights.sum() == pytest.approx(1)
    for tokens, weight, law in zip(seen.tokens.tolist(), seen.weights, seen.next_token, strict=True):
        np.testing.assert_allclose(weight * law, joint[tuple(tokens)], atol=1e-14)
        assert law.sum() == pytest.approx(1)
    for part, copy in zip(windows[1:], before, strict=True):
        np.testing.assert_array_equal(part, copy)


@every_choice
def test_entropy_is_that_of_the_joint_law(lags: tuple[int, ...]):
    windows = random_windows(seed=1)
    assert ladder.entropy(ladder.given(windows, lags)) == pytest.approx(entropy_by_hand(windows, lags), abs=1e-12)


def test_entropies_by_hand():
    certain = Windows((1,), np.array([[0], [1]]), np.array([0.5, 0.5]), np.eye(2))
    assert ladder.entropy(certain) == 0
    assert ladder.entropy(ladder.given(certain, ())) == pytest.approx(math.log(2))


@given(st.integers(0, 1000))
@some
def test_a_lag_more_never_raises_the_entropy(seed: int):
    windows = random_windows(seed=seed)
    entropies = [ladder.entropy(ladder.given(windows, (3, 1, 2)[:n])) for n in range(4)]
    assert (np.diff(entropies) < 0).all()
    assert entropies[0] < math.log(3)


def test_windows_that_are_never_met_are_left_out():
    met = Windows((1,), np.array([[0], [1]]), np.array([1.0, 0.0]), np.eye(2))
    assert ladder.given(met, (1,)).tokens.tolist() == [[0]]


def test_windows_that_differ_in_a_far_lag_stay_apart():
    tokens = np.zeros((2, 80), dtype=int)
    tokens[1, -1] = 1
    far = Windows(tuple(range(1, 81)), tokens, np.array([0.5, 0.5]), np.eye(2))
    assert len(ladder.given(far, far.lags).tokens) == 2
    assert len(ladder.given(far, far.lags[:-1]).tokens) == 1


READ = {
    "one lag": (((3,),), ((1.0,),)),
    "two lags": (((3,), (1,)), ((1.0,), (2.0,))),
    "block": (((2, 1),), ((0.7, 0.3),)),
    "shared lag": (((1, 2), (2, 3)), ((1.0, 1.0), (0.5, 1.0))),
}
every_reading = pytest.mark.parametrize("read", READ.values(), ids=READ)


def slow_loss(predictor: Additive, windows: Windows, read: tuple) -> float:
    total = 0.0
    for tokens, weight, law in zip(windows.tokens, windows.weights, windows.next_token, strict=True):
        scores = predictor.bias.copy()
        for block, alphas, matrix in zip(*read, predictor.B, strict=True):
            for lag, alpha in zip(block, alphas, strict=True):
                scores += alpha * matrix[tokens[windows.lags.index(lag)]]
        total -= weight * law @ (scores - np.log(np.exp(scores).sum()))
    return total


def random_predictor(n_blocks: int, d_vocab: int, seed: int) -> Additive:
    draw = np.random.default_rng(seed).normal
    return Additive(draw(size=d_vocab), draw(size=(n_blocks, d_vocab, d_vocab)))


@every_reading
def test_the_loss_of_a_predictor_is_that_of_slow_loops(read: tuple):
    windows, predictor = random_windows(), random_predictor(len(read[0]), 3, seed=5)
    assert ladder.loss(predictor, ladder.read(windows, *read)) == pytest.approx(slow_loss(predictor, windows, read))


def around(predictor: Additive, reading: ladder.Reading, size: float) -> list[np.ndarray]:
    """Changes of the loss along twenty directions, forwards and backwards."""
    here = ladder.loss(predictor, reading)
    directions = np.random.default_rng(0).normal(size=(20, *predictor.B.shape))
    return [
        np.array([ladder.loss(predictor._replace(B=predictor.B + sign * size * way), reading) for way in directions])
        - here
        for sign in (1, -1)
    ]


@every_reading
def test_no_change_of_the_best_additive_predictor_lowers_its_loss(read: tuple):
    reading = ladder.read(random_windows(seed=2), *read)
    best = ladder.best_additive(reading, EXACT)
    worse = best._replace(B=best.B + 0.1 * np.eye(3))
    assert ladder.loss(worse, reading) > ladder.loss(best, reading) + 1e-4
    for size in (1e-3, 1.0):
        assert np.min(around(best, reading, size)) > 0
    forwards, backwards = around(best, reading, 1e-3)
    assert (abs(forwards - backwards) < 0.02 * (forwards + backwards)).all()  # all curvature and no slope
    forwards, backwards = around(worse, reading, 1e-3)
    assert np.mean(abs(forwards - backwards) > (forwards + backwards)) > 0.5


@every_reading
def test_torch_finds_no_better_additive_predictor(read: tuple):
    windows = random_windows(seed=3)
    reading = ladder.read(windows, *read)
    B = torch.randn(len(read[0]), 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bias = torch.zeros(3, dtype=torch.float64)
    for parameter in (B, bias):
        parameter.requires_grad_()
    optimizer = torch.optim.LBFGS([B, bias], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")
    tokens, weights, law = map(torch.from_numpy, windows[1:])

    def loss() -> torch.Tensor:
        scores = bias.expand(len(tokens), -1)
        for block, alphas, matrix in zip(*read, B, strict=True):
            scores = scores + sum(alpha * matrix[tokens[:, lag - 1]] for lag, alpha in zip(block, alphas, strict=True))
        return -(weights[:, None] * law * scores.log_softmax(-1)).sum()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    before = loss().item()
    optimizer.step(closure)
    found = ladder.loss(ladder.best_additive(reading, EXACT), reading)
    assert found == pytest.approx(loss().item(), abs=1e-8)
    assert before > found + 0.1


def test_with_one_lag_the_best_additive_predictor_is_the_law_itself():
    windows = random_windows(seed=4)
    reading = ladder.read(windows, ((2,),), ((1.7,),))
    best = ladder.best_additive(reading, EXACT)
    assert ladder.loss(best, reading) == pytest.approx(entropy_by_hand(windows, (2,)), abs=1e-9)


def test_with_no_lag_the_best_predictor_knows_frequencies():
    windows = random_windows(seed=4)
    reading = ladder.read(windows, (), ())
    best = ladder.best_additive(reading, EXACT)
    np.testing.assert_allclose(np.exp(best.bias), windows.weights @ windows.next_token)
    assert ladder.loss(best, reading) == pytest.approx(entropy_by_hand(windows, ()), abs=1e-12)


def test_two_lags_that_interact_cost_an_additive_predictor_something():
    exclusive_or = np.zeros((2, 2, 2))
    for i, j in np.ndindex(2, 2):
        exclusive_or[i, j, i ^ j] = 1
    windows = ladder.every_window(exclusive_or, burn_in=0, queries=1)
    reading = ladder.read(windows, ((1,), (2,)), ((1.0,), (1.0,)))
    assert ladder.entropy(reading.windows) == 0
    assert ladder.loss(ladder.best_additive(reading, EXACT), reading) == pytest.approx(math.log(2))


@given(st.integers(0, 1000))
@some
def test_a_law_that_is_additive_is_found(seed: int):
    law = random_predictor(2, 3, seed)._replace(bias=np.zeros(3))
    scores = law.B[0][:, None] + law.B[1][None]
    next_token = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    windows = ladder.every_window(next_token, burn_in=2, queries=1)
    reading = ladder.read(windows, ((1,), (2,)), ((1.0,), (1.0,)))
    best = ladder.loss(ladder.best_additive(reading, EXACT), reading)
    assert best == pytest.approx(ladder.entropy(windows), abs=1e-8)
    assert best == pytest.approx(ladder.loss(law, reading), abs=1e-8)


def test_a_looser_fit_is_worse_but_near():
    reading = ladder.read(random_windows(8, 2, seed=0), ((1,), (2,)), ((1.0,), (1.0,)))
    loose, close = (ladder.loss(ladder.best_additive(reading, tolerance), reading) for tolerance in (1e-3, 1e-7))
    assert 0 < loose - close < 1e-3


@pytest.mark.parametrize(("d_vocab", "lookback"), [(16, 5), (2, 23), (256, 2)])
def test_up_to_the_limit_windows_can_be_enumerated(d_vocab: int, lookback: int):
    assert ladder.enumerable(d_vocab, lookback)
    ladder.check_enumerable(d_vocab, lookback)
    assert not ladder.enumerable(d_vocab + 1, lookback)
    assert not ladder.enumerable(d_vocab, lookback + 1)


def test_too_many_windows_are_refused_with_their_number_and_the_limit():
    message = r"50\^7, about 10\^11\.9, probabilities are too many to enumerate; the limit is 10\^7\.2, so take fewer"
    with pytest.raises(InputError, match=message):
        ladder.check_enumerable(50, 6)
    with pytest.raises(InputError, match=r"50\^1001, about 10\^1700\.7, probabilities"):
        ladder.check_enumerable(50, 1000)
