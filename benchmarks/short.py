"""What megaspan costs on short rows: `python -m benchmarks.short --tokens 4096 8192`.

Forward and backward of the prepared model against plain transformers with checkpointing and the same attention kernel, the two
taken in turns on two models of one shape, the median of each quoted. The bar is a ratio of 1.03.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.case import shape_of
from benchmarks.record import Record, wants_a_gpu
from megaspan import SFTConfig, prepare, world
from megaspan.attention import install
from megaspan.human import format_tokens, parse_tokens
from megaspan.model import levers

BAR = 1.03


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-4b", help="a shape that ships with megaspan, or a folder with a config.json")
    parser.add_argument("--tokens", nargs="+", type=parse_tokens, default=[4096, 8192])
    parser.add_argument("--layers", type=int, default=0, help="this many layers instead of the shape's own")
    parser.add_argument("--repeats", type=int, default=5, help="measured turns of each; the median is quoted")
    parser.add_argument("--json", type=Path, help="file that results are appended to, a line each")
    parser.add_argument("--tiny", action="store_true", help="a toy shape on whatever is there, in seconds: tries the code only")
    made = parser.parse_args(given)
    if made.tiny:
        made.shape, made.tokens, made.layers, made.repeats = "tiny", [64, 128], 0, 3
    return made


def model_of(args: argparse.Namespace, tokens: int) -> Any:
    """Random weights of the shape: bf16 on a GPU, fp32 elsewhere."""
    from transformers import AutoConfig, AutoModelForCausalLM

    cuda = torch.cuda.is_available()
    config = shape_of(vars(args)) | {"use_cache": False}
    config["max_position_embeddings"] = max(tokens, config["max_position_embeddings"])
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        dtype = torch.bfloat16 if cuda else torch.float32
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).train()


def plain(model: Any) -> str:
    """Checkpointing as transformers has it, with the kernel that megaspan would take; its name."""
    name = install(model).name
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return name


def ours(model: Any, tokens: int) -> str:
    """What `megaspan train` puts on a model; the kernel's name."""
    dtype = "bfloat16" if torch.cuda.is_available() else None
    prepare(model, SFTConfig(max_length=tokens, dtype=dtype))
    placed = levers(model)
    assert placed is not None
    placed.reserve(model, tokens)
    return placed.kernel.name


def seconds(model: Any, ids: torch.Tensor) -> float:
    """One forward and backward, with the device idle before and after."""
    if ids.is_cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    took = time.perf_counter() - begun
    model.zero_grad(set_to_none=True)
    return took


def main(given: list[str] | None = None) -> int:
    """A line for each length; 1 where the ratio is above the bar on a GPU."""
    args = arguments(given)
    if wants_a_gpu("short", args.tiny):
        return 2
    world.set_allocator()
    record = Record(args.json, command="short", **vars(args))
    above = False
    for tokens in args.tokens:
        models = model_of(args, tokens), model_of(args, tokens)
        kernels = plain(models[0]), ours(models[1], tokens)
        assert kernels[0] == kernels[1], kernels
        ids = torch.randint(3, models[0].config.vocab_size, (1, tokens), device=models[0].device)
        for model in models * 2:  # kernels compile, the allocator fills
            seconds(model, ids)
        took: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.repeats):
            for each, model in zip(took, models, strict=True):
                each.append(seconds(model, ids))
        middle = [statistics.median(each) for each in took]
        ratio = middle[1] / middle[0]
        above |= ratio > BAR
        record.write(tokens=tokens, kernel=kernels[0], plain=middle[0], megaspan=middle[1], ratio=ratio, all=took)
        print(
            f"{format_tokens(tokens)} tokens, {kernels[0]}: plain {middle[0]:.4f} s, megaspan {middle[1]:.4f} s, "
            f"{ratio:.3f} x (bar {BAR})"
        )
        del models, model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return int(above and torch.cuda.is_available())


if __name__ == "__main__":
    sys.exit(main())
