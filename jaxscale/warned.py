"""Warnings that a process gives once, however often it comes by."""

import functools
import logging

log = logging.getLogger(__name__)


@functools.cache
def once(line: str) -> None:
    """Logs a warning; not again in this process, where a plan may be made more than once."""
    log.warning("%s", line)
