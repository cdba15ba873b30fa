import re
import shutil
from pathlib import Path

import pytest
import xarray as xr

from fd_interp import cli
from fd_interp.report import film
from fd_interp.training.loop import train
from tests.report.test_sandbox import a_run, data_of
from tests.test_cli import Command, fd, is_refused

__all__ = ["fd"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    train(a_run(), directory, show_progress=False)
    return directory


@pytest.fixture
def directory(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "tiny"))


def drawn(page: Path) -> dict[str, list]:
    return {panel["key"]: panel["traces"] for panel in data_of(page.read_text(encoding="utf-8"))["panels"]}


def test_a_page_is_written_into_the_run_directory(fd: Command, directory: Path) -> None:
    done = fd("sandbox", directory)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"open {directory / 'sandbox.html'}\n"
    panels = drawn(directory / "sandbox.html")
    assert [len(panels[name]) for name in ("loss", "measures")] == [4, 4]
    names = [re.search("<extra>(.*)</extra>", curve["hovertemplate"]) for curve in panels["loss"][:3]]
    assert [name[1] for name in names if name] == ["each batch", "loss", "accuracy"]
    assert not (directory / "trace.nc").exists()


def test_what_was_observed_before_is_drawn_if_it_has_every_step(fd: Command, directory: Path) -> None:
    assert fd("observe", directory).code == 0
    trace = xr.load_dataset(directory / "trace.nc")
    trace["accuracy"][:] = 0.125
    trace.to_netcdf(directory / "trace.nc", engine="h5netcdf")
    assert fd("sandbox", directory, "--out", "page.html").code == 0
    assert drawn(Path("page.html"))["loss"][2]["y"] == [0.125] * 5
    trace.isel(step=slice(3)).to_netcdf(directory / "trace.nc", engine="h5netcdf")
    assert fd("sandbox", directory, "--out", "page.html").code == 0
    accuracy = drawn(Path("page.html"))["loss"][2]["y"]
    assert len(accuracy) == 5
    assert accuracy[0] != 0.125


def test_fewer_frames_are_announced_and_json_is_alone_on_stdout(fd: Command, directory: Path) -> None:
    done = fd("sandbox", directory, "--most", "2", "--json", "--out", "page.html")
    assert done.json == {"page": "page.html"}
    assert done.err == "fd-interp: 2 of 5 snapshots are shown, evenly spread among them (--most)\n"
    assert data_of(Path("page.html").read_text(encoding="utf-8"))["steps"] == [0, 40]


def test_a_run_without_losses_is_shown_without_them(fd: Command, directory: Path) -> None:
    (directory / "losses.parquet").unlink()
    assert fd("sandbox", directory).code == 0
    assert len(drawn(directory / "sandbox.html")["loss"]) == 3


def test_pictures_are_asked_of_film(fd: Command, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def export(shown, *, pngs: Path | None, film: Path | None, show_progress: bool) -> list[Path]:
        asked.append((len(shown.frames), shown.trace is not None, pngs, film, show_progress))
        return [Path("last.png")]

    monkeypatch.setattr(film, "export", export)
    monkeypatch.setattr(film, "check_exportable", lambda file: None)
    done = fd("sandbox", directory, "--png", "frames", "--film", "film.gif", "--json")
    assert done.json == {"page": str(directory / "sandbox.html")}
    assert asked == [(5, True, Path("frames"), Path("film.gif"), False)]
    assert done.err == "fd-interp: 1 files with pictures, the last of them last.png\n"


def test_bad_input_is_refused_before_anything_is_written(fd: Command, directory: Path, small_directory: Path) -> None:
    before = sorted(directory.rglob("*"))
    assert "ends in .gif or .webp, not film.avi" in is_refused(fd("sandbox", directory, "--film", "film.avi"))
    assert "at least one frame, not 0" in is_refused(fd("sandbox", directory, "--most", "0"))
    refused = is_refused(fd("sandbox", small_directory, "--out", "page.html"))
    assert "is a one_layer model on the task markov" in refused
    assert "is not a run directory" in is_refused(fd("sandbox", directory / "weights"))
    assert not Path("page.html").exists()
    assert sorted(directory.rglob("*")) == before


def test_the_verb_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert re.search(r"sandbox +write a page on which every tensor", capsys.readouterr().out)
