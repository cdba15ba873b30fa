"""The precision that measures compute in."""

import torch
from torch import Tensor


def at_least_single(values: Tensor) -> Tensor:
    """Half precision raised to single: its sums over many positions overflow, and it has no decompositions."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
