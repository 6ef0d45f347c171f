"""How a case lies on several GPUs, as it is written on the command line: `one`, `cp2`, `sp2`, `cp4xsp2`, `dp2xcp2`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch

WORDS = {"rep": "dp_replicate", "dp": "dp_shard", "cp": "cp", "sp": "sp"}


@dataclass(frozen=True)
class Layout:
    """Sizes of megaspan's mesh.

    Attributes:
        dp_replicate: copies of the model.
        dp_shard: ranks that share a copy and have rows of their own.
        cp: ranks that share a row by tokens.
        sp: ranks that share a row by heads.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1

    @staticmethod
    def read(text: str) -> Layout:
        """A layout from its name.

        Raises:
            argparse.ArgumentTypeError: it is none.
        """
        parts = [] if text == "one" else [re.fullmatch(r"(rep|dp|cp|sp)([1-9]\d*)", part) for part in text.split("x")]
        sizes = {WORDS[part[1]]: int(part[2]) for part in parts if part is not None}
        if None in parts or len(sizes) < len(parts):
            raise argparse.ArgumentTypeError(f"{text} is no layout: one, cp2, sp2, cp4xsp2, dp2xcp2, rep2xdp2")
        return Layout(**sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes above 1 by axis."""
        return {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) > 1}

    @property
    def ranks(self) -> int:
        """Processes, each with a GPU."""
        return prod(self.sizes.values())

    @property
    def rows(self) -> int:
        """Rows of a step: data ranks have each their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def options(self) -> dict[str, int]:
        """megaspan's options."""
        return {f"{axis}_size": size for axis, size in self.sizes.items()}

    @property
    def name(self) -> str:
        """As `read` takes it."""
        words = {axis: word for word, axis in WORDS.items()}
        return "x".join(f"{words[axis]}{size}" for axis, size in self.sizes.items()) or "one"


def layout_of(case: dict[str, Any]) -> Layout:
    """The layout of a case; one GPU where it names none."""
    return Layout.read(case.get("layout", "one"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options for one layout."""
    parser.add_argument("--nproc", type=int, help="GPUs; by default the product of the sizes")
    parser.add_argument("--cp", type=int, default=1, help="GPUs that share a row by tokens")
    parser.add_argument("--sp", type=int, default=1, help="GPUs that share a row by heads")
    parser.add_argument("--dp-shard", type=int, default=1, help="GPUs with rows of their own that share the model's states")
    parser.add_argument("--dp-replicate", type=int, default=1, help="copies of the model")


def layouts_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Layout]:
    """The layouts that the options ask for; the command ends here where they contradict each other or the machine."""
    by_sizes = Layout(args.dp_replicate, args.dp_shard, args.cp, args.sp)
    named: list[Layout] = getattr(args, "layouts", None) or []
    if named and by_sizes.ranks > 1:
        parser.error("--layouts and sizes say the same thing twice: cp2 is --cp 2")
    found = list(dict.fromkeys(named or [by_sizes]))
    for layout in found:
        if args.nproc is not None and layout.ranks not in ({args.nproc} if not named else {1, args.nproc}):
            parser.error(f"--nproc {args.nproc}, but {layout.name} takes {layout.ranks}")
    most, here = max(layout.ranks for layout in found), torch.cuda.device_count()
    if not args.tiny and 0 < here < most:
        parser.error(f"{most} GPUs are asked for, and there are {here}")
    return found
