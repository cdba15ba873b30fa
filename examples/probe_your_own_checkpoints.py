"""Train a TransformerLens model in a loop of your own, keep its weights, and ask where its heads look."""

import torch

from fd_interp import EMBEDDING_CONDENSATION, MarkovChain, Transformer, frequency_focus, from_checkpoints, observe
from fd_interp.measures import focus
from fd_interp.models import lens

# Any model with TransformerLens' hooks will do. `build_transformer` makes one on 3.x and on 4.x.
chain = MarkovChain.zipf(8)
config = Transformer(n_layers=2, n_heads=2, d_model=32, d_head=16)


def build() -> lens.Model:
    return lens.build_transformer(config, d_vocab=8, n_ctx=32)


model = build()
generator = torch.Generator().manual_seed(0)
parameters = lens.trainable(model)
for parameter in parameters.values():
    parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3)

# Your loop, your optimizer. What matters is that weights are kept under HookedTransformer's names.
kept: dict[int, lens.Weights] = {}
for step in range(101):
    if step % 20 == 0:
        kept[step] = lens.weights(model)
    tokens, targets = chain.sample(64, generator)
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# As a series they can be observed like any other: one forward pass for each checkpoint, however many probes.
held_out = torch.randint(8, (128, 33), generator=generator)
series = from_checkpoints(build, {step: lambda at=step: kept[at] for step in kept}, held_out)
trace = observe(series, [EMBEDDING_CONDENSATION, frequency_focus(top=1)])
print(trace.focus_ratio.to_dataframe().unstack(["layer", "head"]).round(3))

# The measures themselves take tensors, so they work on a cache that you already have.
hook = "blocks.1.attn.hook_pattern"
pattern = lens.run_and_cache(model, held_out[:, :-1], [hook]).activations[hook]
tokens = held_out[:, :-1]
attention = focus.attention_by_token(pattern, tokens, queries=torch.ones_like(tokens, dtype=torch.bool), d_vocab=8)
print("self-focus of layer 1:", focus.self_focus(attention))
