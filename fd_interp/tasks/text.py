"""Real text as a task: its documents as one row of tokens, cut into windows."""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int, Int32
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from fd_interp.config import Frozen, InputError
from fd_interp.tasks.bigram import Bigram
from fd_interp.tasks.corpus import END, read_documents
from fd_interp.tasks.task import Baseline, Batch
from fd_interp.tasks.tokens import BYTES, displayed, encoded, joined_ids, load_tokenizer, train_bpe, vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextCorpus(Frozen):
    """Windows of `context + 1` tokens of real text, each beginning with the last token of the one before.

    So every training token but the first is a target in exactly one window, and only the tail, less than a window, is
    lost. A window may span documents; a separator token stands between them. What the task knows of its own law is the
    bigram of its training text. Nothing is read before it is needed, and everything that is read is then kept.

    Raises:
        InputError: at construction for a wrong field; when the text is first needed, for a text that cannot be read, is
            shorter than one window, or supports fewer tokens than `vocab`.
    """

    kind: Literal["text"] = "text"
    source: str = Field(min_length=1)
    """A file (.txt, .json, .jsonl, .parquet), a folder or a glob pattern, or the name of a Hub data set."""
    name: str | None = None
    """Configuration of a Hub data set, such as "wikitext-2-raw-v1"."""
    split: str = "train"
    """Split of a Hub data set; files have none."""
    column: str = "text"
    """Where the document is in the rows of a Hub data set or a Parquet file, or in JSON objects."""
    max_documents: PositiveInt | None = None
    """Read no more than the first of them; a Hub data set is then streamed instead of downloaded."""
    vocab: int = Field(default=300, gt=BYTES)
    """Tokens of the byte-level BPE that is trained on the training text: all bytes, the separator, and merges."""
    tokenizer: str | None = None
    """A tokenizer.json, or a folder with one, to use as it is; nothing is trained then, and `vocab` is not read."""
    separator: str = Field(default=END, min_length=1)
    """The special token between documents; with `tokenizer`, one that it knows."""
    context: PositiveInt = 32
    """Tokens that the model sees."""
    held_out_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the documents, the last ones and at least one, that training never sees. A single document is cut in
    two; a document that was also among the first is left out, so that none is on both sides."""
    smoothing: PositiveFloat = 30.0
    """Followers, drawn from the unigram, that the bigram gives to every token in addition to those counted; 30 is near
    the best held-out loss on TinyStories and WikiText-2 for vocabularies of 300 to 2000."""

    @property
    def d_vocab(self) -> int:
        return self.vocab if self._given_tokenizer is None else vocabulary_size(self._given_tokenizer)

    @property
    def n_ctx(self) -> int:
        return self.context

    @property
    def train_windows(self) -> Int32[Tensor, "batch position"]:
        """All training windows in order, `context + 1` tokens each."""
        return self._packed.train.unfold(0, self.context + 1, self.context)

    @property
    def held_out_windows(self) -> Int32[Tensor, "batch position"]:
        """All held-out windows in order, `context + 1` tokens each."""
        return self._packed.held_out.unfold(0, self.context + 1, self.context)

    def sample(self, n: int, generator: torch.Generator) -> Batch:
        """`n` training windows, drawn independently."""
        windows = self.train_windows
        return _batch(windows[torch.randint(len(windows), (n,), generator=generator)])

    def held_out(self, n: int, generator: torch.Generator) -> Batch:
        """`n` distinct windows of held-out text in random order; all of them if there are fewer."""
        windows = self.held_out_windows
        return _batch(windows[torch.randperm(len(windows), generator=generator)[:n]])

    def bayes(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
        """Log-probabilities of the smoothed bigram of the training text, all that is known of its law; models beat it.

        Raises:
            InputError: a token is not in the vocabulary.
        """
        if ((tokens < 0) | (tokens >= self.d_vocab)).any():
            raise InputError(f"tokens must be in [0, {self.d_vocab}), but some are not")
        return self._packed.bigram.log_probs(tokens)

    def baselines(self) -> list[Baseline]:
        """Losses on all held-out windows of predictors made from the training text."""
        tokens, targets = _batch(self.held_out_windows)
        bigram = self._packed.bigram
        return [
            Baseline("uniform", math.log(self.d_vocab)),
            Baseline("unigram", -bigram.unigram[targets].log().mean().item()),
            Baseline("bigram", -bigram.probability(tokens, targets).log().mean().item()),
        ]

    def token_frequencies(self) -> Float[Tensor, " vocab"]:
        """Shares of the tokens of the training text, zero for those that never occur."""
        return self._packed.bigram.seen / self._packed.bigram.seen.sum()

    def unigram_entropy(self) -> float:
        """Nats per token of the training text, on its own."""
        return self._packed.bigram.unigram_entropy()

    def bigram_entropy(self) -> float:
        """Nats per token of the training text, given the token before it."""
        return self._packed.bigram.bigram_entropy()

    def frequent(self, k: int) -> list[int]:
        """The `k` most frequent tokens of the training text, most frequent first.

        Raises:
            InputError: fewer occur.
        """
        seen = self._packed.bigram.seen
        occurring = int((seen > 0).sum())
        if not 1 <= k <= occurring:
            raise InputError(f"k must be in [1, {occurring}], the number of tokens that occur, not {k}")
        return seen.argsort(descending=True, stable=True)[:k].tolist()

    def token_strings(self) -> list[str]:
        """Every token as it reads in the text; where it is no whole letter, its bytes (`<0xE2><0x80>`)."""
        return displayed(self._packed.tokenizer)

    def encode(self, text: str) -> Int[Tensor, " position"]:
        """Tokens of `text`, with no special token among them."""
        return torch.tensor(encoded(self._packed.tokenizer, [text])[0], dtype=torch.int64)

    def decode(self, tokens: Int[Tensor, " position"]) -> str:
        """The text of `tokens`; undoes `encode` (with somebody's tokenizer, as far as that one does)."""
        return self._packed.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the token ids, training and held-out: equal where the same text became the same windows."""
        packed = self._packed
        digest = hashlib.sha256(f"{self.context} {len(packed.train)}:".encode())
        for ids in (packed.train, packed.held_out):
            digest.update(ids.numpy().astype("<i4").tobytes())
        return digest.hexdigest()

    @cached_property
    def _given_tokenizer(self) -> "Tokenizer | None":
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer, separator=self.separator)

    @cached_property
    def _packed(self) -> "_Packed":
        documents = read_documents(
            self.source, column=self.column, name=self.name, split=self.split, max_documents=self.max_documents
        )
        train, held_out = _split(documents, self.held_out_fraction)
        tokenizer = self._given_tokenizer
        if tokenizer is None:
            tokenizer = train_bpe(train, vocab=self.vocab, separator=self.separator)
        train_ids = joined_ids(tokenizer, train, separator=self.separator)
        held_out_ids = joined_ids(tokenizer, held_out, separator=self.separator)
        for part, ids in (("training", train_ids), ("held-out", held_out_ids)):
            if len(ids) <= self.context:
                raise InputError(
                    f"the {part} text of {self.source!r} has {len(ids)} tokens, fewer than one window of "
                    f"{self.context + 1}: give more text or a shorter context"
                )
        bigram = Bigram(train_ids, d_vocab=self.d_vocab, strength=self.smoothing)
        return _Packed(tokenizer, train_ids, held_out_ids, bigram)


@dataclass(frozen=True, eq=False)
class _Packed:
    """What was read. Compared by identity: tensors as attributes would make `==` between two tasks fail."""

    tokenizer: "Tokenizer"
    train: Int32[Tensor, " train_position"]
    held_out: Int32[Tensor, " held_out_position"]
    bigram: Bigram


def _split(documents: list[str], fraction: float) -> tuple[list[str], list[str]]:
    if len(documents) == 1:
        [text] = documents
        cut = round((1 - fraction) * len(text))
        return [text[:cut]], [text[cut:]]
    first = len(documents) - min(max(1, round(fraction * len(documents))), len(documents) - 1)
    train = documents[:first]
    seen = set(train)
    return train, [document for document in documents[first:] if document not in seen]


def _batch(windows: Int[Tensor, "batch position"]) -> Batch:
    windows = windows.long()
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
