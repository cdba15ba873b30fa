import ast
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import fd_interp

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "transformer_lens", "numpy", "pandas", "xarray", "plotly", "circuitsvis", "datasets", "pydantic"}


def in_a_new_interpreter(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def shown_to_type_checkers() -> dict[str, str]:
    """Name -> module, of the imports that run under TYPE_CHECKING only."""
    tree = ast.parse(Path(fd_interp.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert isinstance(block.test, ast.Name)
    assert block.test.id == "TYPE_CHECKING"
    return {
        alias.asname or alias.name: node.module or ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_every_public_name_is_what_type_checkers_see() -> None:
    shown = shown_to_type_checkers()
    assert sorted(fd_interp.__all__) == sorted(shown)
    assert len(set(fd_interp.__all__)) == len(fd_interp.__all__)
    for name in fd_interp.__all__:
        module = sys.modules.get(shown[name]) or __import__(shown[name], fromlist=[name])
        assert getattr(fd_interp, name) is getattr(module, name), name
    assert set(fd_interp.__all__) <= set(dir(fd_interp))


def test_no_public_name_is_hidden_by_a_module_of_the_same_name() -> None:
    """Once `fd_interp.x` is imported, the import system makes it the attribute x of the package."""
    modules = {file.stem for file in Path(fd_interp.__file__).parent.iterdir()}
    assert not modules & set(fd_interp.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fd_interp' has no attribute 'trian'"):
        _ = fd_interp.trian


def test_importing_the_package_imports_nothing_heavy() -> None:
    names = f"sorted({HEAVY} & set(sys.modules))"
    assert in_a_new_interpreter(f"import sys, fd_interp; print({names}, fd_interp.__version__)") == (
        f"[] {fd_interp.__version__}\n"
    )


def test_training_needs_no_library_of_reports_or_data_sets() -> None:
    """What is seldom used is imported when it is used, unless TransformerLens has already done so."""
    seldom = {"circuitsvis", "datasets", "tokenizers", "plotly", "ruptures", "jinja2"}
    program = f"""
import sys, transformer_lens
before = set(sys.modules)
from fd_interp import MarkovChain, OneLayer, Run, observe, train
print(sorted({seldom} & (set(sys.modules) - before)))
"""
    assert in_a_new_interpreter(program) == "[]\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="building without isolation, and so without a network, needs hatchling")
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_holds_the_library_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "fd_interp"
    ours = {
        f"fd_interp/{file.relative_to(package)}"
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == ours
    assert {"attention.html.jinja", "attention_page.html.jinja", "report.html.jinja"} <= {
        Path(name).name for name in names if name.endswith(".jinja")
    }


def test_the_wheel_says_what_it_is_and_brings_the_command(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("fd-interp", fd_interp.__version__)
    assert "fd-interp = fd_interp.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert any(name.startswith(f"{info}/licenses/") for name in wheel.namelist())


def test_an_unpacked_wheel_works_without_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import fd_interp, numpy as np
from fd_interp.report.attention import AttentionFrame, attention_page
assert fd_interp.__file__.startswith({str(tmp_path)!r})
page = attention_page("t", ["a", "b"], [AttentionFrame(0, np.eye(2)[None, None])])
print(page.rstrip().endswith("</html>"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
