"""What Orbax prints of a failed save, in tracebacks, besides raising it: our own line says it.

Three ways, all of Orbax 0.12: its logger, with the traceback; asyncio's, for the other writes of
the same save; and where those end after their event loop, `sys.unraisablehook`, once a write.
"""

import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any


def quieten_orbax() -> None:
    """Leaves Orbax's warnings, and everybody else's messages to the same loggers, as they are."""
    for name, keeps in (("absl", _is_news), ("asyncio", _is_not_of_a_save)):
        logger = logging.getLogger(name)
        if keeps not in logger.filters:
            logger.addFilter(keeps)


def leave_out_late_writes() -> Callable[[], None]:
    """From now on writes that end after their event loop are not told, by any thread.

    Returns a function that ends this. It is not to be called after a save that failed, whose other
    writes end whenever they do.
    """
    previous = sys.unraisablehook

    def tell(unraisable: Any) -> None:
        if not _is_late_write(unraisable.exc_value):
            previous(unraisable)

    def end() -> None:
        if sys.unraisablehook is tell:
            sys.unraisablehook = previous

    sys.unraisablehook = tell
    return end


def _is_news(record: logging.LogRecord) -> bool:
    # Some 60 lines a save are at level INFO. What has a traceback is raised as well.
    if "orbax" not in record.pathname:
        return True
    if "primary_host=None" in record.getMessage():  # of a process's own folder: it logs no sizes
        return False
    return record.levelno >= logging.WARNING and not record.exc_info


def _is_not_of_a_save(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return True
    return not any("orbax" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def _is_late_write(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
