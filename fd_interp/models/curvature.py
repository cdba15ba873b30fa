"""How a loss bends where the weights are: its gradient, and the steepest curvature of its Hessian, weight by weight."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor

from fd_interp.config import InputError

TOLERANCE = 1e-6
"""Of the eigenvalue, relative to itself."""


class Eigenpair(NamedTuple):
    """An eigenvalue and its unit eigenvector, cut up into the weights that it moves."""

    value: float
    vector: dict[str, Tensor]

    def masses(self) -> dict[str, Tensor]:
        """Squared length of each weight's part of the vector; they are not negative and add up to 1."""
        return {name: part.square().sum() for name, part in self.vector.items()}


def loss_gradient(loss: Float[Tensor, ""], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of a loss with respect to each of the parameters that it was computed from; zero for the others.

    Raises:
        InputError: the gradient is not finite, as where a vector that is normalised is zero.
    """
    gradients = _gradients(loss, parameters, keep_graph=False)
    _check_finite(loss, gradients)
    return dict(zip(parameters, gradients, strict=True))


def top_eigenpair(
    loss: Float[Tensor, ""], parameters: Mapping[str, Tensor], scale: Mapping[str, Tensor] | None = None
) -> Eigenpair:
    """The largest eigenvalue of a loss' Hessian with respect to the parameters, the *sharpness*, and its eigenvector.

    The largest, not the one largest in size: of a Hessian whose eigenvalues are all negative it is the one next to
    zero. In units of the loss per squared unit of the weights. By Lanczos' method on products of the Hessian with
    vectors, from a start that is the same each time. A lone eigenvalue is exact to about six digits in double
    precision, and its vector to about three; among equal eigenvalues the vector is one of many.

    Args:
        loss: what was computed from the parameters, with its graph.
        parameters: two numbers or more in all.
        scale: D, for the eigenvalue of `D^(-1/2) H D^(-1/2)`, which is that of `D^(-1) H`: of what an optimizer sees
            that divides its steps by D. The vector then is in units of `D^(1/2)` times the weights.

    Raises:
        InputError: the gradient is not finite, or a scale is not positive.
    """
    gradients = _gradients(loss, parameters, keep_graph=True)
    _check_finite(loss, gradients)
    gradient, tensors = _flat(gradients), list(parameters.values())
    stretch = torch.ones_like(gradient) if scale is None else _stretch(scale, parameters)

    def product(vector: np.ndarray) -> np.ndarray:
        along = stretch * torch.as_tensor(vector).to(gradient)
        rows = torch.autograd.grad(gradient, tensors, along, retain_graph=True, materialize_grads=True)
        return (stretch * _flat(rows)).double().cpu().numpy()

    value, vector = _largest(product, len(gradient))
    parts = torch.as_tensor(vector).to(gradient).split([tensor.numel() for tensor in tensors])
    return Eigenpair(
        value, {name: part.view_as(parameters[name]) for name, part in zip(parameters, parts, strict=True)}
    )


class _Products(LinearOperator):
    """A symmetric matrix that is known by its products with vectors."""

    def __init__(self, product: Callable[[np.ndarray], np.ndarray], size: int) -> None:
        super().__init__(np.float64, (size, size))
        self.product = product

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        return self.product(x)


def _largest(product: Callable[[np.ndarray], np.ndarray], size: int) -> tuple[float, np.ndarray]:
    start = np.random.default_rng(0).normal(size=size)
    if not product(start).any():  # a Hessian of zeros, where Lanczos' method finds no direction to go in
        return 0.0, start / np.linalg.norm(start)
    # Any, because scipy's own types take a tolerance for an integer.
    lanczos: Any = eigsh
    values, vectors = lanczos(_Products(product, size), k=1, which="LA", v0=start, tol=TOLERANCE)
    return float(values[0]), vectors[:, 0]


def _gradients(loss: Float[Tensor, ""], parameters: Mapping[str, Tensor], *, keep_graph: bool) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=True, create_graph=keep_graph, materialize_grads=True
    )


def _check_finite(loss: Float[Tensor, ""], gradients: Iterable[Tensor]) -> None:
    if not all(gradient.isfinite().all() for gradient in gradients):
        raise InputError(f"the gradient of the loss, which is {loss.item():.4g}, is not finite here, nor its curvature")


def _stretch(scale: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Float[Tensor, " number"]:
    """What a Hessian's rows and columns are multiplied by."""
    if absent := parameters.keys() - scale.keys():
        raise InputError(f"there is no scale for {', '.join(sorted(absent))}; give one for each parameter")
    flat = _flat(scale[name].expand_as(parameter).to(parameter) for name, parameter in parameters.items())
    if not (flat > 0).all():
        raise InputError("a scale is not positive; what an optimizer divides by is")
    return flat.rsqrt()


def _flat(tensors: Iterable[Tensor]) -> Float[Tensor, " number"]:
    return torch.cat([tensor.flatten() for tensor in tensors])
