"""What an installed jaxscale, its set-up files and a fresh clone promise."""

import configparser
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
CONFIG_FILES = sorted(
    path for path in (ROOT / "configs").glob("*.py") if path.name != "__init__.py"
)


def python(code, cwd=ROOT):
    """Runs `python -c code`, which has `cwd` on sys.path."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=600
    )


def is_installed(name):
    """True for an installed package, whatever lies on sys.path."""
    return any(found.name == name for found in importlib.metadata.distributions())


def read_requirements(lines):
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def read_setup():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup


def read_groups():
    """Returns {group: requirements}: what is always installed under '', and every extra."""
    setup = read_setup()
    groups = {"": setup["options"]["install_requires"], **setup["options.extras_require"]}
    return {group: read_requirements(text.splitlines()) for group, text in groups.items()}


def read_pins(python_version):
    """Returns {canonical name: [version, ...]} of constraints.txt on one Python."""
    pins = {}
    for pin in read_requirements((ROOT / "constraints.txt").read_text().splitlines()):
        if pin.marker is None or pin.marker.evaluate({"python_version": python_version}):
            (specifier,) = pin.specifier
            assert specifier.operator == "==", pin
            pins.setdefault(canonicalize_name(pin.name), []).append(specifier.version)
    return pins


def tracked_text_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if b"\0" not in content[:8192]:
                yield name, content.decode("utf-8", errors="replace")


def test_kernels_are_a_relative_symlink():
    link = ROOT / "jaxscale" / "kernels"
    assert link.is_symlink(), (
        "jaxscale/kernels is a copy; it must be a link: ln -s ../kernels jaxscale/kernels"
    )
    assert os.readlink(link) == "../kernels"


@pytest.mark.parametrize(
    "statement",
    [
        "import kernels.xla_attention",
        "from kernels import xla_attention",
        "from kernels.xla_attention import reference",
    ],
)
def test_the_bare_name_kernels_gives_no_second_copy_of_a_module(statement):
    done = python(statement)
    assert done.returncode
    assert "ImportError" in done.stderr or "ModuleNotFoundError" in done.stderr


# What transformers does before it uses the package named kernels: it takes the version of the
# installed package of that name, or else the module's, and compares.
PROBE = """
import importlib, importlib.metadata, importlib.util
from packaging import version

assert importlib.util.find_spec("kernels") is not None
try:
    found = importlib.metadata.version("kernels")
except importlib.metadata.PackageNotFoundError:
    found = getattr(importlib.import_module("kernels"), "__version__", "N/A")
print(version.parse(found) >= version.parse("0.0.1"))
"""


@pytest.mark.skipif(is_installed("kernels"), reason="the other package is installed")
def test_a_probe_for_the_other_package_named_kernels_does_not_fail_and_does_not_take_ours():
    done = python(PROBE)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.skipif(not is_installed("transformers"), reason="transformers is not installed")
@pytest.mark.skipif(is_installed("kernels"), reason="the other package is installed")
def test_transformers_can_be_imported_with_the_checkout_on_sys_path():
    done = python("import transformers; print(transformers.LlamaForCausalLM.__name__)")
    assert (done.returncode, done.stdout) == (0, "LlamaForCausalLM\n"), done.stderr


def test_tests_do_not_see_the_checkout_on_sys_path():
    assert importlib.util.find_spec("kernels") is None, (
        "run the tests as `pytest`, not `python -m pytest`"
    )


def test_jaxscale_is_imported_from_this_checkout_with_kernels_and_version():
    done = python(
        "import jaxscale, jaxscale.kernels as k; print(jaxscale.__version__); print(k.__file__)",
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    version, file = done.stdout.splitlines()
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", version)
    assert Path(file).resolve() == ROOT / "kernels" / "__init__.py"


@pytest.mark.parametrize("module", ["jaxscale", "jaxscale.kernels", "jaxscale.config"])
def test_importing_loads_no_jax(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    done = python(
        f"import sys, {module}; print(sorted({{'jax', 'flax', 'numpy.linalg'}} & set(sys.modules)))"
    )
    assert done.returncode == 0, done.stderr
    assert "jax" not in done.stdout and "flax" not in done.stdout, done.stdout


def test_every_folder_of_the_package_has_an_init_file():
    # `packages = find:` leaves a folder without one out of the wheel, and nothing says so.
    folders = {
        path.parent
        for package in ("jaxscale", "kernels")
        for path in (ROOT / package).rglob("*.py")
    }
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_project_tables_of_both_files_agree():
    import tomllib

    project, setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], read_setup()
    assert project["name"] == setup["metadata"]["name"]
    assert project["requires-python"] == setup["options"]["python_requires"]
    assert {"version", "dependencies", "optional-dependencies"} <= set(project["dynamic"])


@pytest.mark.parametrize("python_version", PYTHONS)
@pytest.mark.parametrize("group", read_groups())
def test_every_requirement_has_one_pin_that_satisfies_it(group, python_version):
    pins = read_pins(python_version)
    for requirement in read_groups()[group]:
        versions = pins.get(canonicalize_name(requirement.name), [])
        assert len(versions) == 1, (
            f"{requirement} has {versions or 'no version'} in constraints.txt"
        )
        assert requirement.specifier.contains(versions[0], prereleases=True), (
            f"{requirement} is pinned to {versions[0]}"
        )


@pytest.mark.parametrize("python_version", PYTHONS)
def test_no_name_is_pinned_twice(python_version):
    assert {
        name: versions for name, versions in read_pins(python_version).items() if len(versions) > 1
    } == {}


def test_cpu_users_get_no_triton():
    names = {
        r.name for group, rs in read_groups().items() if not group.startswith("cuda") for r in rs
    }
    assert not names & {"triton", "jax-triton"}


# By its shape: the list of a package's files, a file for an installer, or an option that names an
# index.
INDEX_ADDRESS = re.compile(
    r"""https?://[^\s'"<>]*/simple(?![\w.-])
    | https?://[^\s'"<>]*\.whl\b
    | (?<![a-z])index[-_]url\b
    | --(?:extra-|default-)?index[=\s]+\S*://
    | _index=\S*://
    | \b(?:registry|find[-_]links)\b['"]?\s*[:=\s]\s*['"]?https?://
    """,
    re.IGNORECASE | re.VERBOSE,
)
HOME_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|Users|root)/[\w.]+")
PATTERNS = {"package index": INDEX_ADDRESS, "home path": HOME_PATH}


@pytest.mark.parametrize("kind", PATTERNS)
def test_no_tracked_file_names_this_machine(kind):
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in tracked_text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if PATTERNS[kind].search(line) and name != "tests/test_packaging.py"
    ]
    assert found == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("package index", "--extra-index-url https://example.org/x"),
        ("package index", "index-url = https://example.org/x"),
        ("package index", "export TOOL_INDEX_URL=https://example.org/x"),
        ("package index", "TOOL_DEFAULT_INDEX=https://example.org/x"),
        ("package index", "tool --index=https://example.org/x install"),
        ("package index", "tool --default-index https://example.org/x"),
        ("package index", "https://example.org/api/simple"),
        ("package index", '"https://example.org/simple/jax/"'),
        ("package index", 'source = { registry = "https://example.org/a" }'),
        ("package index", "registry=https://example.org/a"),
        ("package index", "--find-links https://example.org/a"),
        ("package index", 'url = "https://example.org/a/b-1.0-py3-none-any.whl"'),
        ("home path", "see /home/ada/jaxscale/runs"),
        ("home path", '"/root/.cache/jax"'),
        ("home path", "file:///Users/ada/x"),
    ],
)
def test_the_patterns_see_a_planted_address(kind, text):
    assert PATTERNS[kind].search(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/simple-example.html",
        "https://example.org/jaxscale/index.html",
        "axis_index = 3",
        "--index 3",
        "a registry of models: see https://example.org",
    ],
)
def test_an_address_of_another_kind_is_let_be(text):
    assert not INDEX_ADDRESS.search(text)


def test_readme_stays_short():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("README.md is not written yet")
    assert len(readme.read_text().splitlines()) <= 200


@pytest.mark.parametrize(
    "path", CONFIG_FILES or [None], ids=lambda path: path.name if path else "none"
)
def test_config_file_imports_and_offers_get_config(path):
    if path is None:
        pytest.skip("no config files yet")
    spec = importlib.util.spec_from_file_location(f"configs_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.get_config)
