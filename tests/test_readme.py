import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("  #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would be: the checkout's scripts at hand, and a runs/ of one's own."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("probes", "scripts", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_library_example_runs_as_shown(folder: Path):
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 12
    done = run([sys.executable, "-c", example], folder)
    assert done.returncode == 0, done.stderr
    assert "IV new directions" in done.stdout


def test_commands_run_as_shown(folder: Path):
    shown = commands()
    assert len(shown) > 8
    for command in shown:
        words = shlex.split(command)
        if words[0] == "make":
            words.insert(1, "--dry-run")
        if "stories260K.bin" in words:
            continue
        done = run(words, ROOT if words[0] == "make" else folder)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_commands_on_a_real_checkpoint_run_as_shown(folder: Path, shared_data: Path):
    (folder / "stories260K.bin").symlink_to(shared_data / "stories260K" / "stories260K.bin")
    (folder / "tok512_hf").symlink_to(shared_data / "stories260K" / "tok512_hf")
    (folder / "stories.txt").symlink_to(shared_data / "tinystories" / "valid_head.txt")
    for command in (command for command in commands() if "stories260K.bin" in command):
        done = run(shlex.split(command), folder)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert "L4H7" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path):
    done = run([sys.executable, str(example)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
