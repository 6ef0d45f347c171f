"""Runs a case in processes of its own, on one GPU or several, and ends all of them when it is over.

One process runs `benchmarks.case` itself. Several are started as a user would start a script: megaspan's by torchrun, TRL's by
`accelerate launch` with a file for FSDP2 and its context parallelism. Launchers put ranks into sessions of their own, so every
process of a case carries a mark in its environment, and whoever still has it when the case is over, or too late, is ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.layouts import layout_of
from benchmarks.outcome import Outcome
from megaspan import world

ROOT = Path(__file__).resolve().parents[1]
START = Path(__file__).with_name("start.py")
MARK = "MEGASPAN_BENCHMARK"
HERE = "127.0.0.1"
PATIENCE = 30.0  # seconds until a killed process is gone: its memory is unpinned first
TAIL = 200  # lines of a failed case's stderr that are kept; a launcher's report takes 50 of them
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:[\w.]*(?:Error|Exception)|megaspan|fatal)\b.*)", re.IGNORECASE)


def run_case(name: str, case: dict[str, Any], timeout: float, heard: Callable[[dict[str, Any]], None] | None = None) -> Outcome:
    """Run one case and collect what its ranks say, passing on each result, and each step that all ranks have finished."""
    outcome, mark = Outcome(name, case), uuid.uuid4().hex

    def listen(line: str) -> None:
        if line.startswith("RESULT "):
            result = json.loads(line.removeprefix("RESULT "))
            step = outcome.collect(result)
            if heard is not None and (step or "step" not in result):
                heard(step or result)

    with tempfile.TemporaryDirectory(prefix="megaspan-case-") as folder:
        _run(outcome, command_of(case, Path(folder)), environment_of(case, mark), mark, timeout, listen)
    if outcome.failed is None and (missing := outcome.missing):
        outcome.failed, outcome.why = "incomplete", missing
    return outcome


def run_command(name: str, words: Sequence[str], timeout: float, heard: Callable[[str], None]) -> Outcome:
    """Run a Python module, passing on what it says line by line; the last of it is in the outcome, as `said`."""
    outcome, mark = Outcome(name, {"command": list(words)}), uuid.uuid4().hex
    said: deque[str] = deque(maxlen=TAIL)

    def listen(line: str) -> None:
        said.append(line.rstrip("\n"))
        heard(line)

    environment = environment_of({"system": "command"}, mark) | {"PYTHONUNBUFFERED": "1"}
    _run(outcome, [sys.executable, "-m", *words], environment, mark, timeout, listen)
    outcome.facts["said"] = list(said)
    return outcome


def _run(
    outcome: Outcome, command: list[str], environment: dict[str, str], mark: str, timeout: float, listen: Callable[[str], None]
) -> None:
    """Runs processes to their end or `timeout`, hears each line of their stdout, and files how they ended."""
    begun = time.monotonic()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as talk,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=talk, text=True) as child,
    ):
        late = threading.Event()
        timer = threading.Timer(timeout, lambda: (late.set(), end(mark)))
        over = threading.Thread(target=lambda: (child.wait(), end(mark)), daemon=True)
        timer.start()
        over.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                listen(line)
            code = child.wait()
        finally:
            timer.cancel()
            end(mark)  # nothing is left behind where this process is interrupted
            over.join()
        outcome.wall_seconds = time.monotonic() - begun
        if late.is_set():
            outcome.failed, outcome.why = "timeout", f"more than {timeout:.0f} s"
        elif code and outcome.failed is None:
            outcome.failed = "killed" if code < 0 else "failed"
            outcome.why = f"signal {-code}" if code < 0 else last_words(talk)
        if outcome.failed:
            talk.seek(0)
            outcome.facts["stderr"] = talk.read().splitlines()[-TAIL:]


def last_words(talk: Any) -> str:
    """The line of a failed case's stderr that says why; launchers write much after it."""
    talk.seek(0)
    lines = [line.strip() for line in talk.read().splitlines() if line.strip()]
    causes = [found[1] for line in lines if (found := _ERROR.match(line)) and "ChildFailedError" not in line]
    return ((causes or lines or ["no message"])[-1])[:300]


def command_of(case: dict[str, Any], folder: Path) -> list[str]:
    """What starts the case; its ranks share `folder`."""
    words = ["-m", "benchmarks.case", json.dumps(case), str(folder)]
    ranks = layout_of(case).ranks
    if ranks == 1:
        return [sys.executable, *words]
    if case["system"] == "trl":
        file = folder / "accelerate.yaml"
        file.write_text(yaml.safe_dump(accelerate_file(ranks, torch.cuda.is_available())))
        launcher = ["accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0"]
    else:
        launcher = ["torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", "0"]
        # No name of this machine has to resolve.
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HERE}:0", "--local-addr", HERE]
    return [sys.executable, "-P", str(START), *launcher, *words]


def accelerate_file(ranks: int, cuda: bool) -> dict[str, Any]:
    """TRL's guide: FSDP2 in bf16 with a row's tokens over all ranks.

    On the CPU accelerate refuses context parallelism, and leaves FSDP2 away: data parallelism tries the code there.
    """
    made: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": ranks, "machine_rank": 0,
        "main_training_function": "main", "main_process_ip": HERE, "rdzv_backend": "static", "same_network": True,
        "use_cpu": not cuda, "mixed_precision": "bf16" if cuda else "no", "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
    }  # fmt: skip
    return made | ({"parallelism_config": {"parallelism_config_cp_size": ranks}} if cuda else {})


def environment_of(case: dict[str, Any], mark: str) -> dict[str, str]:
    """The environment of a case's processes."""
    made = dict(os.environ) | {MARK: mark}
    made["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), made.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    made.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # a case need not compile what the one before it compiled
    if case["system"] == "trl" and "PYTORCH_ALLOC_CONF" not in made:
        made.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if (ranks := layout_of(case).ranks) > 1:
        world.share_cores(ranks, world.cores(), made)
    return made


def marked(mark: str) -> list[int]:
    """Processes of a case, whoever their parent is now."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def end(mark: str) -> None:
    """Ends all processes of a case at once, but does not wait for ever for one that a driver holds."""
    until = time.monotonic() + PATIENCE
    while (pids := marked(mark)) and time.monotonic() < until:  # again for those that one started meanwhile
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
