"""Each probe on models whose numbers are known, and against its measures on the snapshots of a trained run."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fd_interp.measures import condensation, focus, redistribution
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights
from fd_interp.models.config import OneLayer, Transformer
from fd_interp.models.one_layer import OneLayerAttention
from fd_interp.observation import Probe, Trace, observe
from fd_interp.probes.condensation import EMBEDDING_CONDENSATION
from fd_interp.probes.focus import frequency_focus
from fd_interp.probes.prediction import excess_loss, held_out_loss
from fd_interp.probes.redistribution import REDISTRIBUTION
from fd_interp.tasks.markov import MarkovChain
from fd_interp.training.loop import train
from fd_interp.training.run import AdamW, Every, Keep, Run, Training
from fd_interp.training.series import Inputs, Series, Snapshot, open_series

CHAIN = MarkovChain.zipf(5, context=12)
EVERY_PROBE = [
    EMBEDDING_CONDENSATION,
    frequency_focus(),
    REDISTRIBUTION,
    held_out_loss(),
    excess_loss(CHAIN),
]
SHARP = 50.0
"""Scores that leave a softmax nothing to hesitate about."""


def observed(weights: lens.Weights, *probes: Probe, n: int = 64) -> Trace:
    """One snapshot of the one-layer model with these weights, without its layer and head, on sequences of the chain."""
    config = OneLayer(d_model=5, d_head=5)

    def model() -> OneLayerAttention:
        return OneLayerAttention(config, 5, 12, torch.float64)

    whole = lens.weights(model()) | {
        "blocks.0.attn.W_V": torch.eye(5)[None].double(),
        "blocks.0.attn.W_O": torch.eye(5)[None].double(),
        **weights,
    }
    inputs = Inputs(
        CHAIN.held_out(n, torch.Generator().manual_seed(0)), CHAIN.token_frequencies(), CHAIN.token_strings()
    )
    series = Series("by hand", (Snapshot(0, lambda: whole, model),), model, lambda: inputs)
    trace = observe(series, probes).isel(step=0)
    return trace.isel({dim: 0 for dim in ("layer", "head") if dim in trace.dims})


def scores(of_tokens: Tensor) -> lens.Weights:
    """With one direction for each token, the scores between tokens are W_Q itself."""
    eye = torch.eye(5, dtype=torch.float64)
    return {
        "embed.W_E": eye,
        "blocks.0.attn.W_Q": of_tokens[None].double(),
        "blocks.0.attn.W_K": eye[None],
    }


def held_out(n: int = 64) -> tuple[Tensor, Tensor]:
    return CHAIN.held_out(n, torch.Generator().manual_seed(0))


def test_uniform_attention_neither_focuses_nor_dilutes() -> None:
    trace = observed(scores(torch.zeros(5, 5)), frequency_focus())
    for name in ("focus_ratio", "focus_ratio_rare", "self_focus"):
        assert trace[name].item() == pytest.approx(1.0), name
    np.testing.assert_allclose(trace.focus_ratio_by_query, np.ones(5))
    assert trace.frequency_slope.item() == pytest.approx(0, abs=1e-6)
    expected = np.mean([math.log(query + 1) for query in range(3, 12)])  # all queries but the first quarter
    assert trace.attention_entropy.item() == pytest.approx(expected)


def test_attention_on_the_most_frequent_token_alone_focuses_by_one_over_its_share() -> None:
    to_first = torch.zeros(5, 5)
    to_first[:, 0] = SHARP
    trace = observed(scores(to_first), frequency_focus())
    tokens, _ = held_out()
    visible = torch.stack([(tokens[:, : query + 1] == 0).double().mean(1) for query in range(3, 12)], dim=1)
    expected = (visible > 0).double().mean() / visible.mean()
    assert trace.focus_ratio.item() == pytest.approx(expected.item(), rel=1e-6)
    assert trace.focus_ratio.item() > 1.9
    assert trace.frequency_slope.item() > 0.5
    for token in range(5):
        asked = visible[tokens[:, 3:] == token]
        expected = (asked > 0).double().mean() / asked.mean()
        assert trace.focus_ratio_by_query.sel(token=token).item() == pytest.approx(expected.item(), rel=1e-6)


def test_rare_queries_that_turn_away_dilute_while_frequent_ones_do_not() -> None:
    away = torch.zeros(5, 5)
    away[3:, 0] = -SHARP  # half of the four other tokens, the rarest, are rare
    trace = observed(scores(away), frequency_focus())
    assert trace.focus_ratio_rare.item() == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(trace.focus_ratio_by_query, [1, 1, 1, 0, 0], atol=1e-6)
    assert 0 < trace.focus_ratio.item() < 1


def test_attention_on_ones_own_token_is_self_focus() -> None:
    trace = observed(scores(SHARP * torch.eye(5)), frequency_focus())
    tokens, _ = held_out()
    own = torch.stack([(tokens[:, : query + 1] == tokens[:, [query]]).double().mean(1) for query in range(3, 12)])
    assert trace.self_focus.item() == pytest.approx(1 / own.mean().item(), rel=1e-6)


def test_tokens_that_the_batch_lacks_are_nan_and_leave_the_others_in_their_place() -> None:
    tokens, _ = held_out(n=1)
    assert tokens[0, 3:].unique().tolist() == [0, 4]
    to_first = torch.zeros(5, 5)
    to_first[4, 0] = -SHARP  # but where the first token is not in sight yet
    trace = observed(scores(to_first), frequency_focus(), n=1)
    np.testing.assert_allclose(trace.focus_ratio_by_query, [1, math.nan, math.nan, math.nan, math.nan], atol=1e-6)


def test_more_tokens_can_count_as_frequent() -> None:
    to_second = torch.zeros(5, 5)
    to_second[:, 1] = SHARP
    one = observed(scores(to_second), frequency_focus(1)).focus_ratio.item()
    two = observed(scores(to_second), frequency_focus(2)).focus_ratio.item()
    assert one < 1 < two
    assert "the most frequent token" in frequency_focus(1).variables["focus_ratio"].long_name
    assert "the 2 most frequent tokens" in frequency_focus(2).variables["focus_ratio"].long_name


@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_the_best_predictor_has_no_excess_and_the_frequencies_none_over_themselves(loss_on: str) -> None:
    """Attention on one's own token turns the rows of W_U into what follows each token."""
    own_token = scores(SHARP * torch.eye(5))
    tokens, targets = held_out()
    chosen = slice(-1, None) if loss_on == "last" else slice(None)
    log_pi, log_bigram = CHAIN.token_frequencies().log(), CHAIN.transition.log()
    losses = {
        "unigram": -log_pi[targets[:, chosen]].mean().item(),
        "bigram": -log_bigram[tokens[:, chosen], targets[:, chosen]].mean().item(),
        "uniform": math.log(5),
    }
    unembeddings = {"unigram": log_pi.expand(5, 5), "bigram": log_bigram, "uniform": torch.zeros(5, 5)}
    probes = [held_out_loss(chosen), excess_loss(CHAIN, chosen)]
    for name, W_U in unembeddings.items():
        trace = observed(own_token | {"unembed.W_U": W_U.double().contiguous()}, *probes)
        assert trace.loss.item() == pytest.approx(losses[name], abs=1e-5)
        assert trace.excess_over_unigram.item() == pytest.approx(losses[name] - losses["unigram"], abs=1e-5)
        assert trace.excess_over_best.item() == pytest.approx(losses[name] - losses["bigram"], abs=1e-5)
    assert losses["bigram"] < losses["unigram"] < losses["uniform"]


def test_an_embedding_along_the_frequencies_is_condensed_on_them() -> None:
    pi = CHAIN.token_frequencies()
    direction = torch.tensor([0.0, 0.6, 0.8, 0.0, 0.0], dtype=torch.float64)
    trace = observed({"embed.W_E": 3 * torch.outer(pi, direction)}, EMBEDDING_CONDENSATION, REDISTRIBUTION)
    assert trace.W_E_top_share.item() == pytest.approx(1)
    assert trace.W_E_effective_rank.item() == pytest.approx(1, abs=1e-6)
    assert trace.W_E_singular_ratio.item() == pytest.approx(0, abs=1e-7)
    assert trace.W_E_frequency_cosine.item() == pytest.approx(1)
    assert trace.W_E_norm.item() == pytest.approx(3 * pi.norm().item())
    np.testing.assert_allclose(trace.embedding_norm, 3 * pi, rtol=1e-6)
    np.testing.assert_allclose(trace.embedding_along_alpha, 3 * pi, rtol=1e-6)
    assert trace.gamma_perp.item() == pytest.approx(0, abs=1e-9)


def test_an_embedding_with_a_direction_for_each_token_is_not_condensed() -> None:
    trace = observed({"embed.W_E": 2 * torch.eye(5).double()}, EMBEDDING_CONDENSATION)
    assert trace.W_E_top_share.item() == pytest.approx(1 / 5)
    assert trace.W_E_effective_rank.item() == pytest.approx(5)
    assert trace.W_E_singular_ratio.item() == pytest.approx(1)


@pytest.fixture(scope="module")
def deep_series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """Two layers with three heads each, trained a little, so that every layer, head and step is another."""
    run = Run(
        task=CHAIN,
        model=Transformer(n_layers=2, n_heads=3, d_model=6, d_head=4, d_mlp=5, normalization_type="LN", std=0.4),
        training=Training(optimizer=AdamW(lr=3e-2), steps=6, batch_size=8),
        keep=Keep(at=Every(stride=3), held_out=24),
    )
    return train(run, tmp_path_factory.mktemp("deep") / "run", show_progress=False)


def test_every_number_is_the_measure_of_its_layer_head_and_step(deep_series: Series) -> None:
    trace, pi = observe(deep_series, EVERY_PROBE), CHAIN.token_frequencies()
    tokens, targets = deep_series.inputs.held_out
    queries, token = (torch.arange(12) >= 3).expand(24, -1), torch.arange(5)
    frequent, rare, every = token == 0, token >= 3, token >= 0
    first = previous = deep_series[0].weights()
    for snapshot in deep_series:
        weights, model = snapshot.weights(), snapshot.model()
        found = lens.run_and_cache(model, tokens, ["pattern"])
        at = trace.sel(step=snapshot.step)

        def check(name: str, expected: Tensor, at: Trace = at, **where: int) -> None:
            np.testing.assert_allclose(at[name].sel(where), expected.detach(), rtol=1e-5, atol=1e-6, err_msg=name)

        for layer in range(2):
            pattern = found.activations[f"blocks.{layer}.attn.hook_pattern"]
            check("attention_entropy", focus.attention_entropy(pattern, queries), layer=layer)
            attention = focus.attention_by_token(pattern, tokens, queries, 5)
            check("focus_ratio", focus.focus_ratio(attention, frequent, every), layer=layer)
            check("focus_ratio_rare", focus.focus_ratio(attention, frequent, rare), layer=layer)
            check("focus_ratio_by_query", focus.focus_ratio_by_query(attention, frequent), layer=layer)
            check("self_focus", focus.self_focus(attention), layer=layer)
            check("frequency_slope", focus.frequency_slope(attention, pi), layer=layer)
            for name in ("W_Q", "W_K"):
                for head in range(3):
                    now, start, before = (w[f"blocks.{layer}.attn.{name}"][head] for w in (weights, first, previous))
                    check_weight(at.sel(layer=layer, head=head), name, now, start, before)
        check_weight(at, "W_E", *(w["embed.W_E"] for w in (weights, first, previous)))
        check_weight(at, "W_U", *(w["unembed.W_U"].mT for w in (weights, first, previous)))
        W_E = weights["embed.W_E"]
        check("W_E_frequency_cosine", condensation.direction_cosine(W_E, pi))
        check("embedding_norm", W_E.norm(dim=1))
        gamma = redistribution.embedding_along_alpha(W_E, pi)
        check("embedding_along_alpha", gamma)
        check("gamma_perp", redistribution.gamma_perp(gamma, pi))
        log_probs = found.logits.log_softmax(-1)
        loss = -log_probs.gather(-1, targets[..., None]).mean()
        check("loss", loss)
        check("excess_over_unigram", loss + pi.log()[targets].mean())
        check("excess_over_best", loss + CHAIN.bayes(tokens).gather(-1, targets[..., None]).mean())
        previous = weights
    assert not any(np.isnan(variable).any() for variable in trace.data_vars.values())
    for name in ("focus_ratio", "attention_entropy", "W_Q_norm"):
        assert len(np.unique(trace[name])) == trace[name].size  # else a mistaken layer, head or step could not be seen


def check_weight(at: Trace, name: str, now: Tensor, start: Tensor, before: Tensor) -> None:
    s = torch.linalg.svdvals(now.double())
    expected = {
        "top_share": s[0] ** 2 / (s**2).sum(),
        "effective_rank": condensation.effective_rank(s),
        "singular_ratio": s[1] / s[0],
        "norm": now.norm(),
        "norm_change": (now.norm() - start.norm()) / start.norm(),
        "alignment": condensation.singular_vector_alignment(now, before),
    }
    for measure, value in expected.items():
        assert at[f"{name}_{measure}"].item() == pytest.approx(float(value), rel=1e-4, abs=1e-5), f"{name}_{measure}"


def test_axes_are_those_of_layers_heads_and_tokens(deep_series: Series) -> None:
    trace = observe(deep_series, EVERY_PROBE)
    assert dict(trace.sizes) == {"step": 3, "layer": 2, "head": 3, "token": 5}
    dims = {name: variable.dims[1:] for name, variable in trace.data_vars.items()}
    per_head = {name for name in dims if dims[name] == ("layer", "head")}
    assert per_head == {
        "attention_entropy", "focus_ratio", "focus_ratio_rare", "self_focus", "frequency_slope",
        *(f"{name}_{measure}" for name in ("W_Q", "W_K") for measure in (
            "top_share", "effective_rank", "singular_ratio", "norm", "norm_change", "alignment"
        )),
    }  # fmt: skip
    assert dims["focus_ratio_by_query"] == ("layer", "head", "token")
    assert dims["embedding_norm"] == dims["embedding_along_alpha"] == ("token",)
    for name in ("loss", "excess_over_unigram", "excess_over_best", "attention_entropy"):
        assert trace[name].attrs["units"] == "nats"
    for name, variable in trace.data_vars.items():
        assert variable.attrs["long_name"], name
        assert variable.attrs["units"] in ("nats", "1"), name


def test_a_trained_run_starts_with_no_change_and_full_alignment(small_directory: Path) -> None:
    trace = observe(open_series(small_directory), [EMBEDDING_CONDENSATION]).isel(step=0)
    for name in ("W_E", "W_U", "W_Q", "W_K"):
        assert trace[f"{name}_norm_change"].item() == 0
        assert trace[f"{name}_alignment"].item() == pytest.approx(1, abs=1e-5)


def test_probes_have_the_dims_of_a_model_of_many_heads_without_residual() -> None:
    config = OneLayer(d_model=5, d_head=3, n_heads=4, fixed={}, std=0.5)

    def model() -> lens.Model:
        return build(config, 5, 12)

    weights = initial_weights(config, lens.weights(model()), torch.Generator().manual_seed(0))
    inputs = Inputs(CHAIN.held_out(8, torch.Generator().manual_seed(0)), CHAIN.token_frequencies(), list("abcde"))
    series = Series("by hand", (Snapshot(3, lambda: weights, model),), model, lambda: inputs)
    trace = observe(series, EVERY_PROBE)
    assert dict(trace.sizes) == {"step": 1, "layer": 1, "head": 4, "token": 5}
    assert np.isfinite(trace.focus_ratio).all()


def test_tokens_that_never_occur_are_no_obstacle() -> None:
    """On text a vocabulary has tokens of frequency zero, and the held-out text may hold them."""
    pi = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0], dtype=torch.float64)
    config = OneLayer(d_model=5, d_head=5, std=0.5)

    def model() -> lens.Model:
        return build(config, 5, 12)

    weights = initial_weights(config, lens.weights(model()), torch.Generator().manual_seed(0))
    batch = CHAIN.held_out(32, torch.Generator().manual_seed(0))
    series = Series("text", (Snapshot(0, lambda: weights, model),), model, lambda: Inputs(batch, pi, list("abcde")))
    trace = observe(series, EVERY_PROBE)
    assert all(np.isfinite(trace[name]).all() for name in trace.data_vars), [
        name for name in trace.data_vars if not np.isfinite(trace[name]).all()
    ]
    same = observe(replace(series, name="again"), EVERY_PROBE)
    assert trace.drop_attrs().equals(same.drop_attrs())
