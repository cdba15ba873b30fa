"""The runs: the paper's own setting, a film of it that ends well, and the wider model that most seeds solve.

Sizes, optimizer and initialisation are those of the paper's code; which of its numbers the text reports is not known to
us. Whether a run solves the task depends on the seed, so the named runs have seeds that are known to.
"""

from fd_interp.claims import Claim
from fd_interp.models.config import LearnedQuery, Transformer
from fd_interp.observation import Probe
from fd_interp.papers.clustering import claims
from fd_interp.probes.clustering import (
    attention_on_informative,
    classifier_of_head,
    clustering_head,
    lattice_of_head,
    memorization,
)
from fd_interp.probes.prediction import accuracy, held_out_loss
from fd_interp.tasks.modular import SparseModularAddition
from fd_interp.training.run import AdamW, Every, Keep, Run, Training

STEPS_PER_EPOCH = 64
"""Batches of 32 in a training set of 2048."""


def paper_run(*, d_model: int, epochs: int, seed: int, every: int = 1) -> Run:
    """A run with everything as in the paper's code but for these; `every` so many epochs a snapshot is kept."""
    return Run(
        task=SparseModularAddition(data_seed=seed),
        model=LearnedQuery(d_model=d_model),
        training=Training(optimizer=AdamW(lr=3e-3), steps=epochs * STEPS_PER_EPOCH, batch_size=32, loss_on="last"),
        keep=Keep(at=Every(stride=every * STEPS_PER_EPOCH), held_out=4096),
        seed=seed,
    )


CLUSTERING = paper_run(d_model=8, epochs=100, seed=12)
CLUSTERING_2D = paper_run(d_model=2, epochs=300, seed=25)
PAPER = paper_run(d_model=2, epochs=1000, seed=0, every=10)
TRANSFORMER = Run(
    task=SparseModularAddition(k=3, sequences=None),
    model=Transformer(n_heads=4, d_model=32, d_head=8, d_mlp=128, normalization_type="LN", std=0.1),
    training=Training(optimizer=AdamW(lr=3e-3), steps=1000, batch_size=128, loss_on="last"),
    keep=Keep(at=Every(stride=25), held_out=4096),
)
"""A plain transformer with several heads, on new sequences at each step, and on a sum of three: with five it did not
leave the plateau in any of our few tries of up to 3000 steps."""

SETTINGS: dict[str, Run] = {
    "clustering": CLUSTERING,
    "clustering-2d": CLUSTERING_2D,
    "clustering-paper": PAPER,
    "clustering-transformer": TRANSFORMER,
}


def probes(run: Run) -> list[Probe]:
    """What is measured at every snapshot of a run on sparse modular addition."""
    task = run.task
    assert isinstance(task, SparseModularAddition)
    asked = [*probes_of_many(run), classifier_of_head(task)]
    if task.sequences is not None and task.enumerated(run.keep.held_out):
        asked.append(memorization(task))
    return asked


def probes_of_many(run: Run) -> list[Probe]:
    """What tells one seed from another: less, where there are many."""
    task = run.task
    assert isinstance(task, SparseModularAddition)
    asked = [
        held_out_loss(run.queries),
        accuracy(run.queries, _sequences(task, run.keep.held_out)),
        clustering_head(task),
        attention_on_informative(task),
    ]
    return [*asked, lattice_of_head(task)] if task.p == 2 else asked


def _sequences(task: SparseModularAddition, held_out: int) -> str:
    every = task.p**task.length
    return f"all {every} sequences" if task.enumerated(held_out) else f"{held_out} sequences drawn from {every}"


def claims_about(run: Run) -> tuple[Claim, ...]:
    """The claims that a run of this paper is judged by; a plain transformer need not have a clustering head."""
    if isinstance(run.model, LearnedQuery):
        return (claims.SOLVED, claims.CLUSTERED, claims.REPRESENTATION_FIRST)
    return (claims.SOLVED,)
