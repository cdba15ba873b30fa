"""What is run to reproduce this paper, and on how many seeds."""

from fd_interp.papers.clustering.settings import CLUSTERING, CLUSTERING_2D, PAPER, STEPS_PER_EPOCH
from fd_interp.training.run import Every, Run

TOGETHER = 16
"""Seeds in one ensemble: half of the paper's, so that two cores share them."""
WIDE_SEEDS, SHUFFLED_SEEDS = 16, 8
"""Seeds of the wider model and of the control at most."""
WIDE_EPOCHS = 160


def _lasting(run: Run, epochs: int, every: int) -> Run:
    training = run.training.model_copy(update={"steps": epochs * STEPS_PER_EPOCH})
    return run.model_copy(
        update={
            "training": training,
            "keep": run.keep.model_copy(update={"at": Every(stride=every * STEPS_PER_EPOCH)}),
        }
    )


NAMED: dict[str, Run] = {"clustering": CLUSTERING, "clustering-2d": CLUSTERING_2D}
"""One seed each, which is known to solve the task."""
D_2 = PAPER
D_8 = _lasting(CLUSTERING, WIDE_EPOCHS, every=4)
SHUFFLED = CLUSTERING.model_copy(
    update={
        "task": CLUSTERING.task.model_copy(update={"shuffled": True}),
        "keep": CLUSTERING.keep.model_copy(update={"at": Every(stride=CLUSTERING.training.steps)}),
    }
)
"""Control: the labels of the training set change places."""
