"""Does the embedding condense onto one direction, which, and is attention frozen meanwhile?"""

from torch import Tensor

from fd_interp.measures import condensation as measures
from fd_interp.observation import Observation, Probe, Variable

PAPER = "arXiv 2605.01199, stages I and IV"
PER_HEAD = ("W_Q", "W_K")


def _variables() -> dict[str, Variable]:
    variables = {}
    for name in ("W_E", "W_U", *PER_HEAD):
        dims = ("layer", "head") if name in PER_HEAD else ()
        variables |= {
            f"{name}_top_share": Variable(dims, f"share of the top singular direction in |{name}|^2", PAPER),
            f"{name}_effective_rank": Variable(dims, f"effective rank of {name}", "Roy and Vetterli 2007"),
            f"{name}_singular_ratio": Variable(dims, f"s_2 / s_1 of {name}", PAPER),
            f"{name}_norm": Variable(dims, f"Frobenius norm of {name}", PAPER),
            f"{name}_norm_change": Variable(dims, f"(|{name}| - |{name}(0)|) / |{name}(0)|", PAPER),
            f"{name}_alignment": Variable(
                dims, f"alignment of {name}'s singular vectors with those of the snapshot before", "arXiv 2510.06954"
            ),
        }
    variables["W_E_frequency_cosine"] = Variable((), "|cos| between W_E's top direction and token frequencies", PAPER)
    return variables


def _measure(seen: Observation) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    weight, first, previous = (w["embed.W_E"] for w in (seen.weights, seen.first, seen.previous))
    values |= _of("W_E", weight, first, previous)
    values["W_E_frequency_cosine"] = measures.direction_cosine(weight, seen.frequencies)
    values |= _of("W_U", *(w["unembed.W_U"].mT for w in (seen.weights, seen.first, seen.previous)))
    for name in PER_HEAD:
        values |= _of(name, *(seen.stacked(name, w) for w in (seen.weights, seen.first, seen.previous)))
    return values


def _of(name: str, weight: Tensor, first: Tensor, previous: Tensor) -> dict[str, Tensor]:
    s = measures.singular_values(weight)
    return {
        f"{name}_top_share": measures.top_share(s),
        f"{name}_effective_rank": measures.effective_rank(s),
        f"{name}_singular_ratio": measures.singular_ratio(s),
        f"{name}_norm": measures.frobenius_norm(s),
        f"{name}_norm_change": measures.relative_norm_change(weight, first),
        f"{name}_alignment": measures.singular_vector_alignment(weight, previous),
    }


EMBEDDING_CONDENSATION = Probe("embedding_condensation", _variables(), _measure)
