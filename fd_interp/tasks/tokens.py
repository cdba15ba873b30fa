"""Documents as token ids: byte-level BPE trained on them, or somebody's tokenizer."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from fd_interp.config import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256


def train_bpe(documents: Iterable[str], *, vocab: int, separator: str) -> "Tokenizer":
    """A byte-level BPE with exactly `vocab` tokens: the separator, all bytes, and merges of pairs seen at least twice.

    Every text can be encoded, and `decode(encode(text)) == text`.

    Raises:
        InputError: the documents support fewer tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[separator],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    supported = tokenizer.get_vocab_size()
    if supported < vocab:
        raise InputError(f"vocab: the training text supports at most {supported} tokens, not {vocab}")
    return tokenizer


def load_tokenizer(path: str, *, separator: str) -> "Tokenizer":
    """The tokenizer in a `tokenizer.json`, or in a folder that holds one.

    Raises:
        InputError: there is none, or it does not know the separator.
    """
    from tokenizers import Tokenizer

    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise InputError(f"tokenizer: there is no {str(file)!r}; give a tokenizer.json or a folder that holds one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more special
        raise InputError(f"tokenizer: {str(file)!r} is not a tokenizer.json: {error}") from None
    if tokenizer.token_to_id(separator) is None:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        raise InputError(
            f"separator: {str(file)!r} has no token {separator!r}; its special tokens: {', '.join(special)}"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocabulary_size(tokenizer: "Tokenizer") -> int:
    """One more than the largest id; some vocabularies have holes."""
    return 1 + max(tokenizer.get_vocab().values())


def encoded(tokenizer: "Tokenizer", texts: list[str]) -> list[list[int]]:
    """The ids of each text, with no special token among them: WikiText's `<unk>` is three letters in brackets."""
    tokenizer.encode_special_tokens = True  # here, because a tokenizer forgets it when it is copied
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def joined_ids(tokenizer: "Tokenizer", documents: list[str], *, separator: str) -> Int32[Tensor, " position"]:
    """The ids of all documents in a row, with the separator between each two of them."""
    between = tokenizer.token_to_id(separator)
    parts = [np.empty(0, dtype=np.int32)]
    for start in range(0, len(documents), 1000):
        for ids in encoded(tokenizer, documents[start : start + 1000]):
            parts.append(np.array([*ids, between], dtype=np.int32))
    return torch.from_numpy(np.concatenate(parts)[:-1])


def displayed(tokenizer: "Tokenizer") -> list[str]:
    """Each token as it reads in a text; where it is no whole letter, its bytes (`<0xE2><0x80>`)."""
    return [_displayed(tokenizer, token) for token in range(vocabulary_size(tokenizer))]


def _displayed(tokenizer: "Tokenizer", token: int) -> str:
    once = tokenizer.decode([token], skip_special_tokens=False)
    # Some decoders drop a leading space, which tells " the" from "the"; in second place it is kept.
    again = tokenizer.decode([token, token], skip_special_tokens=False).removeprefix(once)
    if "\ufffd" not in again:
        return again
    spelled = [_BYTE.get(letter, ord(letter)) for letter in tokenizer.id_to_token(token) or ""]
    return "".join(chr(code) if code < 128 else f"<0x{code:02X}>" for code in spelled)


# Byte-level BPE spells a byte as the Latin-1 letter with that code where it has a shape, and the others as the letters
# from 256 on. A tokenizer that falls back to bytes names them `<0xE2>` itself.
_SHAPELESS = [byte for byte in range(256) if not 33 <= byte <= 126 and not 161 <= byte <= 172 and byte < 174]
_BYTE = {chr(256 + n): byte for n, byte in enumerate(_SHAPELESS)}
