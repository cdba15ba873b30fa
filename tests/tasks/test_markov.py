import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from fd_interp.config import InputError
from fd_interp.tasks.markov import MarkovChain
from fd_interp.tasks.task import Task

SEQUENCES, CONTEXT = 6250, 32  # 2e5 transitions


def general(d_vocab: int, seed: int, persistence: float = 0.0, context: int = CONTEXT) -> MarkovChain:
    """A chain with random rows, and its stationary distribution by iterating them."""
    rows = np.random.default_rng(seed).dirichlet(np.ones(d_vocab) * 2, size=d_vocab)
    pi = np.full(d_vocab, 1 / d_vocab)
    for _ in range(300):
        pi = pi @ rows
    return MarkovChain(pi=tuple(pi), redraw=tuple(map(tuple, rows)), persistence=persistence, context=context)


CHAINS = {
    "persistent": MarkovChain.paper(persistence=0.6, context=CONTEXT),
    "alternating": MarkovChain.uniform(3, persistence=-0.3, context=CONTEXT),
    "general": general(4, seed=1, persistence=0.2),
    "antitone": MarkovChain.antitone((0.4, 0.3, 0.2, 0.1), context=CONTEXT),
}
every_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)

laws = st.lists(st.floats(0.05, 1), min_size=2, max_size=6).map(lambda w: tuple(x / math.fsum(w) for x in w))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def transition_counts(chain: MarkovChain) -> torch.Tensor:
    batch = chain.sample(SEQUENCES, generator())
    pairs = batch.tokens.flatten() * chain.d_vocab + batch.targets.flatten()
    return torch.bincount(pairs, minlength=chain.d_vocab**2).view(chain.d_vocab, chain.d_vocab).double()


def within(counts: torch.Tensor, law: torch.Tensor, sigmas: float) -> bool:
    """Whether each row of counts is that far at most from a multinomial draw of `law`."""
    n = counts.sum(-1, keepdim=True)
    return bool(((counts / n - law).abs() <= sigmas * (law * (1 - law) / n).sqrt()).all())


@every_chain
def test_transitions_follow_the_matrix(chain: MarkovChain):
    assert within(transition_counts(chain), chain.transition, sigmas=5)


def test_two_hundred_thousand_tokens_tell_chains_apart():
    counts = transition_counts(CHAINS["persistent"])
    assert not within(counts, MarkovChain.paper(persistence=0.57).transition, sigmas=5)


@every_chain
def test_every_position_has_the_law_pi(chain: MarkovChain):
    batch = chain.sample(SEQUENCES, generator(1))
    for position in (*batch.tokens.unbind(1), batch.targets[:, -1]):
        counts = torch.bincount(position, minlength=chain.d_vocab).double()
        assert within(counts, chain.token_frequencies(), sigmas=5)


@every_chain
def test_pi_is_stationary_and_rows_sum_to_one(chain: MarkovChain):
    pi = chain.token_frequencies()
    torch.testing.assert_close(pi @ chain.transition, pi, atol=1e-9, rtol=0)
    torch.testing.assert_close(chain.transition.sum(-1), torch.ones_like(pi), atol=1e-9, rtol=0)


@every_chain
def test_targets_are_the_tokens_one_later(chain: MarkovChain):
    batch = chain.sample(5, generator())
    assert batch.tokens.shape == batch.targets.shape == (5, CONTEXT)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


@every_chain
def test_baselines_are_the_formulas(chain: MarkovChain):
    uniform = unigram = bigram = 0.0
    for i in range(chain.d_vocab):
        unigram -= chain.pi[i] * math.log(chain.pi[i])
        for j in range(chain.d_vocab):
            p = transition_by_hand(chain, i, j)
            uniform += chain.pi[i] * p * math.log(chain.d_vocab)
            bigram -= chain.pi[i] * p * math.log(p) if p > 0 else 0.0
    assert [baseline.name for baseline in chain.baselines()] == ["uniform", "unigram", "bigram"]
    assert [baseline.loss for baseline in chain.baselines()] == pytest.approx([uniform, unigram, bigram], abs=1e-9)


def transition_by_hand(chain: MarkovChain, i: int, j: int) -> float:
    redraw = chain.pi[j] if chain.redraw is None else chain.redraw[i][j]
    return chain.persistence * (i == j) + (1 - chain.persistence) * redraw


@every_chain
def test_baselines_are_what_samples_cost(chain: MarkovChain):
    batch = chain.sample(SEQUENCES, generator(2))
    losses = {baseline.name: baseline.loss for baseline in chain.baselines()}
    unigram = chain.token_frequencies().log()[batch.targets]
    bigram = chain.bayes(batch.tokens).gather(-1, batch.targets[..., None])[..., 0]
    for name, log_p in (("unigram", unigram), ("bigram", bigram)):
        by_sequence = -log_p.mean(1)
        assert abs(by_sequence.mean() - losses[name]) < 4 * by_sequence.std() / math.sqrt(SEQUENCES) + 1e-12


@every_chain
def test_more_knowledge_costs_less(chain: MarkovChain):
    uniform, unigram, bigram = (baseline.loss for baseline in chain.baselines())
    assert bigram < unigram - 1e-3
    assert unigram <= uniform + 1e-12


def test_independent_tokens_have_nothing_beyond_frequencies():
    chain = MarkovChain.zipf(5, persistence=0.0)
    _, unigram, bigram = (baseline.loss for baseline in chain.baselines())
    assert bigram == pytest.approx(unigram, abs=1e-12)


@every_chain
def test_bayes_is_the_row_of_the_last_token(chain: MarkovChain):
    tokens = chain.sample(3, generator()).tokens
    bayes = chain.bayes(tokens)
    torch.testing.assert_close(bayes.exp().sum(-1), torch.ones(tokens.shape, dtype=torch.float64))
    for index, token in np.ndenumerate(tokens.numpy()):
        row = [transition_by_hand(chain, int(token), j) for j in range(chain.d_vocab)]
        assert bayes[index].exp().tolist() == pytest.approx(row, abs=1e-12)


def test_what_never_follows_has_probability_zero():
    assert MarkovChain.antitone((0.5, 0.5)).bayes(torch.tensor([[0, 1]])).tolist() == [[[-math.inf, 0], [0, -math.inf]]]


@given(laws)
@settings(deadline=None, max_examples=40)
def test_antitone_coupling_has_the_least_correlation(pi: tuple[float, ...]):
    chain = MarkovChain.antitone(pi)
    law = chain.token_frequencies().numpy()
    coupling = law[:, None] * chain.transition.numpy()
    np.testing.assert_allclose(coupling.sum(1), law, atol=1e-12)
    np.testing.assert_allclose(coupling.sum(0), law, atol=1e-12)
    first, second = (
        np.kron(*pair) for pair in ((np.eye(len(pi)), np.ones(len(pi))), (np.ones(len(pi)), np.eye(len(pi))))
    )
    least = linprog(np.outer(law, law).ravel(), A_eq=np.vstack([first, second]), b_eq=np.concatenate([law, law]))
    assert law @ coupling @ law == pytest.approx(least.fun, abs=1e-6)  # ten times the solver's own tolerance


@given(laws, st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_no_random_coupling_is_more_antitone(pi: tuple[float, ...], seed: int):
    law = np.array(pi)
    coupling = np.random.default_rng(seed).exponential(size=(len(pi), len(pi))) ** 3
    for _ in range(500):
        coupling *= (law / coupling.sum(1))[:, None]
        coupling *= law / coupling.sum(0)
    antitone = law[:, None] * MarkovChain.antitone(pi).transition.numpy()
    assert law @ antitone @ law <= law @ coupling @ law + 1e-6


def test_antitone_chain_by_hand():
    # Token 0 (.5) is followed by tokens 2 and 1, the rarest, which lead back to it.
    chain = MarkovChain.antitone((0.5, 0.3, 0.2))
    torch.testing.assert_close(chain.transition, torch.tensor([[0, 0.6, 0.4], [1, 0, 0], [1, 0, 0]]).double())


def test_named_chains_have_their_stationary_distributions():
    assert MarkovChain.paper().pi == (0.75, 0.19, 0.05, 0.01)
    assert MarkovChain.zipf(3).pi == pytest.approx((6 / 11, 3 / 11, 2 / 11))
    assert MarkovChain.uniform(4).pi == (0.25,) * 4
    assert MarkovChain.symmetric_low(4, 0.55).pi == pytest.approx((0.55, 0.15, 0.15, 0.15))


def test_a_persistent_chain_keeps_its_token_and_an_independent_one_forgets_it():
    pi = torch.tensor([0.5, 0.3, 0.2]).double()
    kept = MarkovChain(pi=(0.5, 0.3, 0.2), persistence=0.4).transition
    torch.testing.assert_close(kept, 0.4 * torch.eye(3).double() + 0.6 * pi.expand(3, -1))
    torch.testing.assert_close(MarkovChain(pi=(0.5, 0.3, 0.2), persistence=0.0).transition, pi.expand(3, -1))


def test_same_generator_state_same_batch():
    chain = CHAINS["general"]
    assert torch.equal(chain.sample(4, generator(3)).tokens, chain.sample(4, generator(3)).tokens)
    assert not torch.equal(chain.sample(4, generator(3)).tokens, chain.sample(4, generator(4)).tokens)
    going_on = generator(3)
    assert not torch.equal(chain.sample(4, going_on).tokens, chain.held_out(4, going_on).tokens)


def test_sampling_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    CHAINS["general"].sample(4, generator())
    assert torch.equal(before, torch.get_rng_state())


@given(laws, st.floats(0, 0.99), st.integers(1, 64))
@settings(deadline=None, max_examples=40)
def test_survives_json(pi: tuple[float, ...], persistence: float, context: int):
    for chain in (
        MarkovChain(pi=pi, persistence=persistence, context=context),
        MarkovChain.antitone(pi, context=context),
    ):
        again = MarkovChain(**json.loads(chain.model_dump_json()))
        assert again == chain
        assert hash(again) == hash(chain)
        assert torch.equal(again.transition, chain.transition)


def test_is_a_task_with_its_sizes_and_a_name_for_each_token():
    chain = MarkovChain.zipf(5, context=7)
    assert isinstance(chain, Task)
    assert (chain.d_vocab, chain.n_ctx, chain.token_strings()) == (5, 7, ["0", "1", "2", "3", "4"])


def test_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        CHAINS["general"].persistence = 0.0  # pyright: ignore


def test_a_changed_copy_is_another_chain():
    chain = MarkovChain.zipf(4, persistence=0.5)
    copy = chain.model_copy(update={"persistence": 0.0})
    assert torch.equal(copy.transition, MarkovChain.zipf(4, persistence=0.0).transition)
    with pytest.raises(InputError, match="persistence must be in"):
        chain.model_copy(update={"persistence": 2.0})


HALF = (0.5, 0.5)
EVEN = ((0.5, 0.5), (0.5, 0.5))
BAD = {
    "one token": ({"pi": (1.0,)}, "pi must have at least two tokens, not 1"),
    "sum": ({"pi": (0.5, 0.4)}, "pi must sum to one, not 0.9"),
    "zero": ({"pi": (0.5, 0.5, 0.0)}, "pi must be positive everywhere, but pi[2] is 0.0"),
    "negative": ({"pi": (1.2, -0.2)}, "pi must be positive everywhere, but pi[1] is -0.2"),
    "nan": ({"pi": (0.5, math.nan)}, "pi.1: Input should be a finite number, not nan"),
    "persistence one": ({"pi": HALF, "persistence": 1.0}, "persistence must be in [-1, 1) for 2 tokens, not 1.0"),
    "persistence low": ({"pi": (0.5, 0.3, 0.2), "persistence": -0.6}, "persistence must be in [-0.5, 1) for 3 tokens"),
    "persistence nan": ({"pi": HALF, "persistence": math.nan}, "persistence: Input should be a finite number, not nan"),
    "negative transition": (
        {"pi": (0.9, 0.1), "persistence": -0.5},
        "persistence -0.5 makes a transition probability -0.35; take one nearer to zero, or a larger smallest pi",
    ),
    "wrong size": ({"pi": HALF, "redraw": ((1.0, 0.0),)}, "redraw must be a 2 x 2 matrix, as long as pi"),
    "ragged": ({"pi": HALF, "redraw": ((1.0, 0.0), (1.0,))}, "redraw must be a 2 x 2 matrix, as long as pi"),
    "row sum": ({"pi": HALF, "redraw": ((0.5, 0.5), (0.5, 0.6))}, "but row 1 is (0.5, 0.6)"),
    "row negative": ({"pi": HALF, "redraw": ((1.5, -0.5), (0.5, 0.5))}, "but row 0 is (1.5, -0.5)"),
    "row nan": (
        {"pi": HALF, "redraw": ((math.nan, 0.5), (0.5, 0.5))},
        "redraw.0.0: Input should be a finite number, not nan",
    ),
    "not stationary": (
        {"pi": (0.6, 0.4), "redraw": EVEN},
        "pi must be stationary for redraw, but pi[0] is 0.6 and its inflow 0.5",
    ),
    "context": ({"pi": HALF, "context": 0}, "context: Input should be greater than 0, not 0"),
    "no pi": ({}, "MarkovChain needs the field 'pi'"),
    "unknown field": ({"pi": HALF, "persistance": 0.5}, "has no field 'persistance', did you mean persistence?"),
}


@pytest.mark.parametrize(("fields", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_named(fields: dict, message: str):
    with pytest.raises(InputError, match=re.escape(message)):
        MarkovChain(**fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MarkovChain.antitone((0.5, 0.5, 0.0)), "pi must be positive everywhere"),
        (lambda: MarkovChain.antitone((0.5, 0.4)), "pi must sum to one"),
        (lambda: MarkovChain.uniform(0), "at least two tokens, not 0"),
        (lambda: MarkovChain.zipf(1), "at least two tokens, not 1"),
        (lambda: MarkovChain.symmetric_low(1, 0.5), "at least two tokens, not 1"),
        (lambda: MarkovChain.symmetric_low(3, 1.5), "pi must be positive everywhere"),
    ],
)
def test_named_chains_refuse_what_is_no_law(make, message: str):
    with pytest.raises(InputError, match=re.escape(message)):
        make()
