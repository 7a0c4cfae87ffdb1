"""What an installed jaxscale, its set-up files and a fresh clone promise."""

import configparser
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
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )


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


def test_the_bare_name_kernels_is_refused_with_the_right_one():
    done = python("import kernels")
    assert done.returncode
    assert "ImportError" in done.stderr
    assert "jaxscale.kernels" in done.stderr


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


INDEX_ADDRESS = re.compile(
    r"(?:extra-|default-)?index-url\s*=?|https?://[^\s'\"]*/(?:simple|pypi/)|https?://[^\s/'\"]*(?:registry|mirror|pypi|pythonhosted)",
    re.IGNORECASE,
)
HOME_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|Users|root)/[\w.]+")


@pytest.mark.parametrize("pattern", [INDEX_ADDRESS, HOME_PATH], ids=["package index", "home path"])
def test_no_tracked_file_names_this_machine(pattern):
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in tracked_text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line) and name != "tests/test_packaging.py"
    ]
    assert found == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (INDEX_ADDRESS, "--extra-index-url https://example.org/x"),
        (INDEX_ADDRESS, "https://packages.example.org/api/simple"),
        (INDEX_ADDRESS, "registry = https://mirror.example.org/a"),
        (HOME_PATH, "see /home/ada/jaxscale/runs"),
        (HOME_PATH, '"/root/.cache/jax"'),
        (HOME_PATH, "file:///Users/ada/x"),
    ],
)
def test_the_patterns_see_a_planted_address(pattern, text):
    assert pattern.search(text)


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
