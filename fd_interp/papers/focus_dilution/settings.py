"""The runs: the paper's settings, with our choice for what it leaves open, and the controls.

Persistence, context, width, learning rate and optimizer of the paper's experiments are not known to us. Persistence
0.5, 32 tokens, width 16 and plain gradient descent from a normal initialisation of 0.01 are our choice.
"""

from dataclasses import dataclass

from fd_interp.claims import Claim
from fd_interp.models.config import Hold, OneLayer, Transformer
from fd_interp.observation import Probe
from fd_interp.papers.focus_dilution import claims
from fd_interp.probes.condensation import EMBEDDING_CONDENSATION
from fd_interp.probes.focus import frequency_focus
from fd_interp.probes.prediction import excess_loss, held_out_loss
from fd_interp.probes.redistribution import REDISTRIBUTION
from fd_interp.tasks.markov import MarkovChain
from fd_interp.tasks.text import TextCorpus
from fd_interp.training.run import SGD, AdamW, Keep, LogSpaced, Run, Training

FOCUS_ON_TEXT = frequency_focus(top=10, rare=1.0)
"""On text the ten most frequent tokens count as frequent, and all others as rare."""


def _chain(task: MarkovChain, *, steps: int, batch_size: int) -> Run:
    return Run(
        task=task,
        model=OneLayer(),
        training=Training(optimizer=SGD(lr=0.2), steps=steps, batch_size=batch_size, loss_on="last"),
        keep=Keep(at=LogSpaced(count=80)),
    )


def changed(run: Run, **fields: object) -> Run:
    """The same run but for some fields, checked anew."""
    return Run(**{**run.model_dump(), **fields})


ZIPF = _chain(MarkovChain.zipf(8), steps=6000, batch_size=128)
PAPER_PI = _chain(MarkovChain.paper(), steps=3000, batch_size=256)
TRANSFORMER = changed(
    ZIPF,
    model=Transformer(std=1e-2),
    training=Training(optimizer=SGD(lr=0.2), steps=2500, batch_size=128, loss_on="last"),
)
MULTI_HEAD = changed(
    ZIPF,
    model=Transformer(n_layers=2, n_heads=4, d_head=8, d_model=32, d_mlp=64, normalization_type="LN"),
    training=Training(optimizer=AdamW(lr=1e-3), steps=2000, batch_size=128, loss_on="all"),
)
ADAM = changed(ZIPF, training=Training(optimizer=AdamW(lr=1e-3), steps=2000, batch_size=128, loss_on="last"))
TEXT = Run(
    task=TextCorpus(source="roneneldan/TinyStories", max_documents=20_000),
    model=OneLayer(d_model=32, d_head=32, std=5e-3),
    training=Training(optimizer=SGD(lr=2.0), steps=5000, batch_size=64, loss_on="all"),
    keep=Keep(at=LogSpaced(count=120), held_out=256),
)

SETTINGS: dict[str, Run] = {
    "focus-dilution": ZIPF,
    "focus-dilution-paper": PAPER_PI,
    "focus-dilution-text": TEXT,
    "focus-dilution-adam": ADAM,
    "focus-dilution-transformer": TRANSFORMER,
    "focus-dilution-multihead": MULTI_HEAD,
}


def probes(run: Run) -> list[Probe]:
    """What is measured at every snapshot of a run of this paper."""
    return [
        EMBEDDING_CONDENSATION,
        FOCUS_ON_TEXT if isinstance(run.task, TextCorpus) else frequency_focus(top=1),
        REDISTRIBUTION,
        held_out_loss(run.queries),
        excess_loss(run.task, run.queries),
    ]


def probes_of_text() -> list[Probe]:
    """What is measured on any language model, of which no run is known."""
    return [EMBEDDING_CONDENSATION, FOCUS_ON_TEXT, REDISTRIBUTION, held_out_loss()]


def claims_about(run: Run) -> tuple[Claim, ...]:
    """The claims that a run of this paper is judged by."""
    return claims.ON_TEXT if isinstance(run.task, TextCorpus) else claims.ON_CHAINS


@dataclass(frozen=True)
class Control:
    """A run that lacks what a claim needs, so that the claim must fail on it."""

    name: str
    taken_away: str
    run: Run
    in_model: tuple[Claim, ...] = ()
    """What must fail on the model itself, in its finite context."""
    in_population: tuple[Claim, ...] = ()
    """What must fail in the limit of infinitely long contexts; nothing where the theory does not follow the run."""


def _at_most(training: Training, steps: int) -> Training:
    """A residual stream needs no more steps than that to reach the bigram, and its steps cost more."""
    return training.model_copy(update={"steps": min(training.steps, steps)})


def controls(base: Run) -> list[Control]:
    """What must not show the cycle, each made from the base run by taking one thing away.

    In a finite context a query's own token is more visible than its frequency says. So there equal rare tokens do not
    stop a second direction, and with uniform frequencies attention learns in the end, though nothing condenses before.
    """
    task = base.task
    if not isinstance(task, MarkovChain):
        return []
    frozen: dict[str, Hold] = {**base.model.fixed, "W_Q": "init", "W_K": "init"}
    common = {"persistence": task.persistence, "context": task.context}
    independent = MarkovChain(pi=task.pi, persistence=0.0, context=task.context)
    return [
        Control(
            "persistence-0",
            "tokens are independent",
            changed(base, task=independent),
            in_model=(claims.FOCUS,),
            in_population=(claims.FOCUS,),
        ),
        Control(
            "symmetric-low",
            "all tokens but one are equally frequent",
            changed(base, task=MarkovChain.symmetric_low(4, 0.55, **common)),
            in_population=(claims.NEW_DIRECTIONS,),
        ),
        Control(
            "uniform",
            "no token is frequent",
            changed(base, task=MarkovChain.uniform(task.d_vocab, **common)),
            in_model=(claims.CONDENSATION,),
            in_population=(claims.CONDENSATION, claims.FOCUS),
        ),
        Control(
            "frozen-attention",
            "W_Q and W_K are held at their start",
            changed(base, model=base.model.model_copy(update={"fixed": frozen})),
            in_model=(claims.FOCUS, claims.DILUTION),
        ),
        Control(
            "residual",
            "a residual stream, positions and trained W_V and W_O are added: a plain transformer",
            changed(base, model=TRANSFORMER.model, training=_at_most(base.training, TRANSFORMER.training.steps)),
            in_model=(claims.FOCUS, claims.DILUTION),
        ),
        Control(
            "anti-focus",
            "frequent tokens are followed by rare ones (S < 0)",
            changed(base, task=MarkovChain.antitone(task.pi, context=task.context)),
            in_model=(claims.FOCUS,),
            in_population=(claims.FOCUS,),
        ),
    ]
