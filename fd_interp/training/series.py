"""A series of snapshots: the directory that training fills, or somebody else's checkpoints, read lazily."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.build import build
from fd_interp.tasks.task import Batch
from fd_interp.training.run import Run

RUN_FILE = "run.json"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Snapshot:
    """The weights at one step, read when asked for."""

    step: int
    read: Callable[[], lens.Weights]
    build: Callable[[], lens.Model]
    activations_file: Path | None = None

    def weights(self) -> lens.Weights:
        """Canonical (HookedTransformer) names and shapes."""
        return self.read()

    def model(self) -> lens.Model:
        """A model of its own with these weights."""
        model = self.build()
        lens.load_weights(model, self.weights())
        return model

    def activations(self) -> dict[str, Tensor]:
        """What training cached at this step, by hook name; gradients are under `grad.<hook>`."""
        if self.activations_file is None or not self.activations_file.exists():
            return {}
        return read_tensors(self.activations_file)

    def cache(self, hooks: list[str], tokens: Tensor) -> dict[str, Tensor]:
        """The named activations on `tokens`, from one forward pass."""
        return lens.run_and_cache(self.model(), tokens, hooks)[1]


class Inputs(NamedTuple):
    """What a series is measured on, and with."""

    held_out: Batch
    """Sequences that training never saw."""
    frequencies: Float[Tensor, " vocab"]
    """How often each token occurs in what the model was trained on, as far as is known; sums to one."""
    token_strings: list[str]
    """Each token as a person reads it."""


@dataclass(frozen=True)
class Series(Sequence[Snapshot]):
    """Snapshots in the order of their steps, with what is needed to look at them."""

    name: str
    snapshots: tuple[Snapshot, ...]
    build: Callable[[], lens.Model]
    """Makes a model that the snapshots' weights fit."""
    read_inputs: Callable[[], Inputs]
    run: Run | None = None

    def __len__(self) -> int:
        return len(self.snapshots)

    def __getitem__(self, index):
        return self.snapshots[index]

    @property
    def steps(self) -> list[int]:
        return [snapshot.step for snapshot in self.snapshots]

    @cached_property
    def inputs(self) -> Inputs:
        """Read when first asked for, since a text takes seconds."""
        return self.read_inputs()

    def at(self, step: int) -> Snapshot:
        """The snapshot of exactly this step."""
        for snapshot in self.snapshots:
            if snapshot.step == step:
                return snapshot
        closest = min(self.steps, key=lambda kept: abs(kept - step))
        raise InputError(f"{self.name} keeps no step {step}; the nearest one is {closest}")


def open_series(directory: str | Path) -> Series:
    """Reads a run directory, finished or not."""
    directory = Path(directory)
    return series_of(read_run(directory), directory)


def series_of(run: Run, directory: Path) -> Series:
    """The snapshots that a run has left in its directory so far."""
    files = sorted((directory / "weights").glob(f"step_{'[0-9]' * 8}.safetensors"))
    if not files:
        raise InputError(f"{directory} holds no snapshots yet")
    if files[0].stem != f"step_{0:08d}":
        raise InputError(f"{directory} has lost its snapshot of step 0, which the others are compared with")

    def model() -> lens.Model:
        return build(run.model, run.task.d_vocab, run.task.n_ctx, run.torch_dtype)

    def snapshot(file: Path) -> Snapshot:
        step = int(file.stem.removeprefix("step_"))
        return Snapshot(step, lambda: read_tensors(file), model, directory / "activations" / file.name)

    return Series(
        name=str(directory),
        snapshots=tuple(snapshot(file) for file in files),
        build=model,
        read_inputs=lambda: Inputs(
            held_out=run.task.held_out(run.keep.held_out, run.generator("held_out")),
            frequencies=run.task.token_frequencies(),
            token_strings=run.task.token_strings(),
        ),
        run=run,
    )


def read_run(directory: Path) -> Run:
    """The run whose series the directory holds."""
    file = directory / RUN_FILE
    if not file.is_file():
        raise InputError(f"{directory} is not a run directory: it has no {RUN_FILE}")
    try:
        return Run(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError) as error:
        raise InputError(f"{file} does not hold a run: {error}") from None


def claim_directory(directory: Path, run: Run) -> None:
    """Makes the directory this run's own; one that holds another run, or other files, is refused."""
    if (directory / RUN_FILE).exists():
        held = read_run(directory)
        if held != run:
            differing = ", ".join(_differences(held.model_dump(), run.model_dump()))
            raise InputError(
                f"{directory} already holds another run (it differs in {differing}); choose a new directory"
            )
    else:
        if directory.exists() and not _is_free(directory):
            raise InputError(f"{directory} is not an empty directory and holds no run; choose a new directory")
        with atomic(directory / RUN_FILE) as file:
            file.write_text(run.model_dump_json(indent=2), encoding="utf-8")
    for left_by_a_kill in directory.rglob(f".*{PARTIAL}"):
        left_by_a_kill.unlink()


def _is_free(directory: Path) -> bool:
    """Whether it holds nothing but what a kill may have left of this function's own writing."""
    return directory.is_dir() and all(file.match(f".{RUN_FILE}.*{PARTIAL}") for file in directory.iterdir())


def _differences(left: object, right: object, path: str = "") -> Iterator[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            yield from _differences(left.get(key), right.get(key), f"{path}.{key}" if path else key)
    elif left != right:
        yield path


@contextmanager
def atomic(file: Path) -> Iterator[Path]:
    """A path to write to that takes the place of `file` once complete, so that a kill leaves the old or the new."""
    partial = file.with_name(f".{file.name}.{os.getpid()}{PARTIAL}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(file)
    except (OSError, SafetensorError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error).splitlines()[0]
        raise InputError(f"{file} could not be written ({reason}); what was kept before is whole") from error
    finally:
        with suppress(OSError):  # where there is no such folder, there is nothing to remove
            partial.unlink()


def write_tensors(file: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """One safetensors file, atomically; tensors may be views of the same memory."""
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    with atomic(file) as partial:
        save_file(copies, partial, metadata)


def is_whole(file: Path) -> bool:
    """Whether there is such a safetensors file, of the length that its header announces; the rest is not read."""
    try:
        with safe_open(file, "pt"):
            return True
    except (SafetensorError, OSError):
        return False


def read_tensors(file: Path) -> dict[str, Tensor]:
    """One safetensors file, or a sentence that says which one is broken."""
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is truncated or no safetensors file ({error})") from None
