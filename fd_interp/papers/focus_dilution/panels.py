"""What a report of this paper shows of a trace."""

from collections.abc import Sequence

from fd_interp.report.figures import Curve, Panel, by_token
from fd_interp.tasks.task import Baseline


def panels(tokens: Sequence[tuple[int, str]], baselines: Sequence[Baseline]) -> list[Panel]:
    """The panels.

    Args:
        tokens: in the order of their frequency, with their names.
        baselines: the simpler predictors, whose losses are drawn as levels.
    """
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
