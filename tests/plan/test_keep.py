"""The keep policy: what is refused, which segments follow, how many of what lie where."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.plan.keep import PLACES, KeepPolicy, LayerKeep

HOST = LayerKeep("host", "host")
AGAIN = LayerKeep(None, None)


@pytest.mark.parametrize(
    ("layers", "again", "words"),
    [
        ((), "host", "at least one layer"),
        ((AGAIN, HOST), "host", "layer 0 must keep its input"),
        ((LayerKeep(None, "host"),), "host", "layer 0 must keep its input"),
        ((LayerKeep("gpu", None),), "host", "'gpu' is no place"),
        ((HOST, LayerKeep(None, "ssd")), "host", "'ssd' is no place"),
        ((HOST,), "nowhere", "'nowhere' is no place"),
    ],
)
def test_what_no_layer_could_follow_is_refused(layers: Any, again: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KeepPolicy(layers, again)


def test_segments_begin_where_an_input_is_kept() -> None:
    policy = KeepPolicy((HOST, LayerKeep(None, "host"), AGAIN, LayerKeep("device", None), HOST))
    assert policy.segments == (range(0, 3), range(3, 4), range(4, 5))
    assert (policy.runs_again, policy.outputs) == (2, 3)
    assert [policy.stored_again(segment) for segment in policy.segments] == [(2, 0), (0, 0), (0, 0)]
    bare = KeepPolicy((LayerKeep("host", None), AGAIN, AGAIN))
    assert bare.stored_again(bare.segments[0]) == (2, 2), "the last one's output is made where it is used"


def test_the_last_layers_are_counted_from_the_top() -> None:
    device, half = LayerKeep("device", "device"), LayerKeep("device", None)
    policy = KeepPolicy((device, HOST, half, device))
    assert (policy.keep_on_device, policy.keep_outputs) == (2, 1)
    assert KeepPolicy((HOST, device)).keep_outputs == 2
    assert KeepPolicy((HOST,)).keep_on_device == 0
    assert KeepPolicy.everything(5, "device").keep_on_device == 5
    assert KeepPolicy.everything(5, "host", outputs=False).outputs == 0


@given(data=st.data(), count=st.integers(1, 40))
def test_counts_agree_with_the_layers(data: st.DataObject, count: int) -> None:
    places = st.sampled_from([*PLACES, None])
    first = data.draw(st.builds(LayerKeep, st.sampled_from(PLACES), places))
    rest = data.draw(st.lists(st.builds(LayerKeep, places, places), min_size=count - 1, max_size=count - 1))
    policy = KeepPolicy((first, *rest))
    assert [layer for segment in policy.segments for layer in segment] == list(range(count))
    assert all(policy.layers[segment[0]].input is not None for segment in policy.segments)
    assert all(policy.layers[layer].input is None for segment in policy.segments for layer in segment[1:])
    for place in PLACES:
        for number in range(count + 1):
            below = policy.layers[:number]
            assert policy.below[place][number] == (
                sum(layer.input == place for layer in below),
                sum(layer.output == place for layer in below),
            )
    assert policy.places == {place for layer in policy.layers for place in (layer.input, layer.output) if place}
    spelled = [kind.keep for kind in policy.kinds for _ in range(kind.first, kind.last + 1)]
    assert tuple(spelled) == policy.layers
    assert all(a.keep != b.keep for a, b in zip(policy.kinds, policy.kinds[1:], strict=False))
