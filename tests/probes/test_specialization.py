"""Probes of heads that specialise, and of the rung that a model stands on, on weights set by hand."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.measures import lags, specialization
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights
from fd_interp.models.config import Minimal, Transformer
from fd_interp.observation import Probe, Trace, observe
from fd_interp.probes.prediction import excess_loss, held_out_loss
from fd_interp.probes.rungs import excess_over_rungs, teacher_kl
from fd_interp.probes.specialization import block_name, head_specialization, skip_alignment, value_alignment
from fd_interp.reproduction import write_trace
from fd_interp.tasks.high_order import HighOrderMarkov
from fd_interp.tasks.lag_regression import LagRegression
from fd_interp.training.series import Inputs, Series, Snapshot

CHAIN = HighOrderMarkov(d_vocab=5, features="gram_schmidt", ratio=2.0, scale=1.5, context=8)
PAIRS = HighOrderMarkov(d_vocab=4, features="gram_schmidt", blocks=((1, 2), (4, 3)), scale=1.0, context=7)
REGRESSION = LagRegression(d_vocab=5, context=6)
SHARP = 1000.0
"""Scores that leave a softmax nothing to hesitate about, even for the last bit."""
Task = HighOrderMarkov | LagRegression


def where_all_is_seen(task: Task) -> slice:
    return slice(task.lookback - 1, None)


def looking_at(n_ctx: int, *heads: Sequence[int]) -> Tensor:
    """W_Q of heads that divide their attention evenly between some lags, as far as a query sees them."""
    W_Q = torch.zeros(len(heads), n_ctx, n_ctx, dtype=torch.float64)
    for head, of_head in enumerate(heads):
        for lag in of_head:
            for query in range(lag - 1, n_ctx):
                W_Q[head, query, query + 1 - lag] = SHARP
    return W_Q


def minimal(task: Task, *layers: tuple[Tensor, Tensor], n: int = 64) -> Series:
    """One snapshot of the minimal model with these W_Q and W_V in its layers, in double precision."""
    config = Minimal(n_layers=len(layers), n_heads=len(layers[0][0]), attn_scale=1.0)
    weights = {
        f"blocks.{number}.attn.{name}": weight
        for number, layer in enumerate(layers)
        for name, weight in zip(("W_Q", "W_V"), layer, strict=True)
    }

    def model() -> lens.Model:
        return build(config, task.d_vocab, task.n_ctx, torch.float64)

    return by_hand(task, weights, model, n)


def by_hand(task: Task, weights: lens.Weights, model, n: int = 64) -> Series:
    batch = task.held_out(n, torch.Generator().manual_seed(0))
    inputs = Inputs(batch, task.token_frequencies(), task.token_strings())
    return Series("by hand", (Snapshot(0, lambda: weights, model),), model, lambda: inputs)


def attending(n_ctx: int, *heads: Sequence[int]) -> Series:
    """A model of which only the attention matters."""
    task = HighOrderMarkov(d_vocab=4, context=n_ctx)
    return minimal(task, (looking_at(n_ctx, *heads), torch.zeros(len(heads), 4, 4, dtype=torch.float64)))


def measured(series: Series, *probes: Probe) -> Trace:
    """What a lone snapshot has, without its layer if there is one."""
    trace = observe(series, probes).isel(step=0)
    return trace.squeeze("layer") if trace.sizes.get("layer") == 1 else trace


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ((3,), "lag 3"),
        ((4, 5, 6), "lags 4-6"),
        ((2, 1), "lags 1-2"),
        ((1, 3), "lags 1, 3"),
        ((7, 2, 1), "lags 7, 2, 1"),
    ],
)
def test_a_block_has_a_name(block: tuple[int, ...], name: str) -> None:
    assert block_name(block) == name


def test_heads_with_a_block_each_cooperate() -> None:
    trace = measured(attending(8, [1], [3], [2]), head_specialization([[3], [1], [2]]))
    np.testing.assert_allclose(trace.block_mass, [[0, 1, 0], [1, 0, 0], [0, 0, 1]], atol=1e-12)
    np.testing.assert_array_equal(trace.block_mass_last, trace.block_mass)
    assert trace.competition.item() == pytest.approx(0)
    assert trace.cooperation.item() == pytest.approx(1)
    assert trace.redundancy.item() == 0
    assert trace.participation_rank.item() == pytest.approx(3)


def test_heads_on_one_block_compete() -> None:
    trace = measured(attending(8, [3], [3], [3]), head_specialization([[3], [1], [2]]))
    np.testing.assert_allclose(trace.block_mass, [[1, 0, 0]] * 3, atol=1e-12)
    assert trace.competition.item() == pytest.approx(1)
    assert trace.cooperation.item() == pytest.approx(1 / 3)
    assert trace.redundancy.item() == 1
    assert trace.participation_rank.item() == pytest.approx(1)


def test_attention_on_a_block_is_that_on_all_its_lags() -> None:
    trace = measured(attending(8, [1, 2, 5, 6], [2]), head_specialization([[1, 2], [6], [2, 6]]))
    np.testing.assert_allclose(trace.block_mass, [[0.5, 0.25, 0.5], [1, 0, 1]], atol=1e-12)
    assert trace.block_name.values.tolist() == ["lags 1-2", "lag 6", "lags 2, 6"]


def test_attention_is_averaged_over_the_queries_that_are_asked_for() -> None:
    """Of eight queries the first six look at lag 1 and the last two at lag 2."""
    W_Q = torch.cat([looking_at(8, [1])[:, :6], looking_at(8, [2])[:, 6:]], dim=1)
    task = HighOrderMarkov(d_vocab=4, context=8)
    series = minimal(task, (W_Q, torch.zeros(1, 4, 4, dtype=torch.float64)))
    for queries, share in ((None, 2 / 7), (slice(4, None), 0.5), (slice(-1, None), 1), (slice(2, 6), 0)):
        trace = measured(series, head_specialization([[1], [2]], queries))
        np.testing.assert_allclose(trace.block_mass, [[1 - share, share]], atol=1e-12, err_msg=str(queries))
        np.testing.assert_allclose(trace.block_mass_last, [[0, 1]], atol=1e-12)
        assert np.isnan(trace.redundancy)  # one head has none to be spared for


def test_uniform_attention_gives_each_block_its_share() -> None:
    trace = measured(attending(4, [], []), head_specialization([[1], [2], [3, 4]], slice(-1, None)))
    np.testing.assert_allclose(trace.block_mass, [[0.25, 0.25, 0.5]] * 2)
    assert trace.competition.item() == pytest.approx(0.5)


def test_layers_are_measured_apart() -> None:
    task = HighOrderMarkov(d_vocab=4, context=8)
    W_V = torch.randn(2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    series = minimal(task, (looking_at(8, [3], [3]), W_V), (looking_at(8, [1], [3]), W_V))
    trace = measured(series, head_specialization(task.blocks))
    assert trace.block_mass.dims == ("layer", "head", "block")
    np.testing.assert_allclose(trace.block_mass, [[[1, 0, 0], [1, 0, 0]], [[0, 1, 0], [1, 0, 0]]], atol=1e-12)
    np.testing.assert_allclose(trace.competition, [1, 0], atol=1e-12)
    np.testing.assert_allclose(trace.cooperation, [0.5, 1])
    np.testing.assert_array_equal(trace.redundancy, [1, 0])
    np.testing.assert_allclose(trace.participation_rank, [1, 2])


DEEP = Transformer(n_layers=3, n_heads=2, d_model=6, d_head=4, d_mlp=5, std=0.7)


def drawn(config: Transformer, task: Task, seed: int = 0) -> Series:
    """A transformer with random weights."""

    def model() -> lens.Model:
        return build(config, task.d_vocab, task.n_ctx)

    weights = initial_weights(config, lens.weights(model()), torch.Generator().manual_seed(seed))
    return by_hand(task, weights, model)


def test_any_model_can_be_asked_about_any_lags() -> None:
    series = drawn(DEEP, CHAIN)
    trace = measured(series, head_specialization([[2, 3], [8], [1]]))
    patterns = series[0].cache(["pattern"], series.inputs.held_out.tokens)
    for layer in range(3):
        pattern = patterns[f"blocks.{layer}.attn.hook_pattern"]
        mass = lags.attention_by_block(pattern, [[2, 3], [8], [1]])
        np.testing.assert_allclose(trace.block_mass.sel(layer=layer), mass.detach(), rtol=1e-5)
        last = lags.attention_by_block(pattern, [[2, 3], [8], [1]], lags.LAST_QUERY)
        np.testing.assert_allclose(trace.block_mass_last.sel(layer=layer), last.detach(), rtol=1e-5)
        by_lag = lags.attention_by_lag(pattern, [1, 2, 3, 8])
        rank = specialization.participation_rank(by_lag).item()
        assert trace.participation_rank.sel(layer=layer).item() == pytest.approx(rank, rel=1e-5)
    assert len(np.unique(trace.block_mass)) == trace.block_mass.size


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ([[0]], "lag 0 is not in the past"),
        ([[1], [9]], "lag 9 reaches beyond the context of 8 positions"),
        ([], "there must be at least one lag"),
    ],
)
def test_lags_that_are_not_there_are_refused(blocks: list[list[int]], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        measured(attending(8, [1]), head_specialization(blocks))


def test_names_of_blocks_are_kept_with_the_trace(tmp_path: Path) -> None:
    trace = observe(attending(8, [1], [3]), [head_specialization([[3], [1, 2]])])
    assert trace.block_name.dims == ("block",)
    write_trace(trace, tmp_path / "trace.nc")
    again = xr.load_dataset(tmp_path / "trace.nc")
    assert again.block_name.values.tolist() == ["lag 3", "lags 1-2"]
    assert again.block.values.tolist() == [0, 1]


def the_law(task: Task) -> Series:
    """A head for each block that divides its attention evenly, and writes what the law says times their number."""
    W_V = torch.stack([len(block) * A for block, A in zip(task.blocks, task.matrices, strict=True)])
    return minimal(task, (looking_at(task.n_ctx, *task.blocks), W_V))


@pytest.mark.parametrize("task", [CHAIN, PAIRS], ids=["lags", "blocks of two"])
def test_a_model_that_is_the_law_has_learned_all_of_each_block_and_is_on_the_last_rung(task: HighOrderMarkov) -> None:
    queries = where_all_is_seen(task)
    probes = [
        held_out_loss(queries),
        excess_loss(task, queries),
        excess_over_rungs(task, queries),
        teacher_kl(task, queries),
        value_alignment(task, queries),
    ]
    series = the_law(task)
    trace = measured(series, *probes)
    tokens, targets = series.inputs.held_out
    bayes = -task.bayes(tokens)[:, queries].gather(-1, targets[:, queries, None]).mean().item()
    assert trace.loss.item() == pytest.approx(bayes)
    assert trace.excess_over_best.item() == pytest.approx(0, abs=1e-9)
    assert trace.excess_over_rung[-1].item() == pytest.approx(0, abs=1e-9)
    assert trace.teacher_kl[-1].item() == pytest.approx(0, abs=1e-9)
    assert (trace.teacher_kl[:-1] > 0.05).all()
    np.testing.assert_allclose(trace.effective_coefficient, 1)
    sizes = np.array([len(block) for block in task.blocks])
    np.testing.assert_allclose(trace.value_coefficient, np.diag(sizes * task.strengths), atol=1e-9)
    np.testing.assert_allclose(trace.value_cosine, np.eye(task.n_blocks), atol=1e-9)
    np.testing.assert_allclose(trace.cooperative_offset, 0, atol=1e-9)


def test_half_a_feature_is_half_learned_and_what_cancels_is_an_offset() -> None:
    W_V = torch.stack([CHAIN.matrices[0], 0.5 * CHAIN.matrices[1], -0.25 * CHAIN.feature_matrices[1]])
    trace = measured(minimal(CHAIN, (looking_at(8, [3], [1], [2]), W_V)), value_alignment(CHAIN))
    np.testing.assert_allclose(trace.effective_coefficient, [1, 0.5, 0], atol=1e-9)
    np.testing.assert_allclose(trace.cooperative_offset, [0, -0.25, 0], atol=1e-9)
    np.testing.assert_allclose(trace.value_cosine.isel(head=2), [0, -1, 0], atol=1e-9)
    assert trace.value_coefficient.dims == ("head", "block")


def test_what_the_owner_of_a_block_holds_is_no_offset() -> None:
    """The first head looks at the second block, with the wrong sign; the others hold a little of its feature."""
    W_V = torch.stack([-CHAIN.matrices[1], 0.5 * CHAIN.feature_matrices[1], 0.25 * CHAIN.feature_matrices[1]])
    trace = measured(minimal(CHAIN, (looking_at(8, [1], [3], [2]), W_V)), value_alignment(CHAIN))
    np.testing.assert_allclose(trace.cooperative_offset, [0, 0.25, 0], atol=1e-9)
    np.testing.assert_allclose(trace.effective_coefficient, [0, -1, 0], atol=1e-9)


def test_what_is_learned_counts_where_it_is_written() -> None:
    """The right values behind a pattern that looks elsewhere have learned nothing."""
    blind = minimal(CHAIN, (looking_at(8, [1], [2], [3]), CHAIN.matrices))
    np.testing.assert_allclose(measured(blind, value_alignment(CHAIN)).effective_coefficient, 0, atol=1e-9)
    late = torch.cat([looking_at(8, [1])[:, :5], looking_at(8, [3])[:, 5:]], dim=1)  # at three of the six queries
    series = minimal(CHAIN, (late, CHAIN.matrices[:1]))
    assert measured(series, value_alignment(CHAIN)).effective_coefficient[0].item() == pytest.approx(0.5)
    last = value_alignment(CHAIN, slice(-1, None))
    assert measured(series, last).effective_coefficient[0].item() == pytest.approx(1)


def test_values_of_a_transformer_are_what_its_heads_add_to_the_logits() -> None:
    series = drawn(DEEP.model_copy(update={"n_layers": 1, "d_mlp": None}), CHAIN)
    trace = measured(series, value_alignment(CHAIN))
    weights = series[0].weights()
    for head in range(2):
        W_V, W_O = (weights[f"blocks.0.attn.{name}"][head] for name in ("W_V", "W_O"))
        OV = weights["embed.W_E"] @ W_V @ W_O @ weights["unembed.W_U"]
        products = torch.einsum("st,bst->b", OV.double(), CHAIN.feature_matrices)
        np.testing.assert_allclose(trace.value_coefficient.sel(head=head), products / 5, rtol=1e-4)  # |O|^2 is d_vocab
        np.testing.assert_allclose(trace.value_cosine.sel(head=head), products / OV.norm() / 5**0.5, rtol=1e-4)


@pytest.mark.parametrize("block", range(3))
def test_the_skip_connection_holds_what_is_set_in_it(block: int) -> None:
    config = Transformer(n_heads=1, d_model=7, d_head=2)

    def model() -> lens.Model:
        return build(config, 5, 8)

    rotation = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(0)))[0]
    weights = lens.weights(model())
    weights["embed.W_E"] = rotation[:5].contiguous()
    weights["unembed.W_U"] = -3 * rotation[:5].mT @ CHAIN.feature_matrices[block].float()
    trace = measured(by_hand(CHAIN, weights, model), skip_alignment(CHAIN))
    np.testing.assert_allclose(trace.skip_cosine, -np.eye(3)[block], atol=1e-6)


def standing_on(task: Task, known: int, matrices: Tensor, bias: Tensor | None = None) -> Series:
    """A model that predicts from the first blocks alone; attention adds up to 1, so a head can write a bias."""
    W_V = torch.zeros(task.n_blocks, task.d_vocab, task.d_vocab, dtype=torch.float64)
    for block in range(known):
        W_V[block] = len(task.blocks[block]) * matrices[block]
    if bias is not None:
        W_V[0] += bias
    return minimal(task, (looking_at(task.n_ctx, *task.blocks), W_V), n=1024)


@pytest.mark.parametrize("known", range(4))
def test_the_best_predictor_of_a_rung_stands_on_it(known: int) -> None:
    bias, matrices = (torch.from_numpy(part) for part in CHAIN.ladder[known].predictor)
    probe = excess_over_rungs(CHAIN, where_all_is_seen(CHAIN))
    excess = measured(standing_on(CHAIN, known, matrices, bias), probe).excess_over_rung
    assert excess[known].item() == pytest.approx(0, abs=1e-9)
    assert (excess[:known] < -0.02).all()
    assert (excess[known + 1 :] > 0.02).all()


def test_a_rung_that_is_estimated_lies_below_its_predictor_by_what_that_falls_short() -> None:
    task = HighOrderMarkov(d_vocab=3, blocks=((1,), (16,)), context=17)
    assert not task.enumerable
    rung = task.ladder[1]
    assert rung.shortfall > 0
    bias, matrices = (torch.from_numpy(part) for part in rung.predictor)
    excess = measured(standing_on(task, 1, matrices, bias), excess_over_rungs(task, where_all_is_seen(task)))
    assert excess.excess_over_rung[1].item() == pytest.approx(rung.shortfall, abs=1e-9)


@pytest.mark.parametrize("known", range(4))
def test_in_a_regression_the_first_blocks_stand_on_their_rung(known: int) -> None:
    queries = slice(-1, None)
    probes = [held_out_loss(queries), excess_over_rungs(REGRESSION, queries), value_alignment(REGRESSION, queries)]
    trace = measured(standing_on(REGRESSION, known, REGRESSION.matrices), *probes)
    assert trace.excess_over_rung[known].item() == pytest.approx(0, abs=1e-12)
    assert (np.diff(trace.excess_over_rung) > 0.01).all()
    assert trace.excess_over_rung[-1].item() == pytest.approx(trace.loss.item())
    assert trace.loss.item() == pytest.approx(REGRESSION.baselines()[known].loss, rel=0.1, abs=1e-12)
    np.testing.assert_allclose(trace.effective_coefficient, np.arange(3) < known, atol=1e-9)


@pytest.mark.parametrize("known", range(4))
def test_a_truncated_teacher_has_no_distance_from_itself_and_some_from_others(known: int) -> None:
    probe = teacher_kl(CHAIN, where_all_is_seen(CHAIN))
    kl = measured(standing_on(CHAIN, known, CHAIN.matrices), probe).teacher_kl
    assert kl[known].item() == pytest.approx(0, abs=1e-9)
    others = [rung for rung in range(4) if rung != known]
    assert (kl[others] > 0.05).all()


def test_the_distance_is_from_the_teacher_to_the_model() -> None:
    """KL is not symmetric; from the uniform teacher it is the mean of log(p / q) with p = 1/5."""
    series = standing_on(CHAIN, 1, CHAIN.matrices)
    queries = where_all_is_seen(CHAIN)
    log_q = CHAIN.teacher(series.inputs.held_out.tokens, 1)[:, queries]
    expected = -(log_q + np.log(5)).mean().item()
    assert measured(series, teacher_kl(CHAIN, queries)).teacher_kl[0].item() == pytest.approx(expected)


def test_only_the_positions_that_are_asked_for_count() -> None:
    """The law by its last six queries; before them the model looks elsewhere."""
    last, every = slice(-1, None), where_all_is_seen(CHAIN)
    W_Q = torch.cat([looking_at(8, [1], [2], [3])[:, :7], looking_at(8, [3], [1], [2])[:, 7:]], dim=1)
    series = minimal(CHAIN, (W_Q, CHAIN.matrices))
    for probe, name in ((excess_over_rungs, "excess_over_rung"), (teacher_kl, "teacher_kl")):
        assert measured(series, probe(CHAIN, last))[name][-1].item() == pytest.approx(0, abs=1e-9)
        assert measured(series, probe(CHAIN, every))[name][-1].item() > 0.05


def test_every_variable_says_what_it_is() -> None:
    for probe in (
        head_specialization(CHAIN.blocks),
        value_alignment(CHAIN),
        skip_alignment(CHAIN),
        excess_over_rungs(CHAIN, slice(2, None)),
        teacher_kl(CHAIN, slice(2, None)),
    ):
        for name, variable in probe.variables.items():
            assert variable.long_name, name
            assert variable.source, name
            assert variable.units == ("nats" if "rung" in variable.dims else "1"), name
