"""How many mistakes are tried, each by its own row of a table."""

import importlib
from pathlib import Path

from tests import test_bad_input as first

FIRST = (
    first.BEFORE_DEVICES,
    first.ON_DEVICES,
    first.BROKEN_CONFIGS,
    first.BROKEN_JSON,
    first.BROKEN_WORKDIRS,
    first.DAMAGES,
)


def tables():
    """Of the files here by their names, those of tests/test_bad_input.py among them."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    modules = [importlib.import_module(f"tests.mistakes.{file.stem}") for file in files]
    found = {module.__name__: getattr(module, "TABLES", ()) for module in modules}
    return found | {first.__name__: FIRST}


def test_two_hundred_mistakes_of_a_user_are_tried_and_none_twice():
    rows = [row for tables_ in tables().values() for table in tables_ for row in table]
    settings = {row for row in rows if row.startswith("--config.")}
    assert len(settings) == sum(row.startswith("--config.") for row in rows)
    assert len(rows) >= 200
