"""How a script shows what its measurements are at."""

import logging
import sys


def show_progress() -> None:
    """From now on progress, and warnings of all of jaxscale, are lines on stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    logging.getLogger("jaxscale.perf").setLevel(logging.INFO)
