"""On a GPU: every kernel against fp32, two layers of the 4B shape in bf16 at 32,768 tokens, and what a streamed layer costs.

    python -m pytest tests/gpu/test_attention.py -m gpu -s

prints one JSON line for each kernel and case, and the table of layer times and peaks (`-k table`), beside what it asserts.
"""

from __future__ import annotations

import copy
import json
import time

import pytest
import torch

from megaspan.attention import install as install_attention
from megaspan.attention.attend import backward_with, forward_with, settle
from megaspan.attention.choose import KERNELS, case_of, choose_kernel
from megaspan.attention.flash2 import Flash2
from megaspan.attention.flash4 import Flash4
from megaspan.attention.kernel import Scoring
from megaspan.attention.tiled import TiledMath

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# What this machine can run at all, of all kernels.
GPU_KERNELS = (
    [kernel for kernel in KERNELS if kernel.refusal(case_of("cuda", torch.bfloat16, 128, None, None, 1024, 1024)) is None]
    if torch.cuda.is_available()
    else []
)
# name: queries, keys, query heads, KV heads, head size, window, soft cap, sinks
CASES = {
    "causal": (1024, 1024, 32, 8, 128, None, None, False),
    "1,000 tokens": (1000, 1000, 4, 1, 128, None, None, False),
    "897 tokens": (897, 897, 4, 1, 128, None, None, False),
    "448 tokens (64 mod 128)": (448, 448, 8, 2, 128, None, None, False),
    "1 token": (1, 1, 8, 2, 128, None, None, False),
    "suffix": (512, 1024, 8, 2, 128, None, None, False),
    "window": (1024, 1024, 8, 2, 128, 256, None, False),
    "window of 1": (300, 300, 8, 2, 128, 1, None, False),
    "window on a suffix": (512, 1024, 8, 2, 128, 256, None, False),
    "sinks": (1024, 1024, 8, 2, 64, None, None, True),
    "sinks and window": (1024, 1024, 8, 2, 64, 128, None, True),
    "soft cap": (1024, 1024, 8, 2, 128, None, 30.0, False),
    "soft cap and window": (1024, 1024, 8, 4, 256, 200, 50.0, False),
    **{f"head size {size}": (1024, 1024, 8, 2, size, None, None, False) for size in (64, 80, 96, 192, 256)},
}


def draw(queries, keys, heads, groups, size, dtype=torch.bfloat16):
    torch.manual_seed(1)
    shapes = ((queries, heads), (keys, groups), (keys, groups), (queries, heads))
    return [torch.randn(tokens, count, size, device="cuda", dtype=dtype) for tokens, count in shapes]


def run(kernel, q, k, v, d_out, scoring, sink=None):
    """Output and the gradients of q, k, v and the sinks."""
    kernel, scoring = settle(q, k, v, scoring, kernel)
    out, lse = forward_with(kernel, q, k, v, sink, scoring)
    return [out, *(x for x in backward_with(kernel, d_out, q, k, v, out, lse, sink, scoring) if x is not None)]


def distance(got, want):
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30))


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_is_right_wherever_it_does_not_refuse(kernel, case):
    queries, keys, heads, groups, size, window, softcap, sinks = CASES[case]
    q, k, v, d_out = draw(queries, keys, heads, groups, size)
    sink = torch.linspace(-1, 8, heads, device="cuda") if sinks else None
    scoring = Scoring(size**-0.5, window, softcap)
    choice = choose_kernel("cuda", q.dtype, size, window, softcap, sinks, keys, queries=queries, kernels=(kernel, TiledMath()))
    if choice.kernel is not kernel:
        pytest.skip(choice.reason)
    got = run(kernel, q, k, v, d_out, scoring, sink)
    want = run(TiledMath(), q.float(), k.float(), v.float(), d_out.float(), scoring, sink)
    errors = [distance(x, y) for x, y in zip(got, want, strict=True)]
    print(json.dumps({"kernel": kernel.name, "case": case, "out dq dk dv (dsink)": [f"{error:.1e}" for error in errors]}))
    # A row of one token has a softmax of one: dq and dk are zero, and only their size can be compared.
    for x, y, error in zip(got, want, errors, strict=True):
        assert error < 1e-2 or float((x.float() - y.float()).abs().max()) < 1e-3


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
def test_slices_of_heads_give_what_the_whole_gives(kernel):
    """Head groups are slices in memory: neither contiguous, nor at the start."""
    q, k, v, d_out = draw(640, 640, 8, 4, 128)
    scoring = Scoring(0.1)
    kernel, scoring = settle(q, k, v, scoring, kernel)
    out, lse = forward_with(kernel, q, k, v, None, scoring)
    whole = backward_with(kernel, d_out, q, k, v, out, lse, None, scoring)
    heads, kv = slice(4, 6), slice(2, 3)
    part_out, _ = forward_with(kernel, q[:, heads], k[:, kv], v[:, kv], None, scoring)
    part = backward_with(kernel, d_out[:, heads], q[:, heads], k[:, kv], v[:, kv], out[:, heads], lse[heads], None, scoring)
    assert distance(part_out, out[:, heads]) < 2e-3
    for got, want in zip(part[:3], (whole[0][:, heads], whole[1][:, kv], whole[2][:, kv]), strict=True):
        assert distance(got, want) < 5e-3


@pytest.mark.parametrize("kernel", [Flash4(), Flash2()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("tokens", "heads", "groups"), [(600_064, 32, 8), (4_300_032, 4, 1)])
def test_past_two_to_the_31_elements(kernel, tokens, heads, groups):
    """R56: the last rows are right where a tensor has more than 2**31 elements; a window keeps it cheap."""
    if kernel.name not in {each.name for each in GPU_KERNELS} or torch.cuda.get_device_properties(0).total_memory < 100 * 2**30:
        pytest.skip("needs the package, and 100 GiB")
    q, k, v, d_out = draw(tokens, tokens, heads, groups, 128)
    scoring, tail = Scoring(128**-0.5, 256), 1024
    got = [x[-256:].clone() for x in run(kernel, q, k, v, d_out, scoring)]
    want = run(TiledMath(), *(x[-tail:].float() for x in (q, k, v, d_out)), scoring)
    assert max(distance(x, y[-256:]) for x, y in zip(got, want, strict=True)) < 1e-2


def shape_4b(layers, tokens, dtype, **more):
    """A Qwen3-4B with few layers and a small vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=4096, hidden_size=2560, intermediate_size=9728, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=tokens, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5e6}, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model.to(dtype).train()


def gradients_of(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    found = {name: parameter.grad.float().cpu() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def stream(model, kernels=None, **options):
    """megaspan's attention by the given kernels, and streamed layers."""
    from megaspan.layers.dials import LayerPlan
    from megaspan.layers.streamed import Streaming
    from megaspan.plan.keep import KeepPolicy

    choice = install_attention(model, prove=kernels is None)
    if kernels is not None:
        for layer in model.model.layers:
            layer.self_attn.megaspan_kernels = kernels
    plan = LayerPlan(**{name: options.pop(name) for name in list(options) if name in LayerPlan.__dataclass_fields__})
    keep = options.pop("keep", None)
    if options.pop("offload", False):
        keep = KeepPolicy.everything(len(model.model.layers), "host")
    streaming = Streaming(plan, keep, **options)
    assert streaming.install(model) == [None] * len(model.model.layers)
    return choice, streaming


@pytest.fixture(scope="module")
def at_32k():
    """Token ids, the bf16 model, its fp32 gradients, and those of plain bf16 transformers."""
    ids = torch.randint(4096, (1, 32768), generator=torch.Generator().manual_seed(3)).cuda()
    model = shape_4b(2, 32768, torch.bfloat16)
    exact = copy.deepcopy(model).float()
    stream(exact, (TiledMath(),), tile_tokens=8192)
    want = gradients_of(exact, ids)
    del exact
    torch.cuda.empty_cache()
    return ids, model, want, gradients_of(copy.deepcopy(model), ids)


@pytest.mark.parametrize("kernel", [kernel for kernel in GPU_KERNELS if kernel.name != TiledMath.name], ids=lambda k: k.name)
@pytest.mark.parametrize("group", [None, 2])
def test_bf16_at_32k_is_as_near_to_fp32_as_plain_bf16(kernel, group, at_32k):
    """P1 on the GPU: all gradients within 1.5 x plain bf16's distance, each within 2 x or 2**-8."""
    ids, model, want, plain = at_32k
    ours = copy.deepcopy(model)
    stream(ours, (kernel,), tile_tokens=5000, kv_heads_per_call=group, offload=True)
    got = gradients_of(ours, ids)
    ours_apart, plain_apart = (sum(float((x[n] - want[n]).square().sum()) for n in want) ** 0.5 for x in (got, plain))
    worst = max((distance(got[n], want[n]) / max(2 * distance(plain[n], want[n]), 2**-8), n) for n in want)
    print(json.dumps({"kernel": kernel.name, "distance / plain bf16's": round(ours_apart / plain_apart, 3), "worst": worst}))
    assert ours_apart <= 1.5 * plain_apart
    assert worst[0] <= 1


@pytest.mark.parametrize("again", ["device", "host"])
def test_segments_and_tiles_read_back_at_32k_are_as_near_to_fp32(again, at_32k):
    """P1 on the GPU with the memory tiers: a segment runs again, attention's outputs too, one KV head at a time."""
    from megaspan.plan.keep import KeepPolicy, LayerKeep

    ids, model, want, plain = at_32k
    ours = copy.deepcopy(model)
    keep = KeepPolicy((LayerKeep("host", None), LayerKeep(None, None)), again)
    _, streaming = stream(ours, tile_tokens=5000, kv_heads_per_call=1, stream_back=True, keep=keep)
    got = gradients_of(ours, ids)
    ours_apart, plain_apart = (sum(float((x[n] - want[n]).square().sum()) for n in want) ** 0.5 for x in (got, plain))
    print(
        json.dumps(
            {"again": again, "distance / plain bf16's": round(ours_apart / plain_apart, 3), "reused": str(streaming.stats())}
        )
    )
    assert ours_apart <= 1.5 * plain_apart
    assert streaming.stats().reused == 2


def measure(model, tokens, steps=3, warm=1):
    """Median seconds of forward and backward of the model's layers, and peak GiB above what was there before."""
    backbone, seconds, peak = model.model, [], 0
    x = torch.randn(1, tokens, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    d_out = torch.randn_like(x)
    for _ in range(warm + steps):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        out = backbone(inputs_embeds=leaf, use_cache=False).last_hidden_state
        torch.cuda.synchronize()
        middle = time.perf_counter()
        out.backward(d_out)
        torch.cuda.synchronize()
        seconds.append((middle - start, time.perf_counter() - middle))
        peak = torch.cuda.max_memory_allocated() - before
        del out, leaf
    forward, backward = (sorted(part)[steps // 2] for part in zip(*seconds[warm:], strict=True))
    return forward, backward, peak / 2**30


@pytest.mark.parametrize("tokens", [4096, 8192, 32768, 131072])
def test_table_of_a_4b_layer(tokens):
    """Seconds and peak of a layer, streamed and ordinarily checkpointed, as (3 layers - 1 layer) / 2: the rest cancels."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    rows = {}
    kinds = {
        "transformers, checkpointed, sdpa": None,
        "checkpointed, our attention": "general",
        "streamed": {},
        "streamed, 8k tiles, 2 KV heads a call": {"tile_tokens": 8192, "kv_heads_per_call": 2},
        "streamed, offload": {"offload": True},
        "streamed, fused norms": {"fused_norms": True},
    }
    for kind, options in kinds.items():
        found = []
        for layers in (1, 3):
            model = shape_4b(layers, tokens, torch.bfloat16)
            if options is None:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                assert all(m.gradient_checkpointing for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
            elif options == "general":
                from megaspan.layers.checkpoint import Checkpointing

                install_attention(model)
                Checkpointing(False).install(model)
            else:
                stream(model, **options)
            found.append(measure(model, tokens))
            del model
            torch.cuda.empty_cache()
        (f1, b1, _), (f3, b3, peak) = found
        rows[kind] = (f3 - f1) / 2 + (b3 - b1) / 2
        print(json.dumps({"tokens": tokens, "layer": kind, "forward s": round((f3 - f1) / 2, 4),
                          "backward s": round((b3 - b1) / 2, 4), "peak GiB, 3 layers": round(peak, 2)}))  # fmt: skip
    if tokens >= 32768:
        assert rows["streamed"] < rows["transformers, checkpointed, sdpa"]


def test_where_a_layers_time_goes():
    """The ten dearest kernels of a streamed layer at 32,768 tokens."""
    model = shape_4b(1, 32768, torch.bfloat16)
    stream(model)
    measure(model, 32768, steps=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        measure(model, 32768, steps=1, warm=0)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    for event in events[:14]:
        print(json.dumps({"kernel": event.key[:90], "ms": round(event.self_device_time_total / 1e3, 2), "calls": event.count}))
    print(json.dumps({"all kernels, ms": round(total / 1e3, 1)}))
    assert total > 0
