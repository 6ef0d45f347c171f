"""The verbs: `megaspan train`, `data`, `plan`, `eval`, `export` and `env`.

Each verb is one lazy import and one call, so that `megaspan --help` and `megaspan plan` answer without loading torch, which
takes seconds. Progress goes to stderr and the result to stdout, as text or, with `--json`, for programs. Exit codes: 0 done
(`plan`: it fits), 1 failed (`plan`: it does not fit), 2 wrong configuration, 3 out of memory, 130 and 143 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType
from typing import Any

from megaspan.human import UserError, UserErrors, fitted, missing_extra, terminal_width

DONE, FAILED, WRONG, OUT_OF_MEMORY = 0, 1, 2, 3
WIDTH = 110


@dataclass(frozen=True)
class Result:
    """What a verb leaves: its text for people, its value for programs, and its exit code."""

    text: str
    value: Any
    code: int = DONE


@dataclass(frozen=True)
class Call:
    """A command line taken apart: what comes before the flags, the verb's own flags, and the options of the run."""

    places: list[str]
    own: dict[str, str]
    flags: list[str]


@dataclass(frozen=True)
class Flag:
    """A flag of a verb itself. `value` names what follows it; without one it is a switch."""

    help: str
    value: str = ""


@dataclass(frozen=True)
class Verb:
    """One word after `megaspan`."""

    usage: str
    summary: str
    run: Callable[[Call], Result]
    places: tuple[int, int]  # the fewest and most words before the flags
    own: dict[str, Flag]
    takes_options: bool = False


def _train(call: Call) -> Result:
    wish = _whole_number(call, "nproc")
    config = _config(call)  # wrong options are said once, before any other process exists
    from megaspan import launch

    if (count := launch.processes(wish, config)) > 1:
        words = ["train", *call.places, *call.flags, *(["--json"] if "json" in call.own else [])]
        return _ended(launch.run(words, count))
    with launch.as_rank() as shows:
        from megaspan.trainer import run

        result = run(config)
    return Result(_lines(result), result) if shows else Result("", None)


def _data(call: Call) -> Result:
    show = _whole_number(call, "show")
    config = _config(call)
    from megaspan.data import data_command

    return Result("", data_command(config, show))  # prints the ledger and the row itself, as it goes


def _plan(call: Call) -> Result:
    if (wish := _whole_number(call, "nproc")) == 0:
        raise UserError("--nproc must be at least 1", got=0)
    config = _config(call)
    if "rehearse" in call.own:
        return _rehearse(call, wish, config)
    from megaspan import world
    from megaspan.plan import has_plain_adapter, is_plain, plan_command

    machine = world.machine()
    place: tuple[Any, ...] = (machine,)
    if wish is not None:
        from megaspan.plan.ranks import RankSizes, share_of

        place = share_of(machine, wish), RankSizes.of(config, wish)
    plan = plan_command(config, *place)
    if not (plan.model.exact and is_plain(config)):  # its class says what it is and has, which takes some seconds
        from megaspan.model.taken import check_files

        check_files(config)
    if not has_plain_adapter(config, plan.model) and find_spec("peft") is not None:
        from megaspan.trainer.early import try_adapter

        try_adapter(config, None)
    if not plan.model.exact:
        from megaspan.model.counted import counts_of

        plan = plan_command(config, *place, counts=counts_of(config))
    return Result(plan.render(), plan.as_dict(), DONE if plan.fits else FAILED)


def _rehearse(call: Call, wish: int | None, config: Any) -> Result:
    from megaspan import launch

    if (count := launch.processes(wish, config)) > 1:
        words = ["plan", *call.places, *call.flags, "--rehearse", *(["--json"] if "json" in call.own else [])]
        failure = launch.run(words, count)
        if failure is not None and failure.sentences == [f"rank {failure.rank} ended with exit code {FAILED}"]:
            return Result("", None, FAILED)  # rank 0 has shown what does not fit
        return _ended(failure)
    with launch.as_rank() as shows:
        from megaspan.rehearse import rehearse

        found = rehearse(config)
    code = DONE if found.fits else FAILED
    return Result(found.render(), found.as_plan(), code) if shows else Result("", None, code)


def _eval(call: Call) -> Result:
    _one_process(call)
    from megaspan import evaluate

    result = evaluate.evaluate_command(call.places[0], call.flags)
    return Result(_rendered(evaluate, result), result)


def _export(call: Call) -> Result:
    from megaspan import store

    out = store.export(call.places[0], call.places[1], merge="merge" in call.own)
    adapter = (out / "adapter_config.json").exists()
    told = ", as README.md in it says" * (out / "README.md").exists()
    readers = f"peft loads onto its base model{told}" if adapter else "plain transformers loads"
    return Result(f"{out} is a folder that {readers}", {"out": str(out)})


def _env(call: Call) -> Result:
    from megaspan import world

    report = world.environment_report()
    return Result(_lines(report), report)


_JSON = {"json": Flag("print the result for programs")}
_NPROC = {"nproc": Flag("processes, one per GPU; without it one for each visible GPU", "N")}
_ONE = {"nproc": Flag("only 1: evaluation runs on one device", "N")}
_REHEARSE = {"rehearse": Flag("run every allocation and copy of a step on this machine, attention left out")}
_PLANNED = {"nproc": Flag("plan for N processes; without it as many as the sizes multiply to", "N")}
_SHOW = {"show": Flag("print row N, counted from 0, with its trained tokens marked", "N")}
_MERGE = {"merge": Flag("of a LoRA run, the base model with the adapter merged into it")}
VERBS = {
    "train": Verb(
        "train CONFIG.yaml [--name value …]", "train as the file and the flags say", _train, (0, 1), _NPROC | _JSON, True
    ),
    "data": Verb(
        "data CONFIG.yaml [--show N] [--name value …]",
        "prepare the rows, print the token ledger",
        _data,
        (0, 1),
        _SHOW | _JSON,
        True,
    ),
    "plan": Verb(
        "plan CONFIG.yaml [--rehearse] [--name value …]",
        "what the run needs, before anything is loaded",
        _plan,
        (0, 1),
        _REHEARSE | _PLANNED | _JSON,
        True,
    ),
    "eval": Verb(
        "eval WHAT [--name value …]",
        "loss by position of a CONFIG.yaml, run or model folder",
        _eval,
        (1, 1),
        _ONE | _JSON,
        True,
    ),
    "export": Verb("export RUN OUT [--merge]", "write a folder that plain transformers loads", _export, (2, 2), _MERGE | _JSON),
    "env": Verb("env", "versions, driver, kernels, memory and limits, for bug reports", _env, (0, 0), _JSON),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, prints its result. Returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr has it: outside of UTF-8 an ellipsis would end the command
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # Libraries print where they like; only the result may reach stdout. What `data` prints is its result.
        quiet = as_json or arguments[:1] != ["data"]
        with _hearing_sigterm(), contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
            result = _run(arguments)
    except (Exception, KeyboardInterrupt) as error:
        result = _failure(error, file=any(word.endswith((".yaml", ".yml")) for word in arguments[1:2]))
    if result.value is None:  # another process shows it
        return result.code
    try:
        text = json.dumps(_for_json(result.value), default=str, indent=2, allow_nan=False) if as_json else result.text
        if text:
            print(text if as_json else fitted(text, terminal_width(sys.stdout)))
        sys.stdout.flush()
    except BrokenPipeError:  # `megaspan plan | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return result.code


def _run(arguments: list[str]) -> Result:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return Result(_help(), {"verbs": list(VERBS)}, DONE if arguments else WRONG)
    if arguments[0] in ("-V", "--version"):
        from megaspan import __version__

        return Result(f"megaspan {__version__}", {"version": __version__})
    name, rest = arguments[0], arguments[1:]
    verb = VERBS.get(name)
    if verb is None:
        from megaspan.config.slips import verb_meant

        raise UserError(f"megaspan has no verb {name!r}", allowed=", ".join(VERBS), do=verb_meant(arguments, VERBS))
    if "-h" in rest or "--help" in rest:
        return Result(_verb_help(verb), {"usage": verb.usage})
    from megaspan.config import commandline  # not before somebody wants more than help

    known = {
        each: commandline.Verb(it.usage, it.places, {flag: own.value for flag, own in it.own.items()}, it.takes_options)
        for each, it in VERBS.items()
    }
    return verb.run(Call(*commandline.take_apart(known[name], rest, list(known.values()), _shapes)))


def _shapes() -> tuple[str, ...]:
    from megaspan.plan.facts import shape_names

    return shape_names()


def _config(call: Call) -> Any:
    from megaspan.config import load_config

    if not call.places and not call.flags:
        raise UserError("there is no configuration", do="Give the path of a YAML file, or options as --name value")
    return load_config(call.places[0] if call.places else None, call.flags)


def _whole_number(call: Call, name: str) -> int | None:
    if name not in call.own:
        return None
    text = call.own[name]
    if not text.isdecimal():
        raise UserError(
            f"--{name} must be a whole number of at least 0",
            got=text or None,
            found="nothing behind it",
            do=f"Write --{name} 1",
        )
    return int(text)


def _one_process(call: Call) -> None:
    if (count := _whole_number(call, "nproc")) not in (None, 1):
        raise UserError("--nproc must be 1: evaluation runs on one device", got=count, do="Leave it out")
    from megaspan import world

    if (started := world.launch()).several:
        raise UserError(
            f"evaluation runs on one device, and {started.by} started {started.world_size} processes",
            do="Type megaspan eval by itself",
        )


# Failures


class Terminated(KeyboardInterrupt):
    """SIGTERM came outside the training loop, which answers signals itself."""

    signum = signal.SIGTERM


@contextlib.contextmanager
def _hearing_sigterm() -> Iterator[None]:
    """Makes a scheduler's SIGTERM end any phase as Ctrl-C does, with a sentence and 143; its default ends without a word."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    process = os.getpid()

    def end(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a worker that was forked off ends as it would have
            os._exit(128 + signum)
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _failure(error: BaseException, *, file: bool) -> Result:
    """Says on stderr what went wrong; the result holds the exit code and, for programs, the sentences.

    Of several ranks one says it, the one that failed first: under `megaspan train` by the parent process.
    """
    from megaspan import world

    if isinstance(error, UserError):
        from megaspan.config.spelling import for_command

        for_command(error, file=file)
    code, sentences = _judge(error)
    trace = "".join(traceback.format_exception(error)) if code == FAILED else ""  # ours to mend, so all of it is shown
    if (failure := world.report_failure(code, sentences, trace)) is None:
        return Result("", None, code)
    return _say(code, failure.told(world.launch().several), failure.trace)


def _say(code: int, sentences: list[str], trace: str) -> Result:
    print(trace, end="", file=sys.stderr)
    for sentence in sentences:
        print(fitted(f"megaspan: {sentence}", terminal_width(sys.stderr)), file=sys.stderr)
    return Result("", {"exit_code": code, "errors": sentences}, code)


def _ended(failure: Any) -> Result:
    """The end of ranks that this process started; rank 0 has shown the result itself."""
    if failure is None:
        return Result("", None)
    return _say(failure.code, failure.told(), failure.trace)


def _judge(error: BaseException) -> tuple[int, list[str]]:
    notes = list(getattr(error, "__notes__", ()))
    if isinstance(error, UserErrors):
        return WRONG, [str(single) for single in error.errors]
    if isinstance(error, UserError):
        return WRONG, [str(error), *notes]
    if isinstance(error, ModuleNotFoundError) and (extra := missing_extra(error.name or "")) is not None:
        return WRONG, [str(extra)]
    if _is_out_of_memory(error):
        first = (str(error).strip().splitlines() or ["no memory left on the host"])[0]
        return OUT_OF_MEMORY, [f"out of memory: {first}", *notes, "megaspan plan with this file shows what fits"]
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return WRONG, [f"a name is longer than the file system knows: {str(error.filename)[:40]}…", *notes]
    if isinstance(error, RuntimeError) and str(error).startswith("Could not determine home directory"):
        return WRONG, ["a path begins with ~ and a name, and this machine has no such user. Write the folder out", *notes]
    signum = getattr(error, "signum", signal.SIGINT if isinstance(error, KeyboardInterrupt) else None)
    if signum is not None:
        return 128 + int(signum), [f"interrupted by {signal.Signals(signum).name}", *notes]
    return FAILED, [f"{type(error).__name__}: {error}", *notes]


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's, torch's (by name: torch may not be loaded), and the driver's when it cannot pin host memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


# Help and results


def _help() -> str:
    verbs = "\n".join(f"  megaspan {verb.usage:<47} {verb.summary}" for verb in VERBS.values())
    return f"""Fine-tune causal language models on sequences of a million tokens, exactly, on few GPUs.

{verbs}

Every verb takes --help, and --json to print its result for programs. The result goes to stdout, progress to stderr.
Exit codes: 0 done (plan: it fits), 1 failed (plan: it does not fit), 2 wrong configuration, 3 out of memory, 130 and 143
interrupted with a complete checkpoint left."""


def _verb_help(verb: Verb) -> str:
    lines = [f"megaspan {verb.usage}", "", f"  {verb.summary[0].upper()}{verb.summary[1:]}.", ""]
    lines += [f"  {f'--{name} {flag.value}':<12} {flag.help}" for name, flag in verb.own.items()]
    if verb.takes_options:
        from megaspan.config.page import options_help

        lines += ["", *options_help(min(WIDTH, terminal_width(sys.__stdout__ or sys.stdout) or WIDTH))]
    return "\n".join(lines)


def _for_json(value: Any) -> Any:
    """`value` with null for the numbers that JSON has no word for: the loss of a run that had no step left, for one."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _for_json(item) for name, item in value.items()}
    return [_for_json(item) for item in value] if isinstance(value, list | tuple) else value


def _rendered(module: Any, result: Any) -> str:
    """The result in the words of its module, which may have a `render`."""
    return module.render(result) if hasattr(module, "render") else _lines(result)


def _lines(value: Any, indent: str = "") -> str:
    """A nested result as indented `name: value` lines."""
    lines = []
    for name, item in value.items():
        if isinstance(item, dict):
            lines += [f"{indent}{name}:", _lines(item, indent + "  ")]
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            lines.append(f"{indent}{name}:")
            lines += [f"{indent}  " + ", ".join(str(part) for part in entry.values()) for entry in item]
        else:
            lines.append(f"{indent}{name}: {'none' if item is None or item == [] else item}")
    return "\n".join(lines)
