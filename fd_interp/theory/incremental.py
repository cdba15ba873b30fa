"""Population flow of attention heads that learn sparse patterns one by one (arXiv 2602.19143), and its closed forms.

This is the paper's regression variant: the target is `sum_j m_j U_j sum_l alpha_jl x_{t-l}` of isotropic inputs, the
model `sum_k V_k sum_l s_kl x_{t-l}` with the attention `s_k = softmax(a_k)` over lags, and the loss half the squared
error. With orthonormal features U_j, values that start in their span stay in it, and everything happens in the
coordinates `v_kj = <V_k, U_j>`: with `G_jl = m_j alpha_jl`, `P = v^T s` and `R = G - P` the loss is `|R|^2 / 2`, and

    dv_k/dt = R s_k,    da_k/dt = g_k (form "fisher") or J(s_k) g_k (form "gradient"),    g_k = R^T v_k,

where `J(s) = diag(s) - s s^T`. "gradient" is the gradient flow; "fisher" moves the logits by the gradient with respect
to the attention itself (mirror flow), as the authors' simulation does. Lag l, counted back from the predicted token,
has index l - 1; a block is a set of lags with its feature, the most important first. The equations are the authors';
the closed forms are our own derivation.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from scipy.integrate import solve_ivp
from scipy.special import softmax

from fd_interp.config import InputError
from fd_interp.measures import specialization

Array = np.ndarray
Form = Literal["fisher", "gradient"]
PAPER = "arXiv 2602.19143, regression variant"


class Target(NamedTuple):
    """What is to be learned: features of some strength, each at its own lags."""

    strengths: Float[Array, " block"]
    """m_j, the length of the feature; not increasing, for a rung to be what the first blocks leave."""
    alphas: Float[Array, "block lag"]
    """Weights of the lags, 0 outside the block; no lag is in two blocks."""

    @classmethod
    def of_lags(cls, strengths: Sequence[float], lags: Sequence[int], n_lags: int) -> "Target":
        """Blocks of a single lag each.

        Raises:
            InputError: strengths and lags differ in number, or there are none; a strength is not positive or exceeds
                the one before; a lag is repeated, below 1 or beyond `n_lags`.
        """
        if not strengths or len(strengths) != len(lags):
            raise InputError(f"each block has a strength and a lag, but there are {len(strengths)} and {len(lags)}")
        if min(strengths) <= 0 or list(strengths) != sorted(strengths, reverse=True):
            raise InputError(f"strengths must be positive, the largest first, not {list(strengths)}")
        if len(set(lags)) < len(lags) or not all(1 <= lag <= n_lags for lag in lags):
            raise InputError(f"lags must be different and from 1 to {n_lags}, not {list(lags)}")
        return cls(np.array(strengths, dtype=float), np.eye(n_lags)[np.array(lags) - 1])

    @property
    def tensor(self) -> Float[Array, "block lag"]:
        """`G = m_j alpha_j`, in the coordinates of the features."""
        return self.strengths[:, None] * self.alphas


class Heads(NamedTuple):
    """State of the flow; leading axes (steps) are allowed on both."""

    logits: Float[Array, "*step head lag"]
    """a_k, of which the attention is the softmax."""
    values: Float[Array, "*step head block"]
    """`v_kj = <V_k, U_j>`."""

    @classmethod
    def small(cls, n_heads: int, target: Target, delta: float, rng: np.random.Generator) -> "Heads":
        """Values of zero and normal logits of standard deviation `delta`: uniform attention, all but symmetric."""
        if n_heads < 1 or delta < 0:
            raise InputError(f"there must be a head, and delta must not be negative: not {n_heads} and {delta}")
        n_blocks, n_lags = target.alphas.shape
        return cls(delta * rng.normal(size=(n_heads, n_lags)), np.zeros((n_heads, n_blocks)))

    @property
    def attention(self) -> Float[Array, "*step head lag"]:
        """s_k."""
        return softmax(self.logits, axis=-1)


def loss(heads: Heads, target: Target) -> Float[Array | np.float64, "*step"]:
    """`|R|^2 / 2`: half the expected squared error on isotropic inputs; 0 when everything is learned."""
    return np.square(_residual(heads.values, heads.attention, target.tensor)).sum((-2, -1)) / 2


def ladder(target: Target) -> Float[Array, " rung"]:
    """Loss with the first k blocks learned exactly and no other, `sum_{j>k} |G_j|^2 / 2`, for k = 0 to their number."""
    of_block = np.square(target.tensor).sum(-1) / 2
    return np.append(of_block[::-1].cumsum()[::-1], 0)


def velocity(heads: Heads, target: Target, *, form: Form, attn_rate: float = 1.0) -> Heads:
    """Right-hand side of the flow.

    Logits move `attn_rate` times as fast: `1 / attn_scale^2` for scores that a model divides by its attn_scale.
    """
    return _velocity(heads, target.tensor, form, attn_rate)


def _velocity(heads: Heads, G: Array, form: Form, attn_rate: float) -> Heads:
    s = softmax(heads.logits, axis=-1)
    R = _residual(heads.values, s, G)
    g = np.einsum("...ji,...kj->...ki", R, heads.values)
    return Heads(attn_rate * _logit_velocity(s, g, form), np.einsum("...ji,...ki->...kj", R, s))


def flow(
    start: Heads,
    target: Target,
    *,
    steps: Sequence[float] | Sequence[int] | Array,
    rate: float = 1.0,
    form: Form,
    attn_rate: float = 1.0,
    rtol: float = 1e-6,
) -> xr.Dataset:
    """The flow, integrated by SciPy, as a trace; step k stands for the time `k * rate`.

    Variables that are also measured on trained models have the same names. `effective_coefficient` is the share of a
    block that the heads predict together, `sum_k v_kj s_k(block j) / (m_j sum alpha_j)`: 0 at the start, 1 when the
    block is learned. Heads that start equal stay equal exactly, and differences between heads count down to about the
    rounding of double precision, 1e-15.

    Raises:
        InputError: no step, or one before 0; a rate that is not positive; sizes that do not fit; numbers that are not
            finite; a flow that SciPy cannot follow.
    """
    if rate <= 0 or attn_rate <= 0:
        raise InputError(f"rate and attn_rate must be positive, not {rate} and {attn_rate}")
    (n_heads, n_lags), n_blocks = start.logits.shape, start.values.shape[-1]
    if target.alphas.shape != (n_blocks, n_lags):
        raise InputError(
            f"the heads have {n_lags} lags and {n_blocks} blocks, but the target has {target.alphas.shape[1]} and "
            f"{target.alphas.shape[0]}"
        )

    G, steps = target.tensor, np.unique(steps)

    def right_hand_side(state: Array) -> Array:
        return _pack(_velocity(_unpack(state, n_heads, n_lags), G, form, attn_rate))

    path = _integrate(right_hand_side, _pack(start), steps * rate, rtol)
    return _trace(_unpack(path, n_heads, n_lags), target, steps)


def reduced_loss(s: Float[Array, "*step lag"], target: Target) -> Float[Array | np.float64, "*step"]:
    """Loss with the best values for heads that all attend alike: `|G|^2 / 2 - |G s|^2 / (2 |s|^2)`."""
    G = target.tensor
    return (np.square(G).sum() - np.square(s @ G.T).sum(-1) / np.square(s).sum(-1)) / 2


def reduced_velocity(s: Float[Array, " lag"], target: Target, n_heads: int, *, form: Form) -> Float[Array, " lag"]:
    """ds/dt of heads that all attend alike while their values are at their best, `sum_k V_k = G s / |s|^2`.

    `ds = J(s) g` in the form "fisher", a replicator, and `J(s)^2 g` in the form "gradient", with
    `g = (G^T G s - |G s|^2 s / |s|^2) / (n_heads |s|^2)`, which is orthogonal to s. For blocks of a single lag,
    `g_i = s_i (m_i^2 - rho) / (n_heads |s|^2)` with rho the mean of m^2 under weights s^2: attention to a lag rises
    while its m^2 is above the mean, and the largest of all wins. Nothing here needs the heads to be many: the values
    are `n_heads` times as fast as those of one head, and the attention as many times slower.
    """
    Gs, norm = target.tensor @ s, s @ s
    g = (target.tensor.T @ Gs - Gs @ Gs / norm * s) / (n_heads * norm)
    return _spread(s, _logit_velocity(s, g, form))


def reduced_flow(
    s: Float[Array, " lag"],
    target: Target,
    n_heads: int,
    *,
    times: Sequence[float] | Sequence[int] | Array,
    form: Form,
    rtol: float = 1e-6,
) -> Float[Array, "step lag"]:
    """Attention along the reduced flow from s, at the given times in increasing order.

    Raises:
        InputError: as `flow`; s is not a distribution.
    """
    if s.min() < 0 or not np.isclose(s.sum(), 1):
        raise InputError(f"attention must not be negative and must sum to one, not to {s.sum():g}")
    return _integrate(lambda state: reduced_velocity(state, target, n_heads, form=form), s, np.unique(times), rtol)


def escape_rate(target: Target, s: Float[Array, " lag"], block: int, *, form: Form) -> float:
    """Rate at which heads drift apart towards a block that is not learned while all attend as s says.

    Differences that add up to zero over the heads do not change what they predict together, so nothing stops them.
    They grow as `exp(rate t)`, the rate being `sqrt(G_j J G_j)` (fisher) or `|J G_j|` (gradient) with J = J(s), to
    leading order in s(block j). For a single lag beside one that has nearly all attention, it is `m_j sqrt(s_j)` or
    `sqrt(2) m_j s_j`.
    """
    G_j = target.tensor[block]
    spread = _spread(s, G_j)
    return float(np.sqrt({"fisher": G_j @ spread, "gradient": spread @ spread}[form]))


def escape_time(target: Target, n_heads: int, delta: float, start_mass: float) -> float:
    """How long heads stay together on the first lag before one leaves for the second; form "fisher", single lags.

    Differences grow from `delta` to 1 by `escape_rate` while the attention to the second lag falls from `start_mass`
    as `1 / s_2 = 1 / start_mass + kappa t`, `kappa = (m_1^2 - m_2^2) / n_heads`. Hence
    `sqrt(1 / start_mass + kappa tau) = sqrt(1 / start_mass) + kappa log(1 / delta) / (2 m_2)`.

    Raises:
        InputError: as `plateau_length`; start_mass not between 0 and 1.
    """
    if not 0 < start_mass < 1:
        raise InputError(f"start_mass is attention to a lag, between 0 and 1, not {start_mass}")
    _, m_2 = _first_two(target, n_heads, delta)
    return float(np.log(1 / delta) / (m_2 * np.sqrt(start_mass))) + plateau_length(target, n_heads, delta)


def plateau_length(target: Target, n_heads: int, delta: float) -> float:
    """`escape_time` for the smallest delta: `(m_1^2 - m_2^2) / (4 n_heads m_2^2) log^2(1 / delta)`.

    Raises:
        InputError: fewer than two heads, or two blocks; a block of several lags; delta not between 0 and 1.
    """
    m_1, m_2 = _first_two(target, n_heads, delta)
    return float((m_1**2 - m_2**2) / (4 * n_heads * m_2**2) * np.log(delta) ** 2)


class Offset(NamedTuple):
    """Values of one feature in the heads that do not own it, added up; equal once the feature is learned."""

    predicted: float
    measured: float


def offset(
    mass: Float[Array, "head block"], values: Float[Array, "head block"], *, block: int, feature: int, owner: int
) -> Offset:
    """What the other heads hold of a feature to cancel what its owner writes of it while it attends to a block.

    With the residual 0, `sum_k v_kf s_k(block) = 0`. With s the others' mean attention to the block, their values,
    each times `s_k(block) / s` (1 for heads that attend alike), add up to `-v_of s_o(block) / s`, o the owner. `block`
    is not the feature's own. `mass` and `values` are `block_mass` and `value_coefficient` of a trace.

    Raises:
        InputError: a block that is the feature's own; a single head.
    """
    if block == feature or len(values) < 2:
        raise InputError("an offset is between two heads, of a feature at another block than its own")
    written = values[:, feature] * mass[:, block]
    others = np.arange(len(values)) != owner
    mean = mass[others, block].mean()
    return Offset(float(-written[owner] / mean), float(written[others].sum() / mean))


def _residual(values: Array, s: Array, G: Array) -> Array:
    """`R = G - P`."""
    return G - np.einsum("...kj,...ki->...ji", values, s)


def _logit_velocity(s: Array, g: Array, form: Form) -> Array:
    return {"fisher": g, "gradient": _spread(s, g)}[form]


def _spread(s: Array, g: Array) -> Array:
    """`J(s) g`: how attention moves when the logits move by g."""
    return s * (g - (s * g).sum(-1, keepdims=True))


def _first_two(target: Target, n_heads: int, delta: float) -> Array:
    if n_heads < 2 or len(target.strengths) < 2:
        raise InputError(f"to part takes two heads and two blocks, not {n_heads} and {len(target.strengths)}")
    if (np.count_nonzero(target.alphas, axis=-1) > 1).any():
        raise InputError("the time to part is known for blocks of a single lag, and a block here has several")
    if not 0 < delta < 1:
        raise InputError(f"delta must be between 0 and 1, not {delta}: equal heads never part")
    return target.tensor.sum(-1)[:2]


def _block_mass(attention: Array, target: Target) -> Array:
    return np.einsum("...ki,ji->...kj", attention, target.alphas > 0)


def _integrate(velocity: Callable[[Array], Array], start: Array, times: Array, rtol: float) -> Array:
    if not len(times) or times[0] < 0:
        raise InputError(f"there must be at least one step, and none before 0, not {times.tolist()}")
    if not np.isfinite(start).all():
        raise InputError("the flow must start from finite numbers")
    # An explicit method: its steps, which fast values keep short, also resolve differences between heads that are too
    # small for the tolerance to see.
    solution = solve_ivp(
        lambda _, state: velocity(state),
        (0, times[-1] or 1.0),
        start,
        method="RK45",
        t_eval=times,
        rtol=rtol,
        atol=rtol * 1e-3,
    )
    if not solution.success:
        raise InputError(f"the flow cannot be followed to time {times[-1]:g}: {solution.message}")
    return solution.y.T


def _pack(heads: Heads) -> Array:
    """Heads after the first as differences from it: zero stays zero, but equal numbers part in SciPy's rounding."""
    rows = np.concatenate(heads, axis=-1)
    return np.concatenate([rows[:1], rows[1:] - rows[0]]).ravel()


def _unpack(state: Array, n_heads: int, n_lags: int) -> Heads:
    rows = state.reshape(*state.shape[:-1], n_heads, -1)
    rows = np.concatenate([rows[..., :1, :], rows[..., 1:, :] + rows[..., :1, :]], axis=-2)
    return Heads(rows[..., :n_lags], rows[..., n_lags:])


def _trace(heads: Heads, target: Target, steps: Array) -> xr.Dataset:
    losses, rungs = loss(heads, target), ladder(target)
    mass = torch.from_numpy(_block_mass(heads.attention, target))
    learned = specialization.effective_coefficients(mass, torch.from_numpy(heads.values)).numpy()
    per_head = ("layer", "head", "block")
    variables = {
        "loss": ((), losses, "half the expected squared error"),
        "excess_over_rung": (
            ("rung",),
            np.subtract.outer(losses, rungs),
            "loss above that of the first blocks learned",
        ),
        "block_mass": (per_head, mass[:, None].numpy(), "attention to the lags of the block"),
        "value_coefficient": (per_head, heads.values[:, None], "v: the feature in the head's values"),
        "effective_coefficient": (("block",), learned / target.tensor.sum(-1), "share of the block that is predicted"),
        "competition": (("layer",), specialization.competition_index(mass)[:, None].numpy(), "competition index"),
        "cooperation": (("layer",), specialization.cooperation_index(mass)[:, None].numpy(), "cooperation index"),
    }
    _, n_heads, n_blocks = mass.shape
    coords = {"step": steps, "layer": [0], "head": range(n_heads), "block": range(n_blocks), "rung": range(len(rungs))}
    trace = xr.Dataset(
        {
            name: (("step", *dims), values, {"long_name": long_name, "units": "1", "source": PAPER})
            for name, (dims, values, long_name) in variables.items()
        },
        coords={name: np.asarray(coord) for name, coord in coords.items()},
    )
    return trace.assign_attrs(series="population gradient flow", source=PAPER)
