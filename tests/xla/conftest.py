import os

import pytest

from jaxscale.xla import jaxlib


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """An environment of the test's own, without XLA_FLAGS; no line has been said yet."""
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    monkeypatch.setattr(os, "environ", own)
    jaxlib.say_once.cache_clear()
    return own
