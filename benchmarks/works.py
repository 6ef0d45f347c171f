"""The works of `benchmarks.reach`: what is measured on 1, 2, 4 and 8 GPUs, with the seconds that each takes from start to end.

The reference run is Qwen3-8B with YaRN 32 x 32,768 on a row of 1,048,576 tokens: 380 s and 56 GB a GPU on 8 H100s; the bars are
265 s and 40 GiB. The scaling line is 131,072 tokens of the 4B shape: 34.6, 17.8, 9.5 s on 2, 4, 8 H100s; the bars are 19, 9.6,
4.9 s. Expected seconds are the plan's seconds of the measured steps, and 50 to 90 for start, weights, pinning and compiling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.layouts import Layout
from megaspan.plan.facts import Machine

GIB = 2**30
M = 2**20
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32_768}
# What is lent, as far as `--list` on another machine has to know. Host memory: 60 GiB are left to the system and to imports.
MACHINES = {
    "one": Machine("NVIDIA H200", 139 * GIB, 128 * GIB, 16),
    "two": Machine("NVIDIA H200", 139 * GIB, 256 * GIB, 32),
    "four": Machine("NVIDIA H200", 139 * GIB, 512 * GIB, 64),
    "eight": Machine("NVIDIA H200", 139 * GIB, 560 * GIB, 128),
}


@dataclass(frozen=True)
class Work:
    """One measured case.

    Attributes:
        part: of the plan.
        name: of the case, in the file too.
        seconds: that it is expected to take, from start to end.
        shape, tokens, layout, layers: what runs; 0 layers are all.
        of_layers: whole depth, where this is a part of it.
        system: megaspan or trl.
        limit, host: bytes of a GPU and of the machine; 0 takes what there is.
        offload: layer inputs in host memory.
        steps: measured ones.
        rope: of the model; None leaves it as it is.
        rehearsal: a step without attention at full depth in place of a step.
        best_of: takes the layout of the fastest of these works.
        masters: fp32 masters; else weights and the optimizer's moments are in bf16.
        kind: of `case.KINDS`, where few layers run as the whole model's do; its most frequent one by default.
        documents: of each row, which do not see each other; 0 for one.
        attention: TRL's.
        profile: one step more, under the profiler.
        command: a Python module and its arguments, in place of a case.
    """

    part: str
    name: str
    seconds: float
    shape: str
    tokens: int
    layout: Layout
    layers: int = 0
    of_layers: int = 0
    system: str = "megaspan"
    limit: int = 0
    host: int = 0
    offload: bool = True
    steps: int = 1
    rope: tuple[tuple[str, Any], ...] = ()
    rehearsal: bool = False
    best_of: tuple[str, ...] = ()
    masters: bool = True
    kind: str = ""
    documents: int = 0
    attention: str = "sdpa"
    profile: bool = False
    command: tuple[str, ...] = ()

    def case(self) -> dict[str, Any]:
        """As `benchmarks.case` takes it.

        A shorter row makes the optimizer's states first, and compiles: it has more than one tile too, as 4,096 tokens had not,
        and the next step took 5.5 s longer than the one after it.
        """
        made: dict[str, Any] = {
            "system": "rehearsal" if self.rehearsal else self.system, "shape": self.shape, "tokens": self.tokens,
            "layers": self.layers, "steps": self.steps, "warm": min(36_864, self.tokens * 5 // 8), "limit": self.limit,
            "host": self.host, "masters": self.masters, "offload": self.offload, "selective": False, "layout": self.layout.name,
            "rope": dict(self.rope), "documents": self.documents, "profile": self.profile,
        }  # fmt: skip
        return made | ({"attention": self.attention} if self.system == "trl" else {})

    def on(self, layout: Layout) -> Work:
        """The same on another layout."""
        return replace(self, layout=layout, best_of=())

    def tiny(self) -> Work:
        """The same at toy size, on two ranks at most."""
        layout = Layout(cp=2) if self.layout.cp > 1 else Layout(sp=2) if self.layout.sp > 1 else self.layout
        few = 1 if self.layers else 0
        return replace(self, shape="tiny", tokens=256, layout=layout, layers=few, limit=0, host=0, rope=(), seconds=60)


def reference(name: str, seconds: float, layout: str, **more: Any) -> Work:
    """The reference run, or a part of it, inside the bar of 40 GiB."""
    common: dict[str, Any] = {"rope": tuple(YARN.items()), "limit": 42 * GIB}
    return Work("reference", name, seconds, "qwen3-8b", M, Layout.read(layout), **(common | more))


def scaling(seconds: float, layout: str) -> Work:
    """The scaling line."""
    name = f"4B 131,072 {layout}"
    return Work("scaling", name, seconds, "qwen3-4b", 131_072, Layout.read(layout), steps=2)


def pure(part: str, name: str, seconds: float, shape: str, tokens: int, **more: Any) -> Work:
    """A work on one GPU with weights and moments in bf16."""
    return Work(part, name, seconds, shape, tokens, Layout(), masters=False, **more)


def run(part: str, name: str, seconds: float, *command: str) -> Work:
    """A command in place of a case."""
    return Work(part, name, seconds, "", 0, Layout(), command=command)


def tested(*files: str) -> tuple[str, ...]:
    """The command of tests that need a GPU."""
    return ("pytest", "-m", "gpu", "-s", "-p", "no:cacheprovider", *files)


def limited(host: int) -> tuple[Work, ...]:
    """Half a million tokens of the 4B shape and a million of the 8B shape inside 80 GiB, and so much host memory.

    Of what the machine has (128 and 256; 125.9 told by the smaller one) the system, the driver's tables of what is pinned and
    the process that waits need some: 3.7 GiB beside 122 were the end of a rehearsal.
    """
    sizes = {"limit": 80 * GIB, "host": host * GIB}
    return (
        pure("tiers", f"4B 524,288 rehearsal, host {host} GiB", 160, "qwen3-4b", M // 2, rehearsal=True, **sizes),
        pure("tiers", f"8B 1M rehearsal, host {host} GiB", 290, "qwen3-8b", M, rehearsal=True, **sizes),
        pure("tiers", f"8B 1M 2 layers, host {host} GiB", 250, "qwen3-8b", M, layers=2, of_layers=36, **sizes),
        pure(
            "tiers", f"4B 524,288 2 layers, host {host} GiB", 140, "qwen3-4b", M // 2, layers=2, of_layers=36, steps=2, **sizes
        ),
    )


NINE = {"layers": 9, "of_layers": 36}
LAYOUTS = ("cp8", "sp8", "cp4xsp2")
FULL = tuple(f"8B 1M 9 layers {layout}" for layout in LAYOUTS)
ROOM = 500 * GIB  # of the 560 GiB of eight GPUs' host

PLANS: dict[str, tuple[Work, ...]] = {
    "one": (
        pure("short", "4B 32,768 TRL", 80, "qwen3-4b", 32_768, system="trl", steps=2),
        pure("short", "4B 32,768", 70, "qwen3-4b", 32_768, steps=3),
        run("kernels", "kernels", 110, "benchmarks.kernels", "--tokens", "32768", "131072", "--repeats", "3"),
        *limited(120),
        *(
            pure(
                "peer",
                f"4B 262,144 {layers} layers TRL",
                seconds,
                "qwen3-4b",
                262_144,
                system="trl",
                offload=True,
                attention="flash_attention_4",
                layers=layers,
                of_layers=36,
            )
            for layers, seconds in ((4, 90), (8, 120))
        ),
        run("tests", "tests", 150, *tested("tests/layers", "tests/parity", "tests/store", "tests/world/test_gpu.py")),
        # Longer than a command of ten minutes: `setsid … --only background --seconds 1000 &`, and its file is read later.
        Work("background", "0.6B 1M one", 820, "qwen3-0.6b", M, Layout(), limit=128 * GIB, host=80 * GIB),
        run("longest", "4B longest row", 540, "benchmarks.rehearse", "qwen3-4b,512k,80GiB,120GiB", "--longest", "--tries", "2"),
    ),
    "two": (
        *(
            Work("row", f"4B 131,072 {layout}", 190, "qwen3-4b", 131_072, Layout.read(layout), steps=1, profile=True)
            for layout in ("sp2", "cp2")
        ),
        *(
            Work(
                "packed",
                f"4B 131,072 in 64 documents {layout}",
                170,
                "qwen3-4b",
                131_072,
                Layout.read(layout),
                steps=3,
                documents=64,
            )
            for layout in ("one", "cp2")
        ),
        run("tests", "gradients of two ranks", 300, *tested("tests/gpu/test_ranks.py")),
        Work("small", "0.6B 1M", 540, "qwen3-0.6b", M, Layout(cp=2)),
        *limited(230),
        reference("8B 1M 2 layers cp2", 150, "cp2", layers=2, of_layers=36, host=230 * GIB),
        reference("8B 1M 2 layers sp2", 150, "sp2", layers=2, of_layers=36, host=230 * GIB),
        Work("part", "0.6B 1M 7 layers", 180, "qwen3-0.6b", M, Layout(cp=2), layers=7, of_layers=28),
        Work("part", "0.6B 1M 14 layers", 285, "qwen3-0.6b", M, Layout(cp=2), layers=14, of_layers=28),
        reference("8B 1M 9 layers cp2", 380, "cp2", host=230 * GIB, **NINE),
    ),
    "four": (
        *(
            scaling(seconds, layout)
            for seconds, layout in ((80, "cp4"), (80, "sp4"), (80, "cp2xsp2"), (100, "cp2"), (100, "sp2"))
        ),
        Work("million", "4B 1M rehearsal cp4", 200, "qwen3-4b", M, Layout(cp=4), limit=80 * GIB, rehearsal=True),
        *(
            Work(
                "million",
                f"4B 1M {layers} layers cp4",
                seconds,
                "qwen3-4b",
                M,
                Layout(cp=4),
                layers=layers,
                of_layers=36,
                limit=80 * GIB,
            )
            for layers, seconds in ((4, 130), (9, 210))
        ),
    ),
    "eight": (
        *(reference(name, 140, layout, host=ROOM, **NINE) for name, layout in zip(FULL, LAYOUTS, strict=True)),
        reference("8B 1M 9 layers TRL cp8", 190, "cp8", system="trl", limit=0, **NINE),
        reference("8B 1M best", 420, "cp8", host=ROOM, best_of=FULL),
        *(scaling(75, layout) for layout in LAYOUTS),
        reference("8B 1M best, all on the devices", 400, "cp8", limit=0, offload=False, best_of=FULL),
        Work("capacity", "8B 4M rehearsal cp8", 300, "qwen3-8b", 4 * M, Layout(cp=8), host=ROOM, rehearsal=True),
        *(
            Work(
                "capacity",
                f"8B 4M {layers} layers cp8",
                seconds,
                "qwen3-8b",
                4 * M,
                Layout(cp=8),
                layers=layers,
                of_layers=36,
                host=ROOM,
            )
            for layers, seconds in ((1, 210), (2, 330))
        ),
        *(scaling(seconds, layout) for seconds, layout in ((85, "cp4"), (105, "cp2"))),
    ),
}
