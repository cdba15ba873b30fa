import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fd_interp.measures.focus import (
    LEAST_LIFT,
    attention_entropy,
    attention_lift,
    attention_mass,
    focus_ratio,
    focus_ratio_by_query,
    frequency_slope,
    frequent_tokens,
    is_causal,
    rare_tokens,
    self_focus,
    visible_share,
)

BATCH, HEADS, LENGTH, D_VOCAB = 3, 2, 7, 4
FREQUENCIES = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
NAN = math.nan


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tokens(seed: int) -> Tensor:
    return torch.randint(0, D_VOCAB, (BATCH, LENGTH), generator=generator(seed))


def causal(scores: Tensor) -> Tensor:
    length = scores.shape[-1]
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf).softmax(-1)


def all_to_all(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def random_scores(seed: int) -> Tensor:
    return 2 * torch.randn(BATCH, HEADS, LENGTH, LENGTH, generator=generator(seed), dtype=torch.float64)


def uniform_scores(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.zeros(batch, HEADS, length, length, dtype=torch.float64)


def by_token(log_weight: Tensor, tokens: Tensor) -> Tensor:
    """Scores that weigh each key by its token alone."""
    length = tokens.shape[1]
    return log_weight[tokens][:, None, None, :].expand(-1, HEADS, length, -1)


def everyone(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


def only_last(tokens: Tensor) -> Tensor:
    return (torch.arange(tokens.shape[1]) == tokens.shape[1] - 1).expand(len(tokens), -1)


def some(seed: int) -> Tensor:
    return torch.rand(BATCH, LENGTH, generator=generator(seed)) < 0.7


def all_equal(measured: Tensor, value: float) -> bool:
    return torch.allclose(measured, torch.full_like(measured, value), atol=1e-9)


seeds = st.integers(0, 10_000)
masks = pytest.mark.parametrize("masked", [causal, all_to_all])
several = settings(deadline=None, max_examples=30)


@masks
@given(seeds)
@several
def test_uniform_attention_is_one_everywhere(masked: Callable[[Tensor], Tensor], seed: int):
    pattern, tokens = masked(uniform_scores()), random_tokens(seed)
    tokens[:, 0] = torch.tensor([0, 1, 2])  # so that each of them is visible
    queries = some(seed) | only_last(tokens)
    for token in range(3):
        assert all_equal(focus_ratio(pattern, tokens == token, queries), 1)
    assert all_equal(self_focus(pattern, queries, tokens), 1)
    assert all_equal(frequency_slope(pattern, queries, tokens, FREQUENCIES), 0)
    lift = attention_lift(pattern, queries, tokens, D_VOCAB)
    assert all_equal(lift[:, :3], 1)
    by_query = focus_ratio_by_query(pattern, tokens == 0, queries, tokens, D_VOCAB)
    assert all_equal(by_query[~by_query.isnan()], 1)


def test_uniform_causal_attention_has_the_mean_entropy_of_its_contexts():
    tokens = random_tokens(0)
    expected = sum(math.log(n) for n in range(1, LENGTH + 1)) / LENGTH
    assert all_equal(attention_entropy(causal(uniform_scores()), everyone(tokens)), expected)
    assert all_equal(attention_entropy(causal(uniform_scores()), only_last(tokens)), math.log(LENGTH))
    assert all_equal(attention_entropy(all_to_all(uniform_scores()), everyone(tokens)), math.log(LENGTH))


def test_entropy_by_hand():
    on_one, on_two = [1.0, 0, 0], [0.5, 0.5, 0]
    pattern = torch.tensor([[[on_one, on_two, [0.5, 0.25, 0.25]], [on_one, on_one, on_one]]])
    every = torch.ones(1, 3, dtype=torch.bool)
    log2 = math.log(2)
    assert attention_entropy(pattern, every).tolist() == pytest.approx([(log2 + 1.5 * log2) / 3, 0])
    assert attention_entropy(pattern, torch.tensor([[False, True, False]])).tolist() == pytest.approx([log2, 0])


def test_mass_and_share_by_hand():
    pattern = torch.tensor([[[[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.125, 0.375]]]])
    keys = torch.tensor([[True, False, True]])
    assert attention_mass(pattern, keys).tolist() == [[[1, 0.25, 0.875]]]
    assert visible_share(pattern, keys)[0].tolist() == pytest.approx([1, 1 / 2, 2 / 3])
    assert visible_share(pattern.flip(-1), keys)[0].tolist() == pytest.approx([2 / 3] * 3)
    ratio = focus_ratio(pattern, keys, torch.tensor([[False, True, True]]))
    assert ratio.item() == pytest.approx((0.25 + 0.875) / (1 / 2 + 2 / 3))


@masks
@given(seeds)
@several
def test_all_attention_on_a_set_is_one_over_its_share(masked: Callable[[Tensor], Tensor], seed: int):
    tokens = random_tokens(seed)
    tokens[:, 0] = tokens[:, -1] = 0  # so that every query sees a member, and the first one looks ahead if it can
    tokens[:, 1] = 2
    keys = (tokens == 0) | (tokens == 1)
    scores = torch.zeros(D_VOCAB, dtype=torch.float64).index_fill(0, torch.tensor([2, 3]), -math.inf)
    pattern = masked(by_token(scores, tokens))
    share = visible_share(masked(uniform_scores()), keys)
    queries = some(seed) | only_last(tokens)
    assert all_equal(attention_mass(pattern, keys), 1)
    assert all_equal(focus_ratio(pattern, keys, queries), 1 / share[queries].mean().item())
    assert all_equal(focus_ratio(pattern, ~keys, queries), 0)


exponents = st.floats(-2, 2)


@given(exponents, seeds)
@several
def test_attention_by_a_power_of_frequency_has_that_slope_where_all_see_all(exponent: float, seed: int):
    tokens = random_tokens(seed)[:1]  # one context, so that each token's lift is its weight up to a factor
    tokens[:, :2] = torch.tensor([0, 1])
    pattern = all_to_all(by_token(exponent * FREQUENCIES.log(), tokens))
    assert all_equal(frequency_slope(pattern, everyone(tokens), tokens, FREQUENCIES), exponent)


@given(exponents, seeds)
@several
def test_and_in_causal_attention_where_queries_see_the_same_counts(exponent: float, seed: int):
    counts = torch.tensor([0, 0, 0, 1, 1, 2, 3])
    tokens = torch.stack([counts[torch.randperm(LENGTH, generator=generator(seed + i))] for i in range(BATCH)])
    pattern = causal(by_token(exponent * FREQUENCIES.log(), tokens))
    assert all_equal(frequency_slope(pattern, only_last(tokens), tokens, FREQUENCIES), exponent)


def test_attention_proportional_to_frequency_in_growing_contexts_has_a_slope_near_one():
    # Contexts differ here, which costs a few per cent: no tolerance of rounding, but far from 0 and from 2.
    tokens = torch.multinomial(FREQUENCIES.expand(64, -1), 128, replacement=True, generator=generator(0))
    late = (torch.arange(128) >= 32).expand(64, -1)
    for exponent in (1.0, -1.0):
        pattern = causal(by_token(exponent * FREQUENCIES.log(), tokens))
        slope = frequency_slope(pattern, late, tokens, FREQUENCIES)
        assert (slope - exponent).abs().max() < 0.05


def test_slope_weighs_tokens_by_their_share_of_the_context():
    tokens = torch.tensor([[0, 0, 0, 1, 1, 2]])
    weights = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64)
    frequencies = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    pattern = all_to_all(weights.log()[tokens].expand(1, HEADS, 6, 6))
    share = torch.tensor([3, 2, 1]).double() / 6
    x, y = frequencies.log(), weights.log()
    x_centred = x - share @ x
    expected = (share * x_centred) @ y / (share @ x_centred**2)
    assert all_equal(frequency_slope(pattern, everyone(tokens), tokens, frequencies), expected.item())


def test_a_token_without_attention_counts_with_the_least_lift():
    tokens = torch.tensor([[0, 0, 1, 1]])
    frequencies = torch.tensor([0.75, 0.25], dtype=torch.float64)
    pattern = all_to_all(torch.where(tokens == 0, 0.0, -math.inf).double().expand(1, HEADS, 4, 4))
    expected = (math.log(2) - math.log(LEAST_LIFT)) / math.log(3)
    assert all_equal(frequency_slope(pattern, everyone(tokens), tokens, frequencies), expected)


def test_tokens_that_do_not_occur_are_nan_and_leave_the_slope_alone():
    tokens = torch.tensor([[0, 1, 0, 1, 1]])
    pattern = causal(by_token(FREQUENCIES.log(), tokens))
    last = only_last(tokens)
    lift = attention_lift(pattern, last, tokens, D_VOCAB)
    assert lift.isnan().tolist() == [[False, False, True, True]] * HEADS
    by_query = focus_ratio_by_query(pattern, tokens == 0, everyone(tokens), tokens, D_VOCAB)
    assert by_query.isnan().tolist() == [[False, False, True, True]] * HEADS
    assert all_equal(frequency_slope(pattern, last, tokens, FREQUENCIES), 1)


def test_a_token_that_no_chosen_query_sees_is_nan():
    tokens = torch.tensor([[0, 1, 2]])
    first = torch.tensor([[True, False, False]])
    assert attention_lift(causal(uniform_scores(1, 3)), first, tokens, 3).isnan().tolist() == [[False, True, True]] * 2


def test_a_set_out_of_sight_has_no_ratio():
    tokens = torch.tensor([[0, 1, 2]])
    first = torch.tensor([[True, False, False]])
    assert focus_ratio(causal(uniform_scores(1, 3)), tokens == 2, first).isnan().all()


def slow_focus_by_query(pattern: Tensor, keys: Tensor, queries: Tensor, tokens: Tensor, sees_later: bool) -> list:
    ratios = []
    for head in range(HEADS):
        for token in range(D_VOCAB):
            mass = share = 0.0
            for b in range(BATCH):
                for q in range(LENGTH):
                    if queries[b, q] and tokens[b, q] == token:
                        visible = range(LENGTH) if sees_later else range(q + 1)
                        members = [k for k in visible if keys[b, k]]
                        mass += sum(pattern[b, head, q, k].item() for k in members)
                        share += len(members) / len(visible)
            ratios.append(mass / share if share > 0 else NAN)
    return ratios


@masks
@given(seeds)
@several
def test_focus_by_query_is_the_slow_loop(masked: Callable[[Tensor], Tensor], seed: int):
    pattern, tokens, queries = masked(random_scores(seed)), random_tokens(seed), some(seed)
    keys = tokens <= 1
    measured = focus_ratio_by_query(pattern, keys, queries, tokens, D_VOCAB)
    expected = slow_focus_by_query(pattern, keys, queries, tokens, sees_later=masked is all_to_all)
    assert measured.flatten().tolist() == pytest.approx(expected, nan_ok=True)


@masks
@given(seeds)
@several
def test_self_focus_and_lift_are_slow_loops(masked: Callable[[Tensor], Tensor], seed: int):
    pattern, tokens, queries = (
        masked(random_scores(seed)),
        random_tokens(seed),
        some(seed) | only_last(random_tokens(0)),
    )
    received, if_uniform = torch.zeros(HEADS, D_VOCAB).double(), torch.zeros(HEADS, D_VOCAB).double()
    own, own_share = torch.zeros(HEADS).double(), torch.zeros(HEADS).double()
    for b, q in queries.nonzero().tolist():
        visible = LENGTH if masked is all_to_all else q + 1
        for head in range(HEADS):
            for k in range(visible):
                token = tokens[b, k]
                received[head, token] += pattern[b, head, q, k]
                if_uniform[head, token] += 1 / visible
                own[head] += pattern[b, head, q, k] * (token == tokens[b, q])
                own_share[head] += (token == tokens[b, q]).double() / visible
    torch.testing.assert_close(attention_lift(pattern, queries, tokens, D_VOCAB), received / if_uniform, equal_nan=True)
    torch.testing.assert_close(self_focus(pattern, queries, tokens), own / own_share)


def test_self_focus_of_attention_on_itself_alone():
    tokens = torch.tensor([[0, 1, 0, 2]])
    pattern = torch.eye(4, dtype=torch.float64).expand(1, HEADS, 4, 4)
    assert all_equal(self_focus(pattern, everyone(tokens), tokens), 4 / (1 + 1 / 2 + 2 / 3 + 1 / 4))
    elsewhere = torch.tensor([[1.0, 0, 0, 0]] * 4).double().expand(1, HEADS, 4, 4)
    assert all_equal(self_focus(elsewhere, torch.tensor([[False, True, False, True]]), tokens), 0)


@masks
@given(seeds, st.permutations(range(D_VOCAB)))
@several
def test_names_of_tokens_do_not_matter(masked: Callable[[Tensor], Tensor], seed: int, names: list[int]):
    pattern, tokens, queries = (
        masked(random_scores(seed)),
        random_tokens(seed),
        some(seed) | only_last(random_tokens(0)),
    )
    new = torch.tensor(names)
    renamed, frequencies = new[tokens], torch.zeros_like(FREQUENCIES).index_copy(0, new, FREQUENCIES)
    keys = tokens == 0
    torch.testing.assert_close(
        frequency_slope(pattern, queries, renamed, frequencies), frequency_slope(pattern, queries, tokens, FREQUENCIES)
    )
    torch.testing.assert_close(self_focus(pattern, queries, renamed), self_focus(pattern, queries, tokens))
    for measured_renamed, measured in (
        (attention_lift(pattern, queries, renamed, D_VOCAB), attention_lift(pattern, queries, tokens, D_VOCAB)),
        (
            focus_ratio_by_query(pattern, keys, queries, renamed, D_VOCAB),
            focus_ratio_by_query(pattern, keys, queries, tokens, D_VOCAB),
        ),
    ):
        torch.testing.assert_close(measured_renamed[:, new], measured, equal_nan=True)


def per_head_measures(pattern: Tensor, tokens: Tensor, queries: Tensor) -> list[Tensor]:
    keys = tokens == 0
    return [
        attention_entropy(pattern, queries),
        focus_ratio(pattern, keys, queries),
        focus_ratio_by_query(pattern, keys, queries, tokens, D_VOCAB),
        self_focus(pattern, queries, tokens),
        attention_lift(pattern, queries, tokens, D_VOCAB),
        frequency_slope(pattern, queries, tokens, FREQUENCIES),
    ]


@masks
@given(seeds, st.permutations(range(BATCH)))
@several
def test_the_order_of_sequences_does_not_matter_and_that_of_heads_is_kept(
    masked: Callable[[Tensor], Tensor], seed: int, order: list[int]
):
    pattern, tokens, queries = (
        masked(random_scores(seed)),
        random_tokens(seed),
        some(seed) | only_last(random_tokens(0)),
    )
    expected = per_head_measures(pattern, tokens, queries)
    assert not torch.allclose(expected[0][0], expected[0][1])
    for a, b in zip(per_head_measures(pattern[order], tokens[order], queries[order]), expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    for a, b in zip(per_head_measures(pattern.flip(1), tokens, queries), expected, strict=True):
        torch.testing.assert_close(a, b.flip(0), equal_nan=True)


def test_one_look_ahead_makes_a_pattern_not_causal():
    pattern = causal(uniform_scores())
    assert is_causal(pattern)
    pattern[-1, -1, 0, 1] = 1e-3
    assert not is_causal(pattern)
    assert is_causal(pattern[:, :1])
    assert is_causal(pattern[:-1])


def test_patterns_of_the_last_query_alone():
    scores, tokens = random_scores(0), random_tokens(0)
    whole, last = causal(scores), causal(scores)[:, :, -1:]
    keys, chosen = tokens == 0, torch.ones(BATCH, 1, dtype=torch.bool)
    torch.testing.assert_close(focus_ratio(last, keys, chosen), focus_ratio(whole, keys, only_last(tokens)))
    torch.testing.assert_close(attention_entropy(last, chosen), attention_entropy(whole, only_last(tokens)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_do_not_overflow_or_stall(dtype: torch.dtype):
    tokens = (torch.arange(64) % 2).expand(1200, -1)
    pattern = (torch.ones(64, 64).tril() / torch.arange(1, 65)[:, None]).to(dtype).expand(1200, 1, -1, -1)
    queries, keys = everyone(tokens), tokens == 0
    expected = sum(math.log(n) for n in range(1, 65)) / 64
    assert attention_entropy(pattern, queries).item() == pytest.approx(expected, rel=1e-2)
    assert focus_ratio(pattern, keys, queries).item() == pytest.approx(1, abs=1e-2)
    by_query = focus_ratio_by_query(pattern, keys, queries, tokens, 2)
    assert by_query.flatten().tolist() == pytest.approx([1, 1], abs=1e-2)
    assert attention_lift(pattern, queries, tokens, 2).flatten().tolist() == pytest.approx([1, 1], abs=1e-2)
    assert self_focus(pattern, queries, tokens).item() == pytest.approx(1, abs=1e-2)


def test_frequent_and_rare_tokens_by_hand():
    frequencies = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.25, 0.05])
    assert frequent_tokens(frequencies, 2).tolist() == [False, True, False, False, True, False]
    # Beside token 1 there are four that occur; half of them, the rarest, are 5 and 0. Token 2 does not occur.
    assert rare_tokens(frequencies, 1, 0.5).nonzero().flatten().tolist() == [0, 5]
    assert rare_tokens(frequencies, 1, 1.0).nonzero().flatten().tolist() == [0, 3, 4, 5]
    # Of three others a half is rounded up to two.
    assert rare_tokens(frequencies, 2, 0.5).nonzero().flatten().tolist() == [0, 5]
    assert not rare_tokens(frequencies, 1, 0.0).any()


@given(st.integers(0, 1000), st.integers(1, 5), st.floats(0, 1))
def test_no_token_is_both_frequent_and_rare(seed: int, frequent: int, share: float):
    frequencies = torch.rand(8, generator=torch.Generator().manual_seed(seed))
    both = frequent_tokens(frequencies, frequent) & rare_tokens(frequencies, frequent, share)
    assert not both.any()
