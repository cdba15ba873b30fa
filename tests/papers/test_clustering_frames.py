import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.nn import functional

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.config import LearnedQuery
from fd_interp.models.learned_query import LearnedQueryAttention
from fd_interp.papers.clustering.frames import (
    GRID,
    MOST_NEURONS,
    MOST_PREFIXES,
    Window,
    answer_of,
    frame,
    grid_points,
    shades,
    view_of,
    window_of,
)
from fd_interp.tasks.modular import SparseModularAddition

TASK = SparseModularAddition(p=2, length=7, k=3)
CONFIG = LearnedQuery(d_model=2, d_mlp=4, eps=0.0)
UNNORMALIZED_XI = CONFIG.model_copy(update={"normalized": ("ln1",)})
SHARPNESS = 3.0


def closed_form_head() -> lens.Weights:
    """Attends to the first three positions, and counts their symbols in the first coordinate; the MLP adds nothing."""
    weights = random_weights(TASK, CONFIG)
    weights["embed.W_E"] = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, -2.0]])
    weights["pos_embed.W_pos"] = torch.tensor([[0.0, 1.0]] * 3 + [[0.0, -1.0]] * 4)
    weights["blocks.0.attn.b_Q"] = torch.tensor([[0.0, SHARPNESS]])
    weights["blocks.0.attn.W_V"] = torch.eye(2)[None]
    weights["blocks.0.mlp.W_in"] = torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 3.0, -4.0]])
    weights["blocks.0.mlp.W_out"] = torch.zeros(4, 2)
    weights["blocks.0.mlp.b_out"] = torch.zeros(2)
    return weights


def random_weights(task: SparseModularAddition, config: LearnedQuery, seed: int = 0) -> lens.Weights:
    generator = torch.Generator().manual_seed(seed)
    model = LearnedQueryAttention(config, task.d_vocab, task.n_ctx)
    return {name: torch.randn(value.shape, generator=generator) for name, value in lens.weights(model).items()}


def loaded(weights: lens.Weights, config: LearnedQuery, task: SparseModularAddition) -> LearnedQueryAttention:
    model = LearnedQueryAttention(config, task.d_vocab, task.n_ctx)
    lens.load_weights(model, weights)
    return model


def test_a_closed_form_head_is_drawn_where_it_can_be_computed_by_hand() -> None:
    weights = closed_form_head()
    view = view_of([weights], CONFIG, TASK)
    shown = frame(weights, CONFIG, TASK, view)

    np.testing.assert_array_equal(shown.tokens, [[1, 0], [-1, 0], [0, -2]])
    np.testing.assert_array_equal(shown.positions, [[0, 1]] * 3 + [[0, -1]] * 4)
    # Position by position, the symbol 0 before the symbol 1; all of these vectors have one length already.
    np.testing.assert_allclose(shown.sums, [[1, 1], [-1, 1]] * 3 + [[1, -1], [-1, -1]] * 4)
    for same in (shown.normalized, shown.values):
        np.testing.assert_allclose(same, shown.sums, rtol=1e-6)
    np.testing.assert_array_equal(shown.query, [[0, SHARPNESS]])
    np.testing.assert_array_equal(shown.receptors, [[1, 0], [2, 0], [0, 3], [0, -4]])
    np.testing.assert_array_equal(shown.assemblers, np.zeros((4, 2)))

    informative = 1 / (3 + 4 * math.exp(-2 * SHARPNESS / math.sqrt(2)))
    spurious = informative * math.exp(-2 * SHARPNESS / math.sqrt(2))
    np.testing.assert_allclose(shown.attention, [[informative] * 3 + [spurious] * 4] * len(view.tokens), rtol=1e-5)
    signs = 1 - 2 * view.tokens.numpy()
    xi = np.stack([
        informative * signs[:, :3].sum(1) + spurious * signs[:, 3:].sum(1),
        np.full(len(signs), 3 * informative - 4 * spurious),
    ], axis=1)  # fmt: skip
    np.testing.assert_allclose(shown.xi, xi, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(shown.normalized_xi, xi * math.sqrt(2) / np.linalg.norm(xi, axis=1)[:, None], rtol=1e-4)
    np.testing.assert_allclose(shown.output, shown.xi, rtol=1e-6)
    np.testing.assert_array_equal(shown.mlp_out, np.zeros_like(xi))
    logits = np.stack([xi[:, 0], -xi[:, 0], -2 * xi[:, 1]], axis=1)
    law = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = [law[view.classes == number].mean(0) for number in range(4)]
    np.testing.assert_allclose(shown.probabilities, expected, rtol=1e-4)


def test_the_view_of_a_head_that_counts_has_its_classes_in_order() -> None:
    view = view_of([closed_form_head()], CONFIG, TASK)
    np.testing.assert_array_equal(view.shifts, [0, 0, 0])
    assert view.class_names == ("000", "001", "011", "111")
    np.testing.assert_array_equal(view.class_labels, [0, 1, 0, 1])
    np.testing.assert_array_equal(view.classes, view.tokens[:, :3].sum(1))
    np.testing.assert_array_equal(view.labels, TASK.labels(view.tokens))
    assert (np.diff(view.classes) >= 0).all()
    assert torch.equal(TASK.prefixes(view.tokens).bincount(), torch.full((8,), 3))
    np.testing.assert_array_equal(view.embedding_plane, np.eye(2))
    np.testing.assert_array_equal(view.output_plane, np.eye(2))


def head_that_swaps_symbols_at_the_third_position() -> lens.Weights:
    """Uniform attention to values `x + reading y`: by the normalisation a 1 moves y more than x at the third position.

    Sums there are (2, 2) and (0, 2), which become (1, 1) and (0, sqrt 2); elsewhere they are (1, 1) and (-1, 1), or so
    long that the symbol does not matter.
    """
    weights = closed_form_head()
    reading = 3 / (math.sqrt(2) - 1)
    weights["pos_embed.W_pos"] = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 2.0]] + [[0.0, 1e3]] * 4)
    weights["blocks.0.attn.b_Q"] = torch.zeros(1, 2)
    weights["blocks.0.attn.W_V"] = torch.tensor([[[1.0, 0.0], [reading, 0.0]]])
    return weights


def test_classes_of_all_frames_are_counted_as_the_last_snapshot_does() -> None:
    plain, swapping = closed_form_head(), head_that_swaps_symbols_at_the_third_position()
    view = view_of([plain, swapping], UNNORMALIZED_XI, TASK)
    np.testing.assert_array_equal(view.shifts, [0, 0, 1])
    counted = view.tokens[:, :3].numpy().copy()
    counted[:, 2] = 1 - counted[:, 2]
    np.testing.assert_array_equal(view.classes, counted.sum(1))
    np.testing.assert_array_equal(view.class_labels, [1, 0, 1, 0])
    np.testing.assert_array_equal(view.labels, view.class_labels[view.classes])
    xi = frame(swapping, UNNORMALIZED_XI, TASK, view).xi[:, 0]
    centres = [xi[view.classes == number].mean() for number in range(4)]
    np.testing.assert_allclose(np.diff(centres), -2 / 7, atol=0.01)
    np.testing.assert_array_equal(view_of([swapping, plain], UNNORMALIZED_XI, TASK).shifts, [0, 0, 0])


@pytest.mark.parametrize("normalized", [("ln1", "ln2"), ("ln1",), ()])
@pytest.mark.parametrize(("d_model", "p"), [(2, 2), (5, 2), (4, 3)])
def test_a_frame_shows_what_the_hooks_of_the_model_show(d_model: int, p: int, normalized: tuple[str, ...]) -> None:
    task = SparseModularAddition(p=p, length=6, k=3)
    config = LearnedQuery(d_model=d_model, d_mlp=7, normalized=normalized)  # pyright: ignore[reportArgumentType]
    weights = random_weights(task, config)
    view = view_of([random_weights(task, config, 1), weights], config, task)
    shown = frame(weights, config, task, view)
    logits, cache = loaded(weights, config, task).run_with_cache(view.tokens)
    early, late = view.embedding_plane, view.output_plane

    def same(shown: np.ndarray, expected: torch.Tensor) -> None:
        np.testing.assert_allclose(shown, expected.detach(), rtol=1e-4, atol=1e-4)

    first_norm = "blocks.0.ln1.hook_normalized" if "ln1" in normalized else "blocks.0.hook_resid_pre"
    second_norm = "blocks.0.ln2.hook_normalized" if "ln2" in normalized else "blocks.0.hook_resid_mid"
    for field, hook in (("sums", "blocks.0.hook_resid_pre"), ("normalized", first_norm)):
        same(getattr(shown, field).reshape(6, p, 2)[range(6), view.tokens], cache[hook] @ early)
    same(shown.values.reshape(6, p, 2)[range(6), view.tokens], cache["blocks.0.attn.hook_v"][:, :, 0] @ late)
    same(shown.attention, cache["blocks.0.attn.hook_pattern"][:, 0, 0])
    for field, hook in (
        ("xi", "blocks.0.attn.hook_z"),
        ("normalized_xi", second_norm),
        ("mlp_out", "blocks.0.hook_mlp_out"),
        ("output", "blocks.0.hook_resid_post"),
    ):
        same(getattr(shown, field), cache[hook].reshape(len(view.tokens), d_model) @ late)
    same(shown.tokens, weights["embed.W_E"] @ early)
    same(shown.positions, weights["pos_embed.W_pos"] @ early)
    same(shown.query, weights["blocks.0.attn.b_Q"] @ early)
    same(shown.receptors, weights["blocks.0.mlp.W_in"].T @ late)
    same(shown.assemblers, weights["blocks.0.mlp.W_out"] @ late)
    law = logits[:, 0].softmax(-1)
    same(shown.probabilities, torch.stack([law[view.classes == number].mean(0) for number in range(task.n_classes)]))


@pytest.mark.parametrize("d_model", [2, 5])
def test_level_sets_are_the_answers_of_the_weights_at_each_point_of_the_plane(d_model: int) -> None:
    """The maths is written anew here, without the model."""
    config = LearnedQuery(d_model=d_model, d_mlp=7)
    weights = random_weights(TASK, config)
    view = view_of([weights], config, TASK)
    shown = frame(weights, config, TASK, view)
    _, cache = loaded(weights, config, TASK).run_with_cache(view.tokens)

    def check(levels: np.ndarray, window: Window, hook: str, answers) -> None:
        columns, rows = grid_points(window)
        plane, mean = view.output_plane, cache[hook][:, 0].mean(0).detach()
        for row, column in ((0, 0), (GRID - 1, 3), (17, GRID - 1), (40, 25)):
            place = torch.tensor([columns[column], rows[row]])
            point = mean + plane @ (place - mean @ plane)
            np.testing.assert_allclose(point @ plane, place, atol=1e-5)
            law = answers(point).softmax(-1)
            answer, certainty = answer_of(int(levels[row, column]), TASK.d_vocab)
            assert answer == law.argmax()
            assert certainty == pytest.approx((law.max().item() - 1 / 3) * 1.5, abs=0.51 / (shades(3) - 1))

    def unembedded(point: torch.Tensor) -> torch.Tensor:
        return weights["embed.W_E"] @ point

    def read(point: torch.Tensor) -> torch.Tensor:
        normalized = point / (point.square().mean().sqrt() + config.eps)
        hidden = functional.gelu(normalized @ weights["blocks.0.mlp.W_in"] + weights["blocks.0.mlp.b_in"])
        return unembedded(point + hidden @ weights["blocks.0.mlp.W_out"] + weights["blocks.0.mlp.b_out"])

    check(shown.xi_levels, view.xi_window, "blocks.0.hook_resid_mid", read)
    check(shown.output_levels, view.output_window, "blocks.0.hook_resid_post", unembedded)


def test_every_shade_stands_for_one_answer_and_certainty() -> None:
    for d_vocab in (2, 3, 8):
        decoded = [answer_of(level, d_vocab) for level in range(shades(d_vocab) * d_vocab)]
        assert decoded == sorted(set(decoded))
        assert {answer for answer, _ in decoded} == set(range(d_vocab))
        assert (decoded[0], decoded[-1]) == ((0, 0.0), (d_vocab - 1, 1.0))
        assert len(decoded) <= 256


def test_planes_of_a_wide_model_show_clusters_across_and_answers_upwards() -> None:
    """Eight coordinates: xi moves along one direction with the count, the MLP writes the answer along another."""
    config = LearnedQuery(d_model=8, d_mlp=2, normalized=("ln1",))
    weights = {name: torch.zeros_like(value) for name, value in random_weights(TASK, config).items()}
    weights["embed.W_E"][:2, 3] = torch.tensor([1.0, -1.0])
    weights["pos_embed.W_pos"][:3, 4], weights["pos_embed.W_pos"][3:, 4] = 1.0, 1e4
    weights["blocks.0.attn.W_V"][0, 3, 6] = 1.0
    weights["blocks.0.mlp.W_in"][6] = torch.tensor([30.0, -30.0])
    weights["blocks.0.mlp.W_out"][:, 1] = 1.0
    view = view_of([weights], config, TASK)
    expected = torch.zeros(8, 2)
    expected[6, 0] = expected[1, 1] = 1
    torch.testing.assert_close(view.output_plane, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(view.embedding_plane.T @ view.embedding_plane, torch.eye(2), atol=1e-5, rtol=0)
    shown = frame(weights, config, TASK, view)
    assert np.corrcoef(shown.xi[:, 0], view.classes)[0, 1] ** 2 > 0.999
    assert np.abs(shown.xi[:, 1]).max() < 1e-3


def test_a_head_that_says_nothing_still_has_two_orthogonal_directions() -> None:
    config = LearnedQuery(d_model=4, d_mlp=2)
    nothing = {name: torch.zeros_like(value) for name, value in random_weights(TASK, config).items()}
    nothing["embed.W_E"] += 1
    view = view_of([nothing], config, TASK)
    for plane in (view.embedding_plane, view.output_plane):
        torch.testing.assert_close(plane.T @ plane, torch.eye(2), atol=1e-5, rtol=0)
    assert all(np.isfinite(array).all() for array in frame(nothing, config, TASK, view))


@pytest.mark.parametrize(("p", "k", "length"), [(2, 5, 12), (3, 4, 8), (4, 3, 6), (2, 3, 3)])
def test_sequences_of_every_class_are_shown_and_not_too_many(p: int, k: int, length: int) -> None:
    task = SparseModularAddition(p=p, k=k, length=length)
    config = LearnedQuery(d_mlp=2 * MOST_NEURONS)
    view = view_of([random_weights(task, config)], config, task)
    assert set(view.classes.tolist()) == set(range(task.n_classes))
    np.testing.assert_array_equal(view.labels, view.class_labels[view.classes])
    assert len(view.class_names) == task.n_classes
    prefixes = task.prefixes(view.tokens).bincount()
    assert set(prefixes.tolist()) <= {0, 3 if length > k else 1}
    assert prefixes.count_nonzero() == min(p**k, MOST_PREFIXES)
    if length > k:
        assert len({tuple(tokens[k:]) for tokens in view.tokens.tolist()}) > 3


def test_the_neurons_of_the_largest_weights_are_shown() -> None:
    config = LearnedQuery(d_mlp=MOST_NEURONS + 10)
    weights = random_weights(TASK, config)
    loud = torch.arange(5, 5 + MOST_NEURONS)
    weights["blocks.0.mlp.W_out"][loud] *= 1e3
    view = view_of([random_weights(TASK, config, 1), weights], config, TASK)
    assert torch.equal(view.neurons, loud)
    np.testing.assert_allclose(
        frame(weights, config, TASK, view).assemblers, weights["blocks.0.mlp.W_out"][loud], rtol=1e-6
    )


def test_windows_cover_all_snapshots() -> None:
    weights = closed_form_head()
    wide = {**weights, "blocks.0.attn.W_V": 10 * weights["blocks.0.attn.W_V"]}
    small, large = (view_of(shown, CONFIG, TASK).xi_window for shown in ([weights], [wide, weights]))
    assert large.right - large.left == pytest.approx(10 * (small.right - small.left), rel=0.05)


COORDINATE = st.floats(-9, 9, width=32)


@given(arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 5), st.just(2)), elements=COORDINATE))
def test_a_window_is_a_square_that_holds_the_points_and_the_origin(points: np.ndarray) -> None:
    left, right, bottom, top = window_of(points, 0.0)
    assert right - left == pytest.approx(top - bottom)
    for x, y in [*points.reshape(-1, 2).tolist(), (0, 0)]:
        assert left < x < right
        assert bottom < y < top


def test_a_window_leaves_out_a_frame_that_is_far_from_all_others_but_no_point_that_is_far_in_every_frame() -> None:
    points = np.random.default_rng(0).random((100, 50, 2))
    points[70] *= 100
    points[:, 3] = [-5.0, 0.0]
    window = window_of(points)
    assert window.right < 4
    assert window.left < -5
    assert window_of(points, 0.0).right > 90


def test_nothing_is_written_to_the_weights_or_the_view() -> None:
    weights = random_weights(TASK, CONFIG)
    copies = {name: value.clone() for name, value in weights.items()}
    view = view_of([weights], CONFIG, TASK)
    tokens, plane = view.tokens.clone(), view.output_plane.clone()
    first, second = (frame(weights, CONFIG, TASK, view) for _ in range(2))
    assert all(torch.equal(weights[name], value) for name, value in copies.items())
    assert torch.equal(view.tokens, tokens)
    assert torch.equal(view.output_plane, plane)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_double_precision_is_drawn_too() -> None:
    weights = {name: value.double() for name, value in random_weights(TASK, CONFIG).items()}
    view = view_of([weights], CONFIG, TASK)
    single = {name: value.float() for name, value in weights.items()}
    other = frame(single, CONFIG, TASK, view_of([single], CONFIG, TASK))
    for one, same in zip(frame(weights, CONFIG, TASK, view), other, strict=True):
        np.testing.assert_allclose(one, same, rtol=1e-3, atol=1.01 if one.dtype == np.uint8 else 1e-4)


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="at least one snapshot"):
        view_of([], CONFIG, TASK)
    with pytest.raises(InputError, match="colours for 8 tokens, and the vocabulary has 9"):
        view_of([closed_form_head()], CONFIG, TASK.model_copy(update={"least_vocab": 9}))
    other = random_weights(TASK, LearnedQuery(d_model=3, d_mlp=4))
    with pytest.raises(InputError, match="shape"):
        view_of([other], CONFIG, TASK)
    view = view_of([closed_form_head()], CONFIG, TASK)
    with pytest.raises(InputError, match="shape"):
        frame(other, CONFIG, TASK, view)
