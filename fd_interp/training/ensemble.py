"""Many small models trained at once, as one with a leading axis: a step of thirty takes little longer than one of one.

Every weight of every model has an optimizer state of its own and every model its own batches, so each becomes what
`train` makes of its run alone, up to the last bits: sums are taken in another order, which a chaotic stretch of
training can make visible. Each run has its own directory, of the same form.
"""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.config import LearnedQuery
from fd_interp.models.learned_query import NAMES, LearnedQueryWeights, learned_query_logits, one_hot_places
from fd_interp.training.interrupt import deferred_interrupts
from fd_interp.training.loop import BATCHES_PER_DRAW, check_kept, drawn, make_optimizer, new_model
from fd_interp.training.run import Run
from fd_interp.training.series import Series, claim_directory, series_of
from fd_interp.training.state import (
    DivergedError,
    Moments,
    State,
    kept_moments,
    moments_of,
    read_state,
    state_at,
    write_snapshot,
    write_state,
)
from fd_interp.training.threads import torch_threads

SECONDS_BETWEEN_STATES = 60.0


class Member(NamedTuple):
    """One run of an ensemble, and where it stands."""

    run: Run
    directory: Path
    state: State


class Draw(NamedTuple):
    """The batches of all members that are drawn at once."""

    one_hot: Float[Tensor, "seed batch place"]
    targets: Int[Tensor, "seed batch"]


def train_together(
    runs: Sequence[Run], directories: Sequence[str | Path], *, show_progress: bool = True
) -> list[Series]:
    """Trains runs that differ in seeds, training sets and starts alone, each into its directory, or goes on with them.

    A run that diverges stops where `train` would stop it, and the others go on; its series ends before the last step.

    Raises:
        InputError: the runs differ in more than that, are of a model that has no form with a leading axis (all but
            `LearnedQuery`), or keep activations.
    """
    if len(runs) != len(directories):
        raise InputError(f"every run needs a directory of its own, and there are {len(runs)} and {len(directories)}")
    _check_alike(runs)
    runs[0].check_device()
    members = []
    for run, directory, new in zip(runs, map(Path, directories), [_new(run) for run in runs], strict=True):
        claim_directory(directory, run)
        state = read_state(directory) or new
        check_kept(run, directory, len(state.losses))
        members.append(Member(run, directory, state))
    with torch_threads(runs[0].threads):
        for alike in _by_step(members):
            _train(alike, show_progress)
    return [series_of(member.run, member.directory) for member in members]


def _check_alike(runs: Sequence[Run]) -> None:
    if not runs:
        raise InputError("an ensemble needs at least one run")
    first = runs[0]
    if not isinstance(first.model, LearnedQuery):
        raise InputError(f"a model of kind {first.model.kind} cannot be trained in an ensemble; learned_query can")
    if first.keep.hooks or first.keep.gradients:
        raise InputError("an ensemble keeps no activations; leave keep.hooks and keep.gradients empty")
    for run in runs:
        if _without_seeds(run) != _without_seeds(first):
            raise InputError(
                "runs of an ensemble may differ in seed, task.data_seed and start.snapshot, and not in more"
            )


def _without_seeds(run: Run) -> Run:
    start = run.start and run.start.model_copy(update={"snapshot": ""})
    return run.model_copy(update={"seed": 0, "task": run.task.model_copy(update={"data_seed": 0}), "start": start})


def _new(run: Run) -> State:
    return State(lens.weights(new_model(run)), state_at(run.start).moments if run.start else {}, [])


def _by_step(members: Sequence[Member]) -> list[list[Member]]:
    """Those that stand at the same step go on together: the optimizer counts steps for all."""
    by_step: dict[tuple[int, float], list[Member]] = {}
    for member in members:
        by_step.setdefault((len(member.state.losses), _counted(member.state.moments)), []).append(member)
    return list(by_step.values())


def _counted(moments: Moments) -> float:
    """The steps that an optimizer has counted, with those before a start; some do not count."""
    return max((each["step"].item() for each in moments.values() if "step" in each), default=0.0)


def _train(members: list[Member], show_progress: bool) -> None:
    run, start = members[0].run, len(members[0].state.losses)
    stacked = _Stacked(members)
    steps = range(start + 1, run.training.steps + 1)
    bar = tqdm(total=run.training.steps, initial=start, disable=None if show_progress else True, unit="step",
               desc=f"{len(members)} runs")  # fmt: skip
    kept, saved_at = set(run.kept_steps()), time.monotonic()
    with bar, deferred_interrupts() as interruption:
        if not start:
            stacked.keep(0)
        for step, batch in zip(steps, _batches([member.run for member in members], start), strict=False):
            stacked.step(batch)
            if step in kept:
                stacked.keep(step)
            if interruption.arrived or time.monotonic() - saved_at > SECONDS_BETWEEN_STATES:
                stacked.save()
                saved_at = time.monotonic()
            if interruption.arrived:
                raise KeyboardInterrupt
            bar.update()
        if start < run.training.steps:
            stacked.save()


class _Stacked:
    """The members' weights along a leading axis, with one optimizer for all."""

    def __init__(self, members: list[Member]) -> None:
        self.members, self.run = members, members[0].run
        assert isinstance(self.run.model, LearnedQuery)
        self.config = self.run.model
        self.weights = {
            name: torch.stack([member.state.weights[name] for member in members]).to(self.run.device) for name in NAMES
        }
        trained = [name for name in NAMES if name.rsplit(".", 1)[-1] not in self.config.fixed]
        self.parameters = {name: torch.nn.Parameter(self.weights[name]) for name in trained}
        self.weights |= self.parameters
        self.optimizer = make_optimizer(self.run, self.parameters)
        self._restore()
        self.losses = [list(member.state.losses) for member in members]
        self.alive = [True] * len(members)
        self._arguments = LearnedQueryWeights(*[self.weights[name] for name in NAMES])

    def _restore(self) -> None:
        for name, parameter in self.parameters.items():
            of_weight = [member.state.moments.get(name, {}) for member in self.members]
            for key, value in of_weight[0].items():
                one_for_all = value.ndim == 0  # the number of steps
                self.optimizer.state[parameter][key] = (
                    value.to(parameter.device)
                    if one_for_all
                    else torch.stack([each[key] for each in of_weight]).to(parameter)
                )

    def step(self, batch: Draw) -> None:
        """One step of every member; the losses of those that have diverged are no longer looked at."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = learned_query_logits(self._arguments, batch.one_hot, self.config)
        each = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
        losses = each.view(batch.targets.shape).mean(1)
        losses.sum().backward()
        self.optimizer.step()
        for index, value in enumerate(losses.tolist()):
            self.alive[index] = self.alive[index] and math.isfinite(value)
            if self.alive[index]:
                self.losses[index].append(value)

    def keep(self, step: int) -> None:
        """Writes a snapshot of every member."""
        for index, member in enumerate(self.members):
            if not self.alive[index]:
                continue
            try:
                kept = kept_moments(self._moments(index), self.run.keep.moments)
                write_snapshot(member.directory, step, self._weights(index), kept)
            except DivergedError:
                self.alive[index] = False

    def save(self) -> None:
        """Writes what every member can go on from; one that has diverged has nothing to go on from."""
        for index, member in enumerate(self.members):
            if self.alive[index]:
                write_state(member.directory, State(self._weights(index), self._moments(index), self.losses[index]))

    def _weights(self, index: int) -> lens.Weights:
        return {name: weight[index].detach() for name, weight in self.weights.items()}

    def _moments(self, index: int) -> Moments:
        return {
            name: {key: value if value.ndim == 0 else value[index] for key, value in each.items()}
            for name, each in moments_of(self.optimizer, self.parameters).items()
        }


def _batches(runs: Sequence[Run], start: int) -> Iterator[Draw]:
    """The batches that each run has alone."""
    size, first = runs[0].training.batch_size, start // BATCHES_PER_DRAW
    for number in range(first, runs[0].training.steps // BATCHES_PER_DRAW + 1):
        together = _drawn(runs, number)
        for index in range(start - number * BATCHES_PER_DRAW if number == first else 0, BATCHES_PER_DRAW):
            rows = slice(index * size, (index + 1) * size)
            yield Draw(together.one_hot[:, rows], together.targets[:, rows])


def _drawn(runs: Sequence[Run], number: int) -> Draw:
    device, dtype, d_vocab = runs[0].device, runs[0].torch_dtype, runs[0].task.d_vocab
    draws = [drawn(run, number) for run in runs]
    one_hot = torch.stack([one_hot_places(draw.tokens, d_vocab, dtype) for draw in draws])
    return Draw(one_hot.to(device), torch.stack([draw.targets[:, -1] for draw in draws]).to(device))
