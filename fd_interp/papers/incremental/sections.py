"""The sections of the reports on this paper, with what to look for in each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fd_interp.observation import Trace
from fd_interp.papers import incremental as paper
from fd_interp.papers.incremental import laws
from fd_interp.papers.incremental.acquisition import flattest_steps, nearest_rung, off_rung
from fd_interp.papers.incremental.cases import SIZES, STDS
from fd_interp.report.figures import Curve, overview_figure, points_figure
from fd_interp.report.page import Section
from fd_interp.report.sections import run_section
from fd_interp.training.run import Run
from fd_interp.training.series import open_series

CHAIN_TEXT = (
    "Three heads, sixteen tokens, lags 3, 1, 2 in the order of importance (m = 1.7). Solid: seeds, the first one "
    "strongly; heads are renumbered by the block that they end on. Shaded: the rungs on which the first seed stands. "
    "Dotted: the exact ladder, the best that can be predicted from no lag, the first, the first two, and all. All "
    "heads take lag 3, with a little of lag 1 mixed in, which puts the plateau slightly below its rung; then one "
    "leaves for lag 1, then one for lag 2: the last head stays divided, as in the paper's own Fig. 10."
)
DOUBLE_TEXT = (
    "The same with m = 2, where plateaus are longest. Here the last head still divides its attention evenly between "
    "two lags when the loss is that of the law, so that nothing moves it any more."
)
REGRESSION_TEXT = (
    "The variant of which the gradient flow is known: squared loss, plain gradient descent. Dashed: the flow from the"
    " first seed's own start, with nothing fitted; step k is time k lr / d_vocab. It says when each block is learned,"
    " which head takes it, and on which mixture the last head comes to rest."
)
ORDERS_TEXT = (
    "What is learned of each block, in runs whose lags are equally many and differ in which is the most important: "
    "the order is that of importance and not of distance. With equal strengths there is no such order, and no "
    "plateau."
)
HEADS_TEXT = (
    "H heads stop on rung min(H, 3). A single pattern can mix lags, so one head alone does a little better than the "
    "best predictor from one lag. Heads that start exactly alike are one head for ever."
)
LAWS_TEXT = (
    "Left: under Adam, in double precision, heads part later by as many steps for each decade that they start closer "
    "together. In the gradient flow it is the square of that logarithm instead, because attention to the next lag "
    "fades meanwhile. Right, and below: with N training sequences the best held-out loss comes the earlier, on the "
    "lower rung, the fewer there are; the rung is that of the nearest truncated teacher."
)
FULL_TEXT = (
    "A plain transformer with learned embeddings, positions, MLP, layer norm and skip. The residual stream carries "
    "the query's own token, which is lag 1, to the logits: W_E W_U learns the features of lag 1, and no head need "
    "attend to it. Without lag 1 in the task (second case of the controls) W_E W_U holds no feature, and each head "
    "takes a lag."
)
PAPER_TEXT = (
    "The sizes of the paper's minimal model: 50 tokens, blocks of two lags, scale 10, full W_Q and W_V, AdamW at "
    "0.08. Its figures show plateaus at 1.38 and 0.83 and an end at 0.52 (read off Figs. 6 and 7); its batches are "
    "larger, its learning rate falls on plateaus, and the configuration of its runs is not known to us."
)
TWO_LAYERS_TEXT = "Two layers of three heads that attend by position, the second reading what the first has written."
OVERLAPPING_TEXT = "Blocks that share lags: (1, 2), (2, 3), (3, 4), in the order of importance."

TEXTS = {
    "m-1.7": ("m = 1.7", CHAIN_TEXT),
    "m-2": ("m = 2", DOUBLE_TEXT),
    "regression": ("Regression and its flow", REGRESSION_TEXT),
    "full": ("A full transformer", FULL_TEXT),
    "two-layers": ("Two layers", TWO_LAYERS_TEXT),
    "overlapping": ("Overlapping blocks", OVERLAPPING_TEXT),
    "size-m-1.7": ("The paper's size, m = 1.7", PAPER_TEXT),
    "size-m-1.9": ("The paper's size, m = 1.9", PAPER_TEXT),
}
"""Title and text of each case that has a section."""

Traces = Mapping[str, list[Trace]]


def of_case(out: Path, case: str, seeds: Sequence[Trace], predicted: Sequence[Trace] = (), more: str = "") -> Section:
    """Curves, stages and attention of a case, with a sentence on what came out if there is one."""
    title, text = TEXTS[case]
    return run_section(paper, title, f"{text} {more}".strip(), open_series(out / case / "seed-0"), seeds, predicted)


def outcome(seeds: Sequence[Trace]) -> str:
    """A sentence on where the seeds of a reported run ended."""
    rungs = [int(nearest_rung(trace)[-1]) for trace in seeds]
    last = seeds[0].sizes["rung"] - 1
    off = [float(off_rung(trace, last)[-1]) for trace in seeds]
    ends = ", ".join(f"{value:+.1%}" for value in off)
    return f"Nothing is claimed. Nearest rung at the end: {rungs}; loss beside that of the law: {ends}."


def of_orders(traces: Traces) -> Section:
    """What is learned of each block where the order of importance is another."""
    groups = {
        "lags 3, 1, 2": traces["m-1.7"],
        "lags 1, 2, 3": traces["importance-1-2-3"],
        "lags 2, 1, 3": traces["importance-2-1-3"],
        "lags 3, 1, 2, equal": traces["equal"],
    }
    curves = [Curve("effective_coefficient", f"block {block + 1}", {"block": block}) for block in range(3)]
    figure = overview_figure(curves, "Share learned of each block (E_kk)", groups)
    return Section("Order of importance", ORDERS_TEXT, wide_figures=[figure])


def of_heads(traces: Traces, run: Run) -> Section:
    """The run is that of three heads, whose task has the levels."""
    groups = {f"H = {heads}": traces[f"heads-{heads}"] for heads in (1, 2, 5)}
    groups = {"H = 3": traces["m-1.7"], **groups, "H = 3, alike": traces["alike"]}
    levels = [(baseline.name.split(":")[0], baseline.loss) for baseline in run.task.baselines()[2:]]
    figure = overview_figure(
        [Curve("loss", "held-out loss")], "Held-out loss (nats)", dict(sorted(groups.items())), levels
    )
    return Section("Number of heads", HEADS_TEXT, wide_figures=[figure])


def of_laws(breaking: Sequence[Trace], stopping: Sequence[Trace]) -> Section:
    """How the steps of parting and halting depend on the start and on the number of sequences."""
    parting = {
        f"seed {seed}": [laws.parting_step(trace.sel(std=std)) for std in STDS] for seed, trace in enumerate(breaking)
    }
    halting = {
        f"seed {seed}": [laws.stopped_at(trace.sel(sequences=size))[1] for size in SIZES]
        for seed, trace in enumerate(stopping)
    }
    small = [
        points_figure("Step at which heads part", "std of W_Q at the start", "step", STDS, parting),
        points_figure("Rung at the best held-out loss", "training sequences", "rung", SIZES, halting),
    ]
    groups = {
        f"N = {size}, halts at step {laws.stopped_at(stopping[0].sel(sequences=size))[0]}": [
            trace.sel(sequences=size) for trace in stopping
        ]
        for size in SIZES
    }
    curves = [Curve("teacher_kl", f"{known} blocks", {"rung": known}) for known in (1, 2, 3)]
    wide = overview_figure(curves, "KL to truncated teachers (nats) with N training sequences", groups)
    return Section("Laws", LAWS_TEXT, figures=small, wide_figures=[wide])


def plateaus(seeds: Sequence[Trace]) -> str:
    """A sentence on where plateaus lie, at their flattest steps, and where training ends."""
    ends = []
    for trace in seeds:
        losses = [float(trace.loss.sel(step=step)) for step in flattest_steps(trace) if step is not None]
        ends.append(", ".join(f"{loss:.2f}" for loss in [*losses, float(trace.loss[-1])]))
    return f"Loss on the plateaus and at the end: {'; '.join(ends)}."
