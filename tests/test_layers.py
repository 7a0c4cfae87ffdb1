"""Imports point down: each part of the tree may use the layers below it.

So it can be read and tested without those above.
"""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = {
    "jaxscale": 0,  # the package itself: docstring and version
    "jaxscale.config": 0,
    "jaxscale.launch": 0,
    "jaxscale.files": 0,
    "jaxscale.warned": 0,
    "jaxscale.gpu_facts": 0,
    "jaxscale.watch": 1,
    "jaxscale.xla": 1,
    "jaxscale.sharding": 1,
    "jaxscale.kernels": 1,
    "jaxscale.distributed": 2,
    "jaxscale.ops": 2,
    "jaxscale.models": 3,
    "jaxscale.optim": 3,
    "jaxscale.schedules": 3,
    "jaxscale.data": 3,
    "jaxscale.checkpoint": 3,
    "jaxscale.metrics": 3,
    "jaxscale.parallel": 3,
    "jaxscale.command_line": 4,
    "jaxscale.step": 4,
    "jaxscale.compile": 5,
    "jaxscale.train": 6,
    "jaxscale.inference": 7,
    "jaxscale.perf": 8,
    "scripts": 9,
    "configs": 9,
    "tests": 10,  # nothing imports tests, and tests may look at everything
}

# Other people's packages that a part may import; parts without a line may import any. All may
# import the standard library.
ONLY = {"jaxscale": set(), "jaxscale.kernels": {"jax", "numpy", "jax_triton", "triton"}}
NEVER = {"jaxscale.config": {"jax", "jaxlib", "flax", "optax", "orbax", "grain"}}
# What measures training is no part of it: a config, although it is above, does not import it.
IMPORTERS = {"jaxscale.perf": {"jaxscale.perf", "scripts", "tests"}}
# At module level only: sharding reads flax metadata where it meets some, and works without flax.
NEVER_AT_IMPORT = {"jaxscale.sharding": {"flax"}}


@dataclass(frozen=True)
class Import:
    module: str  # absolute and dotted: the most precise name the statement gives
    line: int
    at_import: bool  # runs when the file is imported, not when a function is called


def source_files(root):
    """Yields (dotted module name, path).

    kernels/ counts as jaxscale.kernels; the symlink to it is not followed.
    """
    folders = {"jaxscale": "jaxscale", "kernels": "jaxscale.kernels"} | {
        top: top for top in ("scripts", "configs", "tests")
    }
    for folder, package in folders.items():
        for path in sorted((root / folder).rglob("*.py")):
            names = path.relative_to(root / folder).with_suffix("").parts
            if folder == "jaxscale" and names[0] == "kernels":
                continue  # rglob followed links before Python 3.13
            yield ".".join((package, *(names[:-1] if names[-1] == "__init__" else names))), path


def imports_of(path, module):
    """Returns every import in the file, also those inside functions and under TYPE_CHECKING."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []

    def visit(node, at_import):
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*parents, *filter(None, [base])))
            found.extend(
                Import(f"{base}.{alias.name}", node.lineno, at_import) for alias in node.names
            )
        for child in ast.iter_child_nodes(node):
            visit(
                child,
                at_import
                and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda),
            )

    visit(ast.parse(path.read_text(), str(path)), True)
    return found


def part_of(module, root):
    """Returns the part of the tree a module belongs to, as LAYERS names it.

    None for other people's modules.
    """
    names = module.split(".")
    if names[0] == "kernels":
        return "jaxscale.kernels"
    if names[0] == "jaxscale" and len(names) > 1:
        part = f"jaxscale.{names[1]}"
        is_module = part in LAYERS or any(
            (root / "jaxscale" / f"{names[1]}{end}").exists() for end in ("", ".py")
        )
        return part if is_module else "jaxscale"  # `from jaxscale import __version__`
    return names[0] if names[0] in LAYERS else None


def objection(part, imported, root):
    """Returns why `part` may not have this import, or None."""
    target, outside = part_of(imported.module, root), imported.module.split(".")[0]
    if target is None:
        if outside in sys.stdlib_module_names:
            return None
        if part in ONLY and outside not in ONLY[part]:
            allowed = ", ".join(sorted(ONLY[part])) or "nothing"
            return f"{part} may import {allowed} and the standard library only"
        if outside in NEVER.get(part, ()):
            return f"{part} must be importable without {outside}"
        if imported.at_import and outside in NEVER_AT_IMPORT.get(part, ()):
            return f"{part} may import {outside} inside functions only"
        return None
    if target not in LAYERS:
        return f"{target} has no layer yet: give it one in LAYERS"
    if imported.module.split(".")[0] == "kernels":
        return "the package is jaxscale.kernels"
    if part == "jaxscale.sharding" and target == "jaxscale.config":
        return (
            "other projects take jaxscale.sharding alone, so it takes plain arguments and no Config"
        )
    if part not in IMPORTERS.get(target, {part}):
        return f"{target} is imported by {' and '.join(sorted(IMPORTERS[target] - {target}))} only"
    if target == part or LAYERS[target] < LAYERS[part]:
        if part in ONLY and target not in (part, "jaxscale"):
            return f"{part} imports nothing else of jaxscale"
        return None
    return (
        f"{part} is layer {LAYERS[part]} and {target} is layer {LAYERS[target]}: imports point down"
    )


def violations(root):
    """Returns one line for each import that breaks a rule: 'path:line: import of X: reason'."""
    lines = []
    for module, path in source_files(root):
        part, place = part_of(module, root), path.relative_to(root)
        if part not in LAYERS:
            lines.append(f"{place}:1: {part} has no layer yet: give it one in LAYERS")
            continue
        for imported in imports_of(path, module):
            if reason := objection(part, imported, root):
                lines.append(f"{place}:{imported.line}: import of {imported.module}: {reason}")
    return lines


def write_tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_imports_point_down():
    assert violations(ROOT) == []


def test_the_checker_reads_this_tree():
    modules = {module for module, _ in source_files(ROOT)}
    assert {"jaxscale", "jaxscale.kernels", "tests.test_layers"} <= modules
    assert len(modules) == len(
        list(source_files(ROOT))
    )  # kernels/ once, not again through its symlink


ALLOWED = {
    "lower layer": (
        "jaxscale/ops/norm.py",
        "from jaxscale import sharding as shd\nfrom jaxscale.kernels import rms",
    ),
    "own package": (
        "jaxscale/models/mixtral.py",
        "from jaxscale.models import llama\nfrom . import layers",
    ),
    "relative, down": (
        "jaxscale/train/loop.py",
        "from .. import metrics\nfrom ..models.llama import Config",
    ),
    "flax inside a function of sharding": (
        "jaxscale/sharding.py",
        "def axes(tree):\n    from flax import nnx",
    ),
    "kernel": (
        "kernels/rms.py",
        "import functools\nimport jax.numpy as jnp\nimport jax_triton as jt\n"
        "import triton.language as tl",
    ),
    "kernel, its own package": ("kernels/rms.py", "from jaxscale.kernels import tiles"),
    "version": ("jaxscale/metrics.py", "from jaxscale import __version__"),
    "config": (
        "jaxscale/config.py",
        "import dataclasses, enum\nfrom ml_collections import config_dict",
    ),
    "a script that measures": ("scripts/x.py", "from jaxscale.perf import records"),
    "a test": ("tests/test_x.py", "from jaxscale import config, train\nimport scripts.train"),
    "a config file": (
        "configs/foo.py",
        "from jaxscale.config import Config\nfrom jaxscale.models import llama",
    ),
}

FORBIDDEN = {
    "up": ("jaxscale/ops/norm.py", "from jaxscale.models import llama"),
    "up, from the package": ("jaxscale/xla.py", "from jaxscale import train"),
    "up, inside a function": ("jaxscale/ops/norm.py", "def f():\n    import jaxscale.train.loop"),
    "up, for a type": (
        "jaxscale/parallel/pipeline.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..train import loop",
    ),
    "up, relative": ("jaxscale/data/loader.py", "from ..train import step"),
    "same layer, layer 4": ("jaxscale/optim/adamw.py", "from jaxscale.schedules import cosine"),
    "same layer, layer 0": ("jaxscale/config.py", "from jaxscale import xla"),
    "same layer, files": ("jaxscale/checkpoint.py", "from jaxscale.data import store"),
    "scripts above train": ("jaxscale/train/loop.py", "from scripts import train"),
    "tests": ("scripts/train.py", "import tests.conftest"),
    "configs and perf": ("configs/foo.py", "from jaxscale.perf import records"),
    "train and perf": ("jaxscale/train/loop.py", "from jaxscale.perf import records"),
    "sharding and config": ("jaxscale/sharding.py", "from jaxscale.config import MeshConfig"),
    "sharding and config, inside a function": (
        "jaxscale/sharding.py",
        "def f():\n    from . import config",
    ),
    "sharding and flax": ("jaxscale/sharding.py", "from flax import nnx"),
    "sharding and flax, in a try": (
        "jaxscale/sharding.py",
        "try:\n    import flax.nnx\nexcept ImportError:\n    pass",
    ),
    "sharding and flax, in a class body": ("jaxscale/sharding.py", "class Rules:\n    import flax"),
    "kernels and flax": ("kernels/rms.py", "import flax"),
    "kernels and the layer below": ("kernels/rms.py", "from jaxscale import xla"),
    "kernels and sharding": ("kernels/rms.py", "from jaxscale import sharding"),
    "config and jax": ("jaxscale/config.py", "def f():\n    import jax.numpy as jnp"),
    "config and optax": ("jaxscale/config.py", "import optax"),
    "the package and jax": ("jaxscale/__init__.py", "import jax"),
    "the package and a part": ("jaxscale/__init__.py", "from jaxscale import sharding"),
    "the bare kernels": ("jaxscale/ops/norm.py", "from kernels import rms"),
    "a part without a layer": ("jaxscale/utils.py", "import os"),
    "import of a part without a layer": ("jaxscale/ops/norm.py", "from jaxscale import misc"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_an_allowed_import_passes(case, tmp_path):
    name, text = ALLOWED[case]
    assert violations(write_tree(tmp_path, {name: text})) == []


@pytest.mark.parametrize("case", FORBIDDEN)
def test_a_planted_violation_is_reported_once_with_its_line(case, tmp_path):
    name, text = FORBIDDEN[case]
    write_tree(
        tmp_path, {name: text, "jaxscale/misc/__init__.py": "" if "misc" in text else "import os"}
    )
    reported = [line for line in violations(tmp_path) if "misc/__init__" not in line]
    assert len(reported) == 1, reported
    assert reported[0].startswith(f"{name}:")
