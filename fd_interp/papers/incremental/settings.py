"""The runs: those of the paper as far as they are known to us, and the small one that shows every stage in seconds.

The paper's own runs draw q from a uniform law, clip gradients and lower the learning rate on plateaus; its full model
has dropout and normalises after each sum. None of that is here. Its absolute losses are not reproduced by ours.
"""

from fd_interp.claims import Claim
from fd_interp.measures.lags import full_context
from fd_interp.models.config import Minimal, Transformer
from fd_interp.observation import Probe
from fd_interp.papers.incremental import claims
from fd_interp.probes.prediction import excess_loss, held_out_loss
from fd_interp.probes.rungs import excess_over_rungs, teacher_kl
from fd_interp.probes.specialization import head_specialization, skip_alignment, value_alignment
from fd_interp.tasks.high_order import HighOrderMarkov
from fd_interp.tasks.lag_regression import LagRegression
from fd_interp.tasks.lags import spans
from fd_interp.training.run import SGD, AdamW, Every, Keep, Run, Training

ADAM = AdamW(lr=0.03, lrs={"W_Q": 0.1})


def changed(run: Run, **fields: object) -> Run:
    """The same run but for some fields, checked anew."""
    return Run(**{**run.model_dump(), **fields})


def _small(task: HighOrderMarkov, *, steps: int, every: int = 10) -> Run:
    return Run(
        task=task,
        model=Minimal(attn_scale=4.0),
        training=Training(optimizer=ADAM, steps=steps, batch_size=256, loss_on="full_context"),
        keep=Keep(at=Every(stride=every)),
    )


INCREMENTAL = _small(HighOrderMarkov(), steps=1200)
DOUBLE = _small(HighOrderMarkov(ratio=2.0, scale=3.0), steps=1500, every=20)
EQUAL = _small(HighOrderMarkov(ratio=1.0, scale=8.0), steps=700)
TWO_LAYERS = changed(
    _small(HighOrderMarkov(), steps=600), model=Minimal(n_layers=2, attn_scale=4.0, stds={"W_V": 0.25})
)
"""With two layers values of zero are a saddle point that nothing leaves; 0.25 is Xavier's for sixteen tokens."""
OVERLAPPING = _small(
    HighOrderMarkov(blocks=((1, 2), (2, 3), (3, 4)), overlapping=True, scale=3.0), steps=1200, every=20
)
REGRESSION = Run(
    task=LagRegression(context=8),
    model=Minimal(attn_scale=1.0),
    training=Training(optimizer=SGD(lr=2.0), steps=3500, batch_size=128, loss_on="last"),
    keep=Keep(at=Every(stride=25)),
)
PAPER = Run(
    task=HighOrderMarkov(d_vocab=50, blocks=spans((2, 2, 2)), scale=10.0, context=25, burn_in=0),
    model=Minimal(attends_by="token_and_position", std=1e-6),
    training=Training(optimizer=AdamW(lr=0.08, weight_decay=0.01), steps=1500, batch_size=256, loss_on="full_context"),
    keep=Keep(at=Every(stride=25)),
)
FULL = Run(
    task=HighOrderMarkov(),
    model=Transformer(n_heads=3, d_model=48, d_head=16, d_mlp=64, act_fn="relu", normalization_type="LN"),
    training=Training(optimizer=AdamW(lr=5e-3), steps=250, batch_size=128, loss_on="full_context"),
    keep=Keep(at=Every(stride=20)),
)
"""The paper's is wider (255, heads of 85) and normalises after each sum, which HookedTransformer does not offer."""

SETTINGS: dict[str, Run] = {
    "incremental": INCREMENTAL,
    "incremental-double": DOUBLE,
    "incremental-equal": EQUAL,
    "incremental-regression": REGRESSION,
    "incremental-paper": PAPER,
    "incremental-full": FULL,
    "incremental-two-layers": TWO_LAYERS,
    "incremental-overlapping": OVERLAPPING,
}


def probes(run: Run) -> list[Probe]:
    """What is measured at every snapshot of a run of this paper, at the last query or at all that see every lag."""
    task = run.task
    assert isinstance(task, HighOrderMarkov | LagRegression)
    queries = run.queries if run.training.loss_on == "last" else full_context(task.lags)
    asked = [held_out_loss(queries), excess_over_rungs(task, queries), head_specialization(task.blocks, queries)]
    if isinstance(task, HighOrderMarkov):
        asked += [excess_loss(task, queries), teacher_kl(task, queries)]
    if getattr(run.model, "n_layers", 1) == 1:
        asked.append(value_alignment(task, queries))
    if isinstance(run.model, Transformer):
        asked.append(skip_alignment(task))
    return asked


STAGED = (
    claims.ORDER,
    claims.DETECTORS,
    claims.COMPETITION,
    claims.PLATEAUS,
    claims.FINAL,
    claims.OFFSETS,
    claims.RUNG_OF_HEADS,
)


def claims_about(run: Run) -> tuple[Claim, ...]:
    """The claims that a run of this paper is judged by.

    With as many heads as blocks each is to have one of its own in the end. With m = 2 it is not judged: there the last
    head's attention is still divided evenly between two blocks when the loss is that of the law, so nothing moves it.
    Equal blocks have no order and so no stages, and a skip connection carries nothing but lag 1.
    """
    model, task = run.model, run.task
    assert isinstance(task, HighOrderMarkov | LagRegression)
    if isinstance(task, LagRegression):
        return (claims.ORDER, claims.SOLVED)
    if isinstance(model, Transformer):
        return (claims.SKIP,) if 1 in task.lags else ()
    if not isinstance(model, Minimal) or model.n_layers > 1 or model.n_heads != task.n_blocks or task.overlapping:
        return (claims.RUNG_OF_HEADS,)
    if task.ratio == 1:
        return (claims.FINAL, claims.RUNG_OF_HEADS, claims.PERMUTATION)
    return (*STAGED, claims.PERMUTATION) if task.ratio < 2 else STAGED
