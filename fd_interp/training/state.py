"""What training leaves on disk as it goes: snapshots, and the state that it can go on from."""

from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from safetensors import safe_open
from torch import Tensor, nn

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.training.run import Start
from fd_interp.training.series import atomic, read_tensors, write_tensors

LOSSES_FILE = "losses.parquet"
STATE_FILE = "state/latest.safetensors"
REMEDY = "a smaller learning rate or initial std may help"

Moments = dict[str, dict[str, Tensor]]
"""By weight and by torch's name, what an optimizer remembers of a weight's gradients."""


class DivergedError(InputError):
    """The loss is no longer a number; the snapshots before that are kept."""


class State(NamedTuple):
    """Where training is: all that its next step depends on beside the run, and the losses that led there."""

    weights: lens.Weights
    moments: Moments
    losses: list[float]


def moments_of(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> Moments:
    """What the optimizer remembers, by weight."""
    remembered = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    return {
        name: {key: value for key, value in of_weight.items() if value is not None}
        for name, of_weight in remembered.items()
    }


def snapshot_name(step: int) -> str:
    """File name of a snapshot; names sort as their steps do."""
    return f"step_{step:08d}.safetensors"


def write_snapshot(directory: Path, step: int, weights: lens.Weights, kept: dict[str, Tensor]) -> None:
    """The weights of a step, and what else the run keeps there.

    Raises:
        DivergedError: a weight is not finite.
    """
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise DivergedError(f"{name} is no longer finite at step {step}; {REMEDY}")
    if kept:
        write_tensors(directory / "activations" / snapshot_name(step), kept)
    write_tensors(directory / "weights" / snapshot_name(step), weights)


def kept_moments(moments: Moments, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Those that a run keeps, as they are named in a snapshot: `exp_avg_sq.embed.W_E`; none before the first step."""
    return {
        f"{name}.{weight}": of_weight[name]
        for weight, of_weight in moments.items()
        for name in names
        if name in of_weight
    }


def write_state(directory: Path, state: State) -> None:
    """Writes what a later `train` needs to go on from here; the losses first, since the state says how many count."""
    table = pd.DataFrame({"step": range(1, len(state.losses) + 1), "loss": state.losses}).astype(
        {"step": "int64", "loss": "float64"}
    )
    with atomic(directory / LOSSES_FILE) as partial:
        table.to_parquet(partial, index=False)
    tensors = {f"weights/{name}": tensor for name, tensor in state.weights.items()}
    tensors |= {f"optimizer/{name}/{key}": value for name, each in state.moments.items() for key, value in each.items()}
    write_tensors(directory / STATE_FILE, tensors, step=str(len(state.losses)))


def read_state(directory: Path) -> State | None:
    """Where an earlier training stopped, if there was one."""
    file = directory / STATE_FILE
    if not file.exists():
        return None
    tensors = read_tensors(file)
    with safe_open(file, "pt") as opened:
        step = int(opened.metadata()["step"])
    moments: Moments = {}
    for name, value in _under("optimizer/", tensors).items():
        weight, key = name.rsplit("/", 1)
        moments.setdefault(weight, {})[key] = value
    return State(_under("weights/", tensors), moments, losses_of(directory, step))


def state_at(start: Start) -> State:
    """What a run that begins with a snapshot begins with.

    Raises:
        InputError: there is no such snapshot, or it keeps no such averages.
    """
    file = Path(start.snapshot)
    if not file.is_file():
        raise InputError(f"start.snapshot: there is no file {file}; give one like RUN/weights/{snapshot_name(64)}")
    weights = read_tensors(file)
    return State(weights, _moments_at(file, start.moments, weights), [])


def _moments_at(file: Path, names: tuple[str, ...], weights: lens.Weights) -> Moments:
    if not names:
        return {}
    beside = file.parents[1] / "activations" / file.name
    stored = read_tensors(beside) if beside.is_file() else {}
    if absent := [name for name in names if not any(f"{name}.{weight}" in stored for weight in weights)]:
        raise InputError(f"start.moments: {file} keeps no {', '.join(absent)}; train it with keep.moments")
    step = float(file.stem.removeprefix("step_"))  # Adam corrects its averages by it, and counts on for each weight
    return {
        weight: {"step": torch.tensor(step)} | {name: stored[f"{name}.{weight}"] for name in names}
        for weight in weights
        if f"{names[0]}.{weight}" in stored  # weights that were held have none
    }


def losses_of(directory: Path, step: int | None = None) -> list[float]:
    """The loss of each training step until `step`, or of all that are on disk.

    Raises:
        InputError: they cannot be read, or end before.
    """
    file = directory / LOSSES_FILE
    try:
        losses = pd.read_parquet(file)["loss"].tolist()[:step]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{file} cannot be read ({str(error).splitlines()[0]})") from None
    if step is not None and len(losses) < step:
        raise InputError(f"{file} ends at step {len(losses)}, before step {step} of {STATE_FILE}")
    return losses


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
