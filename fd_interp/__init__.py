"""Watch attention learn: runs, series of snapshots, probes and claims about the training dynamics of transformers.

Names are imported from their modules when they are first used, so that `import fd_interp` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fd_interp.claims import Claim, Evidence, Finding, Verdict, judge, judge_control
    from fd_interp.config import InputError
    from fd_interp.models.config import LearnedQuery, Minimal, OneLayer, Transformer
    from fd_interp.observation import Observation, Probe, Trace, Variable, observe
    from fd_interp.papers import setting, settings
    from fd_interp.probes.clustering import class_share, clustering_head, token_at_lag
    from fd_interp.probes.condensation import EMBEDDING_CONDENSATION
    from fd_interp.probes.focus import frequency_focus
    from fd_interp.probes.prediction import accuracy, excess_loss, held_out_loss
    from fd_interp.probes.redistribution import REDISTRIBUTION
    from fd_interp.probes.rungs import excess_over_rungs, teacher_kl
    from fd_interp.probes.specialization import head_specialization, skip_alignment, value_alignment
    from fd_interp.sources import from_checkpoints, open_source
    from fd_interp.tasks.high_order import HighOrderMarkov
    from fd_interp.tasks.lag_regression import LagRegression
    from fd_interp.tasks.markov import MarkovChain
    from fd_interp.tasks.modular import SparseModularAddition
    from fd_interp.tasks.task import Baseline, Batch, Task
    from fd_interp.tasks.text import TextCorpus
    from fd_interp.training.ensemble import train_together
    from fd_interp.training.loop import train
    from fd_interp.training.run import SGD, AdamW, Every, Given, Keep, LogSpaced, Run, Start, Training
    from fd_interp.training.series import Series, Snapshot, open_series

_HOME = {
    "claims": ["Claim", "Evidence", "Finding", "Verdict", "judge", "judge_control"],
    "config": ["InputError"],
    "models.config": ["LearnedQuery", "Minimal", "OneLayer", "Transformer"],
    "observation": ["Observation", "Probe", "Trace", "Variable", "observe"],
    "papers": ["setting", "settings"],
    "probes.clustering": ["class_share", "clustering_head", "token_at_lag"],
    "probes.condensation": ["EMBEDDING_CONDENSATION"],
    "probes.focus": ["frequency_focus"],
    "probes.prediction": ["accuracy", "excess_loss", "held_out_loss"],
    "probes.redistribution": ["REDISTRIBUTION"],
    "probes.rungs": ["excess_over_rungs", "teacher_kl"],
    "probes.specialization": ["head_specialization", "skip_alignment", "value_alignment"],
    "tasks.high_order": ["HighOrderMarkov"],
    "tasks.lag_regression": ["LagRegression"],
    "tasks.markov": ["MarkovChain"],
    "tasks.modular": ["SparseModularAddition"],
    "tasks.task": ["Baseline", "Batch", "Task"],
    "tasks.text": ["TextCorpus"],
    "sources": ["from_checkpoints", "open_source"],
    "training.ensemble": ["train_together"],
    "training.loop": ["train"],
    "training.run": ["SGD", "AdamW", "Every", "Given", "Keep", "LogSpaced", "Run", "Start", "Training"],
    "training.series": ["Series", "Snapshot", "open_series"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [name for names in _HOME.values() for name in names]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fd_interp' has no attribute '{name}'")
    return getattr(import_module(f"fd_interp.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
