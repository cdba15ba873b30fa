"""Training: a generator of steps, and the function that runs it and keeps snapshots."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights, trained
from fd_interp.models.paper_model import PaperModel
from fd_interp.tasks.task import Batch
from fd_interp.tasks.text import TextCorpus
from fd_interp.training.interrupt import deferred_interrupts
from fd_interp.training.run import SGD, Run
from fd_interp.training.series import Series, atomic, claim_directory, is_whole, series_of
from fd_interp.training.state import (
    REMEDY,
    STATE_FILE,
    DivergedError,
    State,
    kept_moments,
    moments_of,
    read_state,
    snapshot_name,
    state_at,
    write_snapshot,
    write_state,
)
from fd_interp.training.threads import torch_threads

BATCHES_PER_DRAW = 64
SECONDS_BETWEEN_STATES = 20.0
TEXT_FILE = "text.sha256"


class Step(NamedTuple):
    """The loss on the batch that led from `step - 1` to `step`."""

    step: int
    loss: float


def batches(run: Run, start: int = 0) -> Iterator[Batch]:
    """The training batches from step `start` on. Batch i depends on the run and on i alone.

    Many are drawn at once because sampling one position of many sequences costs little more than of a few.
    """
    size = run.training.batch_size
    for draw in range(start // BATCHES_PER_DRAW, run.training.steps // BATCHES_PER_DRAW + 1):
        tokens, targets = drawn(run, draw)
        skipped = max(start - draw * BATCHES_PER_DRAW, 0)
        for index in range(skipped, BATCHES_PER_DRAW):
            rows = slice(index * size, (index + 1) * size)
            yield Batch(tokens[rows].to(run.device), targets[rows].to(run.device))


def drawn(run: Run, draw: int) -> Batch:
    """The `BATCHES_PER_DRAW` batches of a draw, one after another."""
    return run.task.sample(run.training.batch_size * BATCHES_PER_DRAW, run.generator("train", draw))


def batch_loss(run: Run, model: lens.Model, batch: Batch) -> Float[Tensor, ""]:
    """The loss where the run predicts."""
    queries = run.queries
    logits = model(batch.tokens, queries=queries) if isinstance(model, PaperModel) else model(batch.tokens)[:, queries]
    return loss_of(logits, batch.targets[:, queries])


def loss_of(
    logits: Float[Tensor, "batch query vocab"],
    targets: Int[Tensor, "batch query"] | Float[Tensor, "batch query vocab"],
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats; where targets are vectors, half the mean squared distance to them."""
    if targets.is_floating_point():
        return (logits - targets.to(logits)).square().sum(-1).mean() / 2
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(run: Run, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """One parameter group per rate: a weight can have one of its own, and a step costs the more the more groups."""
    config = run.training.optimizer
    known = {name.rsplit(".", 1)[-1] for name in parameters}
    if unknown := config.lrs.keys() - known:
        raise InputError(
            f"lrs names {', '.join(sorted(unknown))}, which is not trained; trained: {', '.join(sorted(known))}"
        )
    by_rate: dict[float, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        by_rate.setdefault(config.lrs.get(name.rsplit(".", 1)[-1], config.lr), []).append(parameter)
    groups = [{"params": alike, "lr": rate} for rate, alike in by_rate.items()]
    if isinstance(config, SGD):
        return torch.optim.SGD(groups, momentum=config.momentum, fused=True)
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def training_steps(run: Run, model: lens.Model, optimizer: torch.optim.Optimizer, start: int = 0) -> Iterator[Step]:
    """Takes one optimizer step after another from step `start` to the end of the run.

    Raises:
        DivergedError: the loss of a step is not finite; the weights are those before that step.
    """
    for step, batch in zip(range(start + 1, run.training.steps + 1), batches(run, start), strict=False):
        optimizer.zero_grad(set_to_none=True)
        loss = batch_loss(run, model, batch)
        value = loss.item()
        if not math.isfinite(value):
            raise DivergedError(f"the loss became {value} at step {step}; {REMEDY}")
        loss.backward()
        optimizer.step()
        yield Step(step, value)


def train(run: Run, directory: str | Path, *, show_progress: bool = True) -> Series:
    """Trains into `directory`, or goes on where an interrupted training of the same run stopped.

    Weights are written at the kept steps; the optimizer's state at least every 20 seconds and when interrupted, so
    that little is lost even when the process is killed. The resumed series has the same bytes as an unbroken one.
    """
    directory = Path(directory)
    # Everything that can be refused is looked at before the directory is touched; a text is read here.
    run.check_device()
    run.task.token_frequencies()
    model = new_model(run)
    parameters = trained(run.model, model)
    optimizer = make_optimizer(run, parameters)
    keep = snapshot_keeper(run, directory, model, optimizer, parameters)
    claim_directory(directory, run)
    keep_text(run, directory)
    losses = restore(run, directory, model, optimizer, parameters)
    check_kept(run, directory, len(losses))
    if not losses:
        with torch_threads(run.threads):
            keep(0)

    def save() -> None:
        write_state(directory, State(lens.weights(model), moments_of(optimizer, parameters), losses))

    kept = set(run.kept_steps())
    saved_at = time.monotonic()
    bar = tqdm(
        total=run.training.steps,
        initial=len(losses),
        disable=None if show_progress else True,
        unit="step",
        desc=directory.name,
    )
    with torch_threads(run.threads), bar, deferred_interrupts() as interruption:
        for step, loss in training_steps(run, model, optimizer, start=len(losses)):
            losses.append(loss)
            if step in kept:
                keep(step)
            if interruption.arrived or time.monotonic() - saved_at > SECONDS_BETWEEN_STATES:
                save()
                saved_at = time.monotonic()
            if interruption.arrived:
                raise KeyboardInterrupt
            if step % 50 == 0:
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()
    save()
    return series_of(run, directory)


def check_kept(run: Run, directory: Path, last: int) -> None:
    """Refuses to go on where snapshots that were kept are gone or broken, since only training anew brings them back."""
    steps = [step for step in run.kept_steps() if step <= last and (last or step)]
    lost = [step for step in steps if not is_whole(directory / "weights" / snapshot_name(step))]
    if lost:
        raise InputError(
            f"{directory} has lost the snapshots of steps {', '.join(map(str, lost))}; "
            f"remove {directory / STATE_FILE} to train it anew from the start"
        )


def keep_text(run: Run, directory: Path) -> None:
    """Leaves the fingerprint of a text beside its run, or refuses to go on with another text under the same name."""
    if not isinstance(run.task, TextCorpus):
        return
    file = directory / TEXT_FILE
    if not file.exists():
        with atomic(file) as partial:
            partial.write_text(run.task.fingerprint, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != run.task.fingerprint:
        raise InputError(f"{run.task.source} no longer holds the text that {directory} was trained on")


def new_model(run: Run) -> lens.Model:
    """The run's model at step 0."""
    model = lens.to_device(build(run.model, run.task.d_vocab, run.task.n_ctx, run.torch_dtype), run.device)
    if run.start is None:
        weights = initial_weights(run.model, lens.weights(model), run.generator("init"))
    else:
        weights = state_at(run.start).weights
    lens.load_weights(model, weights)
    return model


def snapshot_keeper(
    run: Run,
    directory: Path,
    model: lens.Model,
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
) -> Callable[[int], None]:
    """A function that writes the weights, and what else the run keeps, at a step."""
    hooks = lens.resolve_hooks(model, list(run.keep.hooks))
    gradients = lens.resolve_hooks(model, list(run.keep.gradients))
    if hooks or gradients:
        held_out = run.task.held_out(run.keep.held_out, run.generator("held_out"))
        held_out = Batch(held_out.tokens.to(run.device), held_out.targets.to(run.device))

    def keep(step: int) -> None:
        kept = kept_moments(moments_of(optimizer, parameters), run.keep.moments)
        if hooks:
            kept |= lens.run_and_cache(model, held_out.tokens, hooks)[1]
        if gradients:
            _, of_hooks = lens.run_with_gradients(
                model,
                held_out.tokens,
                gradients,
                lambda logits: loss_of(logits[:, run.queries], held_out.targets[:, run.queries]),
            )
            kept |= {f"grad.{hook}": gradient for hook, gradient in of_hooks.items()}
        write_snapshot(directory, step, lens.weights(model), kept)

    return keep


def restore(
    run: Run, directory: Path, model: lens.Model, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]
) -> list[float]:
    """Puts model and optimizer where an earlier training stopped, and returns the losses until then."""
    state = read_state(directory) or (state_at(run.start) if run.start else None)
    if state is None:
        return []
    lens.load_weights(model, state.weights)
    for name, parameter in parameters.items():
        for key, value in state.moments.get(name, {}).items():
            optimizer.state[parameter][key] = value if value.ndim == 0 else value.to(parameter)
    return state.losses
