"""The model of arXiv 2410.24050, a learned query over normalised embeddings, with TransformerLens' hooks and names."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from fd_interp.models.config import LearnedQuery
from fd_interp.models.lens import HookPoint
from fd_interp.models.paper_model import EVERY_QUERY, PaperModel, Shape, Tap, attention_block, parameters, silent


class LearnedQueryWeights(NamedTuple):
    """The weights of one model, or of several with a leading axis for the seeds."""

    W_E: Float[Tensor, "*seed vocab d_model"]
    W_pos: Float[Tensor, "*seed n_ctx d_model"]
    b_Q: Float[Tensor, "*seed 1 d_model"]
    """The query."""
    W_V: Float[Tensor, "*seed 1 d_model d_model"]
    W_in: Float[Tensor, "*seed d_model d_mlp"]
    b_in: Float[Tensor, "*seed d_mlp"]
    W_out: Float[Tensor, "*seed d_mlp d_model"]
    b_out: Float[Tensor, "*seed d_model"]


NAMES = (
    "embed.W_E",
    "pos_embed.W_pos",
    "blocks.0.attn.b_Q",
    "blocks.0.attn.W_V",
    "blocks.0.mlp.W_in",
    "blocks.0.mlp.b_in",
    "blocks.0.mlp.W_out",
    "blocks.0.mlp.b_out",
)
"""The canonical name of each weight, in the same order."""


def rms_scale(x: Float[Tensor, "*place d_model"], eps: float) -> Float[Tensor, "*place 1"]:
    """What RMS normalisation divides by: the root mean square, and eps outside of the root."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True) * x.shape[-1] ** -0.5 + eps


def learned_query_logits(
    weights: LearnedQueryWeights, one_hot: Float[Tensor, "*seed batch place"], config: LearnedQuery
) -> Float[Tensor, "*seed batch vocab"]:
    """Logits of one model, or of several at once, each on its own batch.

    Args:
        one_hot: `one_hot_places` of the tokens: what is at a place of the sequence is the same whatever is beside it,
            so that attention is the ratio of two sums over a small table.
    """
    xi = gathered(weights, one_hot, config)
    out = xi + mlp(weights, _normalized(xi, config, "ln2"))
    return out @ weights.W_E.mT


def gathered(
    weights: LearnedQueryWeights, one_hot: Float[Tensor, "*seed batch place"], config: LearnedQuery
) -> Float[Tensor, "*seed batch d_model"]:
    """What the query gathers from each sequence (xi in the paper)."""
    table = (weights.W_pos.unsqueeze(-2) + weights.W_E.unsqueeze(-3)).flatten(-3, -2)  # seed place d_model
    z = _normalized(table, config, "ln1")
    scores = (z @ weights.b_Q.mT) * z.shape[-1] ** -0.5  # seed place 1
    if "ln1" not in config.normalized:  # otherwise scores are no larger than the query, and have a safe exponential
        scores = scores - scores.amax(-2, keepdim=True).detach()
    attention = scores.exp()
    v = z @ weights.W_V.squeeze(-3)
    summed = one_hot @ torch.cat([attention * v, attention], -1)
    values, total = summed.split([v.shape[-1], 1], -1)
    return values / total


def mlp(
    weights: LearnedQueryWeights, normalized: Float[Tensor, "*seed batch d_model"]
) -> Float[Tensor, "*seed batch d_model"]:
    """What the MLP adds to what was gathered."""
    post = functional.gelu(_affine(normalized, weights.W_in, weights.b_in))
    return _affine(post, weights.W_out, weights.b_out)


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """In one call, since a call takes longer than the product."""
    if x.ndim == 2:
        return torch.addmm(bias, x, weight)
    return torch.baddbmm(bias.unsqueeze(-2), x, weight)


def _normalized(
    x: Float[Tensor, "*place d_model"], config: LearnedQuery, where: str
) -> Float[Tensor, "*place d_model"]:
    return x / rms_scale(x, config.eps) if where in config.normalized else x


def one_hot_places(
    tokens: Int[Tensor, "batch position"], d_vocab: int, dtype: torch.dtype
) -> Float[Tensor, "batch place"]:
    """Ones among zeros; the place of a token is `position * d_vocab + token`."""
    return functional.embedding(tokens, torch.eye(d_vocab, dtype=dtype, device=tokens.device)).flatten(1)


class LearnedQueryAttention(PaperModel):
    """`LearnedQuery` as a hooked module: use `run_with_cache` and `run_with_hooks` as on any TransformerLens model.

    There is one query, which stands behind the sequence: `hook_pattern` is `[batch, 1, 1, position]`, and from
    `hook_attn_out` on, which is xi, activations have one position. While anybody listens at a hook, sums are taken in
    another order, which can change the last bits of the logits.
    """

    embed: Any
    pos_embed: Any
    blocks: Any

    def __init__(self, config: LearnedQuery, d_vocab: int, n_ctx: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        d_model, d_mlp = config.d_model, config.d_mlp
        self.cfg = Shape(
            d_model=d_model,
            d_head=d_model,
            n_heads=1,
            d_vocab=d_vocab,
            n_ctx=n_ctx,
            attn_scale=math.sqrt(d_model),
            attn_only=False,
            attention_dir="bidirectional",
        )
        self.embed = parameters(dtype, W_E=(d_vocab, d_model))
        self.hook_embed = HookPoint()
        self.pos_embed = parameters(dtype, W_pos=(n_ctx, d_model))
        self.hook_pos_embed = HookPoint()
        block = attention_block(parameters(dtype, b_Q=(1, d_model), W_V=(1, d_model, d_model)))
        block.add_module(
            "mlp", parameters(dtype, W_in=(d_model, d_mlp), b_in=(d_mlp,), W_out=(d_mlp, d_model), b_out=(d_model,))
        )
        self.blocks = nn.ModuleList([block])
        _add_hooks(block)
        self._parts: Any = (self.embed, self.pos_embed, block.attn, block.mlp)  # nn.Module looks names up slowly
        self.setup()

    def forward(
        self, tokens: Int[Tensor, "batch position"], queries: slice = EVERY_QUERY
    ) -> Float[Tensor, "batch 1 vocab"]:
        """Logits of the one query there is, whatever `queries` says."""
        weights, tap = self.matrices(), self.tap
        if tap is silent:
            one_hot = one_hot_places(tokens, self.cfg.d_vocab, weights.W_E.dtype)
            seen = weights._replace(W_pos=weights.W_pos[: tokens.shape[1]])
            return learned_query_logits(seen, one_hot, self.config)[:, None]
        return self._heard(tokens, weights, tap)

    def _heard(
        self, tokens: Int[Tensor, "batch position"], weights: LearnedQueryWeights, tap: Tap
    ) -> Float[Tensor, "batch 1 vocab"]:
        """The same, sequence by sequence, so that every activation is there to be seen."""
        block = "blocks.0."
        embed = tap("hook_embed", functional.embedding(tokens, weights.W_E))
        pos_embed = tap("hook_pos_embed", weights.W_pos[: tokens.shape[1]].expand_as(embed))
        resid_pre = tap(f"{block}hook_resid_pre", embed + pos_embed)
        z = self._normalize(resid_pre, "ln1", tap)
        xi = self._attend(z, weights, tap)
        resid_mid = tap(f"{block}hook_resid_mid", tap(f"{block}hook_attn_out", xi))
        pre = tap(f"{block}mlp.hook_pre", self._normalize(resid_mid, "ln2", tap) @ weights.W_in + weights.b_in)
        post = tap(f"{block}mlp.hook_post", functional.gelu(pre))
        mlp_out = tap(f"{block}hook_mlp_out", post @ weights.W_out + weights.b_out)
        return tap(f"{block}hook_resid_post", resid_mid + mlp_out) @ weights.W_E.mT

    def _normalize(self, x: Float[Tensor, "batch position d_model"], where: str, tap: Tap) -> Tensor:
        if where not in self.config.normalized:
            return x
        scale = tap(f"blocks.0.{where}.hook_scale", rms_scale(x, self.config.eps))
        return tap(f"blocks.0.{where}.hook_normalized", x / scale)

    def _attend(
        self, z: Float[Tensor, "batch position d_model"], weights: LearnedQueryWeights, tap: Tap
    ) -> Float[Tensor, "batch 1 d_model"]:
        attn = "blocks.0.attn."
        q = tap(f"{attn}hook_q", weights.b_Q.expand(len(z), 1, 1, -1))
        k = tap(f"{attn}hook_k", z[:, :, None])
        v = tap(f"{attn}hook_v", (z @ weights.W_V[0])[:, :, None])
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.cfg.attn_scale
        pattern = tap(f"{attn}hook_pattern", tap(f"{attn}hook_attn_scores", scores).softmax(-1))
        return tap(f"{attn}hook_z", torch.einsum("bhqk,bkhd->bqhd", pattern, v))[:, :, 0]

    def matrices(self) -> LearnedQueryWeights:
        embed, pos_embed, attn, mlp = self._parts
        return LearnedQueryWeights(
            embed.W_E, pos_embed.W_pos, attn.b_Q, attn.W_V, mlp.W_in, mlp.b_in, mlp.W_out, mlp.b_out
        )

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        return self.pos_embed.W_pos

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        return self.embed.W_E.mT

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self.blocks[0].attn.W_V[None]

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        return self.blocks[0].attn.b_Q[None]


def _add_hooks(block: Any) -> None:
    """Those beside attention's own."""
    for where in ("ln1", "ln2"):
        norm = nn.Module()
        for name in ("scale", "normalized"):
            norm.add_module(f"hook_{name}", HookPoint())
        block.add_module(where, norm)
    for name in ("pre", "post"):
        block.mlp.add_module(f"hook_{name}", HookPoint())
    for name in ("resid_mid", "mlp_out"):
        block.add_module(f"hook_{name}", HookPoint())
