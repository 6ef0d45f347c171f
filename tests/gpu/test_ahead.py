"""On a GPU: a head group that is projected beside attention of the one before changes no bit, and attention hides its copies.

`python3 -m pytest tests/gpu/test_ahead.py -m gpu -s` prints what it measures; about a minute on an H200.
"""

from __future__ import annotations

import pytest
import torch

from megaspan.attention import install
from megaspan.layers.dials import LayerPlan
from megaspan.layers.streamed import Streaming
from megaspan.plan.keep import KeepPolicy, LayerKeep
from megaspan.report.overlap import device_spans, overlap
from tests.gpu.test_offload import gradients, qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LAYERS, HIDDEN = 4, 2560
POLICIES = {
    "kept": KeepPolicy((LayerKeep("host", "host"),) * LAYERS),
    "attends again": KeepPolicy((LayerKeep("host", None),) * LAYERS),
    "in segments": KeepPolicy((LayerKeep("host", "host"), *[LayerKeep(None, None)] * (LAYERS - 1)), "host", "host"),
}


def step(model: torch.nn.Module, tokens: int) -> list[torch.Tensor]:
    ids = torch.randint(512, (1, tokens), device="cuda", generator=torch.Generator("cuda").manual_seed(tokens))
    model.zero_grad()
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator]
    weight = torch.linspace(-1, 1, hidden.shape[-1], device="cuda", dtype=hidden.dtype)
    (hidden @ weight).float().square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("name", POLICIES)
def test_no_bit_changes(name: str) -> None:
    """Kernels that sum in a fixed order; rows of several lengths, so that memory goes from one use to another."""
    lengths = (65_536, 20_000, 65_536, 40_961)
    found = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for ahead in (False, True):
            model = qwen3(LAYERS, HIDDEN, 9728, 32)
            install(model)
            streaming = Streaming(LayerPlan(4096, 1, True, project_ahead=ahead), POLICIES[name])
            assert streaming.install(model) == [None] * LAYERS
            found[ahead] = [step(model, tokens) for tokens in lengths]
            streaming.remove()
            del model
    finally:
        torch.use_deterministic_algorithms(False)
    for tokens, want, got in zip(lengths, found[False], found[True], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True)), tokens


def test_copies_are_hidden() -> None:
    """Each layer's input is read for each head group; what stays bare are the ends of the step, with nothing beside them."""
    torch._dynamo.reset()  # another test's models have used up the compilations of one function
    tokens, groups, bare, peaks = 131_072, 4, {}, {}
    model = qwen3(LAYERS, HIDDEN, 9728, 32)
    install(model)
    for ahead in (False, True):
        streaming = Streaming(LayerPlan(16_384, 2, True, project_ahead=ahead), POLICIES["kept"])
        streaming.install(model)
        step(model, 40_000)
        step(model, tokens)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(model, tokens)
            torch.cuda.synchronize()
        seen = overlap(*device_spans(profile.profiler.kineto_results.events()))
        bare[ahead], peaks[ahead] = seen.exposed, torch.cuda.max_memory_allocated()
        print(
            f"\nahead {ahead}: {seen.exposed:.3f} s of {seen.copying:.3f} s of copies bare, idle {seen.idle:.3f} s, "
            f"peak {peaks[ahead] / 2**30:.2f} GiB, taken {torch.cuda.memory_reserved() / 2**30:.2f} GiB"
        )
        streaming.remove()
        torch.cuda.empty_cache()
    read = LAYERS * groups * tokens * HIDDEN * 2 / 53e9
    assert bare[False] - bare[True] > 0.5 * read
