"""What the visual sandbox of arXiv 2410.24050 shows of one snapshot, as data: every tensor of the model, in the plane.

A `View` says what stays the same from frame to frame: which sequences are shown, their classes, onto which planes a
model of more than two coordinates is projected. A `Frame` is what one snapshot looks like in that view.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt8
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.measures.clustering import best_gauge
from fd_interp.models import lens
from fd_interp.models.config import LearnedQuery
from fd_interp.models.learned_query import LearnedQueryAttention
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.tasks.task import generator_for

MOST_TOKENS = 8
"""Symbols that can be told apart by their colours."""
MOST_PREFIXES, SUFFIXES = 64, 3
MOST_NEURONS = 64
JUDGED_ON = 4096
"""Sequences that the gauge and the planes are chosen on."""
GRID = 60
"""Points along each side of the level sets."""

_RESID_PRE, _NORMALIZED = "blocks.0.hook_resid_pre", "blocks.0.ln1.hook_normalized"
_VALUES, _PATTERN = "blocks.0.attn.hook_v", "blocks.0.attn.hook_pattern"
_XI, _NORMALIZED_XI = "blocks.0.hook_resid_mid", "blocks.0.ln2.hook_normalized"
_MLP_OUT, _OUT = "blocks.0.hook_mlp_out", "blocks.0.hook_resid_post"
_ALWAYS = [_RESID_PRE, _VALUES, _PATTERN, _XI, _MLP_OUT, _OUT]


class Window(NamedTuple):
    """A rectangle of a plane."""

    left: float
    right: float
    bottom: float
    top: float


class View(NamedTuple):
    """What stays the same from frame to frame."""

    tokens: Int[Tensor, "probe position"]
    """The sequences that are shown: some of every class, each prefix with several suffixes, in the order of classes."""
    labels: Int[np.ndarray, " probe"]
    classes: Int[np.ndarray, " probe"]
    """In the gauge of the last snapshot."""
    shifts: Int[np.ndarray, " k"]
    """That gauge: what is added to the symbol of each informative position before they are counted."""
    class_names: tuple[str, ...]
    """The symbols of each class after that shift, sorted."""
    class_labels: Int[np.ndarray, " class"]
    neurons: Int[Tensor, " neuron"]
    """Neurons of the MLP that are shown: those of the largest weights in the last snapshot, where there are many."""
    embedding_plane: Float[Tensor, "d_model 2"]
    """Onto which embeddings, and what is computed of them before the values, are projected."""
    output_plane: Float[Tensor, "d_model 2"]
    """The same for values and all that follows."""
    xi_window: Window
    """What the level sets of xi cover."""
    output_window: Window


class Frame(NamedTuple):
    """One snapshot. Places are all pairs of a position and a symbol, position by position."""

    tokens: Float32[np.ndarray, "vocab 2"]
    """Token embeddings; those of symbols that never occur too."""
    positions: Float32[np.ndarray, "position 2"]
    sums: Float32[np.ndarray, "place 2"]
    """Token plus position."""
    normalized: Float32[np.ndarray, "place 2"]
    """The same after the normalisation, if the model has one there."""
    query: Float32[np.ndarray, "1 2"]
    attention: Float32[np.ndarray, "probe position"]
    values: Float32[np.ndarray, "place 2"]
    xi: Float32[np.ndarray, "probe 2"]
    """What the query gathers from each sequence."""
    xi_levels: UInt8[np.ndarray, "grid grid"]
    """Answer of the model, had it gathered the point of the plane; see `answer_of`. Rows go up."""
    normalized_xi: Float32[np.ndarray, "probe 2"]
    receptors: Float32[np.ndarray, "neuron 2"]
    """What each neuron listens to: columns of W_in."""
    assemblers: Float32[np.ndarray, "neuron 2"]
    """What each neuron writes: rows of W_out."""
    mlp_out: Float32[np.ndarray, "probe 2"]
    output: Float32[np.ndarray, "probe 2"]
    """MLP and residual: xi plus what the MLP adds."""
    output_levels: UInt8[np.ndarray, "grid grid"]
    """Answer of the model, were the output the point of the plane."""
    probabilities: Float32[np.ndarray, "class vocab"]
    """Of each answer, on average over the sequences of a class."""


def view_of(snapshots: Sequence[lens.Weights], config: LearnedQuery, task: SparseModularAddition) -> View:
    """A view for these snapshots: the last one says in which gauge and on which planes, all say how far out.

    With two coordinates the planes are the space itself. With more, embeddings are seen along the two principal
    directions of token plus position; xi and the output along the first principal direction of the normalised xi, to
    the right, and the first one of the output, made orthogonal to it, upwards.

    Raises:
        InputError: there is no snapshot, or the task has more symbols than colours, or too many gauges.
    """
    if not snapshots:
        raise InputError("there must be at least one snapshot to look at")
    if task.d_vocab > MOST_TOKENS:
        raise InputError(f"the sandbox has colours for {MOST_TOKENS} tokens, and the vocabulary has {task.d_vocab}")
    judged = task.held_out(JUDGED_ON, generator_for(0, "sandbox")).tokens
    last = _model(snapshots[-1], config, task)
    seen = _activations(last, judged)
    listened = seen[_NORMALIZED_XI if _NORMALIZED_XI in seen else _XI][:, 0]
    gauge = int(best_gauge(listened, task.prefixes(judged), task.gauges).gauge)
    tokens = _probes(task, gauge)
    classes = task.gauges[gauge][task.prefixes(tokens)]
    if config.d_model == 2:
        early = late = torch.eye(2).to(listened)
    else:
        early, late = _principal(seen[_RESID_PRE].flatten(0, 1), 2), _output_plane(listened, seen[_OUT][:, 0])
    clouds = [_activations(_model(weights, config, task), tokens) for weights in snapshots]
    matrices = last.matrices()
    weight = matrices.W_in.norm(dim=0) * matrices.W_out.norm(dim=1)
    return View(
        tokens,
        task.labels(tokens).numpy(),
        classes.numpy(),
        _shifts(task, gauge),
        tuple("".join(map(str, sorted(of_class.tolist()))) for of_class in _first_of_each(task)),
        _class_labels(task, gauge),
        weight.topk(min(MOST_NEURONS, config.d_mlp)).indices.sort().values,
        early,
        late,
        window_of(_numpy(torch.stack([cloud[_XI][:, 0] @ late for cloud in clouds]))),
        window_of(_numpy(torch.stack([cloud[_OUT][:, 0] @ late for cloud in clouds]))),
    )


def frame(weights: lens.Weights, config: LearnedQuery, task: SparseModularAddition, view: View) -> Frame:
    """What one snapshot looks like: activations of the model itself, and its answers where one of them is replaced.

    Off the plane, level sets are taken at the mean of the sequences that are shown.

    Raises:
        InputError: the weights are not those of such a model.
    """
    model = _model(weights, config, task)
    matrices = model.matrices()
    symbols = torch.arange(task.p)[:, None].expand(-1, task.length)
    places = _activations(model, symbols)
    seen = _activations(model, view.tokens)
    early, late = view.embedding_plane, view.output_plane

    def of_places(hook: str, plane: Tensor) -> np.ndarray:
        return _numpy(places[hook].movedim(0, 1).reshape(-1, config.d_model) @ plane)

    def of_probes(hook: str) -> np.ndarray:
        return _numpy(seen[hook][:, 0] @ late)

    return Frame(
        tokens=_numpy(matrices.W_E @ early),
        positions=_numpy(matrices.W_pos @ early),
        sums=of_places(_RESID_PRE, early),
        normalized=of_places(_NORMALIZED if _NORMALIZED in places else _RESID_PRE, early),
        query=_numpy(matrices.b_Q @ early),
        attention=_numpy(seen[_PATTERN][:, 0, 0]),
        values=of_places(_VALUES, late),
        xi=of_probes(_XI),
        xi_levels=_levels(model, view, _XI, seen[_XI][:, 0], view.xi_window),
        normalized_xi=of_probes(_NORMALIZED_XI if _NORMALIZED_XI in seen else _XI),
        receptors=_numpy(matrices.W_in.mT[view.neurons] @ late),
        assemblers=_numpy(matrices.W_out[view.neurons] @ late),
        mlp_out=of_probes(_MLP_OUT),
        output=of_probes(_OUT),
        output_levels=_levels(model, view, _OUT, seen[_OUT][:, 0], view.output_window),
        probabilities=_class_means(_answers(model, view, {}).softmax(-1), view),
    )


def shades(d_vocab: int) -> int:
    """Degrees of certainty that level sets tell apart, for each answer."""
    return 256 // d_vocab


def answer_of(level: int, d_vocab: int) -> tuple[int, float]:
    """The answer that a number in the level sets stands for, and its certainty from 0 (all alike) to 1."""
    answer, shade = divmod(level, shades(d_vocab))
    return answer, shade / (shades(d_vocab) - 1)


def grid_points(window: Window) -> tuple[Float32[np.ndarray, " grid"], Float32[np.ndarray, " grid"]]:
    """Where the columns and the rows of level sets lie."""
    along = np.linspace(0, 1, GRID, dtype=np.float32)
    across, up = window.right - window.left, window.top - window.bottom
    return window.left + across * along, window.bottom + up * along


def window_of(points: Float[np.ndarray, "frame point 2"], tail: float = 0.02) -> Window:
    """A square with the origin in it, and with all points, but for frames in which they are far out.

    Args:
        tail: share of such frames at each edge; they are those of a loss spike, for which everything would be small.
    """
    low = np.minimum(np.quantile(points.min(1), tail, axis=0), 0)
    high = np.maximum(np.quantile(points.max(1), 1 - tail, axis=0), 0)
    middle, reach = (low + high) / 2, 0.6 * float(max(*(high - low), 1e-3))
    x, y = middle.tolist()
    return Window(x - reach, x + reach, y - reach, y + reach)


def _model(weights: lens.Weights, config: LearnedQuery, task: SparseModularAddition) -> LearnedQueryAttention:
    dtype = next(iter(weights.values())).dtype
    model = LearnedQueryAttention(config, task.d_vocab, task.n_ctx, dtype)
    lens.load_weights(model, weights)
    return model


@torch.no_grad()
def _activations(model: LearnedQueryAttention, tokens: Int[Tensor, "batch position"]) -> dict[str, Tensor]:
    names = [name for name in model.hook_dict if name in _ALWAYS or name.endswith("hook_normalized")]
    return model.run_with_cache(tokens, names_filter=names)[1]


@torch.no_grad()
def _answers(
    model: LearnedQueryAttention, view: View, replaced: dict[str, Float[Tensor, "batch d_model"]]
) -> Float[Tensor, "batch vocab"]:
    """Logits for the sequences that are shown, or with an activation replaced by others."""
    count = max([len(value) for value in replaced.values()], default=0)
    tokens = view.tokens[:1].expand(count, -1) if replaced else view.tokens
    hooks: list[Any] = [(name, lambda _, hook, value=value: value[:, None]) for name, value in replaced.items()]
    return model.run_with_hooks(tokens, fwd_hooks=hooks)[:, 0]


def _levels(
    model: LearnedQueryAttention, view: View, hook: str, shown: Float[Tensor, "probe d_model"], window: Window
) -> UInt8[np.ndarray, "grid grid"]:
    plane, mean = view.output_plane, shown.mean(0)
    columns, rows = (torch.from_numpy(along).to(plane) for along in grid_points(window))
    flat = torch.cartesian_prod(rows, columns).flip(-1)
    points = flat @ plane.T + (mean - plane @ (mean @ plane))
    certainty, answer = _answers(model, view, {hook: points}).softmax(-1).max(-1)
    d_vocab = model.cfg.d_vocab
    degree = (certainty - 1 / d_vocab) / (1 - 1 / d_vocab) * (shades(d_vocab) - 1)
    return (answer * shades(d_vocab) + degree.round().long()).to(torch.uint8).reshape(GRID, GRID).numpy()


def _class_means(law: Float[Tensor, "probe vocab"], view: View) -> Float32[np.ndarray, "class vocab"]:
    member = torch.nn.functional.one_hot(torch.from_numpy(view.classes), len(view.class_names)).to(law)
    return _numpy(member.T @ law / member.sum(0)[:, None])


def _probes(task: SparseModularAddition, gauge: int) -> Int[Tensor, "probe position"]:
    """Prefixes in the order of their classes, some of each where there are many, each with suffixes of its own."""
    classes = task.gauges[gauge]
    order = classes.argsort(stable=True)
    ranks = torch.arange(len(order)) - torch.searchsorted(classes[order], classes[order])
    chosen = order[ranks.argsort(stable=True)[:MOST_PREFIXES]]
    free = task.length - task.k
    chosen = chosen[classes[chosen].argsort(stable=True)].repeat_interleave(SUFFIXES if free else 1)
    suffixes = torch.randint(task.p, (len(chosen), free), generator=generator_for(0, "suffixes of the sandbox"))
    return torch.cat([task.prefix_tokens[chosen], suffixes], 1)


def _shifts(task: SparseModularAddition, gauge: int) -> Int[np.ndarray, " k"]:
    """Gauges are in the order of their shifts, of which the first is always zero."""
    return gauge // task.p ** np.arange(task.k - 1, -1, -1) % task.p


def _first_of_each(task: SparseModularAddition) -> list[Int[Tensor, " k"]]:
    """Of each class, the first prefix in the gauge that shifts nothing."""
    return [task.prefix_tokens[(task.gauges[0] == number).nonzero()[0, 0]] for number in range(task.n_classes)]


def _class_labels(task: SparseModularAddition, gauge: int) -> Int[np.ndarray, " class"]:
    labels = torch.zeros(task.n_classes, dtype=torch.long)
    labels[task.gauges[gauge]] = task.labels(task.prefix_tokens)
    return labels.numpy()


def _principal(points: Float[Tensor, "point d_model"], count: int) -> Float[Tensor, "d_model count"]:
    axes = torch.linalg.svd(points - points.mean(0), full_matrices=False).Vh[:count].T
    return axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()


def _output_plane(
    normalized_xi: Float[Tensor, "input d_model"], output: Float[Tensor, "input d_model"]
) -> Float[Tensor, "d_model 2"]:
    axes = torch.cat([_principal(normalized_xi, 1), _principal(output, 1)], 1)
    orthogonal, triangular = torch.linalg.qr(axes)
    return orthogonal * torch.where(triangular.diagonal() < 0, -1, 1)


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().numpy().astype(np.float32)
