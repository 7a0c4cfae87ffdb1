"""What the documentation shows is so.

Its examples run, and the files and settings that it names exist.
"""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import jax
import pytest

from jaxscale import config as run_config
from tests import first_hour
from tests.test_layers import LAYERS

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/design.md",
    "docs/decisions.md",
    "docs/sharding.md",
    "docs/data.md",
    "docs/models.md",
    "docs/performance.md",
    "docs/parallelism.md",
    "docs/clusters.md",
    "docs/reliability.md",
)
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


# A line of README's table of files: | `folder/` | `file.py` what it is; ... |
FOLDER_ROW = re.compile(r"^\| `([\w/]+/)` \| (.*) \|$", re.MULTILINE)
FOLDERS = ("jaxscale", "kernels", "configs", "scripts")
# CONTRIBUTING's chain of layers: `a`, `b` < `c` < ...
CHAIN = re.compile(r"^Imports point down: (.*?)\.$", re.MULTILINE | re.DOTALL)
# A line of the table of remat policies: | full | nothing | 0 |, or | gemms (default) | ...
REMAT_TABLE = re.compile(r"^\| remat \|.*\n\|---.*\n((?:\|.*\n)+)", re.MULTILINE)


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
    """What the block prints.

    It has a namespace of its own, and a traceback shows the page's line.
    """
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


@pytest.mark.parametrize("command", first_hour.commands((ROOT / "README.md").read_text()))
def test_a_command_of_the_readme_names_flags_that_there_are(command):
    script = re.search(r"scripts/(\w+)\.py", command)
    if script is None:
        target = command.split()[1]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    source = (ROOT / "scripts" / f"{script[1]}.py").read_text()
    if "ModelFlags()" in source:
        source += (ROOT / "jaxscale" / "inference" / "opening.py").read_text()
    defined = set(re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', source)) | {"config"}
    assert set(re.findall(r"--(\w+)", command)) <= defined


def source_files():
    """Every module of the tree but `__init__.py`, as README's table is to name it."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    names = {str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"}
    # Before Python 3.13 rglob follows the link to kernels/.
    return {name for name in names if not name.startswith("jaxscale/kernels/")}


def files_of_table(text):
    """The modules in a table of lines | `folder/` | `file.py` what it is; ... |."""
    return [
        folder + name
        for folder, cell in FOLDER_ROW.findall(text)
        for name in re.findall(r"`(\w+\.py)`", cell)
    ]


def test_readmes_table_of_files_names_every_module_once():
    named = files_of_table((ROOT / "README.md").read_text())
    assert sorted(named) == sorted(source_files())


def test_contributings_chain_of_layers_is_that_of_the_layer_test():
    (chain,) = CHAIN.findall((ROOT / "CONTRIBUTING.md").read_text())
    written = [set(re.findall(r"`(\w+)`", layer)) for layer in chain.split("<")]
    held: dict[int, set[str]] = {}
    for part, layer in LAYERS.items():
        if part != "jaxscale":  # the package itself, which holds a version
            held.setdefault(layer, set()).add(part.removeprefix("jaxscale."))
    assert written == [held[layer] for layer in sorted(held)]


def test_the_remat_table_has_every_policy():
    (rows,) = REMAT_TABLE.findall((ROOT / "docs/decisions.md").read_text())
    assert set(re.findall(r"^\| (\w+)", rows, re.MULTILINE)) == set(run_config.Remat)
