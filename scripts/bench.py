"""How fast this is beside plain PyTorch, beside TransformerLens' own models, and beside doing nothing but the passes.

    python scripts/bench.py
    python scripts/bench.py --rounds 5 --json

Every row is a ratio measured within this one run, in one thread: the two take turns, and their medians are compared, so
that a busy machine slows both alike. Computation is timed in CPU seconds; what waits for a disk or for another process,
in seconds. The exit status is 0 whatever the ratios are: they are a measurement and not a test.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

import fd_interp
from fd_interp.models import lens
from fd_interp.models.build import trained
from fd_interp.models.config import Hold, LearnedQuery, Minimal, OneLayer, Transformer
from fd_interp.observation import observe
from fd_interp.papers.clustering.settings import CLUSTERING, CLUSTERING_2D
from fd_interp.papers.focus_dilution import ZIPF, probes
from fd_interp.papers.focus_dilution.settings import MULTI_HEAD
from fd_interp.papers.incremental.settings import INCREMENTAL
from fd_interp.reproduction import versions
from fd_interp.tasks.task import Batch
from fd_interp.training.loop import batch_loss, batches, loss_of, make_optimizer, new_model, snapshot_keeper, train
from fd_interp.training.run import Keep, LogSpaced, Run, Training
from fd_interp.training.series import Series

CALLS = 10
"""Calls per turn of what takes a millisecond, so that neither the clock nor the change of turns is measured."""
OBSERVED = Training(optimizer=ZIPF.training.optimizer, steps=100, batch_size=128, loss_on="last")
SNAPSHOTS = LogSpaced(count=24)

ALL = ZIPF.model_copy(update={"training": ZIPF.training.model_copy(update={"loss_on": "all"})})
BY_TOKEN = INCREMENTAL.model_copy(
    update={"model": INCREMENTAL.model.model_copy(update={"attends_by": "token_and_position"})}
)
TRAINED = {
    "training step, loss on last": ZIPF,
    "training step, loss on all": ALL,
    "minimal model by position, training step": INCREMENTAL,
    "minimal model by token and position, training step": BY_TOKEN,
    "learned query, two coordinates, training step": CLUSTERING_2D,
    "learned query, eight coordinates, training step": CLUSTERING,
}

Contestants = Mapping[str, Callable[[], object]]


class Row(NamedTuple):
    """What takes how long, and how many times as long as what it is compared with."""

    name: str
    seconds: float
    ratio: float
    target: float | None = None

    @property
    def verdict(self) -> str:
        return "" if self.target is None else "ok" if self.ratio <= self.target else "missed"


def times(
    contestants: Contestants, rounds: int, *, calls: int = 1, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Median seconds of one call of each; all take a turn in every round, and one more before that is not timed."""
    turns: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, call in contestants.items():
            begun = clock()
            for _ in range(calls):
                call()
            if number:
                turns[name].append((clock() - begun) / calls)
    return {name: median(each) for name, each in turns.items()}


class PlainAttention(nn.Module):
    """The paper's model as one writes it in PyTorch without hooks."""

    future: Tensor

    def __init__(self, d_vocab: int, n_ctx: int, d_model: int, d_head: int, std: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(d_vocab, d_model)
        self.W_Q = nn.Parameter(torch.empty(d_model, d_head))
        self.W_K = nn.Parameter(torch.empty(d_model, d_head))
        self.W_U = nn.Parameter(torch.empty(d_model, d_vocab))
        self.register_buffer("future", torch.ones(n_ctx, n_ctx, dtype=torch.bool).triu(1))
        for weight in self.parameters():
            nn.init.normal_(weight, std=std)

    def forward(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
        x = self.embed(tokens)
        q, k = x @ self.W_Q, x @ self.W_K
        scores = (q @ k.transpose(1, 2)).masked_fill(self.future, float("-inf"))
        return scores.softmax(-1) @ x @ self.W_U


class PlainLastAttention(PlainAttention):
    """The same for the last query alone, which sees every key."""

    def forward(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch one vocab"]:
        x = self.embed(tokens)
        q, k = x[:, -1:] @ self.W_Q, x @ self.W_K
        return (q @ k.transpose(1, 2)).softmax(-1) @ x @ self.W_U


class PlainMinimal(nn.Module):
    """The weights of the minimal model, and what its two forms in plain PyTorch need besides."""

    mask: Tensor
    positions: Tensor

    def __init__(self, run: Run, d_query: int, d_value: int) -> None:
        super().__init__()
        assert isinstance(run.model, Minimal)
        assert run.model.attn_scale is not None
        self.d_vocab, self.queries, self.attn_scale = run.task.d_vocab, run.queries, run.model.attn_scale
        self.W_Q = nn.Parameter(torch.randn(run.model.n_heads, d_query, d_query) * run.model.std)
        self.W_V = nn.Parameter(torch.zeros(run.model.n_heads, d_value, d_value))
        self.register_buffer("mask", torch.full((run.task.n_ctx, run.task.n_ctx), float("-inf")).triu(1))
        self.register_buffer("positions", torch.eye(run.task.n_ctx))


class PlainByPosition(PlainMinimal):
    """Heads that attend by position. Of the obvious ways, to mix tokens and apply W_V to the mixture is the fastest."""

    def forward(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch query vocab"]:
        x = functional.one_hot(tokens, self.d_vocab).float()
        pattern = (self.W_Q[:, self.queries] / self.attn_scale + self.mask[self.queries]).softmax(-1)
        mixed = torch.einsum("hqk,bkv->bqhv", pattern, x)
        return mixed.flatten(2) @ self.W_V.flatten(0, 1)


class PlainByTokenAndPosition(PlainMinimal):
    """Heads that attend by both, in the same way; of what they write only the logits are computed."""

    def forward(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch query vocab"]:
        x = functional.one_hot(tokens, self.d_vocab).float()
        x = torch.cat([x, self.positions.expand(len(tokens), -1, -1)], -1)
        q = torch.einsum("bqm,hmn->bqhn", x[:, self.queries], self.W_Q)
        scores = torch.einsum("bqhn,bkn->bqhk", q, x) / self.attn_scale
        pattern = (scores + self.mask[self.queries, None]).softmax(-1)
        mixed = torch.einsum("bqhk,bkm->bqhm", pattern, x)
        return mixed.flatten(2) @ self.W_V.flatten(0, 1)[:, : self.d_vocab]


class PlainLearnedQuery(nn.Module):
    """The model of a learned query in plain PyTorch, sequence by sequence."""

    def __init__(self, config: LearnedQuery, d_vocab: int, n_ctx: int) -> None:
        super().__init__()
        self.eps, self.scale = config.eps, config.d_model**-0.5
        self.embed = nn.Embedding(d_vocab, config.d_model)
        self.pos_embed = nn.Parameter(torch.randn(n_ctx, config.d_model))
        self.query = nn.Parameter(torch.randn(config.d_model))
        self.value = nn.Linear(config.d_model, config.d_model, bias=False)
        self.first = nn.Linear(config.d_model, config.d_mlp)
        self.second = nn.Linear(config.d_mlp, config.d_model)

    def normalized(self, x: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place d_model"]:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)

    def forward(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch one vocab"]:
        z = self.normalized(self.embed(tokens) + self.pos_embed)
        pattern = (z @ self.query * self.scale).softmax(-1)
        xi = self.value((pattern[:, None] @ z)[:, 0])
        out = xi + self.second(functional.gelu(self.first(self.normalized(xi))))
        return (out @ self.embed.weight.T)[:, None]


def training_step(optimizer: torch.optim.Optimizer, loss_fn: Callable[[], Tensor]) -> Callable[[], None]:
    """One step of training as the loop takes it."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn()
        loss.item()
        loss.backward()
        optimizer.step()

    return step


def our_step(run: Run, batch: Batch) -> Callable[[], None]:
    """A step of the run's own model."""
    model = new_model(run)
    return training_step(make_optimizer(run, trained(run.model, model)), lambda: batch_loss(run, model, batch))


def plain_model(run: Run) -> nn.Module:
    """The run's model in plain PyTorch."""
    d_vocab, n_ctx = run.task.d_vocab, run.task.n_ctx
    if isinstance(run.model, Minimal):
        if run.model.attends_by == "position":
            return PlainByPosition(run, n_ctx, d_vocab)
        return PlainByTokenAndPosition(run, d_vocab + n_ctx, d_vocab + n_ctx)
    if isinstance(run.model, LearnedQuery):
        return PlainLearnedQuery(run.model, d_vocab, n_ctx)
    assert isinstance(run.model, OneLayer)
    kind = PlainLastAttention if run.training.loss_on == "last" else PlainAttention
    return kind(d_vocab, n_ctx, run.model.d_model, run.model.d_head, run.model.std)


def plain_step(run: Run, batch: Batch) -> Callable[[], None]:
    """A step of the same maths in plain PyTorch, with the same optimizer."""
    model = plain_model(run)
    optimizer = make_optimizer(run, dict(model.named_parameters()))
    return training_step(optimizer, lambda: loss_of(model(batch.tokens), batch.targets[:, run.queries]))


HELD: dict[str, Hold] = {
    "W_V": "identity",
    "W_O": "identity",
    "W_pos": "zero",
    "b_Q": "zero",
    "b_K": "zero",
    "b_V": "zero",
    "b_O": "zero",
}
"""What TransformerLens' models have and the paper's has not: held fixed, so that both train the same matrices."""


def lens_step(run: Run, batch: Batch) -> Callable[[], None]:
    """A step of TransformerLens' own model of that size, which has a residual stream and computes every query."""
    return our_step(run.model_copy(update={"model": Transformer(std=1e-2, attn_scale=1.0, fixed=HELD)}), batch)


def rivals(run: Run) -> list[tuple[str, Callable[[Run, Batch], Callable[[], None]], float]]:
    """What a step of the run is compared with: its name, a step of it, and the ratio to stay below."""
    plain = ("plain PyTorch", plain_step, 1.0)
    own = ("TransformerLens' own model", lens_step, 0.8)
    return [plain, own] if isinstance(run.model, OneLayer) else [plain]


def steps(rounds: int) -> list[Row]:
    """Training steps beside those of other implementations."""
    rows = []
    for name, run in TRAINED.items():
        batch = next(batches(run))
        for label, rival, target in rivals(run):
            taken = times({"ours": our_step(run, batch), "theirs": rival(run, batch)}, rounds, calls=CALLS)
            rows.append(Row(f"{name} / {label}", taken["ours"], taken["ours"] / taken["theirs"], target))
    return rows


def bare_passes(series: Series) -> None:
    """The least that looking at a series takes: each snapshot's weights into one model, and a forward pass."""
    model = series.build()
    for snapshot in series:
        lens.load_weights(model, snapshot.weights())
        with torch.no_grad():
            model(series.inputs.held_out.tokens)


def observing(model: str, series: Series, rounds: int) -> Row:
    """All probes of the paper on a series, beside the passes alone."""
    assert series.run is not None
    asked = probes(series.run)
    taken = times({"observe": lambda: observe(series, asked), "passes": lambda: bare_passes(series)}, rounds)
    ratio = taken["observe"] / taken["passes"]
    return Row(f"observe {len(series)} snapshots of {model} / load, forward pass", taken["observe"], ratio, 1.3)


def snapshots(run: Run, series: Series, directory: Path, rounds: int) -> list[Row]:
    """Keeping a snapshot and loading one, beside a training step."""
    model = new_model(run)
    parameters = trained(run.model, model)
    keep = snapshot_keeper(run, directory, model, make_optimizer(run, parameters), parameters)
    contestants: Contestants = {
        "keep a snapshot": lambda: keep(0),
        "load a snapshot": lambda: lens.load_weights(model, series[-1].weights()),
        "step": our_step(run, next(batches(run))),
    }
    taken = times(contestants, rounds, calls=CALLS, clock=time.perf_counter)
    step = taken.pop("step")
    return [Row(f"{name} / training step", seconds, seconds / step) for name, seconds in taken.items()]


COMMANDS = {
    "python -c pass": "pass",
    "import fd_interp": "import fd_interp",
    "fd-interp --help": "from fd_interp.cli import main; main(['--help'])",
}


def start(code: str) -> None:
    """Runs Python code in a process of its own, which finds the library that this one uses."""
    where = Path(fd_interp.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], cwd=where, stdout=subprocess.DEVNULL, check=True)


def starting(rounds: int) -> list[Row]:
    """How long it takes until the library or the command is there, beside Python itself."""
    contestants = {name: lambda code=code: start(code) for name, code in COMMANDS.items()}
    taken = times(contestants, rounds, clock=time.perf_counter)
    alone = taken.pop("python -c pass")
    return [Row(f"{name} / python -c pass", seconds, seconds / alone) for name, seconds in taken.items()]


def peak_memory() -> float:
    """Largest resident set of this process so far, in MiB."""
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def measured(rounds: int) -> dict[str, Any]:
    """Everything, as one JSON object."""
    short = {"training": OBSERVED, "keep": Keep(at=SNAPSHOTS)}
    run, deep = ZIPF.model_copy(update=short), MULTI_HEAD.model_copy(update=short)
    memory = {"after importing": peak_memory()}
    with TemporaryDirectory() as folder:
        series = train(run, Path(folder) / "run", show_progress=False)
        deeper = train(deep, Path(folder) / "deep", show_progress=False)
        rows = [
            *steps(rounds),
            observing("one layer", series, rounds),
            observing("two layers, four heads, MLP", deeper, rounds),
            *snapshots(run, series, Path(folder) / "kept", rounds),
            *starting(rounds),
        ]
    memory["after training and observing"] = peak_memory()
    return {
        "rows": [row._asdict() | {"verdict": row.verdict} for row in rows],
        "peak_memory_MiB": memory,
        "rounds": rounds,
        "versions": versions(),
    }


def print_table(results: dict[str, Any]) -> None:
    width = max(len(row["name"]) for row in results["rows"])
    print(f"{'':{width}}  {'ratio':>6}  {'target':>6}  {'':6}  {'seconds':>9}")
    for row in results["rows"]:
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        print(f"{row['name']:{width}}  {row['ratio']:6.2f}  {target:>6}  {row['verdict']:6}  {row['seconds']:9.5f}")
    print("\npeak memory: " + ", ".join(f"{mib:.0f} MiB {when}" for when, mib in results["peak_memory_MiB"].items()))
    print(", ".join(f"{name} {number}" for name, number in results["versions"].items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="turns of each contestant (default: 25)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {arguments.rounds}")
    torch.set_num_threads(1)
    results = measured(arguments.rounds)
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print_table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
