"""Watch three heads compete for one lag and then part, and ask any model's patterns the same question."""

import torch

from fd_interp import HighOrderMarkov, observe, setting, train
from fd_interp.measures.lags import attention_by_block
from fd_interp.measures.specialization import competition_index, cooperation_index, redundancy
from fd_interp.papers import paper_of

# Sixteen tokens; what comes next depends on the tokens 3, 1 and 2 places before, in this order of importance.
chain = HighOrderMarkov(blocks=((3,), (1,), (2,)), ratio=1.7)
for rung in chain.ladder:
    print(f"{rung.name:24} at best {rung.additive:.3f} nats")

# The setting has this task and the paper's minimal model; 400 steps are enough to see the first head leave.
run = setting("incremental")
run = run.model_copy(update={"task": chain, "training": run.training.model_copy(update={"steps": 400})})
series = train(run, "runs/example-heads")

# Attention of each head on each lag, at a few steps.
trace = observe(series, paper_of(run).probes(run))
for step in (0, 100, 200, 400):
    mass = trace.block_mass.sel(step=step, layer=0).values.round(2).tolist()
    print(f"step {step}: loss {float(trace.loss.sel(step=step)):.3f}, heads on lags 3, 1, 2: {mass}")
for stage in paper_of(run).stages(trace):
    print(f"{stage.name:15} from {stage.start} to {stage.end}: {stage.seen}")

# The measures take patterns of any model. Here, four heads: three look at the token before their own, one further back.
# No block has them all (competition 0), each has an owner (cooperation 1), two heads are spare (redundancy 2/3).
pattern = torch.zeros(1, 4, 8, 8)
for head, back in enumerate((1, 1, 1, 3)):
    pattern[0, head, range(back, 8), range(8 - back)] = 1.0
mass = attention_by_block(pattern, blocks=[(2,), (4,)])
for index in (competition_index, cooperation_index, redundancy):
    print(index.__name__, round(index(mass).item(), 2))
