"""Which head attends to which lags, do the heads compete or cooperate, and what do their values hold?"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fd_interp.measures import lags, specialization
from fd_interp.observation import Observation, Probe, Variable
from fd_interp.tasks.lags import Lags

PAPER = "arXiv 2602.19143, Sec. 3"
PER_BLOCK = ("layer", "head", "block")


def head_specialization(blocks: Sequence[Sequence[int]], queries: slice | None = None) -> Probe:
    """Attention of each head on each block of lags, and how the heads of a layer divide the blocks.

    Works on any model: lag 1 is the query's own token, lag 2 the token before it, and so on.

    Args:
        blocks: sets of lags.
        queries: whose attention is averaged; those with full context if None.
    """
    every = sorted({lag for block in blocks for lag in block})

    def measure(seen: Observation) -> dict[str, Tensor]:
        patterns = seen.activations("pattern")
        by_lag = torch.stack([lags.attention_by_lag(pattern, every, queries) for pattern in patterns])
        mass = lags.block_mass(by_lag, every, blocks)
        last = torch.stack([lags.attention_by_block(pattern, blocks, lags.LAST_QUERY) for pattern in patterns])
        return {
            "block_mass": mass,
            "block_mass_last": last,
            "competition": specialization.competition_index(mass),
            "cooperation": specialization.cooperation_index(mass),
            "redundancy": specialization.redundancy(mass),
            "participation_rank": specialization.participation_rank(by_lag),
        }

    names = {"block": [block_name(block) for block in blocks]}
    return Probe(
        "head_specialization",
        {
            "block_mass": Variable(PER_BLOCK, "attention on each block of lags", PAPER, names=names),
            "block_mass_last": Variable(PER_BLOCK, "the same from the last query", PAPER),
            "competition": Variable(("layer",), "attention that all heads have on one and the same block", "ours"),
            "cooperation": Variable(("layer",), "attention of heads on blocks of their own", "ours"),
            "redundancy": Variable(("layer",), "share of heads whose block another head attends to as well", "ours"),
            "participation_rank": Variable(("layer",), "how many different patterns the heads have", "ours"),
        },
        measure,
        hooks=("pattern",),
    )


def block_name(block: Sequence[int]) -> str:
    """`lag 3`, `lags 4-8`, `lags 1, 3`."""
    if len(block) == 1:
        return f"lag {block[0]}"
    joined = sorted(block) == list(range(min(block), max(block) + 1))
    return f"lags {min(block)}-{max(block)}" if joined else f"lags {', '.join(map(str, block))}"


def value_alignment(task: Lags, queries: slice | None = None) -> Probe:
    """What each head's values hold of each block's features, and what the whole model has learned of each block.

    For models of one layer, where what a head writes is read as logits.

    Args:
        queries: as for `head_specialization`.
    """
    features = task.feature_matrices
    learned = torch.tensor([m * sum(alphas) for m, alphas in zip(task.strengths, task.weights, strict=True)])

    def measure(seen: Observation) -> dict[str, Tensor]:
        OV = token_values(seen, task.d_vocab)
        mass = torch.stack([lags.attention_by_block(p, task.blocks, queries) for p in seen.activations("pattern")])
        coefficients = specialization.value_coefficients(OV, features)
        effective = specialization.effective_coefficients(mass, coefficients)[0] / learned
        owners = specialization.assigned_blocks(mass[0])
        return {
            "value_coefficient": coefficients,
            "value_cosine": specialization.value_cosines(OV, features),
            "effective_coefficient": effective,
            "cooperative_offset": specialization.cooperative_offsets(coefficients[0], owners),
        }

    return Probe(
        "value_alignment",
        {
            "value_coefficient": Variable(PER_BLOCK, "coefficient of each block's feature in a head's values", PAPER),
            "value_cosine": Variable(PER_BLOCK, "cosine of a head's values with each block's feature", PAPER),
            "effective_coefficient": Variable(("block",), "share learned of each block (E_kk; 1: all of it)", "ours"),
            "cooperative_offset": Variable(
                ("block",), "smallest coefficient of a feature among heads that do not own its block", PAPER
            ),
        },
        measure,
        hooks=("pattern",),
    )


def skip_alignment(task: Lags) -> Probe:
    """What the skip connection alone says about the next token, `W_E W_U`, along each block's feature.

    The residual stream carries the query's own token, lag 1, so that no head need attend to it.
    """

    def measure(seen: Observation) -> dict[str, Tensor]:
        direct = (seen.weights["embed.W_E"] @ seen.weights["unembed.W_U"])[None]
        return {"skip_cosine": specialization.value_cosines(direct, task.feature_matrices)[0]}

    variable = Variable(("block",), "cosine of W_E W_U with each block's feature", "ours")
    return Probe("skip_alignment", {"skip_cosine": variable}, measure)


def token_values(seen: Observation, d_vocab: int) -> Float[Tensor, "layer head source target"]:
    """What each head adds to the logits where it attends to a token: `W_E W_V W_O W_U`, or the minimal model's W_V."""
    W_V = seen.stacked("W_V")
    if "embed.W_E" not in seen.weights:
        return W_V[..., :d_vocab, :d_vocab]
    return seen.weights["embed.W_E"] @ W_V @ seen.stacked("W_O") @ seen.weights["unembed.W_U"]
