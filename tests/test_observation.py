from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from fd_interp.config import InputError
from fd_interp.models import lens
from fd_interp.models.build import build, initial_weights
from fd_interp.models.config import OneLayer, Transformer
from fd_interp.observation import LOGITS, Observation, Probe, Variable, by_head, chosen_queries, observe
from fd_interp.probes.focus import frequency_focus
from fd_interp.reproduction import write_trace
from fd_interp.sources import from_checkpoints
from fd_interp.tasks.task import Batch
from fd_interp.training.series import Inputs, Series, Snapshot, open_series

D_VOCAB, LENGTH = 5, 6
BATCH = Batch(
    torch.randint(D_VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0)), torch.zeros(3, LENGTH).long()
)
FREQUENCIES = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
DEEP = Transformer(n_layers=3, n_heads=2, d_model=4, d_head=3, std=0.5)
NUMBER = Variable((), "a number", "nowhere")


def a_series(config: OneLayer | Transformer = DEEP, steps: tuple[int, ...] = (0, 5, 7)) -> Series:
    """Snapshots with random weights of their own."""

    def model() -> lens.Model:
        return build(config, D_VOCAB, LENGTH)

    def snapshot(step: int) -> Snapshot:
        weights = initial_weights(config, lens.weights(model()), torch.Generator().manual_seed(step))
        return Snapshot(step, lambda: weights, model)

    inputs = Inputs(BATCH, FREQUENCIES, list("abcde"))
    return Series("made by hand", tuple(snapshot(step) for step in steps), model, lambda: inputs)


def a_probe(
    measure: Callable[[Observation], Tensor], *hooks: str, dims: tuple[str, ...] = (), name: str = "x"
) -> Probe:
    return Probe(f"probe of {name}", {name: Variable(dims, "what it is", "somewhere", "nats")}, lambda seen: {
        name: measure(seen)
    }, hooks)  # fmt: skip


class Counted:
    """A series that counts what is asked of it."""

    def __init__(self, series: Series) -> None:
        self.counts: Counter[str] = Counter()
        snapshots = tuple(replace(snapshot, read=self.counted("reads", snapshot.read)) for snapshot in series)
        self.series = replace(series, snapshots=snapshots, build=self.counted("builds", self.building(series.build)))

    def counted(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            self.counts[what] += 1
            return function(*arguments, **more)

        return call

    def building(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def built() -> Any:
            model = make()
            model.forward = self.counted("passes", model.forward)
            return model

        return built


@pytest.mark.parametrize("config", [OneLayer(d_model=4, d_head=4), DEEP], ids=["one layer", "transformer"])
def test_each_snapshot_is_read_and_run_once_however_many_probes(config: OneLayer | Transformer) -> None:
    counted = Counted(a_series(config))
    probes = [
        a_probe(lambda seen: seen.activations("pattern")[0].mean(), "pattern", name="a"),
        a_probe(lambda seen: seen.activations("z")[0].mean(), "z", "pattern", name="b"),
        a_probe(lambda seen: seen.cache[LOGITS].mean(), LOGITS, name="c"),
        a_probe(lambda seen: seen.weights["embed.W_E"].mean(), name="d"),
    ]
    observe(counted.series, probes)
    assert counted.counts == {"passes": 3, "reads": 3, "builds": 1}


def test_probes_of_weights_alone_run_no_model() -> None:
    counted = Counted(a_series())
    trace = observe(counted.series, [a_probe(lambda seen: seen.weights["embed.W_E"].norm())])
    assert counted.counts == {"reads": 3, "builds": 1}
    expected = [snapshot.weights()["embed.W_E"].norm().item() for snapshot in a_series()]
    assert trace.x.values.tolist() == pytest.approx(expected)


def test_a_trace_has_labelled_axes_and_says_what_its_numbers_are() -> None:
    per_token = a_probe(lambda seen: torch.stack(seen.activations("v")).mean((1, 2, 4))[..., None].repeat(1, 1, 5), "v",
                        dims=("layer", "head", "token"))  # fmt: skip
    trace = observe(a_series(), [per_token, a_probe(lambda seen: seen.weights["embed.W_E"].sum(), name="y")])
    assert trace.x.dims == ("step", "layer", "head", "token")
    assert trace.y.dims == ("step",)
    assert dict(trace.sizes) == {"step": 3, "layer": 3, "head": 2, "token": 5}
    assert trace.step.values.tolist() == [0, 5, 7]
    assert {dim: trace[dim].values.tolist() for dim in ("layer", "head", "token")} == {
        "layer": [0, 1, 2],
        "head": [0, 1],
        "token": [0, 1, 2, 3, 4],
    }
    assert trace.x.attrs == {"long_name": "what it is", "units": "nats", "source": "somewhere"}
    assert trace.attrs["series"] == "made by hand"
    assert trace.x.dtype == np.float64
    assert trace.x.sel(step=5, layer=2, head=1).shape == (5,)


def named(names: list[str], *, name: str = "x", places: int = 3) -> Probe:
    """A probe of an axis of its own, whose places have names."""
    variable = Variable(("block",), "what it is", "somewhere", names={"block": names})
    return Probe(f"probe of {name}", {name: variable}, lambda seen: {name: torch.arange(places)})


def test_places_along_an_axis_can_have_names() -> None:
    unnamed = a_probe(lambda seen: torch.ones(3), dims=("block",), name="y")
    trace = observe(a_series(), [named(["lag 3", "lag 1", "lag 2"]), unnamed])
    assert trace.block_name.dims == ("block",)
    assert trace.block_name.values.tolist() == ["lag 3", "lag 1", "lag 2"]
    assert trace.block.values.tolist() == [0, 1, 2]  # an axis is still counted
    assert trace.x.isel(step=0, block=1).block_name.item() == "lag 1"
    assert "block_name" not in observe(a_series(), [unnamed]).coords


def test_probes_that_name_an_axis_alike_can_be_observed_together() -> None:
    trace = observe(a_series(), [named(["a", "b", "c"]), named(["a", "b", "c"], name="y")])
    assert trace.block_name.values.tolist() == ["a", "b", "c"]
    with pytest.raises(InputError) as caught:
        observe(a_series(), [named(["a", "b", "c"]), named(["a", "c", "b"], name="y")])
    message = "the axis block cannot be both ['a', 'b', 'c'] and ['a', 'c', 'b']; observe them apart"
    assert str(caught.value) == message


def test_names_must_be_as_many_as_places() -> None:
    with pytest.raises(InputError) as caught:
        observe(a_series(), [named(["a", "b"])])
    assert str(caught.value) == "probe probe of x names 2 places along block, and x has 3"


def test_values_are_those_of_each_snapshot_in_its_layer_and_head() -> None:
    series = a_series()
    pattern = a_probe(lambda seen: torch.stack([each[:, :, -1, 0].mean(0) for each in seen.activations("pattern")]),
                      "pattern", dims=("layer", "head"))  # fmt: skip
    trace = observe(series, [pattern])
    for snapshot in series:
        model: Any = snapshot.model()
        _, cache = model.run_with_cache(BATCH.tokens)
        for layer in range(3):
            expected = cache[f"blocks.{layer}.attn.hook_pattern"][:, :, -1, 0].mean(0)
            found = trace.x.sel(step=snapshot.step, layer=layer).values
            assert found == pytest.approx(expected.detach().numpy(), abs=1e-6)
    assert len(np.unique(trace.x)) == trace.x.size


def test_layers_keep_their_order_whatever_the_names_that_were_asked() -> None:
    """A hook of a later layer, asked by its full name, must not come before those that a short name stands for."""
    series = a_series()
    every = a_probe(lambda seen: torch.stack([each.mean() for each in seen.activations("z")]), "z", dims=("layer",))
    last = a_probe(lambda seen: seen.cache["blocks.2.attn.hook_z"].mean(), "blocks.2.attn.hook_z", name="last")
    alone, together = observe(series, [every]), observe(series, [last, every])
    xr.testing.assert_equal(alone.x, together.x)
    np.testing.assert_array_equal(together.x.sel(layer=2), together["last"])


def test_a_probe_sees_the_snapshot_before_the_first_one_and_what_the_series_is_measured_on() -> None:
    series, seen = a_series(), []
    observe(series, [a_probe(lambda observation: seen.append(observation) or torch.tensor(0.0))])
    weights = [snapshot.weights() for snapshot in series]
    assert [observation.weights is each for observation, each in zip(seen, weights, strict=True)] == [True] * 3
    assert [observation.first is weights[0] for observation in seen] == [True] * 3
    assert [observation.previous is each for observation, each in zip(seen, [weights[0], *weights], strict=False)] == (
        [True] * 3
    )
    assert all(observation.batch is BATCH and observation.frequencies is FREQUENCIES for observation in seen)
    assert all(observation.cache == {} for observation in seen)


def test_what_stays_the_same_is_computed_once_for_a_series_and_anew_for_another_batch() -> None:
    computed: list[int] = []

    def measure(seen: Observation) -> Tensor:
        return seen.once("mean", lambda: computed.append(1) or seen.batch.tokens.double().mean())

    series, other = a_series(), Batch(BATCH.tokens[:1], BATCH.targets[:1])
    for batch in (BATCH, other):
        trace = observe(series, [a_probe(measure), a_probe(measure, name="y")], batch)
        assert trace.x.values.tolist() == trace.y.values.tolist() == [batch.tokens.double().mean()] * 3
    assert len(computed) == 2


def test_only_what_probes_name_is_cached() -> None:
    cached: list[list[str]] = []
    observe(
        a_series(), [a_probe(lambda seen: cached.append(sorted(seen.cache)) or torch.tensor(0.0), "z", "hook_embed")]
    )
    assert cached == [[*(f"blocks.{layer}.attn.hook_z" for layer in range(3)), "hook_embed", LOGITS]] * 3


def test_another_batch_can_be_given() -> None:
    series = a_series()
    batch = Batch(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 4], [3, 0]]))
    loss = a_probe(
        lambda seen: torch.nn.functional.cross_entropy(seen.cache[LOGITS].flatten(0, 1), seen.batch.targets.flatten()),
        LOGITS,
    )
    trace = observe(series, [loss], batch)
    for snapshot in series:
        log_probs = snapshot.model()(batch.tokens).log_softmax(-1)
        expected = -torch.stack([log_probs[0, 0, 1], log_probs[0, 1, 4], log_probs[1, 0, 3], log_probs[1, 1, 0]]).mean()
        assert trace.x.sel(step=snapshot.step).item() == pytest.approx(expected.item(), abs=1e-5)
    assert not np.allclose(trace.x, observe(series, [loss]).x)


def test_a_trace_survives_netcdf(tmp_path: Path) -> None:
    probes = [
        a_probe(lambda seen: torch.stack([each.mean((0, 1, 3)) for each in seen.activations("q")]), "q",
                dims=("layer", "head")),
        a_probe(lambda seen: torch.tensor(torch.nan), name="nothing"),
    ]  # fmt: skip
    trace = observe(a_series(), probes)
    write_trace(trace, tmp_path / "deep" / "trace.nc")
    again = xr.load_dataset(tmp_path / "deep" / "trace.nc")
    xr.testing.assert_identical(again, trace)
    assert again.step.dtype == trace.step.dtype
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["trace.nc"]


@pytest.mark.parametrize(
    ("probes", "message"),
    [
        ([Probe("odd", {"a": NUMBER, "b": NUMBER}, lambda seen: {"a": torch.zeros(()), "c": torch.zeros(())})],
         "probe odd declares ['a', 'b'] but measured ['a', 'c']"),
        ([Probe("odd", {"a": NUMBER}, lambda seen: {})], "probe odd declares ['a'] but measured []"),
        ([Probe("odd", {"a": Variable(("layer", "head"), "", "")}, lambda seen: {"a": torch.zeros(3)})],
         "probe odd declares a with the axes ('layer', 'head') but measured shape (3,)"),
        ([Probe("one", {"a": NUMBER}, lambda seen: {"a": torch.zeros(())}),
          Probe("two", {"a": NUMBER, "b": NUMBER}, lambda seen: {"a": torch.ones(()), "b": torch.ones(())})],
         "probes one and two both measure a"),
        ([a_probe(lambda seen: torch.zeros(()), "patern")], "the model has no hook 'patern', did you mean pattern"),
    ],
    ids=["other names", "nothing", "other axes", "twice the same", "unknown hook"],
)  # fmt: skip
def test_a_probe_that_cannot_be_is_refused(probes: list[Probe], message: str) -> None:
    with pytest.raises(InputError) as caught:
        observe(a_series(), probes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("hooks", [(), (LOGITS,)], ids=["weights alone", "a pass"])
def test_a_series_that_changes_shape_is_refused(hooks: tuple[str, ...]) -> None:
    small, large = a_series(), a_series(DEEP.model_copy(update={"d_head": 2}))
    mixed = replace(small, snapshots=(small[0], small[1], large[2]))
    with pytest.raises(InputError) as caught:
        observe(mixed, [a_probe(lambda seen: torch.zeros(()), *hooks)])
    message = "the series changes shape at step 7: blocks.0.attn.W_K was (2, 4, 3), now (2, 4, 2)"
    assert str(caught.value) == message

    fewer = dict(list(small[2].weights().items())[1:])
    gone = next(iter(small[2].weights()))
    shorter = replace(small, snapshots=(*small[:2], replace(small[2], read=lambda: fewer)))
    with pytest.raises(InputError, match=f"changes shape at step 7: {gone} was .*, now no such weight"):
        observe(shorter, [a_probe(lambda seen: torch.zeros(()), *hooks)])


def test_a_snapshot_with_nan_is_refused_and_named() -> None:
    series = a_series()
    broken = {name: weight.clone() for name, weight in series[1].weights().items()}
    broken["unembed.W_U"][0, 0] = torch.nan
    spoiled = replace(series, snapshots=(series[0], replace(series[1], read=lambda: broken), series[2]))
    with pytest.raises(InputError, match=r"unembed\.W_U holds NaN or infinity in 1 of 20 places"):
        observe(spoiled, [a_probe(lambda seen: seen.cache[LOGITS].mean(), LOGITS)])


def test_per_head_weights_are_stacked_over_layers() -> None:
    seen: list[Observation] = []
    series = a_series()
    observe(series, [a_probe(lambda observation: seen.append(observation) or torch.tensor(0.0))])
    model: Any = series[1].model()
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        torch.testing.assert_close(seen[1].stacked(name), getattr(model, name), atol=0, rtol=0)
    torch.testing.assert_close(seen[1].stacked("W_Q", seen[1].first), torch.stack(
        [series[0].weights()[f"blocks.{layer}.attn.W_Q"] for layer in range(3)]
    ))  # fmt: skip
    with pytest.raises(InputError, match=r"the snapshot has no weight blocks\.0\.attn\.W_X"):
        seen[1].stacked("W_X")


def test_keys_that_heads_share_are_repeated_for_each() -> None:
    W_Q, W_K = torch.randn(4, 3, 2), torch.randn(2, 3, 2)
    weights = {"blocks.0.attn.W_Q": W_Q, "blocks.0.attn._W_K": W_K}
    seen = Observation(weights, weights, weights, {}, BATCH, FREQUENCIES)
    assert torch.equal(seen.stacked("W_K")[0], W_K[[0, 0, 1, 1]])


def test_observing_leaves_a_run_directory_as_it_was(small_directory: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in small_directory.rglob("*") if file.is_file()}

    before, state = contents(), torch.get_rng_state()
    trace = observe(open_series(small_directory), [a_probe(lambda seen: seen.cache[LOGITS].mean(), LOGITS, "pattern")])
    assert trace.step.values.tolist() == [0, 10, 20, 30]
    assert contents() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_ones_own_checkpoints_can_be_observed() -> None:
    tokens = torch.tensor([[0, 1, 1, 1], [2, 1, 0, 0]])
    series = a_series()
    own = from_checkpoints(series.build, {step: series.at(step).read for step in (7, 0)}, tokens)
    frequencies: list[Tensor] = []
    last = a_probe(lambda seen: frequencies.append(seen.frequencies) or seen.cache[LOGITS][0, 0, 0], LOGITS)
    trace = observe(own, [last])
    assert trace.step.values.tolist() == [0, 7]
    assert frequencies[0].tolist() == [3 / 8, 4 / 8, 1 / 8, 0, 0]
    assert trace.x[1].item() == pytest.approx(series.at(7).model()(tokens[:, :-1])[0, 0, 0].item())


def test_heads_have_their_usual_labels() -> None:
    values = np.arange(12.0).reshape(2, 3, 2)
    trace = xr.Dataset({"x": (("step", "layer", "head"), values)}, coords={"step": [0, 1]})
    labelled = dict(by_head(trace))
    assert list(labelled) == ["L0H0", "L0H1", "L1H0", "L1H1", "L2H0", "L2H1"]
    assert labelled["L2H1"].x.values.tolist() == [5, 11]


@pytest.mark.parametrize(("length", "first"), [(1, 0), (3, 0), (4, 1), (32, 8)])
def test_attention_is_measured_after_the_first_quarter(length: int, first: int) -> None:
    tokens = torch.zeros(2, length, dtype=torch.long)
    chosen = chosen_queries(Batch(tokens, tokens))
    assert chosen.tolist() == [[position >= first for position in range(length)]] * 2


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (torch.zeros(2, 7, dtype=torch.int64), "the sequences have 7 tokens, and the model sees at most 6"),
        (torch.tensor([[0, 4]]), r"tokens must be in \[0, 4\), the model's vocabulary, but go from 0 to 4"),
        (torch.tensor([[-1, 3]]), r"tokens must be in \[0, 4\), the model's vocabulary, but go from -1 to 3"),
    ],
)
def test_sequences_that_the_model_cannot_read_are_refused(small_directory: Path, tokens: Tensor, sentence: str):
    with pytest.raises(InputError, match=sentence):
        observe(open_series(small_directory), [frequency_focus()], Batch(tokens, tokens))


def test_a_probe_can_read_what_training_kept_at_its_step(small_directory: Path) -> None:
    series = open_series(small_directory)
    stored = a_probe(lambda seen: seen.stored()["blocks.0.attn.hook_pattern"].square().mean())
    step = a_probe(lambda seen: torch.tensor(float(seen.step)), name="at")
    trace = observe(series, [stored, step])
    expected = [kept.activations()["blocks.0.attn.hook_pattern"].square().mean().item() for kept in series]
    assert trace.x.values.tolist() == pytest.approx(expected)
    assert len(set(expected)) == 4
    assert trace["at"].values.tolist() == [0, 10, 20, 30]


def test_where_training_kept_nothing_beside_the_weights_nothing_is_stored() -> None:
    trace = observe(a_series(), [a_probe(lambda seen: torch.tensor(float(len(seen.stored()))))])
    assert trace.x.values.tolist() == [0, 0, 0]
