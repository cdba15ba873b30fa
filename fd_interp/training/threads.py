"""How many threads torch uses, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Small models lose more by waiting for each other's threads than they gain, and bytes depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
