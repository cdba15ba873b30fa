"""Opens whatever somebody wants to probe: a run directory, or a checkpoint of another program."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.models import lens, llama2c
from fd_interp.tasks.corpus import read_documents
from fd_interp.tasks.task import Batch
from fd_interp.training.series import Inputs, Series, Snapshot, open_series

SEQUENCES = 32
CONTEXT = 256
RANDOM_STD = 0.02
"""Standard deviation of the random weights that a checkpoint is compared with; llama2.c starts its training there."""


def open_source(path: str | Path, *, text: str | None = None, tokenizer: str | None = None) -> Series:
    """A series from a run directory, or of one snapshot from a llama2.c file (`.bin`).

    Args:
        text: what to run a llama2.c model on: a file of stories, best separated by `<|endoftext|>`.
        tokenizer: folder with the model's `tokenizer.json`; by default the one folder beside the file that has it.
    """
    path = Path(path)
    if path.is_dir():
        return open_series(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; give a run directory or a llama2.c checkpoint (.bin)")
    if path.suffix != ".bin":
        raise InputError(f"{path} is neither a run directory nor a llama2.c checkpoint (.bin)")
    return open_llama2c(path, text=text, tokenizer=tokenizer)


def open_llama2c(path: Path, *, text: str | None, tokenizer: str | None = None) -> Series:
    """A llama2.c checkpoint as a series of one snapshot, at step 0, on the first windows of a text."""
    header, weights = llama2c.read(path)
    if text is None:
        raise InputError(f"{path} brings no text to run it on; name one (--text stories.txt)")
    folder = Path(tokenizer) if tokenizer else _tokenizer_beside(path)
    snapshot = Snapshot(0, lambda: weights, lambda: llama2c.build(header))
    return Series(
        name=str(path),
        snapshots=(snapshot,),
        build=lambda: llama2c.build(header),
        read_inputs=lambda: _windows(text, llama2c.Tokenizer(folder), header),
    )


def from_checkpoints(
    build: Callable[[], lens.Model],
    checkpoints: Mapping[int, Callable[[], lens.Weights]],
    tokens: Int[Tensor, "batch longer"],
    *,
    frequencies: Float[Tensor, " vocab"] | None = None,
    token_strings: Sequence[str] | None = None,
    name: str = "checkpoints",
) -> Series:
    """Your own checkpoints as a series, for `observe` and the views.

    Args:
        build: makes a model that the weights fit; its present weights do not matter.
        checkpoints: from a step to a function that reads the weights there, by HookedTransformer's names
            (`fd_interp.models.lens.weights(model)` gives them on every version).
        tokens: sequences to measure on; each but the last token is an input, each but the first a target.
        frequencies: of the training data; by default those of `tokens`.
    """
    if not checkpoints:
        raise InputError("there is no checkpoint; give at least one step")
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise InputError(f"tokens must be [batch, position] with two positions or more, not {list(tokens.shape)}")

    def inputs() -> Inputs:
        d_vocab = build().cfg.d_vocab
        counts = torch.bincount(tokens.flatten(), minlength=d_vocab).double()
        if len(counts) > d_vocab:
            raise InputError(f"tokens go up to {int(tokens.max())}, but the model's vocabulary has {d_vocab}")
        return Inputs(
            held_out=Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
            frequencies=counts / counts.sum() if frequencies is None else frequencies,
            token_strings=[str(token) for token in range(d_vocab)] if token_strings is None else list(token_strings),
        )

    snapshots = tuple(Snapshot(step, checkpoints[step], build) for step in sorted(checkpoints))
    return Series(name, snapshots, build, inputs)


def with_random_weights(series: Series, seed: int = 0) -> Series:
    """The control for a trained checkpoint: the same model, on the same sequences, before any training."""
    weights = series[-1].weights()
    generator = torch.Generator().manual_seed(seed)

    def random() -> lens.Weights:
        return {
            name: weight if weight.ndim < 2 or weight.count_nonzero() == 0
            else RANDOM_STD * torch.randn(weight.shape, generator=generator)
            for name, weight in sorted(weights.items())
        }  # fmt: skip

    drawn = random()
    snapshot = Snapshot(0, lambda: drawn, series.build)
    return Series(f"{series.name} with random weights", (snapshot,), series.build, lambda: series.inputs)


def _tokenizer_beside(path: Path) -> Path:
    found = sorted(file.parent for file in path.parent.glob("*/tokenizer.json"))
    if len(found) != 1:
        raise InputError(f"{len(found)} folders beside {path} have a tokenizer.json; name one (--tokenizer FOLDER)")
    return found[0]


def _windows(text: str, tokenizer: llama2c.Tokenizer, header: llama2c.Header) -> Inputs:
    documents = [torch.tensor(tokenizer.encode(_collapse_blank_lines(document))) for document in read_documents(text)]
    length = min(CONTEXT, header.n_ctx - 1) + 1
    windows = [document.unfold(0, length, length - 1) for document in documents if len(document) >= length]
    if not windows:
        raise InputError(f"no document of {text} has {length} tokens; give longer ones")
    rows = torch.cat(windows)[:SEQUENCES]
    counts = torch.bincount(torch.cat(documents), minlength=header.d_vocab)
    return Inputs(
        held_out=Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()),
        frequencies=counts.double() / counts.sum(),
        token_strings=tokenizer.token_strings(),
    )


def _collapse_blank_lines(story: str) -> str:
    """The models of llama2.c were trained on stories whose paragraphs are one line each."""
    return "\n".join(line for line in story.splitlines() if line.strip())
