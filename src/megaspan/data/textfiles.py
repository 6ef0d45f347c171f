"""Text and source files on disk: which files of a folder are documents, and which are left out and why.

A repository of source code is a natural row of a million tokens, but its folder also holds images, archives and the version
control's own files. One file is one document; a folder takes the endings listed here, a file or glob that was named takes
whatever decodes. Hidden files, caches and what a run keeps in its `output_dir` are not looked at; every other file that is left
out is counted under its reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaspan.human import UserError

PROSE = ("txt", "text", "md", "markdown", "mdx", "rst", "tex", "org", "adoc", "asciidoc", "textile", "srt", "vtt")
CODE = (
    "py", "pyi", "pyx", "pxd", "c", "h", "cc", "cpp", "cxx", "c++", "hh", "hpp", "hxx", "cu", "cuh", "inl", "m", "mm", "rs",
    "go", "java", "kt", "kts", "scala", "groovy", "gradle", "clj", "cljs", "js", "jsx", "mjs", "cjs", "ts", "tsx", "vue",
    "svelte", "rb", "php", "pl", "pm", "lua", "r", "rmd", "jl", "swift", "cs", "fs", "fsx", "vb", "hs", "ml", "mli", "ex",
    "exs", "erl", "hrl", "el", "lisp", "scm", "rkt", "sh", "bash", "zsh", "fish", "ps1", "bat", "cmd", "sql", "html", "htm",
    "css", "scss", "sass", "less", "yaml", "yml", "toml", "ini", "cfg", "conf", "cmake", "mk", "proto", "thrift", "graphql",
    "dart", "zig", "nim", "d", "v", "sv", "vhd", "vhdl", "asm", "s", "f", "f90", "f95", "f03", "for", "pas", "ada", "adb",
    "ads", "tf", "hcl", "nix", "bzl", "cob", "sol", "metal", "glsl", "wgsl", "hlsl", "xsl", "dtd", "xsd", "tcl", "awk", "sed",
    "diff", "patch",
)  # fmt: skip
NAMES = (
    "makefile",
    "dockerfile",
    "readme",
    "license",
    "copying",
    "authors",
    "changelog",
    "rakefile",
    "gemfile",
    "build",
    "news",
)
FOLDERS_LEFT_OUT = ("__pycache__", "node_modules")
RECORDS = ("jsonl", "ndjson", "parquet")
_OF_A_RUN = ("run.json", "config.yaml", "metrics.jsonl", "plots.png", "model")
_ENDINGS = frozenset(PROSE + CODE)
_EXAMPLES = 3


@dataclass
class SkippedFiles:
    """Counts of files that were left out, by reason, with the first few names."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        """Counts one file."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < _EXAMPLES:
            shown.append(name)

    def lines(self) -> list[str]:
        """One line a reason: `12 files left out: unknown ending (a.bin, b.png, …)`."""
        return [
            f"{count:,} {'file' if count == 1 else 'files'} left out: {reason} "
            f"({', '.join(self.examples[reason])}{', …' if count > len(self.examples[reason]) else ''})"
            for reason, count in sorted(self.counts.items())
        ]


def ending(path: Path) -> str:
    """The ending in lower case without its dot: `py`."""
    return path.suffix.lower().removeprefix(".")


def is_text_name(path: Path) -> bool:
    """Whether a folder's file of this name is taken as text: by its ending, or a bare name such as Makefile."""
    return ending(path) in _ENDINGS or (not path.suffix and path.name.lower() in NAMES)


def walk(folder: Path) -> list[Path]:
    """Every file below `folder` in the order of paths; links to folders are not followed.

    Left out are hidden files, caches and what runs keep: an `output_dir` beside the text would be other text at each start.

    Raises:
        UserError: a folder may not be read: its text would be missing without a word.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"the folder {error.filename} may not be read", do="Check its permissions, or name others by a glob")

    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        run = kept_by_a_run(Path(place))
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in FOLDERS_LEFT_OUT and name not in run
        )
        found += [Path(place, name) for name in names if not name.startswith(".") and name not in run]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def kept_by_a_run(folder: Path) -> set[str]:
    """Names of what a run of megaspan keeps in `folder`, its `output_dir`; none where the folder is no run's."""
    try:
        facts = json.loads((folder / "run.json").read_bytes())
    except (OSError, ValueError):
        return set()
    if not isinstance(facts, dict) or "starts" not in facts:
        return set()
    kept = {*_OF_A_RUN, *(path.name for path in folder.glob("checkpoint-*"))}
    # `save_model()` of an adapter writes how it is loaded.
    return kept | {"README.md"} if (folder / "adapter_config.json").exists() else kept


def text_of(folder: Path, files: Iterable[Path], skipped: SkippedFiles) -> list[Path]:
    """The files of `folder` that are taken as text; the others are counted in `skipped`."""
    taken = []
    for path in files:
        name = path.relative_to(folder).as_posix()
        if not os.path.isfile(path):
            skipped.add("broken link or no plain file", name)
        elif is_text_name(path):
            taken.append(path)
        else:
            skipped.add("records beside text" if ending(path) in RECORDS else "unknown ending", name)
    return taken


def read_text(path: Path) -> tuple[str | None, str]:
    """The text of a file as UTF-8 (a byte-order mark is dropped, line ends are kept), or None and why not."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return None, f"unreadable ({error.strerror or type(error).__name__})"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None, "binary" if b"\0" in data[:8192] else "not UTF-8"
    return (None, "binary") if "\0" in text else (text, "")


def stamp(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Path, bytes and time of change of each file: what a prepared store remembers of it."""
    stamps = []
    for path in paths:
        facts = path.stat()
        stamps.append((str(path.resolve()), facts.st_size, facts.st_mtime_ns))
    return stamps
