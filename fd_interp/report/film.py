"""The sandbox as pictures: a PNG of each frame, and an animation of all of them.

It needs the optional packages of the group `film`: kaleido, which draws plotly's figures with the Chrome or Chromium
that is installed, and Pillow.
"""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from plotly.utils import PlotlyJSONEncoder
from tqdm import tqdm

from fd_interp.config import InputError
from fd_interp.report.sandbox import picture
from fd_interp.report.sandbox_panels import Sandbox, groups_of
from fd_interp.training.series import atomic

MILLISECONDS, STILL = 100, 2000
"""How long an animation shows a frame, and the last one before it begins anew."""
FILM_WIDTH = 900
FORMATS = (".gif", ".webp")


def export(
    sandbox: Sandbox, *, pngs: Path | None = None, film: Path | None = None, show_progress: bool = False
) -> list[Path]:
    """Draws every frame once, as `sandbox_page` does, and writes what is asked for.

    Args:
        pngs: folder for a file of each frame, `step_00000640.png`.
        film: animation, a `.gif` or, of a tenth of the size, a `.webp`.

    Returns:
        The files, the animation last.

    Raises:
        InputError: the animation has another ending, a package or a browser is missing, or a file cannot be written.
    """
    check_exportable(film)
    return asyncio.run(_export(sandbox, pngs, film, show_progress))


def check_exportable(film: Path | None) -> None:
    """Whether pictures can be drawn, and written as such a file, as far as can be said beforehand.

    Raises:
        InputError: the animation has another ending, or a package is missing.
    """
    if film is not None and film.suffix.lower() not in FORMATS:
        raise InputError(f"an animation ends in {' or '.join(FORMATS)}, not {film.name}")
    for package in ("kaleido", "PIL.Image"):
        _needed(package)


async def _export(sandbox: Sandbox, pngs: Path | None, film: Path | None, show_progress: bool) -> list[Path]:
    written, moving = [], []
    bar = tqdm(total=len(sandbox.frames), disable=None if show_progress else True, unit="frame", desc="film")
    with bar:
        async for step, png in _drawn(sandbox):
            bar.update()
            if pngs is not None:
                written.append(pngs / f"step_{step:08d}.png")
                with atomic(written[-1]) as partial:
                    partial.write_bytes(png)
            if film is not None:
                moving.append(_scaled(png))
    if film is not None:
        _write_film(film, moving)
        written.append(film)
    return written


async def _drawn(sandbox: Sandbox) -> AsyncIterator[tuple[int, bytes]]:
    """Each frame's step and PNG, from one browser that stays open."""
    kaleido, errors = _needed("kaleido"), _needed("choreographer.errors")
    panels = [panel for group in groups_of(sandbox) for panel in group.panels]
    try:
        async with kaleido.Kaleido(mathjax=False) as browser:  # MathJax would come from the network
            for number, step in enumerate(sandbox.steps):
                figure = json.loads(json.dumps(picture(sandbox, number, panels), cls=PlotlyJSONEncoder))
                yield step, await browser.calc_fig(figure, opts={"format": "png"})
    except (errors.ChromeNotFoundError, errors.BrowserFailedError) as error:
        raise InputError(
            f"kaleido needs Chrome or Chromium, and could not start it ({str(error).splitlines()[0]}); "
            "install one, or name it in the environment variable BROWSER_PATH"
        ) from None


def _scaled(png: bytes) -> Any:
    image = _needed("PIL.Image").open(io.BytesIO(png)).convert("RGB")
    return image.resize((FILM_WIDTH, round(image.height * FILM_WIDTH / image.width)), reducing_gap=2.0)


def _write_film(file: Path, images: list[Any]) -> None:
    times = [MILLISECONDS] * (len(images) - 1) + [STILL]
    kind = file.suffix.lower().removeprefix(".")
    with atomic(file) as partial:
        images[0].save(
            partial, format=kind.upper(), save_all=True, append_images=images[1:], duration=times, loop=0, quality=70
        )


def _needed(package: str) -> ModuleType:
    try:
        return import_module(package)
    except ModuleNotFoundError:
        name = {"PIL.Image": "pillow"}.get(package, package.split(".")[0])
        raise InputError(f'pictures need the package {name}; install it with: pip install "fd-interp[film]"') from None
