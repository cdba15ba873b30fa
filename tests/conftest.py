import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from fd_interp.training.run import Run


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


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """Imports a file of scripts/ or probes/, which are no packages, by its path in the repository."""

    def load(path: str) -> ModuleType:
        file = Path(__file__).resolve().parents[1] / path
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def small_run() -> "Run":
    """One head on a chain of four tokens, for 30 steps: enough to have snapshots, a tenth of a second to train."""
    from fd_interp.models.config import OneLayer  # imported here, where pytest already checks annotations
    from fd_interp.tasks.markov import MarkovChain
    from fd_interp.training.run import SGD, Every, Keep, Run, Training

    return Run(
        task=MarkovChain.zipf(4, context=6),
        model=OneLayer(d_model=5, d_head=5, std=0.3),
        training=Training(optimizer=SGD(lr=0.5), steps=30, batch_size=8),
        keep=Keep(at=Every(stride=10), hooks=("pattern",), held_out=16),
    )


@pytest.fixture(scope="session")
def small_directory(small_run: "Run", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That run, trained. Tests that write into it take a copy."""
    from fd_interp.training.loop import train

    directory = tmp_path_factory.mktemp("runs") / "small"
    train(small_run, directory, show_progress=False)
    return directory


@pytest.fixture
def own_directory(small_directory: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, to write into."""
    return Path(shutil.copytree(small_directory, tmp_path / "small"))
