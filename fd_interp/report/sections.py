"""The part of a report about one run and its seeds."""

from collections.abc import Sequence
from types import ModuleType

from fd_interp.observation import Trace
from fd_interp.report import figures
from fd_interp.report.attention import visible
from fd_interp.report.page import Section
from fd_interp.report.views import attention_of, spread_steps
from fd_interp.training.series import Series

MOST_TOKENS_OF_MATRIX = 64
"""Vocabulary up to which the cosines between all embeddings are shown."""


def run_section(
    paper: ModuleType,
    title: str,
    text: str,
    series: Series,
    seeds: Sequence[Trace],
    predicted: Sequence[Trace] = (),
) -> Section:
    """Stages, curves, embedding cosines and attention of the first seed, the other seeds drawn faintly behind.

    Args:
        series: that of the first seed.
    """
    tokens, stages = series.inputs.token_strings, paper.stages(seeds[0])
    baselines = series.run.task.baselines() if series.run else []
    order = series.inputs.frequencies.argsort(descending=True, stable=True).tolist()
    curves = [paper.most_focused_head(seed) for seed in seeds]
    last = series.steps[-1]
    theory = [figures.one_head(trace).sel(step=slice(0, last)) for trace in predicted]
    panels = paper.panels([(token, visible(tokens[token])) for token in order], baselines)
    small = [figures.panel_figure(panel, curves, stages, theory) for panel in panels]
    wide = []
    if len(tokens) <= MOST_TOKENS_OF_MATRIX:
        wide.append(figures.row_cosine_figure(series, spread_steps(series, most=5)[-4:]))
    view = attention_of(series, spread_steps(series))
    return Section(title, text, stages, small, wide, view)
