"""Graded segments: a step walked layer by layer, every policy of small models, and the numbers of the design."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.plan.keep import KeepPolicy, LayerKeep, Place
from megaspan.plan.segments import Pool, Task, fewest_inputs, held_bytes, most_inputs, most_kept, tightest


def one_pool(layers: int, size: int, x: int = 1, out: int = 1, attends: Place = "device") -> Task:
    return Task(
        x, out, (Pool.steady("host", size, layers),), "host", (True,) * layers, attends, out if attends == "host" else 0
    )


def walked(policy: KeepPolicy, x: int, out: int, place: Place) -> int:
    """The most bytes at `place` in one step: forward, then each layer's backward with the second run of its segment."""
    total = len(policy.layers)
    held: dict[tuple[str, int], int] = {}
    most = 0

    def keep(kind: str, layer: int, where: Place | None) -> None:
        nonlocal most
        if where == place:
            held[kind, layer] = x if kind == "input" else out
        most = max(most, sum(held.values()))

    for layer, wish in enumerate(policy.layers):
        keep("input", layer, wish.input)
        keep("output", layer, wish.output)
    has = {layer for layer, wish in enumerate(policy.layers) if wish.input is not None}
    attended = {layer for layer, wish in enumerate(policy.layers) if wish.output is not None}
    for layer in reversed(range(total)):
        if layer not in has:
            start = max(each for each in has if each < layer)
            for each in range(start, layer):
                if each not in attended:
                    keep("output", each, policy.again)
                    attended.add(each)
                keep("input", each + 1, policy.again)
                has.add(each + 1)
        if layer not in attended:
            keep("output", layer, policy.attends if policy.attends != "device" else None)  # there it is the layer's work
        held.pop(("input", layer), None)
        held.pop(("output", layer), None)
        has.discard(layer)
    assert not held
    return most


def test_36_layers_in_12_units_have_the_lengths_of_the_design() -> None:
    """103 GB for Qwen3-8B at 1,048,576 tokens, where all inputs are 309: a twelfth unit is the output of the one at work."""
    policy = most_inputs(one_pool(36, 12, attends="host"), 0)
    assert policy is not None
    assert [len(segment) for segment in policy.segments] == [6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1]
    assert walked(policy, 1, 1, "host") == 12
    assert pytest.approx(103e9, rel=0.01) == 12 * 1_048_576 * 4096 * 2
    assert most_inputs(one_pool(36, 11, attends="host"), 0) is None
    apart = most_inputs(one_pool(36, 11), 0)
    assert apart is not None
    assert apart.layers == policy.layers, "the same, where that output is on the device with its work"
    assert tightest(36, 1, 1, "device").layers == policy.layers


def test_spare_room_buys_outputs_back() -> None:
    """Each unit that is left saves about one attention forward, 13 s of an 8B layer."""
    outputs = []
    for size in range(11, 73):
        policy = most_kept(one_pool(36, size))
        assert policy is not None
        assert walked(policy, 1, 1, "host") <= size
        outputs.append(policy.outputs)
    assert outputs == sorted(outputs)
    assert outputs[0] == 0
    assert outputs[30] >= 35
    whole = most_kept(one_pool(36, 72))
    assert whole is not None
    assert (whole.outputs, whole.runs_again) == (36, 0)


keeps = st.builds(LayerKeep, st.sampled_from(["host", "device", None]), st.sampled_from(["host", "device", None]))


@settings(max_examples=150, deadline=None)
@given(
    first=st.builds(LayerKeep, st.sampled_from(["host", "device"]), st.sampled_from(["host", "device", None])),
    rest=st.lists(keeps, max_size=14),
    again=st.sampled_from(["host", "device"]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    attends=st.sampled_from(["host", "device"]),
)
def test_the_count_is_what_a_step_holds(
    first: LayerKeep, rest: list[LayerKeep], again: Place, sizes: tuple[int, int], attends: Place
) -> None:
    policy = KeepPolicy((first, *rest), again, attends)
    for place in ("host", "device"):
        if attends == place and policy.again != place:
            continue  # a segment's stored outputs and the one at work never meet then, and the count is on the safe side
        held = max(held_bytes(policy, *sizes, place))
        assert held >= walked(policy, *sizes, place)
        if attends == "device":
            assert held == walked(policy, *sizes, place)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    size=st.integers(1, 40),
    attends=st.sampled_from(["host", "device"]),
)
def test_no_policy_of_a_small_model_is_better(layers: int, sizes: tuple[int, int], size: int, attends: Place) -> None:
    """All of them: every set of kept inputs and outputs. Most outputs first, then most inputs. Optimal in one pool."""
    found = most_kept(one_pool(layers, size, *sizes, attends=attends))
    best: tuple[int, int] | None = None
    inputs = [("host",), *[("host", None)] * (layers - 1)]
    for starts in itertools.product(*inputs):
        for outputs in itertools.product(("host", None), repeat=layers):
            policy = KeepPolicy(tuple(map(LayerKeep, starts, outputs)), attends=attends)
            if walked(policy, *sizes, "host") <= size:
                key = (policy.outputs, len(policy.segments))
                best = key if best is None else max(best, key)
    assert (found and (found.outputs, len(found.segments))) == best
    if found is not None:
        assert walked(found, *sizes, "host") <= size


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 40),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    pools=st.tuples(st.integers(0, 300), st.integers(0, 300)),
    again=st.sampled_from(["host", "device"]),
    fill_device=st.booleans(),
    windows=st.integers(0, 3),
)
def test_two_pools_are_never_overfull(
    layers: int, sizes: tuple[int, int], pools: tuple[int, int], again: Place, fill_device: bool, windows: int
) -> None:
    host, device = Pool.steady("host", pools[0], layers), Pool.steady("device", pools[1], layers)
    worth = tuple(not windows or layer % (windows + 1) == 0 for layer in range(layers))
    order = (device, host) if fill_device else (host, device)
    task = Task(*sizes, order, again, worth)
    policy, fewest = most_kept(task), fewest_inputs(task, 0)
    assert (policy is None) == (fewest is None)
    if policy is None or fewest is None:
        return
    assert len(fewest.segments) <= len(policy.segments) or policy.outputs > 0
    for made in (policy, fewest):
        assert walked(made, *sizes, "host") <= pools[0]
        assert walked(made, *sizes, "device") <= pools[1]
    kept = [layer for layer, keep in enumerate(policy.layers) if keep.output is not None]
    if windows and any(not worth[layer] for layer in kept):
        assert all(policy.layers[layer].output is not None for layer in range(layers) if worth[layer])


def test_room_that_shrinks_downwards_is_heeded() -> None:
    """Gradients take the device from the top down: what stays there belongs to the top layers."""
    layers = 6
    device = Pool("device", None, 12, tuple(range(0, 12, 2)), (0,) * layers)
    task = Task(1, 1, (Pool.steady("host", 6, layers), device), "device", (True,) * layers)
    policy = most_inputs(task, layers)
    assert policy is not None
    assert [layer.input for layer in policy.layers] == ["host"] * 3 + ["device"] * 3
    assert most_inputs(Task(1, 1, (Pool.steady("host", 1, layers), device), "device", (True,) * layers), layers) is None


def test_nothing_fits_in_nothing() -> None:
    assert most_kept(one_pool(4, 0)) is None
    assert most_kept(one_pool(1, 1, attends="device")) is not None
    assert most_kept(one_pool(1, 1, attends="host")) is None
