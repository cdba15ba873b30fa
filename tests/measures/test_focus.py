import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.measures.focus import (
    LEAST_LIFT,
    TokenAttention,
    attention_by_token,
    attention_entropy,
    attention_lift,
    focus_ratio,
    focus_ratio_by_query,
    frequency_slope,
    frequent_tokens,
    is_causal,
    mass_by_token,
    rare_tokens,
    self_focus,
    share_by_token,
)

BATCH, HEADS, LENGTH, D_VOCAB = 3, 2, 7, 4
FREQUENCIES = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
EVERY_TOKEN = torch.ones(D_VOCAB, dtype=torch.bool)
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


def some_and_the_last(seed: int) -> Tensor:
    return some(seed) | (torch.arange(LENGTH) == LENGTH - 1)


def token_set(*members: int, d_vocab: int = D_VOCAB) -> Tensor:
    return torch.isin(torch.arange(d_vocab), torch.tensor(members))


def all_equal(measured: Tensor, value: float) -> bool:
    return torch.allclose(measured, torch.full_like(measured, value), atol=1e-9)


seeds = st.integers(0, 10_000)
token_sets = st.sets(st.integers(0, D_VOCAB - 1)).map(lambda members: token_set(*members))
masks = pytest.mark.parametrize("masked", [causal, all_to_all])
vocabularies = pytest.mark.parametrize(
    "d_vocab", [D_VOCAB, LENGTH, LENGTH + 1, 3 * LENGTH], ids="{} tokens".format
)  # up to LENGTH they are summed in one way, and beyond in another
several = settings(deadline=None, max_examples=30)


def slow_sums(pattern: Tensor, tokens: Tensor, queries: Tensor, d_vocab: int, *, sees_later: bool) -> TokenAttention:
    mass = torch.zeros(HEADS, d_vocab, d_vocab).double()
    share = torch.zeros(d_vocab, d_vocab).double()
    for b in range(BATCH):
        for q in range(LENGTH):
            if not queries[b, q]:
                continue
            visible = range(LENGTH) if sees_later else range(q + 1)
            for k in visible:
                share[tokens[b, q], tokens[b, k]] += 1 / len(visible)
                for head in range(HEADS):
                    mass[head, tokens[b, q], tokens[b, k]] += pattern[b, head, q, k]
    return TokenAttention(mass, share)


@vocabularies
@masks
@given(seeds)
@several
def test_sums_by_token_are_slow_loops(masked: Callable[[Tensor], Tensor], d_vocab: int, seed: int):
    pattern, queries = masked(random_scores(seed)), some(seed)
    tokens = torch.randint(0, d_vocab, (BATCH, LENGTH), generator=generator(seed))
    expected = slow_sums(pattern, tokens, queries, d_vocab, sees_later=masked is all_to_all)
    torch.testing.assert_close(mass_by_token(pattern, tokens, queries, d_vocab), expected.mass)
    torch.testing.assert_close(share_by_token(tokens, queries, d_vocab, causal=masked is causal), expected.share)
    attention = attention_by_token(pattern, tokens, queries, d_vocab)
    torch.testing.assert_close(attention.mass, expected.mass)
    torch.testing.assert_close(attention.share, expected.share)


def test_sums_by_token_by_hand():
    pattern = torch.tensor([[[[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.125, 0.375]]]])
    tokens, every = torch.tensor([[0, 1, 0]]), torch.ones(1, 3, dtype=torch.bool)
    attention = attention_by_token(pattern, tokens, every, 2)
    assert attention.mass.tolist() == [[[1 + 0.875, 0.125], [0.25, 0.75]]]
    assert attention.share.flatten().tolist() == pytest.approx([1 + 2 / 3, 1 / 3, 1 / 2, 1 / 2])
    mirrored = attention_by_token(pattern.flip(-1), tokens, every, 2)
    assert mirrored.share.flatten().tolist() == pytest.approx([4 / 3, 2 / 3, 2 / 3, 1 / 3])
    late = attention_by_token(pattern, tokens, torch.tensor([[False, True, True]]), 2)
    assert late.mass.tolist() == [[[0.875, 0.125], [0.25, 0.75]]]
    ratio = focus_ratio(late, token_set(0, d_vocab=2), torch.tensor([True, True]))
    assert ratio.item() == pytest.approx((0.25 + 0.875) / (1 / 2 + 2 / 3))


@masks
@given(seeds)
@several
def test_names_beyond_the_tokens_in_use_add_nothing(masked: Callable[[Tensor], Tensor], seed: int):
    pattern, tokens, queries = masked(random_scores(seed)), random_tokens(seed), some(seed)
    few = attention_by_token(pattern, tokens, queries, D_VOCAB)
    many = attention_by_token(pattern, tokens, queries, LENGTH + 1)
    for a, b in zip(few, many, strict=True):
        torch.testing.assert_close(b[..., :D_VOCAB, :D_VOCAB], a)
        assert (b[..., D_VOCAB:, :] == 0).all()
        assert (b[..., D_VOCAB:] == 0).all()


@vocabularies
@masks
@given(seeds)
@several
def test_each_chosen_query_gives_one_in_all(masked: Callable[[Tensor], Tensor], d_vocab: int, seed: int):
    tokens, queries = random_tokens(seed), some(seed)
    attention = attention_by_token(masked(random_scores(seed)), tokens, queries, d_vocab)
    asked = tokens[queries].bincount(minlength=d_vocab).double()
    torch.testing.assert_close(attention.mass.sum(-1), asked.expand(HEADS, -1))
    torch.testing.assert_close(attention.share.sum(-1), asked)


@vocabularies
def test_the_precision_of_the_pattern_is_kept_and_shares_are_double(d_vocab: int):
    tokens = random_tokens(0)
    for dtype in (torch.float32, torch.float64):
        attention = attention_by_token(causal(random_scores(0)).to(dtype), tokens, everyone(tokens), d_vocab)
        assert attention.mass.dtype == attention.share.dtype == dtype
    assert share_by_token(tokens, everyone(tokens), d_vocab, causal=True).dtype == torch.float64


@vocabularies
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_tokens_of_any_integer_type(dtype: torch.dtype, d_vocab: int):
    pattern, tokens = causal(random_scores(0)), random_tokens(0) + d_vocab - D_VOCAB
    narrow = mass_by_token(pattern, tokens.to(dtype), everyone(tokens), d_vocab)
    assert torch.equal(narrow, mass_by_token(pattern, tokens, everyone(tokens), d_vocab))


@masks
@given(seeds, token_sets)
@several
def test_uniform_attention_is_one_everywhere(masked: Callable[[Tensor], Tensor], seed: int, asking: Tensor):
    tokens = random_tokens(seed)
    tokens[:, 0] = torch.tensor([0, 1, 2])  # so that each of them is visible
    attention = attention_by_token(masked(uniform_scores()), tokens, some_and_the_last(seed), D_VOCAB)
    for token in range(3):
        assert all_equal(focus_ratio(attention, token_set(token), EVERY_TOKEN), 1)
        among = focus_ratio(attention, token_set(token), asking)
        assert all_equal(among[~among.isnan()], 1)
    assert all_equal(self_focus(attention), 1)
    assert all_equal(frequency_slope(attention, FREQUENCIES), 0)
    assert all_equal(attention_lift(attention)[:, :3], 1)
    by_query = focus_ratio_by_query(attention, token_set(0))
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


@masks
@given(seeds)
@several
def test_all_attention_on_a_set_is_one_over_its_share(masked: Callable[[Tensor], Tensor], seed: int):
    tokens = random_tokens(seed)
    tokens[:, 0] = tokens[:, -1] = 0  # so that every query sees a member, and the first one looks ahead if it can
    tokens[:, 1] = 2
    keys, queries = token_set(0, 1), some_and_the_last(seed)
    scores = torch.zeros(D_VOCAB, dtype=torch.float64).index_fill(0, torch.tensor([2, 3]), -math.inf)
    attention = attention_by_token(masked(by_token(scores, tokens)), tokens, queries, D_VOCAB)
    visible = (masked(uniform_scores())[:, 0] * keys[tokens][:, None]).sum(-1)  # b q
    assert all_equal(focus_ratio(attention, keys, EVERY_TOKEN), 1 / visible[queries].mean().item())
    assert all_equal(focus_ratio(attention, ~keys, EVERY_TOKEN), 0)
    of_zero = queries & (tokens == 0)
    assert all_equal(focus_ratio(attention, keys, token_set(0)), 1 / visible[of_zero].mean().item())
    assert all_equal(focus_ratio_by_query(attention, keys)[:, 0], 1 / visible[of_zero].mean().item())


exponents = st.floats(-2, 2)


@given(exponents, seeds)
@several
def test_attention_by_a_power_of_frequency_has_that_slope_where_all_see_all(exponent: float, seed: int):
    tokens = random_tokens(seed)[:1]  # one context, so that each token's lift is its weight up to a factor
    tokens[:, :2] = torch.tensor([0, 1])
    pattern = all_to_all(by_token(exponent * FREQUENCIES.log(), tokens))
    attention = attention_by_token(pattern, tokens, everyone(tokens), D_VOCAB)
    assert all_equal(frequency_slope(attention, FREQUENCIES), exponent)


@given(exponents, seeds)
@several
def test_and_in_causal_attention_where_queries_see_the_same_counts(exponent: float, seed: int):
    counts = torch.tensor([0, 0, 0, 1, 1, 2, 3])
    tokens = torch.stack([counts[torch.randperm(LENGTH, generator=generator(seed + i))] for i in range(BATCH)])
    pattern = causal(by_token(exponent * FREQUENCIES.log(), tokens))
    attention = attention_by_token(pattern, tokens, only_last(tokens), D_VOCAB)
    assert all_equal(frequency_slope(attention, FREQUENCIES), exponent)


def test_attention_proportional_to_frequency_in_growing_contexts_has_a_slope_near_one():
    # Contexts differ here, which costs a few per cent: no tolerance of rounding, but far from 0 and from 2.
    tokens = torch.multinomial(FREQUENCIES.expand(64, -1), 128, replacement=True, generator=generator(0))
    late = (torch.arange(128) >= 32).expand(64, -1)
    for exponent in (1.0, -1.0):
        pattern = causal(by_token(exponent * FREQUENCIES.log(), tokens))
        slope = frequency_slope(attention_by_token(pattern, tokens, late, D_VOCAB), FREQUENCIES)
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
    slope = frequency_slope(attention_by_token(pattern, tokens, everyone(tokens), 3), frequencies)
    assert all_equal(slope, expected.item())


def test_a_token_without_attention_counts_with_the_least_lift():
    tokens = torch.tensor([[0, 0, 1, 1]])
    frequencies = torch.tensor([0.75, 0.25], dtype=torch.float64)
    pattern = all_to_all(torch.where(tokens == 0, 0.0, -math.inf).double().expand(1, HEADS, 4, 4))
    expected = (math.log(2) - math.log(LEAST_LIFT)) / math.log(3)
    slope = frequency_slope(attention_by_token(pattern, tokens, everyone(tokens), 2), frequencies)
    assert all_equal(slope, expected)


@given(seeds, st.integers(2, 9))
@several
def test_equally_frequent_tokens_have_no_slope(seed: int, d_vocab: int):
    mass, share = torch.rand(2, d_vocab, d_vocab, generator=generator(seed))
    assert frequency_slope(TokenAttention(mass, share), torch.full((d_vocab,), 1 / d_vocab)).isnan()


def test_tokens_that_do_not_occur_are_nan_and_leave_the_slope_alone():
    tokens = torch.tensor([[0, 1, 0, 1, 1]])
    pattern = causal(by_token(FREQUENCIES.log(), tokens))
    last = attention_by_token(pattern, tokens, only_last(tokens), D_VOCAB)
    assert attention_lift(last).isnan().tolist() == [[False, False, True, True]] * HEADS
    every = attention_by_token(pattern, tokens, everyone(tokens), D_VOCAB)
    by_query = focus_ratio_by_query(every, token_set(0))
    assert by_query.isnan().tolist() == [[False, False, True, True]] * HEADS
    assert all_equal(frequency_slope(last, FREQUENCIES), 1)


def test_a_token_of_no_frequency_leaves_the_slope_alone():
    tokens = torch.tensor([[0, 1, 2, 1, 3]])
    frequencies = torch.tensor([0.7, 0.2, 0.0, 0.1], dtype=torch.float64)
    weights = torch.tensor([0.7, 0.2, 5.0, 0.1], dtype=torch.float64)
    attention = attention_by_token(all_to_all(by_token(weights.log(), tokens)), tokens, everyone(tokens), D_VOCAB)
    assert all_equal(frequency_slope(attention, frequencies), 1)


def test_a_token_that_no_chosen_query_sees_is_nan():
    tokens, first = torch.tensor([[0, 1, 2]]), torch.tensor([[True, False, False]])
    attention = attention_by_token(causal(uniform_scores(1, 3)), tokens, first, 3)
    assert attention_lift(attention).isnan().tolist() == [[False, True, True]] * HEADS


def test_a_set_out_of_sight_has_no_ratio():
    tokens, first = torch.tensor([[0, 1, 2]]), torch.tensor([[True, False, False]])
    attention = attention_by_token(causal(uniform_scores(1, 3)), tokens, first, 3)
    every = torch.ones(3, dtype=torch.bool)
    assert focus_ratio(attention, token_set(2, d_vocab=3), every).isnan().all()
    assert focus_ratio(attention, token_set(0, d_vocab=3), ~token_set(0, d_vocab=3)).isnan().all()
    assert not focus_ratio(attention, token_set(0, d_vocab=3), every).isnan().any()


def slow_focus(pattern: Tensor, keys: Tensor, queries: Tensor, *, sees_later: bool) -> Tensor:
    """Focus ratio of each head, from sets of positions."""
    mass, share = torch.zeros(HEADS).double(), 0.0
    for b, q in queries.nonzero().tolist():
        visible = range(LENGTH) if sees_later else range(q + 1)
        members = [k for k in visible if keys[b, k]]
        share += len(members) / len(visible)
        for head in range(HEADS):
            mass[head] += sum(pattern[b, head, q, k].item() for k in members)
    return mass / share if share > 0 else torch.full_like(mass, NAN)


@masks
@given(seeds, token_sets, token_sets)
@several
def test_focus_is_a_slow_loop_over_positions(
    masked: Callable[[Tensor], Tensor], seed: int, keys: Tensor, asking: Tensor
):
    pattern, tokens, queries = masked(random_scores(seed)), random_tokens(seed), some(seed)
    attention = attention_by_token(pattern, tokens, queries, D_VOCAB)

    def slow(of: Tensor) -> Tensor:
        return slow_focus(pattern, keys[tokens], queries & of[tokens], sees_later=masked is all_to_all)

    torch.testing.assert_close(focus_ratio(attention, keys, asking), slow(asking), equal_nan=True)
    by_query = torch.stack([slow(token_set(token)) for token in range(D_VOCAB)], dim=1)
    torch.testing.assert_close(focus_ratio_by_query(attention, keys), by_query, equal_nan=True)


@masks
@given(seeds)
@several
def test_self_focus_and_lift_are_slow_loops(masked: Callable[[Tensor], Tensor], seed: int):
    pattern, tokens, queries = masked(random_scores(seed)), random_tokens(seed), some_and_the_last(seed)
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
    attention = attention_by_token(pattern, tokens, queries, D_VOCAB)
    torch.testing.assert_close(attention_lift(attention), received / if_uniform, equal_nan=True)
    torch.testing.assert_close(self_focus(attention), own / own_share)


def test_self_focus_of_attention_on_itself_alone():
    tokens = torch.tensor([[0, 1, 0, 2]])
    pattern = torch.eye(4, dtype=torch.float64).expand(1, HEADS, 4, 4)
    itself = attention_by_token(pattern, tokens, everyone(tokens), 3)
    assert all_equal(self_focus(itself), 4 / (1 + 1 / 2 + 2 / 3 + 1 / 4))
    to_first = torch.tensor([[1.0, 0, 0, 0]] * 4).double().expand(1, HEADS, 4, 4)
    elsewhere = attention_by_token(to_first, tokens, torch.tensor([[False, True, False, True]]), 3)
    assert all_equal(self_focus(elsewhere), 0)


def measures_of(attention: TokenAttention, keys: Tensor, asking: Tensor, frequencies: Tensor) -> list[Tensor]:
    return [
        focus_ratio(attention, keys, asking),
        self_focus(attention),
        frequency_slope(attention, frequencies),
        focus_ratio_by_query(attention, keys),
        attention_lift(attention),
    ]


@masks
@given(seeds, st.permutations(range(D_VOCAB)))
@several
def test_names_of_tokens_do_not_matter(masked: Callable[[Tensor], Tensor], seed: int, names: list[int]):
    pattern, tokens, queries = masked(random_scores(seed)), random_tokens(seed), some_and_the_last(seed)
    new, keys, asking = torch.tensor(names), token_set(0), token_set(1, 2, 3)

    def renamed(of_tokens: Tensor) -> Tensor:
        return torch.zeros_like(of_tokens).index_copy(0, new, of_tokens)

    original = attention_by_token(pattern, tokens, queries, D_VOCAB)
    other = attention_by_token(pattern, new[tokens], queries, D_VOCAB)
    torch.testing.assert_close(other.mass[:, new][:, :, new], original.mass)
    torch.testing.assert_close(other.share[new][:, new], original.share)
    expected = measures_of(original, keys, asking, FREQUENCIES)
    *of_heads, by_query, lift = measures_of(other, renamed(keys), renamed(asking), renamed(FREQUENCIES))
    for a, b in zip([*of_heads, by_query[:, new], lift[:, new]], expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def per_head_measures(pattern: Tensor, tokens: Tensor, queries: Tensor) -> list[Tensor]:
    attention = attention_by_token(pattern, tokens, queries, D_VOCAB)
    measured = measures_of(attention, token_set(0), token_set(1, 2, 3), FREQUENCIES)
    return [attention_entropy(pattern, queries), attention.mass, *measured]


@masks
@given(seeds, st.permutations(range(BATCH)))
@several
def test_the_order_of_sequences_does_not_matter_and_that_of_heads_is_kept(
    masked: Callable[[Tensor], Tensor], seed: int, order: list[int]
):
    pattern, tokens, queries = masked(random_scores(seed)), random_tokens(seed), some_and_the_last(seed)
    expected = per_head_measures(pattern, tokens, queries)
    assert not torch.allclose(expected[0][0], expected[0][1])
    for a, b in zip(per_head_measures(pattern[order], tokens[order], queries[order]), expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    for a, b in zip(per_head_measures(pattern.flip(1), tokens, queries), expected, strict=True):
        torch.testing.assert_close(a, b.flip(0), equal_nan=True)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 1)], ids=str)
def test_leading_axes_of_attention_are_kept(lead: tuple[int, ...]):
    mass = torch.rand(*lead, D_VOCAB, D_VOCAB, generator=generator(0), dtype=torch.float64)
    share = torch.rand(D_VOCAB, D_VOCAB, generator=generator(1), dtype=torch.float64)
    keys, asking = token_set(0, 3), token_set(1, 2)
    alone = [
        measures_of(TokenAttention(one, share), keys, asking, FREQUENCIES) for one in mass.reshape(-1, D_VOCAB, D_VOCAB)
    ]
    together = measures_of(TokenAttention(mass, share), keys, asking, FREQUENCIES)
    for values, expected in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(values, torch.stack(expected).reshape((*lead, *expected[0].shape)))


def test_one_look_ahead_makes_a_pattern_not_causal():
    pattern = causal(uniform_scores())
    assert is_causal(pattern)
    pattern[-1, -1, 0, 1] = 1e-3
    assert not is_causal(pattern)
    assert is_causal(pattern[:, :1])
    assert is_causal(pattern[:-1])


def test_entropy_of_the_last_query_alone():
    tokens, pattern = random_tokens(0), causal(random_scores(0))
    alone = attention_entropy(pattern[:, :, -1:], torch.ones(BATCH, 1, dtype=torch.bool))
    torch.testing.assert_close(alone, attention_entropy(pattern, only_last(tokens)))


@pytest.mark.parametrize("d_vocab", [2, 65], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_do_not_overflow_or_stall(dtype: torch.dtype, d_vocab: int):
    batch = 2400  # of which the sums would overflow in half precision
    tokens = (torch.arange(64) % 2).expand(batch, -1)
    pattern = (torch.ones(64, 64).tril() / torch.arange(1, 65)[:, None]).to(dtype).expand(batch, 1, -1, -1)
    queries = everyone(tokens)
    expected = sum(math.log(n) for n in range(1, 65)) / 64
    assert attention_entropy(pattern, queries).item() == pytest.approx(expected, rel=1e-2)
    assert mass_by_token(pattern, tokens, queries, d_vocab).sum().item() == pytest.approx(64 * batch, rel=1e-2)
    attention = attention_by_token(pattern, tokens, queries, d_vocab)
    assert attention.mass.dtype == attention.share.dtype == torch.float32
    frequencies = 1 / torch.arange(1, d_vocab + 1, dtype=torch.float64)
    keys, asking = token_set(0, d_vocab=d_vocab), torch.ones(d_vocab, dtype=torch.bool)
    ratio, own, slope, by_query, lift = measures_of(attention, keys, asking, frequencies)
    assert ratio.item() == pytest.approx(1, abs=1e-2)
    assert own.item() == pytest.approx(1, abs=1e-2)
    assert slope.item() == pytest.approx(0, abs=2e-2)
    assert by_query[0, :2].tolist() == pytest.approx([1, 1], abs=1e-2)
    assert lift[0, :2].tolist() == pytest.approx([1, 1], abs=1e-2)


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


def test_patterns_of_some_queries_only_are_refused():
    last = torch.full((1, 2, 1, 4), 0.25)
    tokens = torch.tensor([[0, 1, 0, 1]])
    with pytest.raises(InputError, match="the pattern has 1 queries and 4 keys, and must have as many"):
        attention_by_token(last, tokens, torch.ones(1, 1, dtype=torch.bool), 2)
