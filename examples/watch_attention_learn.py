"""Train the smallest model that shows the whole cycle, and say when each stage began."""

import sys
from pathlib import Path

from fd_interp import MarkovChain, OneLayer, Run, Training, observe, train
from fd_interp.papers import paper_of

# A chain of four tokens: one frequent, three rare. Half of the time the token stays, else a new one is drawn.
chain = MarkovChain.paper(persistence=0.5)

# One layer of attention without residual stream, trained on the token after the last of 32 by gradient descent.
run = Run(task=chain, model=OneLayer(), training=Training(steps=1500, batch_size=256, loss_on="last"))

# Training leaves snapshots in a directory. Run again, it goes on where it stopped, or finds that it is done.
series = train(run, Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example"))

# The paper knows what to measure on such a run; the trace is an xarray.Dataset with a row for each snapshot.
paper = paper_of(run)
trace = observe(series, paper.probes(run))
print(
    trace[["loss", "W_E_top_share", "focus_ratio", "focus_ratio_rare"]].isel(layer=0, head=0).to_dataframe().iloc[::8]
)

for stage in paper.stages(trace):
    print(f"{stage.name:18} from {stage.start} to {stage.end}: {stage.seen}")
