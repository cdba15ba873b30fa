import os
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests run in parallel processes on small machines; more threads each would only get in each other's way."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real text and a real checkpoint, which are not ours to redistribute: tests that need them skip elsewhere."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("FD_INTERP_DATA", beside))
    if not folder.is_dir():
        pytest.skip("real data absent: set FD_INTERP_DATA to a folder with tinystories/, wikitext-2/, stories260K/")
    return folder
