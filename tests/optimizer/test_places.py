"""Wherever gradients, moments and masters lie, the weights are those of the plain path, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from megaspan.human import UserError
from megaspan.optimizer import Optimizer, conveyor
from megaspan.plan.states import StatePlan
from tests.memory.lanes import Lanes
from tests.optimizer.support import (  # noqa: F401
    DEVICE,
    KINDS,
    PLACES,
    assert_same,
    assert_same_state,
    backward,
    make,
    masked,
    settings,
    small_pieces,
    train,
    window,
)

IDS = [f"{place.gradients}-{place.moments}" for place in PLACES]


def limit(place: StatePlan, clips: bool) -> float:
    return 0.05 if clips and place.gradients != "update" else 0.0


@pytest.mark.parametrize("place", PLACES, ids=IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_place_gives_the_same_bits(place: StatePlan, kind: str) -> None:
    """Three steps of two rows of changing length, clipped where that is possible."""
    model, config = make(kind, max_grad_norm=limit(place, True))
    windows = [window(step, 2, (31, 5, 64, 17, 2)) for step in range(3)]
    want = train(model, config, None, windows)
    assert_same(train(model, config, place, windows), want)
    assert not torch.equal(want.weights["lm_head.weight"], model.lm_head.weight)


@profile(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.sampled_from(PLACES), kind=st.sampled_from(list(KINDS)), tied=st.booleans(), frozen=st.booleans(),
    clips=st.booleans(), rows=st.integers(1, 3), late=st.sampled_from(["none", "masked row", "no last_row"]),
    lengths=st.lists(st.integers(2, 40), min_size=5, max_size=5), family=st.sampled_from(["llama", "qwen2"]),
)  # fmt: skip
def test_any_combination_gives_the_same_bits(
    place: StatePlan, kind: str, tied: bool, frozen: bool, clips: bool, rows: int, late: str, lengths: list[int], family: str
) -> None:
    model, config = make(kind, family=family, tied=tied, frozen=frozen, max_grad_norm=limit(place, clips))
    windows = [window(step, rows, tuple(lengths)) for step in range(2)]
    for row in (row for rows in windows for row in rows):
        row["labels"][:, -1] = row["input_ids"][:, -1]  # short rows too have a trained token
    if late == "masked row":
        windows[1].append(masked(7))
    with pytest.MonkeyPatch.context() as patch:
        if late == "no last_row":
            patch.setattr(Optimizer, "last_row", lambda optimizer: None)
        assert_same(train(model, config, place, windows), train(model, config, None, windows))


@pytest.mark.parametrize("place", PLACES, ids=IDS)
def test_a_masked_row_at_the_end_of_a_window_loses_no_update(place: StatePlan) -> None:
    """Its loss has no graph, so no hook comes: what the rows before it have gathered is used all the same."""
    model, config = make("masters", max_grad_norm=0.0)
    windows = [[*window(0, 1), masked(9)], window(1, 2)]
    got = train(model, config, place, windows)
    assert_same(got, train(model, config, None, windows))
    assert got.norms[0] > 0


@pytest.mark.parametrize("place", PLACES, ids=IDS)
def test_an_expert_that_no_token_of_the_last_row_chose_is_updated(place: StatePlan) -> None:
    """Its gradient is that of an earlier row, and nothing comes for it in the last backward; another never had one."""
    first, second, third = (torch.nn.Linear(40, 40) for _ in range(3))
    model = torch.nn.ModuleList([first, second, third])
    results = []
    for states in (None, place):
        each = copy.deepcopy(model)
        optimizer = Optimizer(each, settings(max_grad_norm=0.0), 2, states=states)
        for _ in range(2):
            (each[0](torch.ones(1, 40)).sum() + each[1](torch.ones(1, 40)).sum()).backward()
            optimizer.last_row()
            each[0](torch.ones(1, 40)).sum().backward()
            optimizer.clip(0.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append((each.state_dict(), optimizer.state_dict()))
    for name, weight in results[0][0].items():
        assert torch.equal(results[1][0][name], weight), name
    assert_same_state(results[1][1], results[0][1])
    assert torch.equal(results[1][0]["2.weight"], third.weight)
    assert "exp_avg" not in results[1][1]["parameters"]["2.weight"]


@pytest.mark.parametrize("place", PLACES[3:], ids=IDS[3:])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_used_up_inside_the_backward(place: StatePlan, tied: bool) -> None:
    """When backward returns, nothing is left but a tied table's gradient, and at no moment more than a layer's."""
    model, config = make("masters", tied=tied, max_grad_norm=0.0)
    optimizer = Optimizer(model, config, 2, states=place)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    most = []

    def count(*_: Any) -> None:
        most.append(sum(parameter.grad is not None for parameter in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    backward(model, window(0, 1), optimizer)
    left = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert left == ({"model.embed_tokens.weight"} if tied else set())
    assert max(most) <= 1
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed >= set(before) - left - {name for name in before if "norm" in name or "bias" in name}
    assert optimizer.updating
    assert optimizer.clip(0.0) > 0
    optimizer.step()
    assert not optimizer.updating
    assert not torch.equal(model.model.embed_tokens.weight, before["model.embed_tokens.weight"])


def test_gradients_on_the_host_leave_the_device_in_every_row() -> None:
    """What lies there is what autograd would have summed, and the norm is taken of the whole."""
    model, config = make("masters")
    reference = copy.deepcopy(model)
    optimizer = Optimizer(model, config, 2, states=StatePlan("host", "device"))
    plain = Optimizer(reference, config, 2)
    for row in window(0, 3):
        model(**row, use_cache=False).loss.backward()
        reference(**row, use_cache=False).loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in reference.named_parameters():
        gathered = optimizer._trained[name].gathered
        assert gathered is not None
        assert torch.equal(gathered.view(parameter.shape), parameter.grad), name
    assert optimizer.clip(1.0) == plain.clip(1.0)


def test_a_second_gradient_after_the_last_row_is_an_error() -> None:
    """A weight that is used again would be updated twice, each time by half its gradient."""
    for place in (StatePlan("update", "device"), StatePlan("host", "device")):
        model = torch.nn.Linear(4, 4)
        optimizer = Optimizer(model, settings(max_grad_norm=0.0), 2, states=place)
        optimizer.last_row()
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RuntimeError, match=r"a second gradient of (weight|bias) came after"):
            model(torch.ones(1, 4)).sum().backward()


def test_host_memory_is_taken_once() -> None:
    model, config = make("masters")
    optimizer = Optimizer(model, config, 5, states=StatePlan("host", "host"))
    held = optimizer.host_bytes
    count = sum(parameter.numel() for parameter in model.parameters())
    assert 16 * count <= held <= 16 * count + 4096 * 4 * len(list(model.parameters()))
    for step in range(4):
        backward(model, window(step, 2, (31, 5, 64, 17, 2)), optimizer)
        optimizer.clip(0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.host_bytes == held
    optimizer.close()
    assert optimizer.host_bytes == 0


def test_a_closed_optimizer_leaves_the_model_alone() -> None:
    """A notebook trains twice: the first optimizer's hooks must not take the second one's gradients."""
    model, config = make("fp32", max_grad_norm=0.0)
    Optimizer(model, config, 2, states=StatePlan("update", "device")).close()
    before = copy.deepcopy(model)
    model(**window(0, 1)[0]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("place", [place for place in PLACES if "host" in (place.gradients, place.moments)])
def test_copies_may_run_as_late_as_their_waits_allow(place: StatePlan, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """R64: no buffer is let go of, and no host memory read, before the copy that it waits for."""
    lanes = Lanes(seed)
    calls = iter(range(10**9))

    def copied(destination: torch.Tensor, source: torch.Tensor) -> None:
        lanes.copy(destination, source)
        if next(calls) % 3 == seed % 3:
            lanes.stir()

    model, config = make("masters", tied=bool(seed % 2), max_grad_norm=limit(place, True))
    windows = [window(step, 2, (31, 5, 64)) for step in range(2)]
    want = train(model, config, None, windows)
    monkeypatch.setattr(conveyor, "_copy", copied)
    got = train(model, config, place, windows, backend=lanes)
    assert_same(got, want)
    lanes.assert_idle()


@pytest.mark.parametrize("before", [DEVICE, *PLACES], ids=["device-device", *IDS])
@pytest.mark.parametrize("after", [DEVICE, PLACES[2], PLACES[4]], ids=["device-device", IDS[2], IDS[4]])
def test_a_run_resumes_in_any_other_place(before: StatePlan, after: StatePlan) -> None:
    """Two steps in one place, two in another, four in none: no bit differs."""
    model, config = make("masters", tied=True, max_grad_norm=0.0)
    windows = [window(step, 2) for step in range(4)]
    want = train(model, config, None, windows)
    half = copy.deepcopy(model)
    optimizer = Optimizer(half, config, 4, states=before)
    for rows in windows[:2]:
        backward(half, rows, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    resumed, _ = make("masters", tied=True)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.zero_()
    again = Optimizer(resumed, config, 4, states=after)
    again.load_state_dict(saved)
    for rows in windows[2:]:
        backward(resumed, rows, again)
        again.step()
        again.zero_grad()
    assert_same_state(again.state_dict(), want.state)
    assert all(torch.equal(parameter, want.weights[name]) for name, parameter in resumed.named_parameters())


def test_a_state_from_before_the_first_step_clears_what_is_there() -> None:
    model, config = make("masters")
    start = copy.deepcopy(Optimizer(copy.deepcopy(model), config, 3).state_dict())
    windows = [window(0, 1)]
    want = train(model, config, None, windows)
    optimizer = Optimizer(model, config, 3, states=StatePlan("device", "host"))
    backward(model, window(7, 1), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(start)
    assert "exp_avg" not in optimizer.state_dict()["parameters"]["lm_head.weight"]
    backward(model, windows[0], optimizer)
    optimizer.clip(config.max_grad_norm)
    optimizer.step()
    assert all(torch.equal(parameter, want.weights[name]) for name, parameter in model.named_parameters())


def test_updates_in_the_backward_exclude_clipping() -> None:
    model, config = make("fp32", max_grad_norm=1.0)
    with pytest.raises(ValueError, match="the norm of all gradients is wanted first"):
        Optimizer(model, config, 3, states=StatePlan("update", "device"))
    model, config = make("fp32", max_grad_norm=0.0)
    optimizer = Optimizer(model, config, 3, states=StatePlan("update", "device"))
    backward(model, window(0, 1), optimizer)
    with pytest.raises(ValueError, match="cannot be clipped or scaled"):
        optimizer.step(0.5)


def test_the_option_has_no_meaning_on_a_cpu_and_that_is_said() -> None:
    with pytest.raises(UserError, match="offload_optimizer has no effect with use_cpu"):
        settings(offload_optimizer=True, use_cpu=True)
    model, config = make("fp32", offload_optimizer=True)
    assert "moves nothing here" in Optimizer(model, config, 3, states=DEVICE).reason


def test_the_option_holds_without_a_plan() -> None:
    model, config = make("masters", offload_optimizer=True)
    optimizer = Optimizer(model, config, 3)
    assert optimizer.states == StatePlan("device", "host")
    assert optimizer.host_bytes > 0


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (DEVICE, r"parameters take .* with gradients and moments$"),
        (
            StatePlan("host", "host"),
            r"gradients go to host memory when they are complete; masters and moments lie in host memory",
        ),
        (StatePlan("update", "device"), r"each weight is updated in the backward .* with moments$"),
    ],
)
def test_the_header_says_where_things_lie(place: StatePlan, said: str) -> None:
    import re

    model, config = make("masters", max_grad_norm=0.0)
    optimizer = Optimizer(model, config, 3, states=place)
    assert optimizer.precision == "bf16 weights with fp32 masters"
    assert re.search(said, optimizer.reason), optimizer.reason
    assert ("on the host" in optimizer.reason) == (optimizer.host_bytes > 0)


def test_the_size_of_the_state_is_known_before_it_is_there() -> None:
    for kind, place in (("masters", PLACES[2]), ("pure", DEVICE), ("fp32", PLACES[0])):
        model, config = make(kind)
        optimizer = Optimizer(model, config, 3, states=place)
        planned = optimizer.state_bytes
        backward(model, window(0, 1), optimizer)
        optimizer.step()
        held = optimizer.state_dict()["parameters"].values()
        assert planned == sum(value.nbytes for state in held for key, value in state.items() if key != "step")
