"""Whether heads compete for one block of positions or share the blocks between them (arXiv 2602.19143).

The phases are the paper's, the indices that grade them ours. The measures of attention take each head's `mass` on each
block (`fd_interp.measures.lags`), which is not negative and adds up to at most 1 over disjoint blocks. An index does
not depend on the order of heads or blocks. Leading axes, steps or layers, are independent.

The measures of values take what a head writes: `OV[source, target]` is what it adds to the logit of a target where it
attends to a source with all its attention, and a feature says the same of the task.
"""

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from fd_interp.measures._precision import at_least_single


def competition_index(mass: Float[Tensor, "*batch head block"]) -> Float[Tensor, "*batch"]:
    """Attention that every head has on the block they agree on: the maximum over blocks of the minimum over heads.

    In `[0, 1]`: 1 when all heads have all their attention on one and the same block, the paper's competitive phase; at
    most 1/2 when two heads have half of theirs or more on disjoint blocks; 0 when each block is ignored by some head.
    For uniform attention it is the share of the largest block in the context; for one head its largest mass.
    """
    return at_least_single(mass).amin(-2).amax(-1)


def assigned_blocks(mass: Float[Tensor, "head block"]) -> Int[Tensor, " block"]:
    """The head that owns each block, -1 for none, when blocks are given out so that owners attend to theirs the most.

    The one-to-one assignment of the greatest total mass. With more blocks than heads some have no owner; with more
    heads than blocks some heads own none. Of equally good assignments it is one.
    """
    head, block = linear_sum_assignment(at_least_single(mass).detach().cpu().numpy(), maximize=True)
    owner = torch.full(mass.shape[-1:], -1, device=mass.device)
    owner[torch.as_tensor(block, device=mass.device)] = torch.as_tensor(head, device=mass.device)
    return owner


def cooperation_index(mass: Float[Tensor, "*batch head block"]) -> Float[Tensor, "*batch"]:
    """Mean attention of owners to their own block, under `assigned_blocks`.

    In `[0, 1]`: 1 when as many blocks as can be have a head each with all its attention there, the end of the paper's
    cooperative phase; `1 / min(heads, blocks)` when all heads have all their attention on one block. For uniform
    attention it is the mean share in the context of the `min(heads, blocks)` largest blocks; for one head its largest
    mass.
    """
    mass = at_least_single(mass)
    owned = [_owned(each) for each in mass.reshape(-1, *mass.shape[-2:])]
    return torch.stack(owned).view(mass.shape[:-2])


def _owned(mass: Float[Tensor, "head block"]) -> Float[Tensor, ""]:
    owner = assigned_blocks(mass)
    return mass[owner[owner >= 0], owner >= 0].mean()


def redundancy(mass: Float[Tensor, "*batch head block"]) -> Float[Tensor, "*batch"]:
    """Share of heads that could be spared: `(H - distinct top blocks) / (H - 1)` for H heads; NaN for one head.

    0 when all heads have different top blocks, 1 when all have the same, at least `(H - h) / (H - 1)` with h < H
    blocks. Of several top blocks of one head the first counts.
    """
    heads, blocks = mass.shape[-2:]
    distinct = functional.one_hot(mass.argmax(-1), blocks).amax(-2).sum(-1)
    return (heads - distinct.to(at_least_single(mass))) / (heads - 1)


def participation_rank(by_lag: Float[Tensor, "*batch head lag"]) -> Float[Tensor, "*batch"]:
    """How many different patterns the heads have: the participation ratio `(sum l)^2 / sum l^2`, l = squared singular
    values of heads x lags, not centred.

    From 1, when the heads' rows are proportional, to `min(heads, lags)`, when they are orthogonal and equally long (or
    the columns are). It does not change with a common factor or the order of the lags. NaN for zeros.
    """
    by_lag = at_least_single(by_lag)
    gram = by_lag @ by_lag.mT
    share = gram / gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]  # its eigenvalues are l / sum l
    return 1 / share.square().sum((-2, -1))


def value_coefficients(
    OV: Float[Tensor, "*batch head source target"], features: Float[Tensor, "block source target"]
) -> Float[Tensor, "*batch head block"]:
    """How much of each feature a head's values hold: `<V, O> / |O|^2` in Frobenius norm; NaN for a feature of zeros.

    The paper's value alignment, in units of the feature. For features that are orthogonal in this product they are the
    coefficients of the closest combination of features. Others get a little of each other's: between independent random
    rotations in d dimensions about 1/d of it.
    """
    return _products(OV, features) / features.to(at_least_single(OV)).square().sum((-2, -1))


def value_cosines(
    OV: Float[Tensor, "*batch head source target"], features: Float[Tensor, "block source target"]
) -> Float[Tensor, "*batch head block"]:
    """Cosine between a head's values and each feature, `<V, O> / |V| |O|`: in `[-1, 1]`; NaN for values of zeros.

    1 when the values are the feature, at whatever strength; for orthogonal features the squares add up to at most 1.
    """
    OV = at_least_single(OV)
    lengths = torch.linalg.matrix_norm(OV)[..., None] * torch.linalg.matrix_norm(features.to(OV))
    return _products(OV, features) / lengths


def _products(
    OV: Float[Tensor, "*batch head source target"], features: Float[Tensor, "block source target"]
) -> Float[Tensor, "*batch head block"]:
    OV = at_least_single(OV)
    return torch.einsum("...hst,bst->...hb", OV, features.to(OV))


def effective_coefficients(
    mass: Float[Tensor, "*batch head block"], coefficients: Float[Tensor, "*batch head block"]
) -> Float[Tensor, "*batch block"]:
    """What the model as a whole has learned of each block's feature at the block's lags: `sum_h mass coefficient`.

    0 before the block is learned; once its lags are predicted exactly, the strength of its feature times the sum of its
    lag weights, however heads divide the work.
    """
    return (at_least_single(mass) * at_least_single(coefficients)).sum(-2)


def cooperative_offsets(
    coefficients: Float[Tensor, "head block"], owners: Int[Tensor, " block"]
) -> Float[Tensor, " block"]:
    """The smallest coefficient of each block's feature among the heads that do not own the block (`assigned_blocks`).

    Negative when a head cancels what an owner writes of its feature while it attends to another block, the cooperative
    offset of section 3.3 of the paper; positive when all heads hold the feature. It is the least of several numbers, so
    noise alone makes it negative: compare it with the owner's coefficient. NaN for a block without an owner, and for
    one head.
    """
    coefficients = at_least_single(coefficients)
    owns = owners == torch.arange(len(coefficients), device=coefficients.device)[:, None]
    least = coefficients.masked_fill(owns, torch.inf).amin(0)
    return torch.where(owns.any(0) & ~owns.all(0), least, torch.nan)
