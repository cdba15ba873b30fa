"""Reads checkpoints of llama2.c (small Llamas trained on TinyStories, such as stories260K) as hooked models.

A file is seven little-endian int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len), of which a
negative vocab_size says that the unembedding is not the embedding, and then float32 weights; matrices are [out, in].
"""

import struct
from math import prod
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from pydantic import PositiveInt, model_validator
from torch import Tensor

from fd_interp.config import Frozen, InputError
from fd_interp.models import lens

HEADER = struct.Struct("<7i")
HEADER_FIELDS = ("d_model", "d_mlp", "n_layers", "n_heads", "n_key_value_heads", "d_vocab", "n_ctx")
LATER_FORMAT = 0x616B3432
"""The first word of llama2.c's later, versioned formats."""


class Header(Frozen):
    """The sizes of a llama2.c model, in TransformerLens' words."""

    d_model: PositiveInt
    d_mlp: PositiveInt
    n_layers: PositiveInt
    n_heads: PositiveInt
    n_key_value_heads: PositiveInt
    d_vocab: PositiveInt
    n_ctx: PositiveInt
    tied: bool = True
    """Whether the unembedding is the embedding."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "Header":
        if self.d_model % (2 * self.n_heads):
            raise InputError(f"{self.n_heads} heads of even size do not fit in d_model = {self.d_model}")
        if self.n_heads % self.n_key_value_heads:
            raise InputError(f"{self.n_heads} heads cannot share {self.n_key_value_heads} key-value heads evenly")
        return self

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @property
    def grouped(self) -> bool:
        """Whether several heads share a key-value head."""
        return self.n_key_value_heads < self.n_heads


def read(path: str | Path) -> tuple[Header, lens.Weights]:
    """The sizes and the weights, by HookedTransformer's names and in its shapes, biases zero.

    Raises:
        InputError: there is no such file, or its header or length is not that of a llama2.c checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no llama2.c checkpoint {path}")
    content = path.read_bytes()
    header = _header(path, content)
    shapes = _shapes(header)
    expected = HEADER.size + 4 * sum(prod(shape) for shape in shapes.values())
    if len(content) != expected:
        raise InputError(f"{path} holds {len(content)} bytes where its header {header} asks for {expected}")
    return header, _hooked(header, _split(content, shapes))


def build(header: Header) -> lens.Model:
    """A Llama of these sizes on the CPU: RMSNorm, rotary positions on adjacent pairs, SwiGLU; weights are zero."""
    return lens.build_decoder(
        {
            "d_model": header.d_model,
            "d_head": header.d_head,
            "d_mlp": header.d_mlp,
            "n_layers": header.n_layers,
            "n_heads": header.n_heads,
            "n_key_value_heads": header.n_key_value_heads if header.grouped else None,
            "d_vocab": header.d_vocab,
            "n_ctx": header.n_ctx,
            "act_fn": "silu",
            "gated_mlp": True,
            "normalization_type": "RMS",
            "final_rms": True,
            "eps": 1e-5,
            "positional_embedding_type": "rotary",
            "rotary_dim": header.d_head,
            "rotary_base": 10000,
            "rotary_adjacent_pairs": True,
        }
    )


def load(path: str | Path) -> lens.Model:
    """The checkpoint as a hooked model."""
    header, weights = read(path)
    model = build(header)
    lens.load_weights(model, weights)
    return model


def greedy(model: lens.Model, tokens: Int[Tensor, "batch position"], n: int) -> Int[Tensor, "batch longer"]:
    """`tokens` with the `n` most likely next ones, one at a time; each costs a whole forward pass.

    Raises:
        InputError: the result would be longer than the model's context.
    """
    if tokens.shape[1] + n > model.cfg.n_ctx:
        raise InputError(f"{tokens.shape[1]} tokens and {n} more do not fit in a context of {model.cfg.n_ctx}")
    with torch.no_grad():
        for _ in range(n):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


class Tokenizer:
    """A llama2.c vocabulary from a folder with a `tokenizer.json`, as tok512_hf.

    As in llama2.c, every text starts with BOS, is preceded by a space, and is text throughout: "</s>" is four letters.
    """

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise InputError(f"there is no tokenizer.json in {folder}")
        self._fast = FastTokenizer.from_file(str(file))
        self._fast.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        """Token ids, the first of which is BOS."""
        return self._fast.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        """The text, without BOS and EOS."""
        return self._fast.decode(tokens)

    def token_strings(self) -> list[str]:
        """What each id stands for, "▁" for a space."""
        ids = self._fast.get_vocab()
        return sorted(ids, key=ids.__getitem__)


def _header(path: Path, content: bytes) -> Header:
    if len(content) < HEADER.size:
        raise InputError(f"{path} holds {len(content)} bytes, less than the {HEADER.size} of a llama2.c header")
    sizes = dict(zip(HEADER_FIELDS, HEADER.unpack_from(content), strict=True))
    if sizes["d_model"] == LATER_FORMAT:
        raise InputError(f"{path} is in a later format of llama2.c; export it again with --version 0")
    try:
        return Header(**sizes | {"d_vocab": abs(sizes["d_vocab"])}, tied=sizes["d_vocab"] > 0)
    except InputError as error:
        raise InputError(f"{path} is not a llama2.c checkpoint, its header is foreign: {error}") from None


def _shapes(header: Header) -> dict[str, tuple[int, ...]]:
    """llama2.c's names and shapes, in the order of the file."""
    layers, d_model, d_mlp, vocab = header.n_layers, header.d_model, header.d_mlp, header.d_vocab
    d_key_value = header.n_key_value_heads * header.d_head
    shapes = {
        "token_embedding": (vocab, d_model),
        "rms_att": (layers, d_model),
        "wq": (layers, d_model, d_model),
        "wk": (layers, d_key_value, d_model),
        "wv": (layers, d_key_value, d_model),
        "wo": (layers, d_model, d_model),
        "rms_ffn": (layers, d_model),
        "w1": (layers, d_mlp, d_model),
        "w2": (layers, d_model, d_mlp),
        "w3": (layers, d_mlp, d_model),
        "rms_final": (d_model,),
        "freq_cis_real": (header.n_ctx, header.d_head // 2),
        "freq_cis_imag": (header.n_ctx, header.d_head // 2),
    }
    return shapes if header.tied else shapes | {"wcls": (vocab, d_model)}


def _split(content: bytes, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    values = np.frombuffer(content, dtype="<f4", offset=HEADER.size).astype(np.float32)
    parts = torch.from_numpy(values).split([prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _hooked(header: Header, found: dict[str, Tensor]) -> lens.Weights:
    unembed = found["token_embedding"] if header.tied else found["wcls"]
    weights = {
        "embed.W_E": found["token_embedding"],
        "ln_final.w": found["rms_final"],
        "unembed.W_U": unembed.T,
        "unembed.b_U": torch.zeros(header.d_vocab),
    }
    for layer in range(header.n_layers):
        block = _hooked_block(header, {name: found[name][layer] for name in LAYER_WEIGHTS})
        weights |= {f"blocks.{layer}.{name}": weight for name, weight in block.items()}
    return {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in weights.items()}


LAYER_WEIGHTS = ("rms_att", "wq", "wk", "wv", "wo", "rms_ffn", "w1", "w2", "w3")


def _hooked_block(header: Header, found: dict[str, Tensor]) -> lens.Weights:
    def heads(matrix: Tensor) -> Tensor:
        return matrix.unflatten(0, (-1, header.d_head)).mT

    shared = "_" if header.grouped else ""
    key_value_bias = torch.zeros(header.n_key_value_heads, header.d_head)
    return {
        "ln1.w": found["rms_att"],
        "attn.W_Q": heads(found["wq"]),
        f"attn.{shared}W_K": heads(found["wk"]),
        f"attn.{shared}W_V": heads(found["wv"]),
        "attn.W_O": found["wo"].T.unflatten(0, (-1, header.d_head)),
        "attn.b_Q": torch.zeros(header.n_heads, header.d_head),
        f"attn.{shared}b_K": key_value_bias,
        f"attn.{shared}b_V": key_value_bias,
        "attn.b_O": torch.zeros(header.d_model),
        "ln2.w": found["rms_ffn"],
        "mlp.W_gate": found["w1"].T,
        "mlp.W_in": found["w3"].T,
        "mlp.W_out": found["w2"].T,
        "mlp.b_in": torch.zeros(header.d_mlp),
        "mlp.b_out": torch.zeros(header.d_model),
    }
