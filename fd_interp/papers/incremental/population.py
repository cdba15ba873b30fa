"""What the theory predicts for a run of the regression variant: the flow from the run's own start."""

from collections.abc import Sequence

import numpy as np

from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights
from fd_interp.models.config import Minimal
from fd_interp.observation import Trace
from fd_interp.tasks.lag_regression import LagRegression
from fd_interp.theory import incremental as theory
from fd_interp.training.run import SGD, Run


def applies(run: Run) -> bool:
    """The theory is of one layer that attends by position, trained from values of zero by plain gradient descent."""
    model, training = run.model, run.training
    plain = isinstance(training.optimizer, SGD) and not training.optimizer.momentum and not training.optimizer.lrs
    return (
        isinstance(run.task, LagRegression)
        and isinstance(model, Minimal)
        and (model.n_layers, model.attends_by, model.fixed) == (1, "position", {})
        and model.stds.get("W_V", model.std) == 0
        and plain
        and training.loss_on == "last"
    )


def target_of(task: LagRegression) -> theory.Target:
    """The task in the theory's coordinates."""
    alphas = np.zeros((task.n_blocks, task.context))
    for row, block, weights in zip(alphas, task.blocks, task.weights, strict=True):
        row[np.array(block) - 1] = weights
    return theory.Target(np.array(task.strengths), alphas)


def start_of(run: Run, seed: int) -> theory.Heads:
    """The logits of the last query, and the coefficients of the values, with which the run of a seed begins."""
    assert isinstance(run.task, LagRegression)
    like = lens.weights(build(run.model, run.task.d_vocab, run.task.n_ctx, run.torch_dtype))
    weights = initial_weights(run.model, like, run.model_copy(update={"seed": seed}).generator("init"))
    W_Q, W_V = (weights[f"blocks.0.attn.{name}"].double().numpy() for name in ("W_Q", "W_V"))
    logits = W_Q[:, -1, ::-1] / _attn_scale(run)
    return theory.Heads(logits, np.einsum("hst,bst->hb", W_V, run.task.feature_matrices.numpy()))


def predicted(run: Run, seeds: Sequence[int], *, steps: int | None = None) -> list[Trace]:
    """The flow of each seed's run, with no free parameter; empty where the theory does not apply.

    One-hot tokens have covariance `1 / d_vocab`, which slows the flow and scales its loss.
    """
    if not applies(run):
        return []
    assert isinstance(run.task, LagRegression)
    rate = run.training.optimizer.lr / run.task.d_vocab
    until = run.training.steps if steps is None else steps
    kept = [step for step in run.kept_steps() if step <= until]
    target, attn_rate = target_of(run.task), _attn_scale(run) ** -2
    flows = [
        theory.flow(start_of(run, seed), target, steps=kept, rate=rate, form="gradient", attn_rate=attn_rate)
        for seed in seeds
    ]
    return [_in_units_of(flow, run.task.d_vocab) for flow in flows]


def _in_units_of(flow: Trace, d_vocab: int) -> Trace:
    return flow.assign(loss=flow.loss / d_vocab, excess_over_rung=flow.excess_over_rung / d_vocab)


def _attn_scale(run: Run) -> float:
    return build(run.model, run.task.d_vocab, run.task.n_ctx).cfg.attn_scale
