"""What the documentation shows is so: its examples run, and the files and settings that it names exist."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import jax
import pytest

from jaxscale import config as run_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/design.md", "docs/sharding.md", "docs/data.md")
# Up to the fence that ends the block.
BODY = r"(?:(?!^```).)*"
PYTHON = re.compile(rf"^```python\n(?P<source>{BODY})^```$", re.MULTILINE | re.DOTALL)
# A block, the word "prints" alone in a line, and what it prints.
PRINTED = re.compile(
    rf"{PYTHON.pattern}\n\nprints\n\n^```text\n(?P<printed>{BODY})^```$", re.MULTILINE | re.DOTALL
)
# In a link or in backquotes; `x` stands for a name of the reader's own, as in `configs/x.py`.
FILE = re.compile(
    r"[(`]((?:jaxscale|kernels|configs|scripts|tests|docs|\.ci)/(?!(?:\w+/)?x[._])[\w./]*\w)[)`]"
)
# `config.mesh.fsdp=1` and --config.mesh.fsdp=1, but no file such as `config.json`.
SETTING = re.compile(r"(?:`|--)config\.(?!py\b|json\b)([a-z_]+(?:\.[a-z_]+)*)")


def matches(pattern):
    """A test parameter (page, line, match) for each place where a page has the pattern."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(page, line, match, id=f"{page}:{line}"))
    return found


def run(page, line, source):
    """What the block prints; it has a namespace of its own, and a traceback shows the page's line."""
    printed = io.StringIO()
    # optax needs the standard promotion, and it is what a reader's project has.
    with contextlib.redirect_stdout(printed), jax.numpy_dtype_promotion("standard"):
        exec(compile("\n" * line + source, str(ROOT / page), "exec"), {"__name__": "example"})
    return printed.getvalue()


@pytest.mark.parametrize(("page", "line", "match"), matches(PYTHON))
def test_an_example_runs(page, line, match):
    run(page, line, match["source"])


@pytest.mark.parametrize(("page", "line", "match"), matches(PRINTED))
def test_an_example_prints_what_the_page_shows(page, line, match):
    assert run(page, line, match["source"]) == match["printed"]


@pytest.mark.parametrize("page", PAGES)
def test_the_files_named_on_a_page_exist(page):
    named = set(FILE.findall((ROOT / page).read_text()))
    assert named
    assert not {name for name in named if not (ROOT / name).exists()}


@pytest.mark.parametrize("page", PAGES)
def test_the_settings_named_on_a_page_exist(page):
    spec = importlib.util.spec_from_file_location("tiny", ROOT / "configs" / "tiny.py")
    assert spec and spec.loader
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    missing = []
    for key in set(SETTING.findall((ROOT / page).read_text())):
        try:
            run_config.get(tiny.get_config(), key)
        except AttributeError:
            missing.append(key)
    assert missing == []
