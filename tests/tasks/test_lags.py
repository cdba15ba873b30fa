import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_interp.config import InputError
from fd_interp.models.config import Minimal
from fd_interp.overrides import override
from fd_interp.tasks.high_order import HighOrderMarkov
from fd_interp.tasks.lag_regression import LagRegression
from fd_interp.tasks.lags import Lags, frobenius_orthogonal, spans
from fd_interp.tasks.task import Task
from fd_interp.training.run import Run

sizes = {"d_vocab": st.integers(3, 9), "seed": st.integers(0, 1000)}
some = settings(deadline=None, max_examples=25)


def products(features: torch.Tensor) -> torch.Tensor:
    """`<O_j, O_k>` for each pair."""
    return torch.einsum("jst,kst->jk", features, features)


@given(**sizes)
@some
def test_orthogonal_features_are_orthogonal_matrices_and_differ(d_vocab: int, seed: int):
    features = Lags(d_vocab=d_vocab, feature_seed=seed).feature_matrices
    identity = torch.eye(d_vocab, dtype=torch.float64)
    for feature in features:
        torch.testing.assert_close(feature @ feature.T, identity)
    off_diagonal = products(features) - d_vocab * torch.eye(3)
    assert off_diagonal.abs().max() > 1e-3
    assert off_diagonal.abs().max() < d_vocab * (1 - 1e-3)


@given(**sizes)
@some
def test_gram_schmidt_features_are_orthogonal_to_each_other(d_vocab: int, seed: int):
    task = Lags(d_vocab=d_vocab, feature_seed=seed, features="gram_schmidt")
    torch.testing.assert_close(products(task.feature_matrices), d_vocab * torch.eye(3, dtype=torch.float64))
    plain = Lags(d_vocab=d_vocab, feature_seed=seed).feature_matrices
    torch.testing.assert_close(task.feature_matrices[0], plain[0])
    last = task.feature_matrices[-1]
    assert (last @ last.T - torch.eye(d_vocab)).abs().max() > 1e-3  # the price: no orthogonal matrices any more


@given(**sizes)
@some
def test_shared_features_are_one_orthogonal_matrix(d_vocab: int, seed: int):
    features = Lags(d_vocab=d_vocab, feature_seed=seed, features="shared").feature_matrices
    assert features.shape == (3, d_vocab, d_vocab)
    torch.testing.assert_close(features[0] @ features[0].T, torch.eye(d_vocab, dtype=torch.float64))
    assert torch.equal(features[0], features[1])
    assert torch.equal(features[0], features[2])


@given(**sizes, rank=st.integers(1, 3))
@some
def test_low_rank_features_have_so_many_singular_values_of_one(d_vocab: int, seed: int, rank: int):
    features = Lags(d_vocab=d_vocab, feature_seed=seed, features="low_rank", rank=rank).feature_matrices
    expected = torch.tensor([1.0] * rank + [0.0] * (d_vocab - rank), dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.svdvals(features), expected.expand(3, -1), atol=1e-12, rtol=0)
    assert (features[0] - features[1]).abs().max() > 1e-3


@pytest.mark.parametrize("features", ["orthogonal", "gram_schmidt", "shared", "low_rank"])
def test_features_depend_on_their_seed_alone(features):
    def drawn(seed: int, **fields: Any) -> torch.Tensor:
        rank = 2 if features == "low_rank" else None
        return HighOrderMarkov(d_vocab=5, features=features, rank=rank, feature_seed=seed, **fields).feature_matrices

    assert torch.equal(drawn(3), drawn(3, scale=1.0, ratio=3.0, blocks=((1,), (4,), (2, 3)), data_seed=1, context=9))
    assert (drawn(3) - drawn(4)).abs().max() > 0.1


@given(st.integers(1, 6), st.integers(0, 1000))
@some
def test_frobenius_orthogonal_is_gram_schmidt(count: int, seed: int):
    matrices = np.random.default_rng(seed).normal(size=(count, 3, 2))
    expected: list[np.ndarray] = []
    for matrix in matrices:
        left = matrix - sum(np.sum(matrix * one) / np.sum(one * one) * one for one in expected)
        expected.append(left * np.linalg.norm(matrix) / np.linalg.norm(left))
    np.testing.assert_allclose(frobenius_orthogonal(matrices), expected, atol=1e-6)


def test_strengths_fall_by_the_ratio_down_to_the_scale():
    assert Lags(ratio=2.0, scale=3.0).strengths == (12.0, 6.0, 3.0)
    assert HighOrderMarkov(ratio=2.0, scale=3.0, temperature=0.1).strengths == pytest.approx((120, 60, 30))
    assert Lags(ratio=1.0, scale=8.0).strengths == (8.0, 8.0, 8.0)
    assert Lags(ratio=2.0, blocks=((1, 2),)).strengths == (4.0,)


def test_weights_are_one_unless_given():
    assert Lags(blocks=((1, 4), (2,))).weights == ((1.0, 1.0), (1.0,))
    assert Lags(blocks=((1, 4), (2,)), alphas=((0.7, 0.3), (1.0,))).weights == ((0.7, 0.3), (1.0,))


def test_lags_stand_in_the_order_of_importance_each_once():
    task = Lags(blocks=((4, 2), (2, 1), (5,)), overlapping=True)
    assert task.lags == (4, 2, 1, 5)
    assert [task.lags_of(known) for known in range(4)] == [(), (4, 2), (4, 2, 1), (4, 2, 1, 5)]
    assert (task.lookback, task.n_blocks, task.n_ctx) == (5, 3, 12)


def test_rungs_are_named_by_their_lags():
    names = [Lags(blocks=((3,), (2, 1))).rung_name(known) for known in range(3)]
    assert names == ["rung 0: no lag", "rung 1: lag 3", "rung 2: lags 3, 2, 1"]


def test_spans_are_neighbours_from_the_last_token_on():
    assert spans((2, 2, 2)) == ((1, 2), (3, 4), (5, 6))
    assert spans((2, 1, 4), farthest_first=True) == ((4, 5, 6, 7), (3,), (1, 2))
    assert Lags(blocks=spans((4, 4, 4))).lookback == 12


BLOCKS = {
    "empty block": ({"blocks": ((),)}, "blocks: each block is a list of lags, as in [[3], [1, 2]], not ((),)"),
    "no block": ({"blocks": ()}, "blocks: each block is a list of lags, as in [[3], [1, 2]], not ()"),
    "bare lags": ({"blocks": (3, 1)}, "blocks: each block is a list of lags, as in [[3], [1, 2]], not (3, 1)"),
    "lag 0": ({"blocks": ((1,), (0,))}, "blocks.1.0: Input should be greater than 0, not 0"),
    "repeated lag": ({"blocks": ((1, 1),)}, "blocks: a block is a set of different lags, not [1, 1]"),
    "shared lag": (
        {"blocks": ((1, 2), (2, 3))},
        "blocks [1, 2], [2, 3] share lags; make them disjoint, or set overlapping to true",
    ),
    "beyond the context": (
        {"blocks": ((3,), (9,)), "context": 8},
        "blocks: lag 9 reaches beyond the context of 8 tokens; take a context of 9 or more",
    ),
    "alphas of one block": (
        {"alphas": ((1.0,),)},
        "alphas must have one weight for each lag of [3], [1], [2], not [1.0]",
    ),
    "alphas too many": (
        {"alphas": ((1.0,), (0.7, 0.3), (1.0,))},
        "alphas must have one weight for each lag of [3], [1], [2], not [1.0], [0.7, 0.3], [1.0]",
    ),
    "alphas negative": (
        {"alphas": ((1.0,), (-1.0,), (1.0,))},
        "alphas.1.0: Input should be greater than 0, not -1.0",
    ),
    "ratio": ({"ratio": 0.5}, "ratio: Input should be greater than or equal to 1, not 0.5"),
    "scale": ({"scale": 0.0}, "scale: Input should be greater than 0, not 0.0"),
    "one token": ({"d_vocab": 1}, "d_vocab: Input should be greater than or equal to 2, not 1"),
    "misspelt": ({"block": ((1,),)}, "has no field 'block', did you mean blocks?"),
}
FEATURES = {
    "rank of full features": ({"rank": 2}, "rank is for low_rank features; with orthogonal features leave it out"),
    "no rank": ({"features": "low_rank"}, "rank must be from 1 to d_vocab, 16, for low_rank features, not None"),
    "rank too large": (
        {"features": "low_rank", "rank": 5, "d_vocab": 4},
        "rank must be from 1 to d_vocab, 4, for low_rank features, not 5",
    ),
    "rank 0": ({"features": "low_rank", "rank": 0}, "rank: Input should be greater than 0, not 0"),
    "too many": (
        {"d_vocab": 2, "blocks": ((1,), (2,), (3,), (4,), (5,)), "features": "gram_schmidt"},
        "blocks: there are at most 4 gram_schmidt features of 2 tokens, not 5; take fewer blocks or more tokens",
    ),
    "unknown": ({"features": "random"}, "features: Input should be 'orthogonal', 'gram_schmidt', 'shared' or"),
}
REGRESSION = {
    "other features": ({"features": "orthogonal"}, "features: Input should be 'gram_schmidt', not 'orthogonal'"),
    "rank": ({"rank": 2}, "rank is for low_rank features; with gram_schmidt features leave it out"),
    "too many": (
        {"d_vocab": 2},
        "blocks: there are at most 2 gram_schmidt features of 2 tokens, not 3; take fewer blocks or more tokens",
    ),
}
CHAIN = {
    "temperature": ({"temperature": 0.0}, "temperature: Input should be greater than 0, not 0.0"),
    "burn_in": ({"burn_in": -1}, "burn_in: Input should be greater than or equal to 0, not -1"),
    "no sequences": ({"sequences": 0}, "sequences: Input should be greater than 0, not 0"),
}
BAD = [
    pytest.param(make, *case, id=f"{make.__name__} {name}")
    for make, cases in ((HighOrderMarkov, BLOCKS | FEATURES | CHAIN), (LagRegression, BLOCKS | REGRESSION))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("make", "fields", "message"), BAD)
def test_bad_input_is_named_in_one_sentence(make: type[Lags], fields: dict, message: str):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        make(**fields)
    assert str(caught.value).count("Input should") <= 1
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="task." + str(make.model_fields["kind"].default)):
        Run(task={"kind": make.model_fields["kind"].default, **fields}, model=Minimal())  # pyright: ignore


@pytest.mark.parametrize("limit", [{"d_vocab": 2, "blocks": spans((1, 1, 1, 1)), "features": "gram_schmidt"}])
def test_as_many_orthogonal_features_as_there_are(limit: dict):
    torch.testing.assert_close(products(Lags(**limit).feature_matrices), 2 * torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("known", [-1, 4])
def test_a_predictor_cannot_know_more_blocks_than_there_are(known: int):
    tokens = torch.zeros(1, 12, dtype=torch.long)
    chain, regression = HighOrderMarkov(), LagRegression()
    for ask in (chain.teacher, chain.rung, chain.scores, regression.rung, regression.scores):
        with pytest.raises(InputError, match=f"a predictor can know 0 to 3 blocks, not {known}"):
            ask(tokens, known)
    for ask in (chain.rung_name, chain.lags_of):
        with pytest.raises(InputError, match=f"a predictor can know 0 to 3 blocks, not {known}"):
            ask(known)


TASKS = [
    HighOrderMarkov(),
    HighOrderMarkov(blocks=spans((2, 2, 2)), d_vocab=50, temperature=0.1, burn_in=0, sequences=300, data_seed=2),
    HighOrderMarkov(
        blocks=((1, 2), (2, 3)), overlapping=True, alphas=((0.7, 0.3), (0.5, 0.5)), features="gram_schmidt"
    ),
    HighOrderMarkov(features="low_rank", rank=3, feature_seed=4),
    LagRegression(),
    LagRegression(d_vocab=8, blocks=((2,), (1, 3)), alphas=((1.0,), (0.7, 0.3)), context=4),
]


@pytest.mark.parametrize("task", TASKS)
def test_a_run_survives_json(task: HighOrderMarkov | LagRegression):
    run = Run(task=task, model=Minimal())
    again = Run(**json.loads(run.model_dump_json()))
    assert again == run
    assert hash(again.task) == hash(task)
    assert isinstance(again.task, type(task))
    assert torch.equal(again.task.matrices, task.matrices)


@pytest.mark.parametrize("task", TASKS)
def test_is_a_task_with_its_sizes_and_a_name_for_each_token(task: HighOrderMarkov | LagRegression):
    assert isinstance(task, Task)
    assert task.n_ctx == task.context
    assert task.token_strings() == [str(token) for token in range(task.d_vocab)]


CHANGES = {
    "--task.blocks [[3],[1]]": {"blocks": ((3,), (1,))},
    "--task.blocks [[3],[1],[2]]": {"blocks": ((3,), (1,), (2,))},
    "--task.blocks=[[3],[1,2]]": {"blocks": ((3,), (1, 2))},
    "--task.blocks [3] [1]": {"blocks": ((3,), (1,))},
    "--task.blocks [3,4] [1] --task.alphas [0.7,0.3] [1]": {"blocks": ((3, 4), (1,)), "alphas": ((0.7, 0.3), (1.0,))},
    "--task.blocks [[1,2],[2,3]] --task.overlapping true": {"blocks": ((1, 2), (2, 3)), "overlapping": True},
    "--task.sequences 100": {"sequences": 100},
    "--task.sequences 100 --task.sequences none": {},
    "--task.rank 4 --task.features low_rank": {"features": "low_rank", "rank": 4},
    "--task.ratio 1 --task.scale 8": {"ratio": 1.0, "scale": 8.0},
    "--task.temperature 0.1 --task.burn-in 0": {"temperature": 0.1, "burn_in": 0},
}


@pytest.mark.parametrize(("arguments", "fields"), CHANGES.items(), ids=CHANGES)
def test_the_command_line_changes_a_task(arguments: str, fields: dict):
    run = Run(task=HighOrderMarkov(), model=Minimal())
    assert override(run, arguments.split(" ")) == Run(task=HighOrderMarkov(**fields), model=Minimal())


def test_the_command_line_changes_to_the_regression():
    run = Run(task=HighOrderMarkov(ratio=3.0), model=Minimal())
    assert override(run, ["--task.kind", "lag_regression"]).task == LagRegression()


@pytest.mark.parametrize("typed", ["3 1 2", "3", "[3]", "[3,1]", "3,1,2", "(3,)", "none"])
def test_lags_that_are_in_no_block_are_refused_on_the_command_line(typed: str):
    run = Run(task=HighOrderMarkov(), model=Minimal())
    with pytest.raises(InputError, match=re.escape("blocks: each block is a list of lags, as in [[3], [1, 2]], not ")):
        override(run, ["--task.blocks", *typed.split(" ")])
