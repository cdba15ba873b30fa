import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.measures.lags import LAST_QUERY, attention_by_block, attention_by_lag, block_mass, full_context
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights
from fd_interp.models.config import Transformer

BATCH, HEADS, LENGTH = 3, 2, 8
EVERY_LAG = range(1, LENGTH + 1)

seeds = st.integers(0, 10_000)
several = settings(deadline=None, max_examples=40)
lag_lists = st.lists(st.integers(1, LENGTH), min_size=1, unique=True)
block_lists = st.lists(st.lists(st.integers(1, LENGTH), min_size=1, max_size=4), min_size=1, max_size=4)


def random_pattern(seed: int, *, causal: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(BATCH, HEADS, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    return (scores + torch.full((LENGTH, LENGTH), -math.inf).triu(1) if causal else scores).softmax(-1)


def head_on_lag(lag: int) -> Tensor:
    """All attention of each query on one lag, and on the first key where that is out of sight."""
    key = (torch.arange(LENGTH) + 1 - lag).clamp(min=0)
    return torch.eye(LENGTH)[key].expand(1, 1, -1, -1)


def slow_mean(pattern: Tensor, lags: Sequence[int], queries: Sequence[int]) -> Tensor:
    by_lag = torch.zeros(pattern.shape[1], len(lags), dtype=pattern.dtype)
    for b in range(len(pattern)):
        for q in queries:
            for i, lag in enumerate(lags):
                by_lag[:, i] += pattern[b, :, q, q + 1 - lag]
    return by_lag / (len(pattern) * len(queries))


def test_by_hand():
    pattern = torch.tensor([[[[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.125, 0.375]]]])
    # Query 2, which predicts token 3, sees its own token 2 at lag 1.
    assert attention_by_lag(pattern, [1, 2, 3], LAST_QUERY).tolist() == [[0.375, 0.125, 0.5]]
    assert attention_by_lag(pattern, [1, 2]).tolist() == [[(0.75 + 0.375) / 2, (0.25 + 0.125) / 2]]
    assert attention_by_lag(pattern, [2, 1]).tolist() == [[(0.25 + 0.125) / 2, (0.75 + 0.375) / 2]]
    assert attention_by_lag(pattern, [1]).item() == pytest.approx((1 + 0.75 + 0.375) / 3)
    assert attention_by_lag(pattern, [1, 2], slice(1, 2)).tolist() == [[0.75, 0.25]]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all-to-all"])
@given(seeds, lag_lists, st.integers(0, LENGTH - 1), st.sampled_from([1, 2, 3, -1, -2]))
@several
def test_the_mean_is_that_of_slow_loops(causal: bool, seed: int, lags: list[int], start: int, step: int):
    pattern, first = random_pattern(seed, causal=causal), max(lags) - 1
    torch.testing.assert_close(attention_by_lag(pattern, lags), slow_mean(pattern, lags, range(first, LENGTH)))
    late = max(first, start)
    chosen = slice(late, None, step) if step > 0 else slice(None, late - 1 if late else None, step)
    expected = slow_mean(pattern, lags, range(LENGTH)[chosen])
    torch.testing.assert_close(attention_by_lag(pattern, lags, chosen), expected)


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_a_head_on_one_lag_has_all_its_attention_there_and_none_elsewhere(lag: int):
    measured = attention_by_lag(head_on_lag(lag), [1, 2, 3, 4, 5])
    assert measured.tolist() == [[float(other == lag) for other in range(1, 6)]]


def test_a_previous_token_head_is_on_lag_two():
    # Lag 1 is the query's own token, the most recent before the predicted one; the token before it is at lag 2.
    previous = torch.eye(LENGTH).roll(-1, dims=-1).tril()
    previous[0, 0] = 1
    assert attention_by_lag(previous.expand(1, 1, -1, -1), [1, 2, 3]).tolist() == [[0, 1, 0]]


@given(seeds)
@several
def test_all_lags_of_a_causal_query_add_up_to_one(seed: int):
    every = attention_by_lag(random_pattern(seed), EVERY_LAG)
    torch.testing.assert_close(every.sum(-1), torch.ones(HEADS).double())


def test_lags_miss_what_a_head_puts_on_later_keys():
    pattern = random_pattern(0, causal=False)
    later = pattern[:, :, 2, 3:].sum(-1).mean(0)
    assert (later > 0).all()
    torch.testing.assert_close(attention_by_lag(pattern, [1, 2, 3], slice(2, 3)).sum(-1), 1 - later)


def test_uniform_causal_attention_is_the_mean_of_one_over_the_context():
    uniform = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril()
    uniform = (uniform / uniform.sum(-1, keepdim=True)).expand(BATCH, HEADS, -1, -1)
    expected = sum(1 / n for n in range(3, LENGTH + 1)) / (LENGTH - 2)
    torch.testing.assert_close(attention_by_lag(uniform, [3, 1]), torch.full((HEADS, 2), expected).double())
    torch.testing.assert_close(attention_by_lag(uniform, [3], LAST_QUERY), torch.full((HEADS, 1), 1 / LENGTH).double())


@given(seeds, lag_lists, st.permutations(range(HEADS)), st.permutations(range(BATCH)))
@several
def test_heads_keep_their_place_and_sequences_have_none(seed: int, lags: list[int], heads: list[int], batch: list[int]):
    pattern = random_pattern(seed)
    torch.testing.assert_close(attention_by_lag(pattern[batch][:, heads], lags), attention_by_lag(pattern, lags)[heads])


def test_full_context_begins_with_the_first_query_that_sees_every_lag():
    assert full_context([3, 1]) == slice(2, None)
    assert full_context([1]) == slice(0, None)
    pattern = random_pattern(0)
    assert torch.equal(attention_by_lag(pattern, [3, 1], full_context([3, 1])), attention_by_lag(pattern, [3, 1]))
    with pytest.raises(InputError, match="query 1 cannot see lag 3: the first that can is query 2"):
        attention_by_lag(pattern, [3, 1], slice(1, None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(dtype: torch.dtype):
    # Their sum is 2^16, which half precision cannot hold.
    halves = torch.full((2**15, 1, 4, 4), 0.5, dtype=dtype)
    measured = attention_by_lag(halves, [1])
    assert measured.dtype == torch.float32
    assert measured.item() == 0.5
    assert block_mass(measured.to(dtype), [1], [[1]]).dtype == torch.float32


def test_double_precision_is_kept():
    assert attention_by_block(random_pattern(0), [[1], [2, 3]]).dtype == torch.float64


@pytest.mark.parametrize(
    ("lags", "queries", "message"),
    [
        ([], None, "there must be at least one lag"),
        ([2, 0], None, "lag 0 is not in the past: the first is lag 1, the query's own token"),
        ([-1], None, "lag -1 is not in the past"),
        ([3, 1, 3], None, "lag 3 is repeated, and each must be given once"),
        ([9], None, "lag 9 reaches beyond the context of 8 positions"),
        ([2], slice(0, 3), "query 0 cannot see lag 2: the first that can is query 1"),
        ([8], slice(-2, None), "query 6 cannot see lag 8"),
        ([8, 1], slice(None, None, -1), "query 0 cannot see lag 8"),
        ([1], slice(4, 4), r"slice\(4, 4, None\) chooses none of the 8 queries"),
        ([1], slice(8, None), "chooses none of the 8 queries"),
    ],
)
def test_lags_and_queries_that_do_not_fit_are_refused(lags: list[int], queries: slice | None, message: str):
    with pytest.raises(InputError, match=message):
        attention_by_lag(random_pattern(0), lags, queries)


def test_the_longest_lag_is_the_length_of_the_context():
    pattern = random_pattern(0)
    assert torch.equal(attention_by_lag(pattern, [LENGTH])[:, 0], pattern[:, :, -1, 0].mean(0))


def test_patterns_of_some_queries_only_are_refused():
    with pytest.raises(InputError, match="the pattern has 1 queries and 8 keys, and must have as many of each"):
        attention_by_lag(random_pattern(0)[:, :, -1:], [1])


def test_block_masses_by_hand():
    by_lag = torch.tensor([[0.5, 0.25, 0.125], [0.0, 0.0, 1.0]])
    disjoint = block_mass(by_lag, [3, 1, 2], [[1, 2], [3]])
    assert disjoint.tolist() == [[0.375, 0.5], [1.0, 0.0]]
    overlapping = block_mass(by_lag, [3, 1, 2], [[1, 2], [2, 3], [2, 2]])
    assert overlapping.tolist() == [[0.375, 0.625, 0.125], [1.0, 1.0, 1.0]]
    assert block_mass(by_lag[0], [3, 1, 2], [[1, 2], [3]]).tolist() == [0.375, 0.5]


def test_a_block_with_an_unknown_lag_is_refused():
    with pytest.raises(InputError, match=r"a block has lag 4, which is not among the lags \[3, 1\]"):
        block_mass(torch.ones(2, 2), [3, 1], [[1], [3, 4]])


@given(seeds, block_lists)
@several
def test_blocks_are_sums_over_their_lags_for_any_choice_of_queries(seed: int, blocks: list[list[int]]):
    pattern = random_pattern(seed)
    longest = max(lag for block in blocks for lag in block)
    for queries in (None, LAST_QUERY):
        measured = attention_by_block(pattern, blocks, queries)
        seen = range(longest - 1, LENGTH) if queries is None else [LENGTH - 1]
        for k, block in enumerate(blocks):
            torch.testing.assert_close(measured[:, k], slow_mean(pattern, sorted(set(block)), seen).sum(-1))


@given(seeds, st.permutations(EVERY_LAG), st.lists(st.integers(0, LENGTH), max_size=3))
@several
def test_a_partition_of_the_lags_has_all_the_attention(seed: int, lags: list[int], cuts: list[int]):
    ends = sorted({0, LENGTH, *cuts})
    blocks = [lags[start:end] for start, end in pairwise(ends)]
    masses = attention_by_block(random_pattern(seed), blocks)
    torch.testing.assert_close(masses.sum(-1), torch.ones(HEADS).double())


def test_leading_axes_of_block_mass_are_kept():
    by_lag = torch.rand(5, 4, 3, 6, generator=torch.Generator().manual_seed(0))
    masses = block_mass(by_lag, range(1, 7), [[1, 6], [2]])
    assert masses.shape == (5, 4, 3, 2)
    torch.testing.assert_close(masses[2, 1], block_mass(by_lag[2, 1], range(1, 7), [[1, 6], [2]]))


def test_patterns_of_transformer_lens_fit():
    config, vocab = Transformer(n_layers=2, n_heads=3, d_model=8, d_head=4, std=0.5), 7
    model = build(config, vocab, LENGTH)
    lens.load_weights(model, initial_weights(config, lens.weights(model), torch.Generator().manual_seed(0)))
    tokens = torch.randint(vocab, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    _, activations = lens.run_and_cache(model, tokens, "pattern")
    pattern = activations["blocks.1.attn.hook_pattern"]
    torch.testing.assert_close(attention_by_lag(pattern, EVERY_LAG).sum(-1), torch.ones(3))
    assert attention_by_block(pattern, [[3], [1, 2]]).shape == (3, 2)


def test_a_head_made_to_look_two_back_in_transformer_lens_is_on_lag_three():
    # Positions alone decide: queries carry their position, and keys the one that they are to be seen from.
    config, vocab = Transformer(n_heads=1, d_model=LENGTH, d_head=LENGTH, attn_scale=1.0), 5
    model = build(config, vocab, LENGTH)
    weights = {name: torch.zeros_like(weight) for name, weight in lens.weights(model).items()}
    weights["pos_embed.W_pos"] = torch.eye(LENGTH)
    weights["blocks.0.attn.W_Q"] = 100 * torch.eye(LENGTH)[None]
    weights["blocks.0.attn.W_K"] = torch.eye(LENGTH).roll(2, dims=-1)[None]  # the key at position p answers query p + 2
    lens.load_weights(model, weights)
    _, activations = lens.run_and_cache(model, torch.zeros(1, LENGTH, dtype=torch.long), "pattern")
    pattern = activations["blocks.0.attn.hook_pattern"]
    torch.testing.assert_close(attention_by_lag(pattern, [1, 2, 3, 4]), torch.tensor([[0.0, 0, 1, 0]]))
