"""What a model is made of, as values. Vocabulary and context come from the task, so they are not repeated here."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from fd_interp.config import Frozen, InputError

Hold = Literal["identity", "zero", "init"]
"""How a weight is held fixed: at the identity, at zero, or at its random initial value."""


class OneLayer(Frozen):
    """The one-layer model of arXiv 2605.01199: `softmax(X W_E W_Q W_K^T W_E^T X^T / attn_scale) X W_E W_V W_O W_U`.

    No residual stream round the attention, no positions, no biases, no MLP and no normalisation. With `W_V` and `W_O`
    held at the identity, as in the paper, the output is `A X W_E W_U`. Several heads are summed. Whether the paper
    divides the scores by `sqrt(d_head)` is not known to us; `attn_scale = 1` is our choice.
    """

    kind: Literal["one_layer"] = "one_layer"
    d_model: PositiveInt = 16
    d_head: PositiveInt = 16
    n_heads: PositiveInt = 1
    attn_scale: PositiveFloat = 1.0
    """Scores are divided by it, as in TransformerLens."""
    fixed: dict[str, Hold] = {"W_V": "identity", "W_O": "identity"}
    """Weights that are not trained, and at what they are held; every other weight is trained."""
    std: float = Field(default=1e-2, ge=0)
    """Standard deviation of the normal initialisation of every weight."""
    stds: dict[str, NonNegativeFloat] = {}
    """Exceptions to `std`, by weight name (`{"W_Q": 0.1}`)."""

    @model_validator(mode="after")
    def _weights_exist(self) -> "OneLayer":
        _check_weight_names(self, {"W_E", "W_Q", "W_K", "W_V", "W_O", "W_U"})
        square = self.d_model == self.d_head
        if not square and "identity" in {self.fixed.get("W_V"), self.fixed.get("W_O")}:
            raise InputError(
                f"W_V and W_O can be held at the identity only where d_head equals d_model, "
                f"here {self.d_head} and {self.d_model}"
            )
        return self


class Minimal(Frozen):
    """The minimal model of arXiv 2602.19143: attention alone, on tokens and positions that are one-hot.

    Scores are `x_q W_Q x_k^T / attn_scale` and each head writes `sum_k pattern x_k W_V`: keys are the identity, heads
    are summed, and there is no W_O, no skip, no MLP, no normalisation and no bias. The first `d_vocab` coordinates of
    what the last layer writes are the logits. In a second layer x is what the first has written. `W_Q` and `W_V` have
    the size of the whole input, `d_vocab + n_ctx`; where heads attend by position, as in the paper's theory, there are
    just the block of `W_Q` between positions and the block of `W_V` between tokens.

    The paper draws W_Q from a uniform law; ours is normal.
    """

    kind: Literal["minimal"] = "minimal"
    n_layers: PositiveInt = 1
    n_heads: PositiveInt = 3
    attends_by: Literal["position", "token_and_position"] = "position"
    attn_scale: PositiveFloat | None = None
    """Scores are divided by it; None is `sqrt(d_vocab + n_ctx)`, as in the paper."""
    fixed: dict[str, Hold] = {}
    """Weights that are not trained, and at what they are held."""
    std: float = Field(default=1e-3, ge=0)
    """Standard deviation of the normal initialisation of W_Q (q in the paper)."""
    stds: dict[str, NonNegativeFloat] = {"W_V": 0.0}
    """Exceptions to `std`, by weight name; W_V starts at zero, as in the paper."""

    @model_validator(mode="after")
    def _weights_exist(self) -> "Minimal":
        _check_weight_names(self, {"W_Q", "W_V"})
        return self


class Transformer(Frozen):
    """A plain decoder-only HookedTransformer: residual stream, learned positions, W_V and W_O, optional LN and MLP.

    Built as `HookedTransformer` on TransformerLens 3.x and as the native bridge on 4.x, with the same weights and hook
    names. Biases start at zero. `b_U` is held at zero because the bridge of 4.x has no such parameter.
    """

    kind: Literal["transformer"] = "transformer"
    n_layers: PositiveInt = 1
    n_heads: PositiveInt = 1
    d_model: PositiveInt = 16
    d_head: PositiveInt = 16
    d_mlp: PositiveInt | None = None
    """Width of the MLP; None builds an attention-only model."""
    act_fn: Literal["relu", "gelu", "gelu_new", "silu"] = "gelu"
    normalization_type: Literal["LN", "LNPre"] | None = None
    attn_scale: PositiveFloat | None = None
    """Scores are divided by it; None is `sqrt(d_head)`."""
    fixed: dict[str, Hold] = {}
    """Weights that are not trained, and at what they are held: `{"W_pos": "zero"}` removes positions."""
    std: float = Field(default=2e-2, ge=0)
    """Standard deviation of the normal initialisation of every weight matrix."""
    stds: dict[str, NonNegativeFloat] = {}
    """Exceptions to `std`, by weight name."""

    @model_validator(mode="after")
    def _weights_exist(self) -> "Transformer":
        weights = {"W_E", "W_pos", "W_Q", "W_K", "W_V", "W_O", "W_U", "b_Q", "b_K", "b_V", "b_O"}
        _check_weight_names(self, weights | ({"W_in", "W_out", "b_in", "b_out"} if self.d_mlp else set()))
        return self


ModelConfig = Annotated[OneLayer | Minimal | Transformer, Field(discriminator="kind")]


def _check_weight_names(config: OneLayer | Minimal | Transformer, known: set[str]) -> None:
    unknown = (config.fixed.keys() | config.stds.keys()) - known
    if unknown:
        raise InputError(f"{config.kind} has no weight {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    for name, hold in config.fixed.items():
        if hold == "identity" and name.startswith("b_"):
            raise InputError(f"{name} is a bias, so it can be held at zero, not at the identity")
