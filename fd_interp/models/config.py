"""What a model is made of, as values. Vocabulary and context come from the task, so they are not repeated here."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from fd_interp.config import Frozen, InputError

Hold = Literal["identity", "zero", "init"]
"""How a weight is held fixed: at the identity, at zero, or at its random initial value."""


class Normal(NamedTuple):
    """Initial values are drawn from `N(0, std^2)`."""

    std: float


class Uniform(NamedTuple):
    """Initial values are drawn from `U(-bound, bound)`."""

    bound: float


class Initialised(Frozen):
    """What all models have in common: which weights are held fixed, and how each is drawn."""

    fixed: dict[str, Hold] = {}
    """Weights that are not trained, and at what they are held."""
    stds: dict[str, NonNegativeFloat] = {}
    """Standard deviation of the normal initialisation of a weight, by name."""

    def law(self, name: str) -> Normal | Uniform | None:
        """What the initial values of a weight are drawn from; None for those that start at zero."""
        raise NotImplementedError


class NormallyInitialised(Initialised):
    """Every weight matrix is normal, and biases start at zero."""

    std: float = Field(default=2e-2, ge=0)
    """Standard deviation of the normal initialisation of every weight matrix."""
    stds: dict[str, NonNegativeFloat] = {}
    """Exceptions to `std`, by weight name."""

    def law(self, name: str) -> Normal | None:
        return None if name.startswith("b_") else Normal(self.stds.get(name, self.std))


class OneLayer(NormallyInitialised):
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


class Minimal(NormallyInitialised):
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
    std: float = Field(default=1e-3, ge=0)
    """Standard deviation of the normal initialisation of W_Q (q in the paper)."""
    stds: dict[str, NonNegativeFloat] = {"W_V": 0.0}
    """Exceptions to `std`, by weight name; W_V starts at zero, as in the paper."""

    @model_validator(mode="after")
    def _weights_exist(self) -> "Minimal":
        _check_weight_names(self, {"W_Q", "W_V"})
        return self


class Transformer(NormallyInitialised):
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

    @model_validator(mode="after")
    def _weights_exist(self) -> "Transformer":
        weights = {"W_E", "W_pos", "W_Q", "W_K", "W_V", "W_O", "W_U", "b_Q", "b_K", "b_V", "b_O"}
        _check_weight_names(self, weights | ({"W_in", "W_out", "b_in", "b_out"} if self.d_mlp else set()))
        return self


class LearnedQuery(Initialised):
    """The model of arXiv 2410.24050: one learned query attends over all positions, and an MLP reads what it gathers.

    With `N(u) = u / (rms(u) + eps)`, which has no gain: `z_t = N(W_E[x_t] + W_pos[t])`, scores `b_Q . z_t / sqrt(d)`,
    `xi = sum_t pattern_t z_t W_V`, logits `(xi + MLP(N(xi))) W_E^T` with an exact GELU. There is no mask, no residual
    stream round the attention, no W_K and no W_O, and the unembedding is the embedding. The sizes and the
    initialisation are those of the paper's code; it cuts the MLP's weights from one table, so that a seed has like
    neurons at every width, and ours does not.
    """

    kind: Literal["learned_query"] = "learned_query"
    d_model: int = Field(default=2, ge=2)
    """Coordinates; at least two, since a normalised vector of one is a sign."""
    d_mlp: PositiveInt = 32
    eps: NonNegativeFloat = 1e-5
    """Added to the root mean square in the normalisation."""
    normalized: tuple[Literal["ln1", "ln2"], ...] = ("ln1", "ln2")
    """Which normalisations there are: before the attention, and before the MLP."""
    stds: dict[str, NonNegativeFloat] = {"W_E": 1.0, "W_pos": 1.0}
    """Standard deviation of weights that are drawn from a normal law, by name; all others are uniform, up to one over
    the root of what they read from (torch's default)."""

    @model_validator(mode="after")
    def _weights_exist(self) -> "LearnedQuery":
        _check_weight_names(self, {"W_E", "W_pos", "b_Q", "W_V", "W_in", "b_in", "W_out", "b_out"})
        return self

    def law(self, name: str) -> Normal | Uniform:
        if name in self.stds:
            return Normal(self.stds[name])
        read_from = self.d_mlp if name in ("W_out", "b_out") else self.d_model
        return Uniform(read_from**-0.5)


ModelConfig = Annotated[OneLayer | Minimal | Transformer | LearnedQuery, Field(discriminator="kind")]


def _check_weight_names(config: Initialised, known: set[str]) -> None:
    unknown = (config.fixed.keys() | config.stds.keys()) - known
    if unknown:
        kind = type(config).model_fields["kind"].default
        raise InputError(f"{kind} has no weight {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    for name, hold in config.fixed.items():
        if hold == "identity" and name.startswith("b_"):
            raise InputError(f"{name} is a bias, so it can be held at zero, not at the identity")
