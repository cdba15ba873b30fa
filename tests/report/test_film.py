import itertools
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from fd_interp.config import InputError
from fd_interp.report.film import FILM_WIDTH, MILLISECONDS, STILL, check_exportable, export
from fd_interp.report.sandbox import recorded
from fd_interp.report.sandbox_panels import Sandbox
from fd_interp.training.loop import train
from tests.report.test_sandbox import a_run, a_trace

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    series = train(a_run(), tmp_path_factory.mktemp("runs") / "tiny", show_progress=False)
    return recorded(series, most=3)._replace(trace=a_trace())


def test_pictures_and_an_animation_show_every_frame(shown: Sandbox, tmp_path: Path) -> None:
    pytest.importorskip("kaleido")
    image = pytest.importorskip("PIL.Image")
    if not any(map(shutil.which, BROWSERS)):
        pytest.skip("no chromium")
    files = export(shown, pngs=tmp_path / "frames", film=tmp_path / "film.gif")
    names = ["frames/step_00000000.png", "frames/step_00000020.png", "frames/step_00000040.png", "film.gif"]
    assert [str(file.relative_to(tmp_path)) for file in files] == names
    pictures = [np.asarray(image.open(file).convert("RGB"), int) for file in files[:3]]
    assert {picture.shape for picture in pictures} == {(1356, 1200, 3)}
    for earlier, later in itertools.pairwise(pictures):
        assert (earlier != later).any(-1).mean() > 0.01
    for picture in pictures:  # something is drawn in each of the sixteen squares
        squares = picture[60:].reshape(4, 324, 4, 300, 3).swapaxes(1, 2)
        assert (squares < 250).any(-1).mean((2, 3)).min() > 0.005

    film = image.open(files[-1])
    assert (film.n_frames, film.info["loop"], film.width) == (3, 0, FILM_WIDTH)
    durations = []
    for number, picture in enumerate(pictures):
        film.seek(number)
        durations.append(film.info["duration"])
        frame = np.asarray(film.convert("RGB").resize((1200, 1356)), int)
        distances = [np.abs(frame - other).mean() for other in pictures]
        assert int(np.argmin(distances)) == number
        assert np.abs(frame - picture).mean() < 12
    assert durations == [MILLISECONDS, MILLISECONDS, STILL]


def test_without_the_optional_packages_it_is_said_what_to_install(
    shown: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(InputError, match=r'need the package kaleido; .* pip install "fd-interp\[film\]"'):
        export(shown, pngs=tmp_path / "frames")
    assert not (tmp_path / "frames").exists()


def test_an_animation_of_another_ending_is_refused_before_anything_is_drawn(shown: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ends in \.gif or \.webp, not film\.mp4"):
        export(shown, pngs=tmp_path / "frames", film=tmp_path / "film.mp4")
    with pytest.raises(InputError, match="not film"):
        check_exportable(Path("film"))
    assert list(tmp_path.iterdir()) == []


def test_a_browser_that_does_not_start_is_named(
    shown: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kaleido")
    pytest.importorskip("PIL.Image")
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setenv("BROWSER_PATH", str(broken))
    with pytest.raises(InputError, match="kaleido needs Chrome or Chromium, and could not start it"):
        export(shown, pngs=tmp_path / "frames")
