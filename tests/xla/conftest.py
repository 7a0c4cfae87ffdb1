import os

import pytest

from jaxscale import warned


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """An environment of the test's own, without XLA_FLAGS; no line has been said yet."""
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    monkeypatch.setattr(os, "environ", own)
    warned.once.cache_clear()
    return own
