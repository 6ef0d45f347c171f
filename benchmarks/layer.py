"""Seconds and peak memory of one decoder layer, by how it is run: `python -m benchmarks.layer --tokens 32768 131072`.

A model of three layers against one of a single layer; half the difference is a layer, and embedding, norm and loss cancel. The
memory is the peak of the three-layer model above its weights. `--profile` adds the dearest kernels of a streamed layer.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from megaspan.attention import install as install_attention
from megaspan.human import parse_tokens
from megaspan.layers.checkpoint import Checkpointing
from megaspan.layers.dials import LayerPlan
from megaspan.layers.streamed import Streaming
from megaspan.plan.keep import KeepPolicy

WAYS: dict[str, dict[str, Any] | None] = {
    "transformers": None,
    "checkpointed": {"general": True},
    "streamed": {},
    "streamed-unfused": {"fused": False},
    "streamed-written-norms": {"fused_norms": False},
    "streamed-grouped": {"tile_tokens": 8192, "kv_heads_per_call": 2},
    "streamed-offload": {"offload": True},
    "streamed-back": {"offload": True, "stream_back": True, "kv_heads_per_call": 1, "tile_tokens": 8192},
    "streamed-ahead": {
        "offload": True,
        "stream_back": True,
        "project_ahead": True,
        "kv_heads_per_call": 1,
        "tile_tokens": 8192,
    },
}


def small_model(shape: str, layers: int, tokens: int) -> Any:
    """The shape with few layers and a small vocabulary, random weights in bf16 on the GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from megaspan.plan.facts import read_config

    config = read_config(shape) | {"num_hidden_layers": layers, "vocab_size": 4096, "use_cache": False}
    config["max_position_embeddings"] = max(tokens, config["max_position_embeddings"])
    config.pop("layer_types", None)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16).train()


def set_way(model: Any, options: dict[str, Any] | None) -> None:
    """Puts one way of running layers on the model."""
    if options is None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return
    options = dict(options)
    install_attention(model)
    if options.pop("general", False):
        Checkpointing(False).install(model)
        return
    plan = LayerPlan(**{name: options.pop(name) for name in list(options) if name in LayerPlan.__dataclass_fields__})
    keep = KeepPolicy.everything(model.config.num_hidden_layers, "host") if options.pop("offload", False) else None
    streaming = Streaming(plan, keep, **options)
    reasons = streaming.install(model)
    assert all(reason is None for reason in reasons), reasons
    if streaming.unfused():
        print(json.dumps({"not fused": streaming.unfused()}), flush=True)


def measure(model: Any, tokens: int, repeats: int) -> tuple[float, float, float]:
    """Median seconds of forward and of backward, and peak GiB above what was there before."""
    forward, backward, peak = [], [], 0
    hidden = torch.randn(1, tokens, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    d_out = torch.randn_like(hidden)
    for _ in range(1 + repeats):
        model.zero_grad()
        leaf = hidden.clone().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, begun = torch.cuda.memory_allocated(), time.perf_counter()
        out = model.model(inputs_embeds=leaf, use_cache=False).last_hidden_state
        torch.cuda.synchronize()
        middle = time.perf_counter()
        out.backward(d_out)
        torch.cuda.synchronize()
        forward.append(middle - begun)
        backward.append(time.perf_counter() - middle)
        peak = torch.cuda.max_memory_allocated() - before
        del out, leaf
    return sorted(forward[1:])[repeats // 2], sorted(backward[1:])[repeats // 2], peak / 2**30


def profile(shape: str, tokens: int) -> None:
    """The dearest kernels of one streamed layer, milliseconds and calls."""
    model = small_model(shape, 1, tokens)
    set_way(model, {})
    measure(model, tokens, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        measure(model, tokens, 1)
    events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:30]:
        print(
            json.dumps(
                {"ms": round(event.self_device_time_total / 2e3, 2), "calls": event.count / 2, "kernel": event.key[:110]}
            )
        )
    print(json.dumps({"all_ms": round(sum(event.self_device_time_total for event in events) / 2e3, 1)}), flush=True)


def main() -> None:
    """One JSON line for each length and way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-4b")
    parser.add_argument("--tokens", nargs="+", type=parse_tokens, default=[32_768, 131_072])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for tokens in args.tokens:
        for way in args.ways:
            found = []
            for layers in (1, 3):
                model = small_model(args.shape, layers, tokens)
                set_way(model, WAYS[way])
                found.append(measure(model, tokens, args.repeats))
                del model
                torch.cuda.empty_cache()
            (f1, b1, _), (f3, b3, peak) = found
            line = {"tokens": tokens, "way": way, "forward_s": round((f3 - f1) / 2, 4), "backward_s": round((b3 - b1) / 2, 4)}
            print(json.dumps(line | {"layer_s": round((f3 - f1 + b3 - b1) / 2, 4), "peak_gib": round(peak, 2)}), flush=True)
        if args.profile:
            profile(args.shape, tokens)


if __name__ == "__main__":
    main()
