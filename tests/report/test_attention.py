import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_interp.config import InputError
from fd_interp.report import attention
from fd_interp.report.attention import AttentionFrame, attention_fragment, attention_page, bundle_script, plotly_script

BUNDLE = "var CircuitsVis="
VOID = {"meta", "input", "br", "link", "img", "hr"}


def softmax_patterns(shape: tuple[int, int, int], seed: int, *, causal: bool = True) -> np.ndarray:
    layers, heads, n = shape
    weights = np.exp(2 * np.random.default_rng(seed).normal(size=(layers, heads, n, n)))
    weights = np.tril(weights) if causal else weights
    return weights / weights.sum(-1, keepdims=True)


def some_frames(n_frames: int = 3, shape: tuple[int, int, int] = (1, 2, 4), *, causal: bool = True):
    return [AttentionFrame(10 * i, softmax_patterns(shape, i, causal=causal)) for i in range(n_frames)]


def some_tokens(n: int) -> list[str]:
    return [f" t{i}" for i in range(n)]


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(text)


def weights_of(page: str) -> np.ndarray:
    """`[step, layer, head, query, key]`, as the page's script rebuilds it."""
    data = data_of(page)
    n = len(data["tokens"])
    padded = [[[row + [0] * (n - len(row)) for row in head] for head in layer] for layer in data["patterns"]]
    return np.array([[padded[i] for i in frame] for frame in data["frames"]]) / 10_000


class Outline(HTMLParser):
    """Checks that every element is closed, and collects the addresses that attributes load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in {"src", "href", "data", "srcset", "action"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"script", "style"}:
            self.text.append(data)


def without_libraries(page: str) -> str:
    return page.replace(bundle_script(), "").replace(plotly_script(), "")


@pytest.mark.parametrize("causal", [True, False])
def test_weights_arrive_rounded_and_masked_as_they_are(causal):
    frames = some_frames(causal=causal, shape=(2, 3, 5))
    page = attention_fragment(some_tokens(5), frames, element_id="a")
    np.testing.assert_allclose(weights_of(page), [f.patterns for f in frames], atol=5.1e-5)
    assert data_of(page)["causal"] is causal
    assert data_of(page)["steps"] == [0, 10, 20]


def test_tensors_of_any_precision_are_taken():
    patterns = softmax_patterns((1, 2, 8), 0)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        frames = [AttentionFrame(0, torch.tensor(patterns, dtype=dtype, requires_grad=True))]
        page = attention_fragment(some_tokens(8), frames, element_id="a")
        np.testing.assert_allclose(weights_of(page)[0], patterns, atol=5e-3)


def test_the_input_is_not_written_to():
    frames = some_frames()
    before = [frame.patterns.copy() for frame in frames]
    attention_fragment(some_tokens(4), frames, element_id="a")
    for frame, patterns in zip(frames, before, strict=True):
        np.testing.assert_array_equal(frame.patterns, patterns)


def test_colours_span_the_largest_weight_of_all_steps():
    uniform = AttentionFrame(0, np.full((1, 1, 4, 4), 0.25))
    page = attention_fragment(some_tokens(4), [uniform, uniform._replace(step=5)], element_id="a")
    assert data_of(page)["top"] == 0.25
    peaked = AttentionFrame(9, np.eye(4)[::-1].copy()[None, None])
    assert data_of(attention_fragment(some_tokens(4), [uniform, peaked], element_id="a"))["top"] == 1


def test_a_page_holds_one_bundle_and_a_fragment_none():
    fragment = attention_fragment(some_tokens(4), some_frames(), element_id="a")
    page = attention_page("Title", some_tokens(4), some_frames())
    assert fragment.count(BUNDLE) == 0
    assert page.count(BUNDLE) == 1
    assert bundle_script().count(BUNDLE) == 1
    assert bundle_script() is bundle_script()


def test_the_bundle_is_one_whole_script():
    for script in (bundle_script(), plotly_script()):
        assert script.lower().count("</script") == 1
        assert script.startswith("<script>")
        assert script.endswith("</script>")


@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 4, 4), (2, 17, 2)])
def test_every_element_is_closed_and_nothing_is_loaded(shape):
    page = without_libraries(attention_page("Title", some_tokens(shape[2]), some_frames(shape=shape)))
    assert Outline(page).loads == []
    assert not re.search(r"https?:|//\w+\.|\bimport\b|fetch\(|@import|url\(", page)


def test_tokens_and_title_cannot_leave_their_place():
    hostile = ["</script><b>", "<bos>", "<!--", "&lt;", '"', "'", "\\"]
    page = attention_page("<i>Title</i> & more", hostile, some_frames(shape=(1, 1, 7)))
    outline = Outline(without_libraries(page))
    assert "b" not in outline.tags
    assert "i" not in outline.tags
    assert outline.text.count("<i>Title</i> & more") == 2
    assert data_of(without_libraries(page))["tokens"] == hostile


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" the", "·the"),
        ("the", "the"),
        ("\n", "⏎"),
        ("\n\n", "⏎⏎"),
        ("\t", "⇥"),
        ("\x00", "␀"),
        ("\u00a0\u2028\u3000", "···"),
        ("", "∅"),
        ("a" * 50, "a" * 19 + "…"),
        ("日本🙂", "日本🙂"),
    ],
)
def test_every_token_is_visible(token, shown):
    fragment = attention_fragment([token], [AttentionFrame(0, np.ones((1, 1, 1, 1)))], element_id="a")
    assert data_of(fragment)["tokens"] == [shown]


@given(st.lists(st.text(), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_any_tokens_leave_the_fragment_well_formed(tokens):
    n = len(tokens)
    fragment = attention_fragment(tokens, some_frames(1, (1, 1, n)), element_id="a")
    assert Outline(fragment).tags.count("script") == 2
    shown = data_of(fragment)["tokens"]
    assert len(shown) == n
    assert all(label and not re.search(r"\s", label) for label in shown)


def test_a_lone_surrogate_can_be_written():
    fragment = attention_fragment(["\udc80"], [AttentionFrame(0, np.ones((1, 1, 1, 1)))], element_id="a")
    assert fragment.encode("utf-8")


def test_controls_appear_only_where_there_is_a_choice():
    one = attention_fragment(some_tokens(4), some_frames(1), element_id="a")
    many = attention_fragment(some_tokens(4), some_frames(3, (2, 2, 4)), element_id="a")
    assert "<input" not in one
    assert "<button" not in one
    assert "<select" not in one
    assert '<input type="range" id="a-step" min="0" max="2" value="2">' in many
    assert '<label class="fd-step" for="a-step">step 20</label>' in many
    assert many.count("<option") == 2


def test_equal_patterns_are_stored_once():
    frame = some_frames(1, (1, 4, 16))[0]
    frames = [frame._replace(step=i) for i in range(50)]
    page = attention_fragment(some_tokens(16), frames, element_id="a")
    assert len(data_of(page)["patterns"]) == 1
    assert weights_of(page).shape == (50, 1, 4, 16, 16)


def test_too_much_data_is_thinned_evenly_and_the_page_says_so(monkeypatch):
    frames = some_frames(40, (2, 2, 8))
    whole = attention_fragment(some_tokens(8), frames, element_id="a")
    assert "steps are shown" not in whole
    monkeypatch.setattr(attention, "MAX_BYTES", 5000)
    thinned = attention_fragment(some_tokens(8), frames, element_id="a")
    steps = data_of(thinned)["steps"]
    assert 5 < len(steps) < 20
    assert (steps[0], steps[-1]) == (0, 390)
    assert np.ptp(np.diff(steps)) <= 10
    assert f"{len(steps)} of 40 steps are shown" in thinned
    kept = [frame.patterns for frame in frames if frame.step in steps]
    np.testing.assert_allclose(weights_of(thinned), kept, atol=5.1e-5)
    # What is counted is what is written, up to brackets.
    written = json.dumps(data_of(thinned)["patterns"], separators=(",", ":"))
    assert len(re.sub(r"[\[\]]", "", written)) <= 5000
    assert len(re.sub(r"[\[\]]", "", written)) > 4000


def test_one_step_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(attention, "MAX_BYTES", 50)
    with pytest.raises(InputError, match="fewer layers, heads or tokens"):
        attention_fragment(some_tokens(8), some_frames(3, (1, 2, 8)), element_id="a")


@pytest.mark.parametrize(("shape", "falls_back"), [((1, 16, 3), False), ((1, 17, 3), True), ((1, 1, 65), True)])
def test_plotly_takes_over_beyond_the_cap_and_the_page_says_why(shape, falls_back):
    page = attention_page("Title", some_tokens(shape[2]), some_frames(shape=shape))
    assert (plotly_script() in page) is falls_back
    assert page.count(BUNDLE) == (0 if falls_back else 1)
    assert ("Shown by plotly, one head at a time" in page) is falls_back
    assert f"{shape[1]} × {shape[2]} (heads × tokens)" in page or not falls_back


def edited(index: tuple[int, ...], value: float, shape: tuple[int, int, int] = (1, 2, 4)) -> list[AttentionFrame]:
    frames = some_frames(2, shape)
    frames[1].patterns[index] = value
    return frames


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "at least one AttentionFrame"),
        (edited((0, 1, 2, 0), np.nan), "step 10, L0H1, query 2, hold a weight that is not finite"),
        (edited((0, 1, 3, 0), np.inf), "step 10, L0H1, query 3, hold a weight that is not finite"),
        (edited((0, 0, 2, 1), -0.1), "step 10, L0H0, query 2, hold a negative weight"),
        (edited((0, 1, 0, 0), 0.5), "step 10, L0H1, query 0, sum to 0.5, not to 1"),
        (edited((0, 1, 0, 0), 7.0), "step 10, L0H1, query 0, sum to 7, not to 1"),
        ([*some_frames(1), AttentionFrame(5, softmax_patterns((1, 3, 4), 0))], r"step 5 have shape \(1, 3, 4, 4\)"),
        ([AttentionFrame(0, np.ones((2, 4, 4)) / 4)], "must have shape"),
        ([AttentionFrame(0, np.ones((1, 0, 4, 4)))], "none of them 0"),
        ([AttentionFrame(0, np.ones((1, 1, 4, 5)) / 5)], "4 queries and 5 keys, where 4 tokens"),
        ([AttentionFrame(0, softmax_patterns((1, 1, 5), 0))], "5 queries and 5 keys, where 4 tokens"),
        (some_frames(2)[::-1], "not step 0 after step 10"),
        ([some_frames(1)[0]] * 2, "not step 0 after step 0"),
    ],
)
def test_bad_frames_are_named(frames, message):
    with pytest.raises(InputError, match=message):
        attention_fragment(some_tokens(4), frames, element_id="a")


def test_a_row_that_may_attend_to_nothing_is_allowed():
    frames = some_frames(1)
    frames[0].patterns[0, 0, 2] = 0
    assert not weights_of(attention_fragment(some_tokens(4), frames, element_id="a"))[0, 0, 0, 2].any()


@pytest.mark.parametrize("element_id", ["", "1a", "a b", "a#b", 'a"', "é"])
def test_an_id_must_be_safe_in_html_and_css(element_id):
    with pytest.raises(InputError, match="element_id"):
        attention_fragment(some_tokens(4), some_frames(), element_id=element_id)


def test_token_ids_are_not_tokens():
    # A user runs without the checks of the annotations.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(InputError, match="token 1 must be a str, not the int 7"):
            attention_fragment(["a", 7, "b", "c"], some_frames(), element_id="a")  # pyright: ignore[reportArgumentType]
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


DRIVER = """<script>
const seen = { errors: [] };
addEventListener("error", (event) => seen.errors.push(event.message));
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const pictures = (id) => [...document.querySelectorAll(`#${id} canvas`)].map((canvas) => canvas.toDataURL());
const cells = () => document.getElementById("large-view").data[0].z.flat().filter((v) => v !== null);
const title = (id) => [...document.querySelectorAll(`#${id} h3`)].at(-1).textContent;
const move = async (id, control, value) => {
  const element = document.querySelector(`#${id} ${control}`);
  element.value = value;
  element.dispatchEvent(new Event("input", { bubbles: true }));
  await wait(300);
};
const label = (id) => document.querySelector(`#${id} .fd-step`).textContent;
addEventListener("load", async () => {
  await wait(1000);
  seen.canvases = ["first", "second"].map((id) => pictures(id).length);
  seen.labels = ["first", "second", "large"].map(label);
  const last = pictures("first"), other = pictures("second"), lastCells = cells();
  document.querySelectorAll("#first h4")[1].parentElement.parentElement.click();
  await wait(300);
  seen.locked = title("first");
  await move("first", "input", 0);
  const early = pictures("first");
  seen.moved = { label: label("first"), title: title("first"), changed: early.map((p, i) => p !== last[i]),
                 other: pictures("second").every((p, i) => p === other[i]) };
  await move("first", "select", 1);
  seen.layer = { title: title("first"), changed: pictures("first").map((p, i) => p !== early[i]) };
  await move("first", "select", 0);
  await move("first", "input", 2);
  seen.back = pictures("first").slice(0, 2).map((p, i) => p === last[i]);
  await move("large", "input", 0);
  await move("large", ".fd-head", 16);
  seen.large = { label: label("large"), cells: cells(), before: lastCells,
                 title: document.getElementById("large-view").layout.title.text };
  document.querySelector("#first .fd-play").click();
  await wait(200);
  seen.playing = label("first");
  await wait(4000);
  seen.played = [label("first"), document.querySelector("#first .fd-play").textContent];
  seen.loads = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.body.dataset.seen = JSON.stringify(seen);
});
</script>"""


def dump_dom(browser: str, page: Path, profile: Path) -> subprocess.CompletedProcess[str]:
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    more = "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --window-size=1280,900"
    command = [browser, *quiet.split(), *more.split(), "--virtual-time-budget=20000", f"--user-data-dir={profile}"]
    command += ["--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, encoding="utf-8")


def test_in_a_browser_every_view_is_drawn_and_follows_its_controls(tmp_path):
    browser = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
    if browser is None:
        pytest.skip("no chromium")
    large = some_frames(3, (1, 17, 3))
    fragments = [
        attention_fragment(["</script><b>", "<bos>", "\n", " é"], some_frames(3, (2, 2, 4)), element_id="first"),
        attention_fragment(some_tokens(3), some_frames(1, (1, 1, 3), causal=False), element_id="second"),
        attention_fragment(some_tokens(3), large, element_id="large"),
    ]
    page = tmp_path / "page.html"
    scripts = bundle_script() + plotly_script()
    body = "".join(fragments)
    page.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body>{DRIVER}{scripts}{body}</body>", encoding="utf-8")
    result = dump_dom(browser, page, tmp_path / "profile")
    report = re.search(r'data-seen="([^"]*)"', result.stdout)
    assert report, result.stderr
    seen = json.loads(html.unescape(report[1]))

    assert seen["errors"] == []
    assert "CONSOLE" not in result.stderr
    assert [load for load in seen["loads"] if load.startswith("http")] == []
    # Two thumbnails and the zoomed head; one hidden thumbnail and the zoomed head.
    assert seen["canvases"] == [3, 2]
    assert seen["labels"] == ["step 20", "step 0", "step 20"]
    assert seen["locked"] == "L0H1 Zoomed"
    assert seen["moved"] == {"label": "step 0", "title": "L0H1 Zoomed", "changed": [True] * 3, "other": True}
    assert seen["layer"] == {"title": "L1H1 Zoomed", "changed": [True] * 3}
    assert seen["back"] == [True, True]
    assert seen["large"]["label"] == "step 0"
    assert seen["large"]["title"] == "L0H16"
    below = np.tril_indices(3)
    np.testing.assert_allclose(seen["large"]["before"], large[2].patterns[0, 0][below], atol=5.1e-5)
    np.testing.assert_allclose(seen["large"]["cells"], large[0].patterns[0, 16][below], atol=5.1e-5)
    assert seen["playing"] == "step 0"
    assert seen["played"] == ["step 20", "Play"]
