import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.config import Transformer
from fd_interp.observation import observe
from fd_interp.probes.focus import frequency_focus
from fd_interp.sources import from_checkpoints, open_source, with_random_weights
from fd_interp.tasks.tokens import train_bpe

WORDS = "the cat saw a dog and the dog saw the cat near the old red house by the sea "


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama2.c file with random weights, beside it a folder with its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("checkpoint")
    dim, hidden, layers, heads, kv_heads, vocab, seq = sizes = (16, 12, 2, 4, 2, 300, 40)
    per_layer = 2 * dim + 2 * dim * dim + 2 * (dim // heads * kv_heads) * dim + 3 * hidden * dim
    count = vocab * dim + layers * per_layer + dim + seq * dim // heads
    weights = np.random.default_rng(0).normal(scale=0.5, size=count).astype("<f4")
    (folder / "model.bin").write_bytes(struct.pack("<7i", *sizes) + weights.tobytes())
    tales = [f"tale {number}: {WORDS * 3}\n\nThe end." for number in range(20)]
    (folder / "tales.txt").write_text("<|endoftext|>".join(tales), encoding="utf-8")
    (folder / "tokenizer").mkdir()
    train_bpe(tales, vocab=280, separator="<s>").save(str(folder / "tokenizer" / "tokenizer.json"))
    return folder / "model.bin"


def test_a_llama2c_file_is_a_series_of_one_snapshot(checkpoint: Path):
    series = open_source(checkpoint, text=str(checkpoint.parent / "tales.txt"))
    assert series.steps == [0]
    assert series.inputs.held_out.tokens.shape[1] == 39  # one less than the context, which leaves room for a target
    assert torch.equal(series.inputs.held_out.tokens[:, 1:], series.inputs.held_out.targets[:, :-1])
    assert float(series.inputs.frequencies.sum()) == pytest.approx(1)
    trace = observe(series, [frequency_focus(top=3, rare=1.0)])
    assert trace.focus_ratio.shape == (1, 2, 4)


def test_random_weights_look_nowhere_in_particular(checkpoint: Path):
    series = open_source(checkpoint, text=str(checkpoint.parent / "tales.txt"))
    random = with_random_weights(series, seed=1)
    mine, theirs = series[0].weights(), random[0].weights()
    assert mine.keys() == theirs.keys()
    assert not torch.equal(mine["blocks.0.attn.W_Q"], theirs["blocks.0.attn.W_Q"])
    assert torch.equal(mine["blocks.0.ln1.w"], theirs["blocks.0.ln1.w"])
    assert torch.equal(with_random_weights(series, seed=1)[0].weights()["embed.W_E"], theirs["embed.W_E"])
    probe = frequency_focus(top=3, rare=1.0)
    slope, control = (float(abs(observe(one, [probe]).frequency_slope).max()) for one in (series, random))
    assert control < 0.01 < slope


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("absent.bin", {}, "does not exist; give a run directory or a llama2.c checkpoint"),
        ("tales.txt", {}, "is neither a run directory nor a llama2.c checkpoint"),
        ("model.bin", {}, "brings no text to run it on"),
        ("tokenizer", {}, "is not a run directory: it has no run.json"),
    ],
)
def test_what_cannot_be_opened_is_named(checkpoint: Path, name: str, options: dict[str, str], sentence: str):
    with pytest.raises(InputError, match=sentence):
        open_source(checkpoint.parent / name, **options)


def test_a_text_too_short_is_refused(checkpoint: Path, tmp_path: Path):
    (tmp_path / "short.txt").write_text("the cat", encoding="utf-8")
    with pytest.raises(InputError, match=r"no document of .* has 40 tokens"):
        _ = open_source(checkpoint, text=str(tmp_path / "short.txt")).inputs


def test_a_file_without_one_tokenizer_beside_it_is_refused(checkpoint: Path, tmp_path: Path):
    alone = tmp_path / "model.bin"
    alone.write_bytes(checkpoint.read_bytes())
    with pytest.raises(InputError, match=r"0 folders beside .* have a tokenizer.json; name one"):
        open_source(alone, text=str(checkpoint.parent / "tales.txt"))


def build() -> lens.Model:
    return lens.build_transformer(Transformer(n_layers=1, n_heads=2, d_model=8, d_head=4), d_vocab=5, n_ctx=6)


def test_own_checkpoints_become_a_series_in_the_order_of_steps():
    weights = {step: lens.weights(build()) | {"embed.W_E": torch.full((5, 8), float(step + 1))} for step in (20, 3)}
    tokens = torch.tensor([[0, 1, 2, 0, 1, 2, 4]])
    series = from_checkpoints(build, {step: lambda at=step: weights[at] for step in weights}, tokens)
    assert series.steps == [3, 20]
    assert float(series.at(20).weights()["embed.W_E"][0, 0]) == 21
    assert series.inputs.frequencies.tolist() == pytest.approx([2 / 7, 2 / 7, 2 / 7, 0, 1 / 7])
    assert series.inputs.held_out.targets.tolist() == [[1, 2, 0, 1, 2, 4]]
    assert float(observe(series, [frequency_focus()]).focus_ratio[-1].mean()) == pytest.approx(1)  # weights of zero


def test_own_checkpoints_are_checked():
    weights = lens.weights(build())
    with pytest.raises(InputError, match="there is no checkpoint"):
        from_checkpoints(build, {}, torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(InputError, match=r"two positions or more, not \[1, 1\]"):
        from_checkpoints(build, {0: lambda: weights}, torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(InputError, match="tokens go up to 5, but the model's vocabulary has 5"):
        _ = from_checkpoints(build, {0: lambda: weights}, torch.tensor([[0, 5]])).inputs
