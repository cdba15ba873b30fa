"""The part of a report about one run and its seeds."""

from collections.abc import Sequence
from types import ModuleType

from fd_interp.models.learned_query import LearnedQueryAttention
from fd_interp.observation import Trace
from fd_interp.report.figures import panel_figure
from fd_interp.report.page import Section
from fd_interp.report.views import attention_of, spread_steps
from fd_interp.training.series import Series


def run_section(
    paper: ModuleType,
    title: str,
    text: str,
    series: Series,
    seeds: Sequence[Trace],
    predicted: Sequence[Trace] = (),
) -> Section:
    """Stages, curves and attention of the first seed, the other seeds drawn faintly behind.

    Args:
        paper: says what to draw: `stages(trace)`, `panels(series)` of `shown(trace)`, and `wide_figures(series)`.
        series: that of the first seed.
    """
    stages, last = paper.stages(seeds[0]), series.steps[-1]
    theory = [paper.shown(trace).sel(step=slice(0, last)) for trace in predicted]
    curves = [paper.shown(seed) for seed in seeds]
    small = [panel_figure(panel, curves, stages, theory) for panel in paper.panels(series)]
    one_query = isinstance(series.build(), LearnedQueryAttention)  # which is one row, and shown with the figures
    view = None if one_query else attention_of(series, spread_steps(series))
    return Section(title, text, stages, small, paper.wide_figures(series), view)
