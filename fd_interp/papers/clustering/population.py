"""What the theory predicts for a run of this paper: it has none."""

from collections.abc import Sequence

from fd_interp.observation import Trace
from fd_interp.training.run import Run


def predicted(_run: Run, _seeds: Sequence[int], *, steps: int | None = None) -> list[Trace]:
    """Nothing."""
    return []
