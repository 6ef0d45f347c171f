"""One rank of a machine works while its others wait, and what it finds or fails with is theirs too.

Tokenising a book takes minutes to hours, so the wait has no limit of its own. It ends with the word of the first rank, be it an
error that its script catches; a rank that dies or hangs instead ends the others through the watch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from megaspan.human import UserError, UserErrors
from megaspan.world.board import Board

PAUSE = 0.05  # seconds between two looks
_Result = TypeVar("_Result")
_FIELDS = ("what", "got", "found", "allowed", "do", "option")


def in_turn(board: Board, key: str, first: bool, act: Callable[[], _Result]) -> _Result:
    """Runs `act` on the first rank, then on the others.

    Args:
        board: where the first rank says that it is done.
        key: of that note; used once.
        first: this is the rank that does not wait.
        act: what to do.

    Raises:
        UserError: `act` raised one on the first rank; on every rank.
        RuntimeError: on the others, for anything else that it raised; the first rank raises it as it is.
    """
    if first:
        try:
            result = act()
        except Exception as error:
            board.write(key, told(error))
            raise
        board.write(key, None)
        return result
    while not (notes := board.read([key])):
        time.sleep(PAUSE)
    if notes[key] is not None:
        raise error_told(notes[key], "the first rank of this machine failed")
    return act()


def told(error: BaseException) -> dict[str, Any]:
    """An error in what JSON can hold, for other ranks to raise."""
    if not isinstance(error, UserError):
        return {"other": f"{type(error).__name__}: {error}"}
    singles = error.errors if isinstance(error, UserErrors) else (error,)
    return {"user": [[_plain(getattr(each, name)) for name in _FIELDS] for each in singles]}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def error_told(said: dict[str, Any], who: str) -> Exception:
    """What `told` has told: a `UserError` as it was, of any other the words.

    Args:
        said: by `told`.
        who: begins the sentence of an error that is no user's.
    """
    if "other" in said:
        return RuntimeError(f"{who}: {said['other']}")
    errors = [UserError(fields[0], **dict(zip(_FIELDS[1:], fields[1:], strict=True))) for fields in said["user"]]
    return errors[0] if len(errors) == 1 else UserErrors(errors)
