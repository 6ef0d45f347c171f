"""Every attention kernel alone, by shape and mask: `python -m benchmarks.kernels --tokens 8192 32768 131072`.

Rates count the arithmetic of the mask: 4 x D for each pair of a query and a key it sees forward, 10 x D backward (five products
where the forward has two). The error is that of the output and of all gradients against the tiled kernel in fp32, on a row of
at most 4,096 tokens of the same heads. A kernel that refuses says why. The median of several runs, after two to warm up.
A row shorter than the window has one of a third of its tokens. The tiled products are timed on rows of 32,768 tokens at most:
at 131,072 they took half a minute a call.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import Record, wants_a_gpu
from megaspan.attention.choose import KERNELS, case_of
from megaspan.attention.kernel import Kernel, Scoring
from megaspan.attention.mask import Mask
from megaspan.attention.segments import Segments
from megaspan.attention.tiled import TiledMath
from megaspan.human import parse_tokens

HEADS = {"qwen3-4b": (32, 8, 128), "gemma3-4b": (8, 4, 256), "gpt-oss-20b": (64, 8, 64), "tiny": (4, 2, 16)}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window 1024": {"window": 1024},
    "soft cap": {"softcap": 50.0},
    "64 documents": {"documents": 64},
}
CHECKED = 4096  # tokens of the row that errors are measured on
SLOW = 32_768  # tokens above which the tiled products are left out


def main(given: list[str] | None = None) -> int:
    """Prints one line a kernel, shape, mask and length; returns 0, and 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", nargs="+", type=parse_tokens, default=[8192, 32_768, 131_072])
    parser.add_argument(
        "--heads", nargs="+", choices=HEADS, default=["qwen3-4b"], help="query heads, KV heads and head size of"
    )
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file that results are appended to, a line each")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on whatever is there: tries the code only")
    made = parser.parse_args(given)
    if made.tiny:
        made.tokens, made.heads, made.repeats = [96], ["tiny"], 1
    elif wants_a_gpu("kernels", made.tiny):
        return 2
    record = Record(made.json, command="kernels", **vars(made))
    for shape in made.heads:
        for name in made.masks:
            for tokens in made.tokens:
                for kernel in KERNELS:
                    record.write(**_measured(kernel, shape, name, tokens, made.repeats))
    return 0


def _measured(kernel: Kernel, shape: str, name: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds, rates and error of one kernel in one case, or why it does not run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, groups, size = HEADS[shape]
    mask = dict(MASKS[name])
    documents = mask.pop("documents", 1)
    lengths = [tokens // documents + (number < tokens % documents) for number in range(min(documents, tokens))]
    window = mask.get("window")
    scoring = Scoring(size**-0.5, window if window is None or window < tokens else tokens // 3, mask.get("softcap"))
    case = case_of(device, dtype, size, scoring.window, scoring.softcap, tokens, tokens, len(lengths))
    found: dict[str, Any] = {"kernel": kernel.name, "heads": shape, "mask": name, "tokens": tokens}
    if not kernel.installed():
        return found | {"why": "not installed"}
    if isinstance(kernel, TiledMath) and tokens > SLOW:
        return found | {"why": f"takes minutes, timed up to {SLOW:,} tokens"}
    if (refusal := kernel.refusal(case)) is not None:
        return found | {"why": refusal.reason}
    q, k, v, d_out = (torch.randn(tokens, count, size, device=device, dtype=dtype) for count in (heads, groups, groups, heads))
    segments = Segments.documents(lengths, device) if len(lengths) > 1 else None
    try:
        out, lse = kernel.forward(q, k, v, scoring, segments)
        forward = _seconds(lambda: kernel.forward(q, k, v, scoring, segments), repeats)
        backward = _seconds(lambda: kernel.backward(d_out, q, k, v, out, lse, scoring, segments), repeats)
    except torch.OutOfMemoryError as error:
        return found | {"why": f"out of memory: {str(error)[:100]}"}
    pairs = sum(int(Mask(scoring.window).visible_pairs(_one(0), _one(length))[0]) for length in lengths)
    work = pairs * heads * size / 1e12
    return found | {
        "forward seconds": forward,
        "forward TFLOP/s": 4 * work / forward,
        "backward seconds": backward,
        "backward TFLOP/s": 10 * work / backward,
        "error": _error(kernel, q, k, v, d_out, scoring) if segments is None else None,
    }


def _one(number: int) -> Any:
    import numpy as np

    return np.array([number], np.int64)


def _error(kernel: Kernel, *given: Any) -> float:
    """The largest relative distance of output, dq, dk and dv to the tiled kernel in fp32."""
    *tensors, scoring = given
    short = [tensor[:CHECKED] for tensor in tensors]

    def run(kernel: Kernel, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        q, k, v, d_out = tensors
        out, lse = kernel.forward(q, k, v, scoring, None)
        return (out, *kernel.backward(d_out, q, k, v, out, lse, scoring, None))

    wanted = run(TiledMath(), [tensor.float() for tensor in short])
    got = run(kernel, short)
    return max(float((x.float() - y).norm() / y.norm()) for x, y in zip(got, wanted, strict=True))


def _seconds(run: Callable[[], object], repeats: int) -> float:
    """The median of `repeats` runs, after two that compile and warm up."""
    found = []
    for _ in range(2 + repeats):
        _wait()
        begun = time.perf_counter()
        run()
        _wait()
        found.append(time.perf_counter() - begun)
    return statistics.median(found[2:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
