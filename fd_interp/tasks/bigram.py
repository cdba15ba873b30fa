"""What a text tells about a token and about the token after it, as counts and as predictors made of them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Bigram:
    """How often tokens, and pairs of neighbours, occur in a text; and predictors that give every token a chance.

    `p(y) = (n(y) + 1) / (n + d_vocab)`, and `p(y | x) = (n(x, y) + strength p(y)) / (n(x) + strength)`: what follows a
    token that was seldom seen is left to the unigram. Only the pairs that occur take memory, not `d_vocab` squared.
    """

    def __init__(self, ids: Int[Tensor, " position"], *, d_vocab: int, strength: float) -> None:
        before, after = ids[:-1].long(), ids[1:].long()
        self.d_vocab = d_vocab
        self.strength = strength
        self.seen = torch.bincount(ids, minlength=d_vocab).double()
        self.followed = torch.bincount(before, minlength=d_vocab).double()
        self.pairs, self.pair_counts = torch.unique(before * d_vocab + after, return_counts=True)
        self.unigram = (self.seen + 1) / (len(ids) + d_vocab)

    def count(self, before: Int[Tensor, "..."], after: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        """How often `after` follows `before`."""
        pair = before * self.d_vocab + after
        found = torch.searchsorted(self.pairs, pair).clamp(max=len(self.pairs) - 1)
        return torch.where(self.pairs[found] == pair, self.pair_counts[found], 0).double()

    def probability(self, before: Int[Tensor, "..."], after: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        """p(after | before), smoothed."""
        drawn = self.strength * self.unigram[after]
        return (self.count(before, after) + drawn) / (self.followed[before] + self.strength)

    def log_probs(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
        """log p(. | last token) at each position."""
        distinct, place = tokens.unique(return_inverse=True)
        before = distinct[:, None].expand(-1, self.d_vocab)
        after = torch.arange(self.d_vocab).expand(len(distinct), -1)
        return self.probability(before, after).log()[place]

    def unigram_entropy(self) -> float:
        """Entropy of a token of the text, without smoothing, in nats."""
        p = self.seen / self.seen.sum()
        return -torch.xlogy(p, p).sum().item()

    def bigram_entropy(self) -> float:
        """Entropy of a token of the text given the one before it, without smoothing, in nats."""
        given = self.followed[self.pairs // self.d_vocab]
        return -(self.pair_counts * (self.pair_counts / given).log()).sum().item() / self.followed.sum().item()
