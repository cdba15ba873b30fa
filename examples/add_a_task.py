"""A task of your own: a law of sequences that knows its optimum. Here tokens alternate between two halves."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fd_interp import Baseline, Batch
from fd_interp.config import Frozen
from fd_interp.tasks.task import Task


class Alternating(Frozen):
    """The next token is uniform over the half of the vocabulary that the last token is not in."""

    half: int = 4
    context: int = 16

    @property
    def d_vocab(self) -> int:
        return 2 * self.half

    @property
    def n_ctx(self) -> int:
        return self.context

    def sample(self, n: int, generator: torch.Generator) -> Batch:
        within = torch.randint(self.half, (n, self.context + 1), generator=generator)
        side = (torch.arange(self.context + 1) + torch.randint(2, (n, 1), generator=generator)) % 2
        tokens = within + self.half * side
        return Batch(tokens[:, :-1], tokens[:, 1:])

    def held_out(self, n: int, generator: torch.Generator) -> Batch:
        return self.sample(n, generator)

    def bayes(self, tokens: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position vocab"]:
        other = (torch.arange(self.d_vocab) < self.half) != (tokens < self.half)[..., None]
        return torch.where(other, -math.log(self.half), -torch.inf)

    def baselines(self) -> list[Baseline]:
        return [Baseline("uniform", math.log(self.d_vocab)), Baseline("bigram", math.log(self.half))]

    def token_frequencies(self) -> Float[Tensor, " vocab"]:
        return torch.full((self.d_vocab,), 1 / self.d_vocab, dtype=torch.float64)

    def token_strings(self) -> list[str]:
        return [f"{'ab'[token // self.half]}{token % self.half}" for token in range(self.d_vocab)]


# A task is tested against its own law: its best predictor, on its own samples, loses what its baseline says.
task: Task = Alternating()
tokens, targets = task.sample(1000, torch.Generator().manual_seed(0))
loss = -task.bayes(tokens).gather(-1, targets[..., None]).mean().item()
print(f"best predictor {loss:.4f} nats, bigram baseline {task.baselines()[-1].loss:.4f}")
assert abs(loss - task.baselines()[-1].loss) < 1e-6
