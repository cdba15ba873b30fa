"""How steep and how curved is the loss where the weights are, and does the normalisation make it so?

arXiv 2410.24050 lays loss spikes to the curvature of normalisation: where what is normalised is short, a small change
of the weights turns it far. Everything is computed in double precision on the sequences observed.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fd_interp.config import InputError, nearest
from fd_interp.measures import clustering
from fd_interp.models import lens
from fd_interp.models.build import build, trained
from fd_interp.models.curvature import loss_gradient, top_eigenpair
from fd_interp.observation import Observation, Probe, Variable
from fd_interp.tasks.task import Batch
from fd_interp.training.loop import batch_loss
from fd_interp.training.run import AdamW, Run

SECOND_MOMENT = "exp_avg_sq"
Loss = Callable[[lens.Weights, Batch], Float[Tensor, ""]]
"""The loss with these weights, with its graph."""


def loss_curvature(run: Run) -> Probe:
    """Gradient and sharpness of the loss that a run is trained on, and which trained weights they lie in.

    The *sharpness* is the largest eigenvalue of the Hessian. Gradient descent is stable below `2 / lr`. Adam divides
    its steps by `D = sqrt(v) + eps`, with v its second moment after bias correction; where the run keeps that
    (`keep.moments`), there is a `preconditioned_sharpness`, of `D^(-1/2) H D^(-1/2)`, beside it, to be compared with
    `stability_limit`. It is NaN at a snapshot without moments, as that of step 0.
    """
    parameters, loss_at = _differentiable(run)
    adam = adam_with_moments(run)

    def measure(seen: Observation) -> dict[str, Tensor]:
        loss = loss_at(seen.weights, seen.batch)
        squares = torch.stack([part.square().sum() for part in loss_gradient(loss, parameters).values()])
        top = top_eigenpair(loss, parameters)
        measured = {
            "gradient_norm": squares.sum().sqrt(),
            "gradient_share": squares / squares.sum(),
            "sharpness": torch.tensor(top.value),
            "sharpness_mass": torch.stack(list(top.masses().values())),
        }
        if adam is not None:
            scale = _steps_are_divided_by(seen, adam, _steps_before(run))
            sharpness = top_eigenpair(loss, parameters, scale).value if scale else torch.nan
            measured["preconditioned_sharpness"] = torch.tensor(sharpness)
        return measured

    names = {"weight": list(parameters)}
    variables = {
        "gradient_norm": Variable((), "norm of the loss' gradient", "arXiv 2410.24050"),
        "gradient_share": Variable(("weight",), "share of each weight in its square", "ours", names=names),
        "sharpness": Variable((), "largest eigenvalue of the loss' Hessian", "ours"),
        "sharpness_mass": Variable(("weight",), "share of each weight in its unit eigenvector", "ours", names=names),
    }
    if adam is not None:
        meaning = "largest eigenvalue of the Hessian as Adam sees it"
        variables["preconditioned_sharpness"] = Variable((), meaning, "arXiv 2207.14484")
    return Probe("loss_curvature", variables, measure)


def adam_with_moments(run: Run) -> AdamW | None:
    """The run's optimizer, if it is Adam and its second moment is kept with each snapshot."""
    optimizer = run.training.optimizer
    return optimizer if isinstance(optimizer, AdamW) and SECOND_MOMENT in run.keep.moments else None


def stability_limit(adam: AdamW) -> float:
    """The preconditioned sharpness up to which Adam is stable: `(2 + 2 beta_1) / ((1 - beta_1) lr)`.

    `38 / lr` for `beta_1 = 0.9` (arXiv 2207.14484). It is that of a quadratic loss, with the whole training set in each
    batch, D at rest and one rate for all weights: a guide, and no law, where batches are small.
    """
    momentum = adam.betas[0]
    return (2 + 2 * momentum) / ((1 - momentum) * adam.lr)


def halving(run: Run, weight: str = "blocks.0.attn.W_V") -> Probe:
    """What becomes of loss and sharpness when a weight is halved, as ratios.

    Where the loss depends on the direction alone of what the weight writes, as behind a normalisation that nothing
    passes by, halving leaves the loss as it is and quadruples the curvature with respect to that weight. A ratio near 4
    of the sharpness, with a loss hardly changed, says that the curvature is the normalisation's; below, other weights
    hold some of it, or the weight acts past the normalisation as well.

    Raises:
        InputError: the model has no such weight.
    """
    parameters, loss_at = _differentiable(run)
    known = lens.weights(_model(run))
    if weight not in known:
        raise InputError(f"the model has no weight '{weight}', {nearest(weight, known)}")

    def measure(seen: Observation) -> dict[str, Tensor]:
        halved = seen.weights | {weight: seen.weights[weight] / 2}
        losses, tops = [], []
        for weights in (seen.weights, halved):
            loss = loss_at(weights, seen.batch)
            losses.append(loss.detach())
            tops.append(top_eigenpair(loss, parameters).value)
        return {"halved_sharpness_ratio": torch.tensor(tops[1] / tops[0]), "halved_loss_ratio": losses[1] / losses[0]}

    return Probe(
        "halving",
        {
            "halved_sharpness_ratio": Variable((), f"sharpness with {weight} halved ÷ sharpness", "ours"),
            "halved_loss_ratio": Variable((), f"loss with {weight} halved ÷ loss", "ours"),
        },
        measure,
    )


def movement(hook: str = "attn_out") -> Probe:
    """How short the vectors at a hook become, and how far they have turned since the snapshot observed before.

    In the model of arXiv 2410.24050 `attn_out` is xi, which is normalised next. Over all sequences and positions.

    Args:
        hook: a short name, which stands for every layer, or a full one.
    """

    def measure(seen: Observation) -> dict[str, Tensor]:
        layers = [seen.cache[hook]] if hook in seen.cache else seen.activations(hook)
        vectors = torch.stack([layer.flatten(0, -2) for layer in layers])
        last = seen.once(f"last {hook}", lambda: {"vectors": vectors})
        turned = clustering.angle_change(vectors, last["vectors"])
        last["vectors"] = vectors
        return {"smallest_norm": clustering.smallest_norm(vectors), "angle_change": turned}

    return Probe(
        "movement",
        {
            "smallest_norm": Variable(("layer",), f"length of the shortest vector at {hook}", "ours"),
            "angle_change": Variable(("layer",), f"mean angle that vectors at {hook} have turned", "ours", "radians"),
        },
        measure,
        hooks=(hook,),
    )


def _differentiable(run: Run) -> tuple[dict[str, nn.Parameter], Loss]:
    """The run's loss as a function of weights, and what it can be differentiated by: the weights that are trained."""
    model = _model(run)

    def loss_at(weights: lens.Weights, batch: Batch) -> Float[Tensor, ""]:
        lens.load_weights(model, weights)
        return batch_loss(run, model, batch)

    return trained(run.model, model), loss_at


def _model(run: Run) -> lens.Model:
    return build(run.model, run.task.d_vocab, run.task.n_ctx, torch.float64)


def _steps_before(run: Run) -> int:
    """Steps that Adam's averages had behind them when the run began."""
    if run.start is None or SECOND_MOMENT not in run.start.moments:
        return 0
    return int(Path(run.start.snapshot).stem.removeprefix("step_"))


def _steps_are_divided_by(seen: Observation, adam: AdamW, steps_before: int) -> dict[str, Tensor]:
    """What Adam divides each weight's step by; empty where it has not begun to average."""
    prefix, correction = f"{SECOND_MOMENT}.", 1 - adam.betas[1] ** (seen.step + steps_before)
    return {
        name.removeprefix(prefix): (average.double() / correction).sqrt() + adam.eps
        for name, average in seen.stored().items()
        if name.startswith(prefix)
    }
