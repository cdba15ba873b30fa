"""What is run to reproduce this paper, and on how many seeds."""

from fd_interp.papers.clustering.settings import CLUSTERING, CLUSTERING_2D, PAPER, paper_run
from fd_interp.training.run import Every, Run

TOGETHER = 16
"""Seeds in one ensemble: half of the paper's, so that two cores share them."""
WIDE_SEEDS, SHUFFLED_SEEDS = 16, 8
"""Seeds of the wider model and of the control at most."""

NAMED: dict[str, Run] = {"clustering": CLUSTERING, "clustering-2d": CLUSTERING_2D}
"""One seed each, which is known to solve the task."""
D_2 = PAPER
D_8 = paper_run(d_model=8, epochs=160, seed=CLUSTERING.seed, every=4)
SHUFFLED = CLUSTERING.model_copy(
    update={
        "task": CLUSTERING.task.model_copy(update={"shuffled": True}),
        "keep": CLUSTERING.keep.model_copy(update={"at": Every(stride=CLUSTERING.training.steps)}),
    }
)
"""Control: the labels of the training set change places."""
