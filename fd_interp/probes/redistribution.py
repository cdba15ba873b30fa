"""Which way do the tokens' embeddings move along the condensed direction?"""

from torch import Tensor

from fd_interp.measures import redistribution as measures
from fd_interp.observation import Observation, Probe, Variable

PAPER = "arXiv 2605.01199, Props. 3.6 to 3.8"


def _measure(seen: Observation) -> dict[str, Tensor]:
    W_E = seen.weights["embed.W_E"]
    gamma = measures.embedding_along_alpha(W_E, seen.frequencies)
    return {
        "embedding_norm": measures.embedding_norms(W_E),
        "embedding_along_alpha": gamma,
        "gamma_perp": measures.gamma_perp(gamma, seen.frequencies),
    }


REDISTRIBUTION = Probe(
    "redistribution",
    {
        "embedding_norm": Variable(("token",), "length of the token's embedding", PAPER),
        "embedding_along_alpha": Variable(("token",), "gamma: embedding along W_E's top direction", PAPER),
        "gamma_perp": Variable((), "part of gamma that is not proportional to frequency", PAPER),
    },
    _measure,
)
