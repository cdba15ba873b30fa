import math
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from fd_interp.config import InputError
from fd_interp.tasks import ladder
from fd_interp.tasks.high_order import HighOrderMarkov, Rung
from fd_interp.tasks.lags import spans
from tests.tasks import lags_by_hand as by_hand

CHAINS = {
    "lags": HighOrderMarkov(d_vocab=3, scale=0.7, context=6),
    "blocks": HighOrderMarkov(
        d_vocab=4, blocks=((1, 3), (2,)), alphas=((0.7, 0.3), (1.5,)), scale=2, temperature=2, context=5, burn_in=0
    ),
    "overlapping": HighOrderMarkov(
        d_vocab=3, blocks=((1, 2), (2, 3)), overlapping=True, features="gram_schmidt", scale=0.6, context=5
    ),
    "gaps": HighOrderMarkov(d_vocab=3, blocks=((4,), (2,)), features="low_rank", rank=2, scale=0.8, context=6),
    "shared": HighOrderMarkov(d_vocab=2, blocks=((2,), (1,)), features="shared", scale=0.7, context=4, burn_in=3),
}
every_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
WIDE = HighOrderMarkov(d_vocab=50, blocks=spans((2, 2, 2)), scale=10.0, context=25, burn_in=0)
LIKELY, UNLIKELY = 1e-5, 1e-12


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def not_enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chains that are treated as one with too many windows."""
    monkeypatch.setattr(ladder, "LIMIT", 0)


def number_of(windows: torch.Tensor, d_vocab: int) -> torch.Tensor:
    return (windows * d_vocab ** torch.arange(windows.shape[-1]).flip(0)).sum(-1)


def window_counts(chain: HighOrderMarkov, n: int) -> np.ndarray:
    """How often each token follows each window, oldest token first."""
    tokens, targets = chain.sample(n, generator())
    windows = number_of(tokens.unfold(1, chain.lookback, 1), chain.d_vocab)
    pairs = windows * chain.d_vocab + targets[:, chain.lookback - 1 :]
    return torch.bincount(pairs.flatten(), minlength=chain.d_vocab ** (chain.lookback + 1)).numpy()


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """That rows of counts are drawn from rows of a law, by Pearson's chi-squared."""
    n = counts.sum(-1, keepdims=True)
    statistic = np.square(counts - n * law) / np.maximum(n * law, 1e-300)
    return float(chi2.sf(statistic.sum(), np.count_nonzero(n) * (law.shape[-1] - 1)))


def follows_the_law(chain: HighOrderMarkov) -> None:
    counts = window_counts(chain, 20_000).reshape(-1, chain.d_vocab)
    assert counts.sum() == 20_000 * (chain.context - chain.lookback + 1)
    assert p_value(counts, law_by_hand(chain)) > LIKELY
    assert p_value(counts, law_by_hand(chain.model_copy(update={"scale": 1.25 * chain.scale}))) < UNLIKELY


def law_by_hand(chain: HighOrderMarkov) -> np.ndarray:
    return np.array([by_hand.law(chain, window) for window in by_hand.every_window(chain)])


@every_chain
def test_tokens_follow_the_law(chain: HighOrderMarkov):
    assert chain.enumerable
    follows_the_law(chain)


@every_chain
@pytest.mark.usefixtures("not_enumerated")
def test_tokens_follow_the_law_where_windows_are_too_many(chain: HighOrderMarkov):
    assert not chain.enumerable
    follows_the_law(chain)


@every_chain
def test_both_ways_of_sampling_draw_the_same_tokens(chain: HighOrderMarkov, monkeypatch: pytest.MonkeyPatch):
    enumerated = chain.sample(500, generator(1))
    monkeypatch.setattr(ladder, "LIMIT", 0)
    for one, other in zip(enumerated, chain.sample(500, generator(1)), strict=True):
        assert torch.equal(one, other)


def surplus(law: HighOrderMarkov, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Surprise at each token minus what is expected: of mean zero, whatever came before, for tokens of that law."""
    queries = slice(law.lookback - 1, None)
    log_p = law.bayes(tokens)[:, queries]
    return -log_p.gather(-1, targets[:, queries, None])[..., 0] + (log_p.exp() * log_p).sum(-1)


def test_a_wide_chain_follows_its_law():
    batch = WIDE.sample(2000, generator())
    right, wrong = surplus(WIDE, *batch), surplus(WIDE.model_copy(update={"scale": 9.5}), *batch)
    assert abs(right.mean()) < 4 * right.std() / math.sqrt(right.numel())
    assert abs(wrong.mean()) > 8 * wrong.std() / math.sqrt(wrong.numel())


@every_chain
@pytest.mark.parametrize("enumerated", [True, False])
def test_a_sequence_starts_with_uniform_tokens(
    chain: HighOrderMarkov, enumerated: bool, monkeypatch: pytest.MonkeyPatch
):
    if not enumerated:
        monkeypatch.setattr(ladder, "LIMIT", 0)
    counts = first_windows(chain.model_copy(update={"burn_in": 0}))
    assert p_value(counts, np.full_like(counts, 1 / counts.size, dtype=float)) > LIKELY


@pytest.mark.parametrize("burn_in", [1, 10])
def test_after_a_burn_in_tokens_are_those_of_the_chain(burn_in: int):
    chain = CHAINS["lags"].model_copy(update={"burn_in": burn_in, "context": 3})
    counts, windows = first_windows(chain), chain.windows()
    weights = windows.weights.reshape([3] * 3).transpose().reshape(1, -1)  # oldest token first
    assert p_value(counts, weights) > LIKELY
    assert p_value(counts, np.full((1, 27), 1 / 27)) < UNLIKELY


def first_windows(chain: HighOrderMarkov) -> np.ndarray:
    tokens = chain.sample(20_000, generator(2)).tokens[:, : chain.lookback]
    windows = number_of(tokens, chain.d_vocab)
    return torch.bincount(windows, minlength=chain.d_vocab**chain.lookback).numpy()[None]


@every_chain
def test_a_burn_in_hides_the_first_tokens(chain: HighOrderMarkov):
    short = chain.model_copy(update={"burn_in": 4})
    long = chain.model_copy(update={"burn_in": 0, "context": chain.context + 4})
    for seen, all_of_it in zip(short.sample(20, generator()), long.sample(20, generator()), strict=True):
        assert torch.equal(seen, all_of_it[:, 4:])


@pytest.mark.parametrize("chain", [*CHAINS.values(), WIDE], ids=[*CHAINS, "wide"])
def test_targets_are_the_tokens_one_later(chain: HighOrderMarkov):
    batch = chain.sample(5, generator())
    assert batch.tokens.shape == batch.targets.shape == (5, chain.context)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert 0 <= batch.targets.min() <= batch.targets.max() < chain.d_vocab


@pytest.mark.parametrize("sequences", [None, 50])
def test_a_batch_is_a_function_of_the_generator(sequences: int | None):
    chain = HighOrderMarkov(d_vocab=5, sequences=sequences)
    assert torch.equal(chain.sample(4, generator(3)).tokens, chain.sample(4, generator(3)).tokens)
    assert not torch.equal(chain.sample(4, generator(3)).tokens, chain.sample(4, generator(4)).tokens)
    assert torch.equal(chain.held_out(4, generator(3)).tokens, chain.held_out(4, generator(3)).tokens)
    going_on = generator(3)
    assert not torch.equal(chain.sample(4, going_on).tokens, chain.sample(4, going_on).tokens)
    before = torch.get_rng_state()
    chain.sample(4, generator())
    assert torch.equal(before, torch.get_rng_state())


def distinct(tokens: torch.Tensor) -> set[tuple[int, ...]]:
    return set(map(tuple, tokens.tolist()))


def test_a_finite_training_set_has_so_many_sequences_and_no_others():
    def trained_on(seed: int, data_seed: int = 0) -> set[tuple[int, ...]]:
        batch = HighOrderMarkov(sequences=30, data_seed=data_seed).sample(1000, generator(seed))
        return distinct(torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1))

    first = trained_on(0)
    assert len(first) == 30
    assert trained_on(1) == first
    assert not trained_on(0, data_seed=1) & first
    assert trained_on(0, data_seed=1) == trained_on(2, data_seed=1)


def test_batches_of_a_finite_training_set_are_drawn_with_replacement():
    chain = HighOrderMarkov(sequences=30)
    rows = chain.sample(30_000, generator()).tokens.unique(dim=0, return_counts=True)[1]
    assert p_value(rows[None].numpy(), np.full((1, 30), 1 / 30)) > LIKELY
    assert len(distinct(chain.sample(30, generator()).tokens)) < 30


def test_what_is_held_out_is_never_trained_on():
    for data_seed in range(3):
        chain = HighOrderMarkov(scale=1.0, context=24, sequences=40, data_seed=data_seed)  # never the same by chance
        trained = distinct(chain.sample(1000, generator(5)).tokens)
        # As many as the training set, also from the generator that has its seed.
        for seed in range(3):
            held_out = distinct(chain.held_out(40, generator(seed)).tokens)
            assert len(held_out) == 40
            assert not held_out & trained


def test_a_finite_training_set_is_drawn_from_the_law():
    batch = HighOrderMarkov(sequences=5000).sample(20_000, generator())
    right, wrong = (surplus(law, *batch).mean(1) for law in (HighOrderMarkov(), HighOrderMarkov(scale=3.8)))
    assert abs(right.mean()) < 4 * right.std() / math.sqrt(5000)
    assert abs(wrong.mean()) > 8 * wrong.std() / math.sqrt(5000)


@pytest.mark.parametrize("known", range(4))
@every_chain
def test_teachers_are_the_formula(chain: HighOrderMarkov, known: int):
    if known > chain.n_blocks:
        return
    tokens = chain.sample(4, generator()).tokens
    teacher = chain.teacher(tokens, known).exp()
    for row, sequence in zip(teacher, tokens.tolist(), strict=True):
        for position, law in enumerate(row.tolist()):
            assert law == pytest.approx(by_hand.law(chain, sequence[: position + 1], known), abs=1e-12)


@pytest.mark.parametrize("chain", [*CHAINS.values(), WIDE], ids=[*CHAINS, "wide"])
def test_the_teacher_that_knows_all_is_the_law_and_the_one_that_knows_nothing_is_uniform(chain: HighOrderMarkov):
    tokens = chain.sample(4, generator()).tokens
    assert torch.equal(chain.teacher(tokens, chain.n_blocks), chain.bayes(tokens))
    uniform = torch.full((*tokens.shape, chain.d_vocab), -math.log(chain.d_vocab), dtype=torch.float64)
    torch.testing.assert_close(chain.teacher(tokens, 0), uniform)
    for one, other in pairwise(range(chain.n_blocks + 1)):
        assert (chain.teacher(tokens, one) - chain.teacher(tokens, other)).abs().max() > 0.1


def test_only_tokens_at_the_lags_matter():
    chain = HighOrderMarkov(d_vocab=5, blocks=((6,), (2,)))
    tokens = chain.sample(1, generator()).tokens
    last = chain.bayes(tokens)[0, -1]
    for lag in range(1, chain.context + 1):
        other = tokens.clone()
        other[0, -lag] = (tokens[0, -lag] + 1) % 5
        assert torch.equal(chain.bayes(other)[0, -1], last) == (lag not in (6, 2))


def test_lags_before_the_start_add_nothing():
    chain = HighOrderMarkov(d_vocab=2, blocks=((6,), (2,)))
    torch.testing.assert_close(chain.bayes(torch.tensor([[1]])).exp(), torch.full((1, 1, 2), 0.5).double())
    tokens = chain.sample(3, generator()).tokens
    for length in range(1, chain.context + 1):
        for known in range(3):
            torch.testing.assert_close(chain.rung(tokens[:, :length], known), chain.rung(tokens, known)[:, :length])
        torch.testing.assert_close(chain.bayes(tokens[:, :length]), chain.bayes(tokens)[:, :length])


@every_chain
def test_enumerated_windows_have_the_law_of_the_formula(chain: HighOrderMarkov):
    windows = chain.windows()
    assert windows.lags == tuple(range(1, chain.lookback + 1))
    assert windows.weights.sum() == pytest.approx(1)
    for tokens, law in zip(windows.tokens[:, ::-1].tolist(), windows.next_token, strict=True):
        assert law.tolist() == pytest.approx(by_hand.law(chain, tokens), abs=1e-12)


@every_chain
def test_enumerated_windows_are_met_as_often_as_in_samples(chain: HighOrderMarkov):
    n, queries = 20_000, chain.context - chain.lookback + 1
    met = window_counts(chain, n).reshape(-1, chain.d_vocab).sum(-1) / (n * queries)
    weights = chain.windows().weights.reshape([chain.d_vocab] * chain.lookback).transpose().ravel()
    # Windows of one sequence are not independent: at most all its queries meet the same.
    assert (abs(met - weights) < 5 * np.sqrt(weights / n)).all()
    assert abs(met - 1 / len(met)).max() > 5 * math.sqrt(1 / len(met) / n)


@every_chain
def test_drawn_windows_are_windows_with_their_law(chain: HighOrderMarkov):
    windows = chain.drawn_windows(1000, generator())
    assert len(windows.tokens) >= 1000
    assert windows.weights == pytest.approx(1 / len(windows.tokens))
    tokens = torch.from_numpy(windows.tokens[:, ::-1].copy())
    for row, law in zip(tokens[:20].tolist(), windows.next_token, strict=False):
        assert law.tolist() == pytest.approx(by_hand.law(chain, row), abs=1e-12)
    expected = chain.windows()
    mean = windows.weights @ windows.next_token - expected.weights @ expected.next_token
    assert abs(mean).max() < 0.05


def rungs_by_hand(chain: HighOrderMarkov) -> list[tuple[float, float]]:
    """Entropy and truncated teacher's loss of each rung, window by window."""
    windows = chain.windows()
    rungs = []
    for known in range(chain.n_blocks + 1):
        lags = chain.lags_of(known)
        joint: dict[tuple[int, ...], np.ndarray] = {}
        teacher = 0.0
        for tokens, weight, law in zip(windows.tokens, windows.weights, windows.next_token, strict=True):
            seen = tuple(int(tokens[lag - 1]) for lag in lags)
            joint[seen] = joint.get(seen, 0) + weight * law
            teacher -= weight * law @ np.log(by_hand.law(chain, tokens[::-1].tolist(), known))
        entropy = -sum((p * np.log(p / p.sum())).sum() for p in joint.values())
        rungs.append((float(entropy), float(teacher)))
    return rungs


@every_chain
def test_the_exact_ladder_is_that_of_slow_loops(chain: HighOrderMarkov):
    rungs = chain.exact_ladder()
    entropies, teachers = zip(*rungs_by_hand(chain), strict=True)
    assert [rung.entropy for rung in rungs] == pytest.approx(entropies, abs=1e-12)
    assert [rung.teacher for rung in rungs] == pytest.approx(teachers, abs=1e-12)
    assert [rung.name for rung in rungs] == [chain.rung_name(known) for known in range(chain.n_blocks + 1)]
    assert [rung.shortfall for rung in rungs] == [0.0] * len(rungs)
    assert chain.ladder[1].additive == rungs[1].additive


@every_chain
def test_each_block_lowers_the_loss_and_the_last_rung_is_the_law(chain: HighOrderMarkov):
    rungs = chain.ladder
    for higher, lower in pairwise(rungs):
        assert lower.additive < higher.additive - 1e-6
        assert entropy_of(lower) < entropy_of(higher) - 1e-6
    for rung in rungs:
        assert entropy_of(rung) - 1e-9 <= rung.additive <= rung.teacher + 1e-9
    assert rungs[0].teacher == pytest.approx(math.log(chain.d_vocab))
    assert rungs[0].additive == pytest.approx(entropy_of(rungs[0]))
    assert rungs[-1].additive == rungs[-1].teacher == pytest.approx(entropy_of(rungs[-1]), abs=1e-12)


def entropy_of(rung: Rung) -> float:
    assert rung.entropy is not None
    return rung.entropy


def test_a_truncated_teacher_is_too_sure_and_two_lags_interact():
    rungs = HighOrderMarkov(d_vocab=8).ladder
    assert rungs[1].teacher > rungs[1].additive + 0.05
    assert rungs[2].teacher > rungs[2].additive + 0.01
    assert rungs[1].additive == pytest.approx(entropy_of(rungs[1]), abs=1e-6)  # one lag: nothing to interact
    assert rungs[2].additive > entropy_of(rungs[2]) + 1e-3


@every_chain
def test_rungs_predict_what_their_losses_say(chain: HighOrderMarkov):
    windows = chain.windows()
    tokens = torch.from_numpy(windows.tokens[:, ::-1].copy())
    for known, rung in enumerate(chain.ladder):
        last = chain.rung(tokens, known)[:, -1]
        torch.testing.assert_close(last.exp().sum(-1), torch.ones(len(tokens), dtype=torch.float64))
        loss = -(windows.weights @ (windows.next_token * last.numpy())).sum()
        assert loss == pytest.approx(rung.additive, abs=1e-9)
        for block in chain.blocks[known:]:
            for lag in set(block) - set(chain.lags_of(known)):
                other = tokens.clone()
                other[:, -lag] = (tokens[:, -lag] + 1) % chain.d_vocab
                assert torch.equal(chain.rung(other, known)[:, -1], last)
    torch.testing.assert_close(chain.rung(tokens, chain.n_blocks), chain.bayes(tokens))


@pytest.mark.parametrize("feature_seed", range(5))
def test_the_strongest_lags_tell_most(feature_seed: int):
    chain = HighOrderMarkov(d_vocab=8, feature_seed=feature_seed)
    assert [most_telling(chain, known) for known in (1, 2)] == [{3}, {3, 1}]


def test_of_equally_strong_lags_none_tells_most_for_all_features():
    best = {frozenset(most_telling(HighOrderMarkov(d_vocab=8, ratio=1, feature_seed=seed), 1)) for seed in range(5)}
    assert len(best) > 1


def most_telling(chain: HighOrderMarkov, known: int) -> set[int]:
    windows = chain.windows()
    entropies = {lags: ladder.entropy(ladder.given(windows, lags)) for lags in combinations((1, 2, 3), known)}
    return set(min(entropies, key=lambda lags: entropies[lags]))


SMALL = HighOrderMarkov(d_vocab=8, context=3)
SEEDS = range(8)


@pytest.fixture(scope="module")
def estimates() -> list[list[Rung]]:
    return [SMALL.estimated_ladder(300, generator(seed)) for seed in SEEDS]


def luck(seed: int, known: int) -> float:
    """By how much the windows that an estimate was drawn from are harder to predict than all windows."""
    going_on, exact = generator(seed), SMALL.ladder[known]
    draws = [SMALL.drawn_windows(300, going_on) for _ in range(2)]
    readings = [ladder.read(windows, SMALL.blocks[:known], SMALL.weights[:known]) for windows in draws]
    return float(np.mean([ladder.loss(exact.predictor, reading) for reading in readings])) - exact.additive


@pytest.mark.parametrize("known", [1, 2])
def test_half_way_is_nearer_than_either_side(estimates: list[list[Rung]], known: int):
    exact = SMALL.ladder[known].additive
    errors = [rungs[known].additive - exact - luck(seed, known) for seed, rungs in zip(SEEDS, estimates, strict=True)]
    shortfalls = [rungs[known].shortfall for rungs in estimates]
    fitted, judged = np.mean(errors) - np.mean(shortfalls), np.mean(errors) + np.mean(shortfalls)
    assert fitted < 0 < judged
    assert abs(np.mean(errors)) < min(-fitted, judged) / 3


@pytest.mark.parametrize("known", [1, 2])
def test_the_shortfall_is_what_the_fitted_predictor_loses(estimates: list[list[Rung]], known: int):
    every = ladder.read(SMALL.windows(), SMALL.blocks[:known], SMALL.weights[:known])
    lost = [ladder.loss(rungs[known].predictor, every) - SMALL.ladder[known].additive for rungs in estimates]
    shortfalls = [rungs[known].shortfall for rungs in estimates]
    assert min(lost) > 0
    assert min(shortfalls) > 0
    assert np.mean(shortfalls) == pytest.approx(np.mean(lost), rel=0.3)


def test_an_estimate_from_many_windows_is_near(estimates: list[list[Rung]]):
    many = SMALL.estimated_ladder(20_000, generator())
    for estimate, few, exact in zip(many, estimates[0], SMALL.ladder, strict=True):
        assert estimate.additive == pytest.approx(exact.additive, abs=0.01)
        assert estimate.teacher == pytest.approx(exact.teacher, abs=0.02)
        assert estimate.shortfall <= few.shortfall / 10
        assert estimate.entropy is None
        assert estimate.name == exact.name
    assert many[-1].additive == many[-1].teacher
    assert many[-1].shortfall == 0


@pytest.mark.usefixtures("not_enumerated")
def test_what_cannot_be_enumerated_is_estimated_the_same_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fd_interp.tasks.high_order.ESTIMATED_ON", 2000)
    chain, again = (HighOrderMarkov(d_vocab=4, scale=1.0) for _ in range(2))
    assert [rung.entropy for rung in chain.ladder] == [None] * 4
    assert [rung.additive for rung in chain.ladder] == [rung.additive for rung in again.ladder]
    assert torch.equal(chain.token_frequencies(), again.token_frequencies())
    names = [baseline.name for baseline in chain.baselines()]
    assert names[:3] == ["uniform", "rung 0: no lag, estimated", "rung 1: lag 3, estimated"]


@every_chain
def test_baselines_are_uniform_and_the_additive_rungs(chain: HighOrderMarkov):
    uniform, *rungs = chain.baselines()
    assert uniform == ("uniform", math.log(chain.d_vocab))
    assert [baseline.name for baseline in rungs] == [chain.rung_name(known) for known in range(chain.n_blocks + 1)]
    assert [baseline.loss for baseline in rungs] == [rung.additive for rung in chain.ladder]


@every_chain
def test_baselines_are_what_samples_cost(chain: HighOrderMarkov):
    tokens, targets = chain.held_out(5000, generator(7))
    queries = slice(chain.lookback - 1, None)
    for known, baseline in enumerate(chain.baselines()[1:]):
        log_p = chain.rung(tokens, known)[:, queries].gather(-1, targets[:, queries, None])[..., 0]
        by_sequence = -log_p.mean(1)
        assert abs(by_sequence.mean() - baseline.loss) < 4 * by_sequence.std() / math.sqrt(5000)


@every_chain
def test_token_frequencies_are_those_of_samples(chain: HighOrderMarkov):
    frequencies = chain.token_frequencies()
    assert frequencies.sum().item() == pytest.approx(1)
    _, targets = chain.sample(20_000, generator(8))
    seen = torch.nn.functional.one_hot(targets[:, chain.lookback - 1 :], chain.d_vocab).double().mean(1)
    assert ((seen.mean(0) - frequencies).abs() < 4 * seen.std(0) / math.sqrt(20_000)).all()


def test_a_chain_with_too_many_windows_says_how_many_and_samples_all_the_same():
    assert not WIDE.enumerable
    for ask in (WIDE.windows, WIDE.exact_ladder):
        with pytest.raises(InputError, match=r"50\^7, about 10\^11\.9, probabilities are too many to enumerate"):
            ask()
    assert len(WIDE.drawn_windows(40, generator()).tokens) == 40
