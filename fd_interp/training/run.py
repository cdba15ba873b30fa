"""The run: everything that determines the bytes of a training series, as one frozen value."""

from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from fd_interp.config import Frozen, InputError
from fd_interp.models.config import LearnedQuery, ModelConfig
from fd_interp.tasks.high_order import HighOrderMarkov
from fd_interp.tasks.lag_regression import LagRegression
from fd_interp.tasks.lags import Lags
from fd_interp.tasks.markov import MarkovChain
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.tasks.text import TextCorpus

TaskConfig = Annotated[
    MarkovChain | TextCorpus | HighOrderMarkov | LagRegression | SparseModularAddition, Field(discriminator="kind")
]


class SGD(Frozen):
    """Gradient descent; with a small rate it follows the gradient flow of the papers."""

    kind: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 0.2
    lrs: dict[str, PositiveFloat] = {}
    """Exceptions to `lr` by weight name: `{"W_Q": 0.8, "W_K": 0.8}` speeds up attention alone."""
    momentum: float = Field(default=0.0, ge=0, lt=1)

    @property
    def moments(self) -> tuple[str, ...]:
        """What it averages over steps, by torch's names."""
        return ("momentum_buffer",) if self.momentum else ()


Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamW(Frozen):
    """Adam with decoupled weight decay; Adam itself at the default `weight_decay` of zero."""

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    lrs: dict[str, PositiveFloat] = {}
    """Exceptions to `lr` by weight name."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0

    @property
    def moments(self) -> tuple[str, ...]:
        """What it averages over steps, by torch's names."""
        return ("exp_avg", "exp_avg_sq")


class Training(Frozen):
    """How long, on how much, and with what."""

    optimizer: Annotated[SGD | AdamW, Field(discriminator="kind")] = SGD()
    steps: PositiveInt = 1000
    batch_size: PositiveInt = 128
    loss_on: Literal["last", "all", "full_context"] = "all"
    """Predict after the last position only, after every one, or after those that see every lag of the task."""


class Given(Frozen):
    """Just these steps."""

    kind: Literal["given"] = "given"
    steps: tuple[NonNegativeInt, ...] = ()

    @field_validator("steps", mode="before")
    @classmethod
    def _one_or_several(cls, steps: Any) -> Any:
        """On a command line, a single value is no list."""
        return (steps,) if isinstance(steps, int) else steps

    def steps_until(self, last: int) -> set[int]:
        return {step for step in self.steps if step <= last}


class Every(Frozen):
    """Every so many steps."""

    kind: Literal["every"] = "every"
    stride: PositiveInt = 20

    def steps_until(self, last: int) -> set[int]:
        return set(range(0, last + 1, self.stride))


class LogSpaced(Frozen):
    """Steps in geometric progression from one on, so that early changes are seen as finely as late ones."""

    kind: Literal["log"] = "log"
    count: PositiveInt = 60

    def steps_until(self, last: int) -> set[int]:
        return {int(step) for step in np.geomspace(1, last, self.count).round()}


class Keep(Frozen):
    """What stays on disk. Step 0 and the last are always in."""

    at: Annotated[Given | Every | LogSpaced, Field(discriminator="kind")] = LogSpaced()
    hooks: tuple[str, ...] = ()
    """Activations to cache at these steps, by hook name, on the held-out batch."""
    gradients: tuple[str, ...] = ()
    """Hooks whose loss gradient to cache as well."""
    moments: tuple[str, ...] = ()
    """Averages of the optimizer to keep as well, by torch's names: `("exp_avg_sq",)` is Adam's second moment."""
    held_out: PositiveInt = 512
    """Sequences in the held-out batch, which every measurement uses."""


class Start(Frozen):
    """A snapshot that a run begins with, in place of random weights; its shapes must fit."""

    snapshot: str
    """File of its weights: `RUN/weights/step_00000064.safetensors`."""
    moments: tuple[str, ...] = ()
    """Averages of the optimizer to take over as well, which must be kept there (`keep.moments`); else it starts anew,
    as in the fine-tuning of arXiv 2410.24050."""


class Run(Frozen):
    """A task, a model and a schedule; equal runs write equal bytes on the same machine."""

    task: TaskConfig
    model: ModelConfig
    training: Training = Training()
    keep: Keep = Keep()
    start: Start | None = None
    """What it begins with; None draws random weights."""
    seed: NonNegativeInt = 0
    dtype: Literal["float32", "float64"] = "float32"
    device: str = "cpu"
    threads: PositiveInt = 1
    """Threads that torch uses: small models are fastest with one, and the last bits depend on the number."""

    @model_validator(mode="after")
    def _lags_are_known(self) -> "Run":
        if self.training.loss_on == "full_context" and not isinstance(self.task, Lags):
            raise InputError(f"training.loss_on: full_context needs a task of lags, and {self.task.kind} has none")
        return self

    @model_validator(mode="after")
    def _predicts_where_it_can(self) -> "Run":
        if isinstance(self.model, LearnedQuery) and self.training.loss_on != "last":
            raise InputError(
                f"training.loss_on: a learned query predicts once, at the last, not {self.training.loss_on}"
            )
        if isinstance(self.model, LearnedQuery) and not isinstance(self.task, SparseModularAddition):
            raise InputError(
                f"model: a learned query gives one answer to a sequence, and {self.task.kind} asks for more"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_has_the_moments(self) -> "Run":
        known = self.training.optimizer.moments
        has = f"{self.training.optimizer.kind} has {', '.join(known) or 'none'}"
        for name in self.keep.moments:
            if name not in known:
                raise InputError(f"keep.moments: the optimizer has no average '{name}'; {has}")
        if self.start and self.start.moments and set(self.start.moments) != set(known):
            raise InputError(f"start.moments: give all averages of the optimizer or none; {has}")
        return self

    @property
    def queries(self) -> slice:
        """The positions after which the run predicts, and where it is measured."""
        if self.training.loss_on == "last":
            return slice(-1, None)
        if self.training.loss_on == "full_context" and isinstance(self.task, Lags):
            return slice(self.task.lookback - 1, None)
        return slice(None)

    def check_device(self) -> None:
        """Raises an InputError where this machine cannot train it; what was trained elsewhere is read on any."""
        try:
            torch.zeros((), device=self.device).item()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"device '{self.device}' is not usable here ({reason}); cpu always is") from None

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    def kept_steps(self) -> list[int]:
        """The steps at which a snapshot is written, in order."""
        last = self.training.steps
        return sorted({0, last} | self.keep.at.steps_until(last))

    def generator(self, purpose: Literal["init", "held_out", "train"], index: int = 0) -> torch.Generator:
        """A fresh generator that depends on the seed, on what it is for, and on nothing else."""
        words = np.random.SeedSequence([self.seed, *purpose.encode(), index]).generate_state(2, np.uint32)
        return torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))
