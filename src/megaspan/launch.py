"""`megaspan train --nproc N`: torch's elastic launcher inside, for the ranks of one machine.

torch's agent starts the ranks and tells them where they meet. Three things are done here around it. Signals: the agent would
give ranks 30 seconds, and a checkpoint of 115 GB takes longer, so it runs in a thread, and this process hands SIGINT and
SIGTERM on and waits. Errors: ranks note on the board why they end, and one error is shown, once. Output: rank 0 writes to the
terminal, the other ranks' stderr goes to files that are shown only when one of them dies without a word.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.config.parallel import OPTIONS, resolve
from megaspan.config.retype import capital, retyped
from megaspan.human import UserError
from megaspan.plan.ranks import heads_of
from megaspan.world import Failure

HOST = "127.0.0.1"  # one machine: nothing here needs a name that resolves
TAIL = 20  # lines of a dead rank's stderr


def processes(wish: int | None, config: SFTConfig) -> int:
    """How many ranks `megaspan train` starts here: the wish, or one for each visible GPU, or one.

    Raises:
        UserError: more than there are GPUs; sizes whose product is another number; a launcher has started the ranks already.
    """
    started = world.launch()
    if started.several:
        if wish is not None:
            raise UserError(
                f"--nproc starts processes, and {started.by} has started {started.world_size} already",
                got=wish,
                do="Leave it out",
            )
        return 1
    gpus = 0 if config.use_cpu else len(world.gpus())
    if wish == 0 or (wish is not None and 0 < gpus < wish):
        raise UserError(
            "--nproc must be a number of processes that each have a GPU" if gpus else "--nproc must be at least 1",
            got=wish,
            allowed=f"1 to {gpus}" if gpus else None,
            do=capital(retyped(gpus or 1, {})) + (", or add --use_cpu true: on the CPU any number works" if gpus else ""),
        )
    count = wish if wish is not None else max(1, gpus)
    given = {option: getattr(config, option) for option in OPTIONS if option in config.model_fields_set}
    resolve(given, count, most=gpus or None, heads=partial(heads_of, config))
    return count


@contextmanager
def as_rank() -> Iterator[bool]:
    """Around the work of one rank; gives whether header, progress and result are its to show.

    A rank of our own launcher ends with its parent. The stderr of any but rank 0 is silent: in a file under our own launcher,
    nowhere under others. Errors are said outside of this.
    """
    started = world.launch()
    if started.by == "megaspan train":
        world.follow_parent()
    with ExitStack() as stack:
        if started.rank > 0 and started.by != "megaspan train":
            stack.enter_context(redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        yield started.rank == 0


def run(words: Sequence[str], count: int, program: Sequence[str] = ("-X", "faulthandler", "-m", "megaspan")) -> Failure | None:
    """Starts `count` ranks of `megaspan WORDS` and waits for them.

    Args:
        words: the command line, without --nproc.
        count: ranks.
        program: arguments of Python before the words.

    Returns:
        None when all are done, or what ended them: the first error of any rank, or the signal that was handed on to all.
    """
    world.share_cores(count, world.cores())
    with TemporaryDirectory(prefix="megaspan-ranks-") as folder, _quiet_launcher():
        agent = _Agent(count, [*program, *words], folder)
        signals = agent.wait()
        return _cause(agent, signals, Path(folder))


class _Agent:
    """torch's elastic agent in a thread, and the signals of this process handed on to its ranks."""

    def __init__(self, count: int, command: list[str], folder: str) -> None:
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        meeting = RendezvousParameters(
            backend="c10d", endpoint=f"{HOST}:0", run_id=uuid.uuid4().hex, min_nodes=1, max_nodes=1, local_addr=HOST
        )
        self._handler = get_rendezvous_handler(meeting)
        spec = WorkerSpec(
            role=world.OWN_ROLE,
            local_world_size=count,
            rdzv_handler=self._handler,
            entrypoint=sys.executable,
            args=tuple(command),
            max_restarts=0,
            monitor_interval=0.1,
            local_addr=HOST,
        )
        logs = DefaultLogsSpecs(log_dir=folder, redirects={rank: Std.ERR for rank in range(1, count)} or Std.NONE)
        self._agent = LocalElasticAgent(spec, logs)
        self._thread = threading.Thread(target=self._run, name="megaspan-launcher")
        self.codes: dict[int, int] = {}  # of the ranks that failed; a negative one is a signal
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            result = self._agent.run()
            self.codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        except BaseException as error:
            self.error = error

    @property
    def meeting(self) -> tuple[str, int]:
        """Where the ranks have met."""
        return HOST, int(self._agent.get_worker_group().master_port or 0)

    def wait(self) -> list[int]:
        """Runs the ranks to their end; returns the signals that came meanwhile."""
        came: list[int] = []
        handed = 0
        with _signals_noted(came):
            self._thread.start()
            while self._thread.is_alive():
                self._thread.join(0.1)
                handed += self._hand_on(came[handed:])
        return came

    def _hand_on(self, signums: list[int]) -> int:
        """Sends signals to all ranks. Returns how many: none before the ranks have started."""
        ranks = [worker.id for worker in self._agent.get_worker_group().workers]
        if not ranks or not all(isinstance(pid, int) for pid in ranks):
            return 0
        for signum in signums:
            for pid in ranks:
                try:
                    os.kill(pid, signum)
                except ProcessLookupError:
                    continue
        return len(signums)

    def close(self) -> None:
        """Ends the store in which the ranks met."""
        self._handler.shutdown()


@contextmanager
def _signals_noted(came: list[int]) -> Iterator[None]:
    """Notes SIGINT and SIGTERM in place of ending this process."""

    def note(signum: int, frame: FrameType | None) -> None:
        came.append(signum)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keeps the agent's own log off the terminal: it repeats, with a traceback, what a rank has said in one sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _cause(agent: _Agent, signals: list[int], folder: Path) -> Failure | None:
    noted = world.read_failure(agent.meeting) if agent.error is None else None
    agent.close()
    if agent.error is not None:
        raise agent.error
    if not agent.codes:
        return None
    # Ranks that were ended by the agent's own SIGTERM, after the first had failed, are no cause. Neither are those that a
    # user's signal ended while they were still loading, without a word or with a library's crash.
    killed = {rank: -code for rank, code in agent.codes.items() if code < 0 and -code != signal.SIGTERM}
    if signals:
        killed = {rank: signum for rank, signum in killed.items() if signum == signal.SIGKILL}
    dead = next(iter(killed), None)
    if noted is not None and noted.code <= 128:
        return replace(noted, trace=noted.trace or ("" if dead is None else _tail(folder, dead)))
    if dead is not None:
        why = " (often the host's lack of memory)" if killed[dead] == signal.SIGKILL else ""
        return Failure(dead, 1, [f"rank {dead} was ended by {signal.Signals(killed[dead]).name}{why}"], _tail(folder, dead))
    if noted is not None:
        return noted
    if signals:
        name = signal.Signals(signals[0]).name
        return Failure(0, 128 + signals[0], [f"interrupted by {name}"])
    rank, code = next(iter(agent.codes.items()))
    return Failure(rank, max(code, 1), [f"rank {rank} ended with exit code {code}"], _tail(folder, rank))


def _tail(folder: Path, rank: int) -> str:
    """The last lines that a rank wrote to its file."""
    files = sorted(folder.glob(f"**/{rank}/stderr.log"))
    return "".join(files[-1].read_text("utf-8", "replace").splitlines(keepends=True)[-TAIL:]) if files else ""
