"""Attention patterns over training as HTML that works offline: a step slider over one CircuitsVis view.

A page holds a drawing script once (`bundle_script`, or `plotly_script` for patterns too large for CircuitsVis) and any
number of fragments, in any order.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt16
from jinja2 import Environment, FileSystemLoader
from numpy.typing import ArrayLike
from torch import Tensor

from fd_interp.config import InputError

MAX_HEADS = 16
"""Most heads of a layer that CircuitsVis redraws within about a second; beyond it plotly shows one head at a time."""
MAX_TOKENS = 64
"""Most tokens that CircuitsVis redraws within about a second, with `MAX_HEADS` heads; beyond it plotly takes over."""
MAX_BYTES = 8_000_000
"""Most JSON that the weights of one fragment take; beyond it fewer steps are shown, evenly spaced among those given."""

_COLOUR, _GREY = "#0b4f9e", "rgb(200,200,200)"
_LONGEST_LABEL = 20
_SIGNS = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "␡", ord("\n"): "⏎", ord("\t"): "⇥"}
# Weights travel as whole numbers of 1e-4, which is shorter than decimals and equal to them once divided.
_UNITS = 10_000


class AttentionFrame(NamedTuple):
    """The attention patterns of one sequence at one step: rows are queries and sum to one."""

    step: int
    patterns: Float[np.ndarray, "layer head query key"] | Float[Tensor, "layer head query key"]


def attention_fragment(tokens: Sequence[str], frames: Sequence[AttentionFrame], *, element_id: str) -> str:
    """A step slider with a play button, a choice of layer where there are several, and one view that follows them.

    Opens at the last step; a colour means the same weight at every step. Weights are rounded to four decimals. Patterns
    that are zero above the diagonal at every step are taken as causal. In tokens, white space is shown as `·`, a
    newline as `⏎`, a tab as `⇥`, other control characters as their pictures and an empty token as `∅`; long ones are
    cut. The script that draws is not included: the page needs `bundle_script()` once, or plotly beyond `MAX_HEADS` and
    `MAX_TOKENS`.

    Raises:
        InputError: no frames, steps out of order, shapes that differ or do not fit the tokens, a weight that is
            negative or not finite, a row that sums to neither one nor zero, a token that is not a str, a bad id, or one
            step that alone exceeds `MAX_BYTES`.
    """
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", element_id):
        raise InputError(f"element_id must be a letter followed by letters, digits, '-' or '_', not {element_id!r}")
    rounded = _rounded(tokens, frames)
    causal = not any(np.triu(patterns, k=1).any() for patterns in rounded)
    shown = _shown(rounded, causal)
    top = float(max(patterns.max() for patterns in rounded) / _UNITS) or 1.0
    steps = [int(frames[i].step) for i in shown]
    head = {"steps": steps, "tokens": [visible(token) for token in tokens], "causal": causal, "top": top}
    n_layers, n_heads = rounded[0].shape[:2]
    return _template("attention.html.jinja").render(
        id=element_id,
        tool=_tool(frames),
        steps=steps,
        n_layers=n_layers,
        n_heads=n_heads,
        causal=causal,
        top=top,
        notes=_notes(frames, shown),
        data=_json(head | _deduplicated([rounded[i] for i in shown], causal)),
        colour=_COLOUR,
        grey=_GREY,
        units=_UNITS,
    )


def attention_page(title: str, tokens: Sequence[str], frames: Sequence[AttentionFrame]) -> str:
    """A complete page with one fragment and the one script that draws it; loads nothing from anywhere.

    Raises:
        InputError: as `attention_fragment`.
    """
    fragment = attention_fragment(tokens, frames, element_id="attention")
    script = bundle_script() if _tool(frames) == "circuitsvis" else plotly_script()
    return _template("attention_page.html.jinja").render(title=title, fragment=fragment, script=script)


@lru_cache
def bundle_script() -> str:
    """The installed CircuitsVis as one `<script>`, to put once in a page.

    Raises:
        InputError: CircuitsVis is not installed, or without its bundle.
    """
    # Found without importing, which would import torch and read package metadata only to learn a path.
    spec = find_spec("circuitsvis")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("circuitsvis")
    bundle = folder / "dist" / "cdn" / "iife.js"
    if not bundle.is_file():
        raise InputError("circuitsvis lacks its bundle dist/cdn/iife.js; install circuitsvis>=1.43 anew")
    return _script(bundle.read_text(encoding="utf-8"))


@lru_cache
def plotly_script() -> str:
    """The installed plotly.js as one `<script>`, for pages that have patterns beyond CircuitsVis and no plotly yet."""
    from plotly.offline import get_plotlyjs

    return _script(get_plotlyjs())


def _script(source: str) -> str:
    # Inside a string of JavaScript `<\/script` is the same as `</script`, which would end the element.
    return "<script>" + re.sub("</(script)", r"<\\/\1", source, flags=re.IGNORECASE) + "</script>"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


@lru_cache
def _template(name: str) -> Any:
    return Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True).get_template(name)


def visible(token: str) -> str:
    """The token with a sign for every kind of white space and control character, cut when long."""
    # CircuitsVis deletes white space from its labels, so every kind of it needs a sign.
    text = "".join("·" if sign.isspace() else sign for sign in token.translate(_SIGNS)) or "∅"
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "…"


def _tool(frames: Sequence[AttentionFrame]) -> str:
    _, n_heads, n_tokens, _ = frames[0].patterns.shape
    return "circuitsvis" if n_heads <= MAX_HEADS and n_tokens <= MAX_TOKENS else "plotly"


def _notes(frames: Sequence[AttentionFrame], shown: list[int]) -> list[str]:
    notes = []
    _, n_heads, n_tokens, _ = frames[0].patterns.shape
    if _tool(frames) == "plotly":
        notes.append(
            f"Shown by plotly, one head at a time: {n_heads} × {n_tokens} (heads × tokens) is more than CircuitsVis "
            f"draws without making you wait, which is {MAX_HEADS} × {MAX_TOKENS}."
        )
    if len(shown) < len(frames):
        notes.append(
            f"{len(shown)} of {len(frames)} steps are shown, evenly spaced among them: "
            f"all of them would take more than {MAX_BYTES / 1e6:.0f} MB."
        )
    return notes


def _rounded(
    tokens: Sequence[str], frames: Sequence[AttentionFrame]
) -> list[UInt16[np.ndarray, "layer head query key"]]:
    """The patterns in `_UNITS`, after every check."""
    for position, token in enumerate(tokens):
        if not isinstance(token, str):
            raise InputError(f"token {position} must be a str, not the {type(token).__name__} {token!r}")
    if not frames:
        raise InputError("frames must hold at least one AttentionFrame, not none")
    for earlier, later in pairwise(frame.step for frame in frames):
        if later <= earlier:
            raise InputError(f"frames must be in increasing order of step, not step {later} after step {earlier}")
    return [_rounded_frame(tokens, frame, tuple(frames[0].patterns.shape)) for frame in frames]


def _rounded_frame(
    tokens: Sequence[str], frame: AttentionFrame, first: tuple[int, ...]
) -> UInt16[np.ndarray, "layer head query key"]:
    patterns = frame.patterns
    patterns = patterns.detach().float().cpu().numpy() if isinstance(patterns, Tensor) else np.asarray(patterns)
    what = f"patterns at step {frame.step}"
    if patterns.ndim != 4 or 0 in patterns.shape:
        raise InputError(f"{what} must have shape [layer, head, query, key], none of them 0, not {patterns.shape}")
    if patterns.shape != first:
        raise InputError(f"{what} have shape {patterns.shape}, those of the first frame {first}; they must agree")
    if patterns.shape[2:] != (len(tokens), len(tokens)):
        queries, keys = patterns.shape[2:]
        raise InputError(
            f"{what} have {queries} queries and {keys} keys, where {len(tokens)} tokens need as many of each"
        )
    patterns = patterns.astype(np.float32)
    if not np.isfinite(patterns).all():
        raise InputError(f"{what}, {_where(~np.isfinite(patterns).all(-1))}, hold a weight that is not finite")
    if (patterns < 0).any():
        raise InputError(f"{what}, {_where((patterns < 0).any(-1))}, hold a negative weight: pass them after softmax")
    sums = patterns.sum(-1)
    # Half precision leaves sums off by up to a hundredth; a row that may attend to nothing is all zero.
    wrong = (np.abs(sums - 1) > 0.02) & (sums != 0)
    if wrong.any():
        raise InputError(f"{what}, {_where(wrong)}, sum to {sums[wrong][0]:.4g}, not to 1 (or 0 where all is masked)")
    return np.rint(patterns * _UNITS).astype(np.uint16)


def _where(wrong: ArrayLike) -> str:
    layer, head, query = np.argwhere(wrong)[0]
    return f"L{layer}H{head}, query {query}"


def _shown(rounded: list[UInt16[np.ndarray, "layer head query key"]], causal: bool) -> list[int]:
    """Indices of the frames that fit into `MAX_BYTES` together: all of them, or evenly spaced ones up to the last."""
    sizes = [{_key(layer): _size(layer, causal) for layer in patterns} for patterns in rounded]
    count = len(rounded)
    while True:
        shown = sorted(set(np.linspace(len(rounded) - 1, 0, count).round().astype(int).tolist()))
        distinct = {key: size for i in shown for key, size in sizes[i].items()}
        total = sum(distinct.values())
        if total <= MAX_BYTES:
            return shown
        if count == 1:
            size, most = f"{total / 1e6:.1f} MB", f"{MAX_BYTES / 1e6:.0f} MB"
            raise InputError(f"patterns of one step take {size}, more than {most}: give fewer layers, heads or tokens")
        count = max(1, min(count - 1, int(count * 0.95)))


def _size(layer: UInt16[np.ndarray, "head query key"], causal: bool) -> int:
    """Characters of the digits and commas of `_rows`."""
    n_heads, n, _ = layer.shape
    separated = n_heads * (n * (n + 1) // 2 if causal else n * n)
    return 2 * separated + sum(int((layer >= power).sum()) for power in (10, 100, 1000, 10_000))


def _deduplicated(frames: list[UInt16[np.ndarray, "layer head query key"]], causal: bool) -> dict[str, Any]:
    """The distinct patterns of a layer, and which of them each layer of each frame has."""
    number: dict[bytes, int] = {}
    patterns: list[list[list[list[int]]]] = []
    for frame in frames:
        for layer in frame:
            if number.setdefault(_key(layer), len(patterns)) == len(patterns):
                patterns.append(_rows(layer, causal))
    return {"frames": [[number[_key(layer)] for layer in frame] for frame in frames], "patterns": patterns}


def _key(layer: UInt16[np.ndarray, "head query key"]) -> bytes:
    return blake2b(layer.tobytes(), digest_size=16).digest()


def _rows(layer: UInt16[np.ndarray, "head query key"], causal: bool) -> list[list[list[int]]]:
    heads = layer.tolist()
    return [[row[: query + 1] for query, row in enumerate(head)] for head in heads] if causal else heads
