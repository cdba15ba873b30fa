"""How far a weight matrix has condensed onto few directions, and onto which.

The first four take singular values, so that one decomposition serves them all:
`s = singular_values(W_E); top_share(s); effective_rank(s)`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from fd_interp.measures._precision import at_least_single


def singular_values(weight: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rank"]:
    """Singular values in descending order, in at least single precision."""
    return torch.linalg.svdvals(at_least_single(weight))


def top_share(singular_values: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """Share of the squared Frobenius norm in the top direction: `s_1^2 / sum s^2`; 1 for rank one, 1/rank if all equal.

    NaN for a matrix of zeros, as for the two measures below. Condensation in arXiv 2605.01199, stage I.
    """
    squares = singular_values.square()
    return squares[..., 0] / squares.sum(-1)


def effective_rank(singular_values: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """Exponential of the entropy of `s / sum s` (Roy and Vetterli 2007): 1 for rank one, the rank if all are equal."""
    share = singular_values / singular_values.sum(-1, keepdim=True)
    return torch.special.entr(share).sum(-1).exp()


def singular_ratio(singular_values: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """`s_2 / s_1`: 0 for rank one, 1 when a second direction is as strong as the first."""
    second = singular_values[..., 1:2].sum(-1)  # 0 for a matrix with a single row or column
    return second / singular_values[..., 0]


def frobenius_norm(singular_values: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """Frobenius norm of the matrix."""
    return singular_values.square().sum(-1).sqrt()


def relative_norm_change(
    weight: Float[Tensor, "*batch rows columns"], start: Float[Tensor, "*batch rows columns"]
) -> Float[Tensor, "*batch"]:
    """`(|W| - |W_0|) / |W_0|` in Frobenius norm: 0 while frozen, 1 when it has doubled, -1 when it has vanished."""
    norm_at_start = torch.linalg.matrix_norm(at_least_single(start))
    return torch.linalg.matrix_norm(at_least_single(weight)) / norm_at_start - 1


def direction_cosine(
    weight: Float[Tensor, "*batch rows columns"], direction: Float[Tensor, " rows"]
) -> Float[Tensor, "*batch"]:
    """`|cos(u_1, direction)|`, u_1 the top left singular vector; 1 when the rows' sizes follow `direction`.

    With `weight = W_E` and `direction = pi` this is the condensation direction of arXiv 2605.01199, stage I.
    """
    weight = at_least_single(weight)
    u = torch.linalg.svd(weight, full_matrices=False).U[..., 0]
    direction = direction.to(u)
    return (u @ direction).abs() / direction.norm()


def singular_vector_alignment(
    weight: Float[Tensor, "*batch rows columns"], previous: Float[Tensor, "*batch rows columns"]
) -> Float[Tensor, "*batch"]:
    """Mean over i of `|cos(u_i, u'_i)|` between the left singular vectors of two matrices.

    1 when no direction moved between two snapshots. Measure of Chen and Luo, arXiv 2510.06954; they leave out the
    absolute value, which we need because the sign of a singular vector is arbitrary.
    """
    u, v = (torch.linalg.svd(at_least_single(matrix), full_matrices=False).U for matrix in (weight, previous))
    return (u * v).sum(-2).abs().mean(-1)


def row_cosines(weight: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows rows"]:
    """Cosine between every two rows, in `[-1, 1]`; all of them are +-1 when the matrix has rank one.

    Rows of zeros have cosine 0 with every row.
    """
    rows = torch.nn.functional.normalize(at_least_single(weight), dim=-1)
    return rows @ rows.mT


def condensation_order(cosines: Float[Tensor, "rows rows"]) -> list[int]:
    """Row order that groups the rows of a cosine matrix: that of the entries of its top eigenvector."""
    return torch.linalg.eigh(cosines).eigenvectors[:, -1].argsort().tolist()
