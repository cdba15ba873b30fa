"""What a report of this paper shows of a trace."""

import plotly.graph_objects as go

from fd_interp.papers.focus_dilution.cycle import most_focused_head
from fd_interp.report.attention import visible
from fd_interp.report.figures import Curve, Panel, by_token, row_cosine_figure
from fd_interp.report.views import spread_steps
from fd_interp.training.series import Series

MOST_TOKENS_OF_MATRIX = 64
"""Vocabulary up to which the cosines between all embeddings are shown."""

shown = most_focused_head
"""What is drawn of a trace."""


def wide_figures(series: Series) -> list[go.Figure]:
    """Cosines between the embeddings at a few steps, where there are few enough tokens to see."""
    if len(series.inputs.token_strings) > MOST_TOKENS_OF_MATRIX:
        return []
    return [row_cosine_figure(series, spread_steps(series, most=5)[-4:])]


def panels(series: Series) -> list[Panel]:
    """Curves over the steps, with the losses of simpler predictors as levels and tokens in the order of frequency."""
    baselines = series.run.task.baselines() if series.run else []
    order = series.inputs.frequencies.argsort(descending=True, stable=True).tolist()
    tokens = [(token, visible(series.inputs.token_strings[token])) for token in order]
    return [
        Panel("Loss (nats)", (Curve("loss", "held-out loss"),), levels=tuple(baselines)),
        Panel(
            "Condensation of W_E",
            (
                Curve("W_E_top_share", "share of the top direction"),
                Curve("W_E_frequency_cosine", "cosine with frequencies"),
                Curve("W_E_singular_ratio", "s2 / s1"),
            ),
        ),
        Panel(
            "Norms of the weights",
            (Curve("W_E_norm", "W_E"), Curve("W_U_norm", "W_U"), Curve("W_Q_norm", "W_Q"), Curve("W_K_norm", "W_K")),
            log_y=True,
        ),
        Panel("Effective rank", (Curve("W_E_effective_rank", "W_E"), Curve("W_Q_effective_rank", "W_Q"))),
        Panel(
            "Attention on frequent tokens ÷ their share",
            (Curve("focus_ratio", "all queries"), Curve("focus_ratio_rare", "rare queries")),
            levels=(("uniform attention", 1.0),),
        ),
        by_token(
            "The same, by the query's token", "focus_ratio_by_query", tokens, levels=(("uniform attention", 1.0),)
        ),
        by_token("Embeddings along the top direction (gamma)", "embedding_along_alpha", tokens),
        Panel(
            "Other faces of attention",
            (Curve("self_focus", "own token ÷ its share"), Curve("frequency_slope", "slope against log frequency")),
        ),
    ]
