import re
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from fd_interp.config import InputError
from fd_interp.models import lens, llama2c

GROUPED = (16, 12, 2, 4, 2, 9, 10)
EVERY_HEAD_ITS_OWN = (16, 12, 2, 4, 4, 9, 10)
UNTIED = (16, 12, 2, 4, 2, -9, 10)

Logits = Callable[[list[int]], np.ndarray]


def write(path: Path, sizes: tuple[int, ...]) -> Path:
    """A llama2.c file with random weights, and norms that are not one."""
    dim, hidden, layers, heads, kv_heads, vocab, seq = sizes
    kv_dim = dim // heads * kv_heads
    per_layer = 2 * dim + 2 * dim * dim + 2 * kv_dim * dim + 3 * hidden * dim
    tables = seq * dim // heads
    count = abs(vocab) * dim * (1 if vocab > 0 else 2) + layers * per_layer + dim + tables
    weights = np.random.default_rng(0).normal(scale=0.7, size=count).astype("<f4")
    path.write_bytes(struct.pack("<7i", *sizes) + weights.tobytes())
    return path


def reference(path: Path) -> Logits:
    """Llama written out from the description of the file format, one position and one head at a time."""
    dim, hidden, layers, heads, kv_heads, vocab, seq = (int(size) for size in np.fromfile(path, "<i4", 7))
    head_size, tied, vocab = dim // heads, vocab > 0, abs(vocab)
    rest = np.fromfile(path, "<f4", offset=28).astype(np.float64)

    def take(*shape: int) -> np.ndarray:
        nonlocal rest
        taken, rest = np.split(rest, [int(np.prod(shape))])
        return taken.reshape(shape)

    kv_dim = head_size * kv_heads
    embedding, rms_att = take(vocab, dim), take(layers, dim)
    wq, wk, wv = take(layers, dim, dim), take(layers, kv_dim, dim), take(layers, kv_dim, dim)
    wo, rms_ffn = take(layers, dim, dim), take(layers, dim)
    w1, w2, w3 = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    rms_final = take(dim)
    take(2, seq, head_size // 2)
    classifier = embedding if tied else take(vocab, dim)
    assert len(rest) == 0

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + 1e-5) * weight

    def rotated(vector: np.ndarray, position: int) -> np.ndarray:
        vector = vector.copy()
        for i in range(0, len(vector), 2):
            angle = position / 10000 ** ((i % head_size) / head_size)
            a, b = vector[i], vector[i + 1]
            vector[i], vector[i + 1] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return vector

    def of_head(vector: np.ndarray, head: int) -> np.ndarray:
        return vector[head * head_size : (head + 1) * head_size]

    def step(token: int, layer_keys: list[list[np.ndarray]], layer_values: list[list[np.ndarray]]) -> np.ndarray:
        x, position = embedding[token], len(layer_keys[0])
        for layer in range(layers):
            y = norm(x, rms_att[layer])
            query = rotated(wq[layer] @ y, position)
            layer_keys[layer].append(rotated(wk[layer] @ y, position))
            layer_values[layer].append(wv[layer] @ y)
            mixed = []
            for head in range(heads):
                shared = head * kv_heads // heads
                scores = [of_head(query, head) @ of_head(key, shared) / np.sqrt(head_size) for key in layer_keys[layer]]
                pattern = np.exp(scores - np.max(scores))
                pattern /= pattern.sum()
                mixed.append(sum(p * of_head(v, shared) for p, v in zip(pattern, layer_values[layer], strict=True)))
            x = x + wo[layer] @ np.concatenate(mixed)
            y = norm(x, rms_ffn[layer])
            gate = w1[layer] @ y
            x = x + w2[layer] @ (gate / (1 + np.exp(-gate)) * (w3[layer] @ y))
        return classifier @ norm(x, rms_final)

    def logits(tokens: list[int]) -> np.ndarray:
        layer_keys, layer_values = [[] for _ in range(layers)], [[] for _ in range(layers)]
        return np.stack([step(token, layer_keys, layer_values) for token in tokens])

    return logits


@pytest.fixture(scope="module")
def stories260k(shared_data: Path) -> Path:
    return shared_data / "stories260K"


@pytest.fixture(scope="module")
def model(stories260k: Path) -> lens.Model:
    return llama2c.load(stories260k / "stories260K.bin")


@pytest.fixture(scope="module")
def tokenizer(stories260k: Path) -> llama2c.Tokenizer:
    return llama2c.Tokenizer(stories260k / "tok512_hf")


@pytest.mark.parametrize("sizes", [GROUPED, EVERY_HEAD_ITS_OWN, UNTIED])
def test_logits_are_those_of_the_written_out_model(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    path = write(tmp_path / "tiny.bin", sizes)
    tokens = [1, 8, 0, 3, 3, 5, 2, 7]
    with torch.no_grad():
        logits = llama2c.load(path)(torch.tensor([tokens]))[0]
    np.testing.assert_allclose(logits.numpy(), reference(path)(tokens), atol=2e-4)


def test_reading_gives_the_sizes_and_the_weights(tmp_path: Path) -> None:
    header, weights = llama2c.read(write(tmp_path / "tiny.bin", UNTIED))
    assert header == llama2c.Header(
        d_model=16, d_mlp=12, n_layers=2, n_heads=4, n_key_value_heads=2, d_vocab=9, n_ctx=10, tied=False
    )
    assert weights["blocks.1.attn.W_Q"].shape == (4, 16, 4)
    assert weights["blocks.1.attn._W_K"].shape == (2, 16, 4)
    assert weights["blocks.1.mlp.W_in"].shape == (16, 12)
    assert not torch.equal(weights["unembed.W_U"], weights["embed.W_E"].T)
    assert not any(weight.any() for name, weight in weights.items() if ".b_" in name or "._b_" in name)


def test_a_tied_unembedding_is_a_copy_of_the_embedding(tmp_path: Path) -> None:
    header, weights = llama2c.read(write(tmp_path / "tiny.bin", GROUPED))
    assert header.tied
    assert torch.equal(weights["unembed.W_U"], weights["embed.W_E"].T)
    assert len({weight.untyped_storage().data_ptr() for weight in weights.values()}) == len(weights)


def test_no_file() -> None:
    with pytest.raises(InputError, match=r"no llama2.c checkpoint nowhere/model.bin"):
        llama2c.read("nowhere/model.bin")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda content: content[:-4], r"holds 11832 bytes where .*d_model=16.* asks for 11836"),
        (lambda content: content + b"\0", r"holds 11837 bytes where .* asks for 11836"),
        (lambda content: content[:20], r"holds 20 bytes, less than the 28"),
        (lambda _: b"", r"holds 0 bytes, less than the 28"),
        (
            lambda _: b"Once upon a time, there was a little girl named Lily.",
            "header is foreign: .* do not fit in d_model",
        ),
        (lambda content: struct.pack("<i", 0) + content[4:], "header is foreign: d_model: .*greater than 0, not 0"),
        (lambda content: struct.pack("<i", -16) + content[4:], "header is foreign: d_model: .*greater than 0"),
        (lambda content: content[:16] + struct.pack("<i", 3) + content[20:], "4 heads cannot share 3 key-value heads"),
        (lambda content: b"24ka" + content[4:], "later format"),
        (lambda content: struct.pack("<i", 2**31 - 16) + content[4:], r"asks for \d{20,}$"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, spoil: Callable[[bytes], bytes], sentence: str) -> None:
    path = write(tmp_path / "tiny.bin", GROUPED)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(InputError, match=sentence):
        llama2c.read(path)


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.bin", GROUPED)
    content = bytearray(path.read_bytes())
    content[28:32] = struct.pack("<f", float("nan"))
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"(embed.W_E|unembed.W_U) holds NaN or infinity in 1 of 144"):
        llama2c.load(path)


def test_greedy_continues_each_sequence_by_its_likeliest_token(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.bin", GROUPED)
    logits = reference(path)
    expected = [[1, 2], [5, 0]]
    for _ in range(6):
        expected = [[*tokens, int(logits(tokens)[-1].argmax())] for tokens in expected]
    assert llama2c.greedy(llama2c.load(path), torch.tensor([[1, 2], [5, 0]]), 6).tolist() == expected


def test_greedy_stops_at_the_context_and_not_before(tmp_path: Path) -> None:
    model = llama2c.load(write(tmp_path / "tiny.bin", GROUPED))
    assert llama2c.greedy(model, torch.tensor([[1, 2]]), 8).shape == (1, 10)
    with pytest.raises(InputError, match="2 tokens and 9 more do not fit in a context of 10"):
        llama2c.greedy(model, torch.tensor([[1, 2]]), 9)


def test_stories260k_writes_what_the_written_out_model_writes(stories260k: Path, model: lens.Model) -> None:
    tokens = llama2c.greedy(model, torch.tensor([[1]]), 60)
    expected = reference(stories260k / "stories260K.bin")(tokens[0].tolist())
    with torch.no_grad():
        np.testing.assert_allclose(model(tokens)[0].numpy(), expected, atol=1e-3)
    assert tokens[0, 1:].tolist() == expected.argmax(-1)[:-1].tolist()


def test_stories260k_writes_what_its_authors_saw(model: lens.Model, tokenizer: llama2c.Tokenizer) -> None:
    """doc/stories260K.md of llama2.c shows the text at temperature 0."""
    text = tokenizer.decode(llama2c.greedy(model, torch.tensor([[1]]), 40)[0].tolist())
    assert text.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    )


def test_stories260k_predicts_stories_as_well_as_its_authors_say(
    shared_data: Path, model: lens.Model, tokenizer: llama2c.Tokenizer
) -> None:
    """Windows of the model's whole context over the first 50,000 tokens, 1.31 nats; the rest of the file is harder."""
    text = (shared_data / "tinystories" / "valid_head.txt").read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer.encode(re.sub("\n\n+", "\n", text))[1:50_000])
    windows = tokens.unfold(0, 512, 511)
    with torch.no_grad():
        losses = [functional.cross_entropy(model(row[None])[0, :-1], row[1:]).item() for row in windows]
    assert sum(losses) / len(losses) == pytest.approx(1.31, abs=0.05)


def byte_pairs(vocabulary: Path, text: str) -> list[int]:
    """llama2.c's encoder: join the pair of neighbours with the best score until none is a token."""
    content, at = vocabulary.read_bytes(), 4
    ids, scores = {}, []
    while at < len(content):
        score, length = struct.unpack_from("<fi", content, at)
        ids.setdefault(content[at + 8 : at + 8 + length], len(scores))
        scores.append(score)
        at += 8 + length
    pieces: list[bytes] = []
    for character in f" {text}":
        symbol = character.encode()
        pieces += [symbol] if symbol in ids else [bytes([byte]) for byte in symbol]
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not pairs:
            return [1, *(ids[piece] if piece in ids else piece[0] + 3 for piece in pieces)]
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_encoding_is_that_of_llama2c(shared_data: Path, stories260k: Path, tokenizer: llama2c.Tokenizer) -> None:
    text = (shared_data / "tinystories" / "valid_head.txt").read_text(encoding="utf-8")
    for start in range(0, 40_000, 2_000):
        piece = text[start : start + 150]
        assert tokenizer.encode(piece) == byte_pairs(stories260k / "tok512.bin", piece)
    for piece in ("Zoë’s café 😀", "  two  spaces ", "a\n\nb"):
        assert tokenizer.encode(piece) == byte_pairs(stories260k / "tok512.bin", piece)


def test_decoding_gives_the_text_back(tokenizer: llama2c.Tokenizer) -> None:
    for text in ("Once upon a time", ' Lily\'s mom said, "Hi!"\nYes.', "😀"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_token_strings_are_in_the_order_of_the_ids(tokenizer: llama2c.Tokenizer) -> None:
    strings = tokenizer.token_strings()
    assert len(strings) == 512
    assert [strings[token] for token in tokenizer.encode("Once upon")] == ["<s>", "▁Once", "▁upon"]


def test_what_looks_like_a_special_token_is_text(tokenizer: llama2c.Tokenizer) -> None:
    tokens = tokenizer.encode("a</s>b<s>")
    assert tokens[0] == 1
    assert not {0, 1, 2} & set(tokens[1:])


def test_the_empty_text_is_bos_alone(tokenizer: llama2c.Tokenizer) -> None:
    assert tokenizer.encode("") == [1]


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tokenizer.json in"):
        llama2c.Tokenizer(tmp_path)
