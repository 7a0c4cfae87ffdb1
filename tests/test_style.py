"""Functions take at most two positional parameters, and a file explains the dims that it uses."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("jaxscale", "kernels", "scripts", "configs")

MAX_POSITIONAL = 2
# A tensor with its dims, as in q_BSNH, or one of any shape.
DIMS = re.compile(r"^[a-z][a-z0-9_]*_([A-Z][A-Za-z0-9]*)$")
TENSOR_OF_ANY_SHAPE = "x"

# Functions whose callers are not ours, and who calls them.
CALLBACKS = {
    "jaxscale/parallel/layer_gradients.py:LayerGradients._closed.backward": "jax.make_jaxpr",
    "jaxscale/step/stages.py:held_out_loss.on_stage": "jax.shard_map",
    "jaxscale/step/stages.py:loss_and_gradients.on_stage": "jax.shard_map",
    "jaxscale/ops/loss.py:_cross_entropy_bwd": "jax.custom_vjp",
    "jaxscale/ops/norm.py:_normed_bwd": "jax.custom_vjp",
    "kernels/cudnn_attention.py:_attention_bwd": "jax.custom_vjp",
    "kernels/flash_attention.py:_attention_bwd": "jax.custom_vjp",
    "jaxscale/sharding.py:_map_described.of_names": "jax.tree_util.tree_map_with_path",
    "jaxscale/step/layout.py:landing_of.lands": "jax.tree.map",
    "jaxscale/step/layout.py:hold.held": "jax.tree.map",
    "jaxscale/optim/adamw.py:Config._scale_by_adam.update": "optax.chain",
    "jaxscale/optim/adamw8bit.py:Config._scale_by_adam.update": "optax.chain",
    "jaxscale/optim/adamw8bit.py:Config._clip.update": "optax.chain",
    "jaxscale/optim/adamw8bit.py:Config._moved.local": "jax.shard_map",
}
# ops/layers.py calls what a stack's layers compute by position, (x, weights, shared, execution): a
# protocol of all families, which jax.checkpoint and jax.lax.scan want so.
BLOCK = "block"
# Triton's programs have no keyword-only parameters, and take tensors as pointers: dozens.
TRITON = "triton.jit"


def source_files(root):
    """Those of the folders; the symlink jaxscale/kernels is not followed."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if not path.is_relative_to(root / "jaxscale" / "kernels"):
                yield path


def functions_of(node, prefix=""):
    """Yields (dotted name, definition) of every function, nested ones and methods too."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{prefix}{child.name}."
            if not isinstance(child, ast.ClassDef):
                yield f"{prefix}{child.name}", child
        yield from functions_of(child, inner)


def is_counted(parameter):
    return not (parameter in ("self", "cls", TENSOR_OF_ANY_SHAPE) or DIMS.fullmatch(parameter))


def long_signatures(place, tree):
    """A line for each function with too many positional parameters."""
    for name, function in functions_of(tree):
        last = name.rpartition(".")[2]
        parameters = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        counted = [parameter for parameter in parameters if is_counted(parameter)]
        is_method = re.fullmatch(f"__.*__|{BLOCK}", last) is not None
        is_kernel = TRITON in map(ast.unparse, function.decorator_list)
        is_exempt = is_method or is_kernel or f"{place}:{name}" in CALLBACKS
        if len(counted) > MAX_POSITIONAL and not is_exempt:
            yield (
                f"{place}:{function.lineno}: {name} takes {', '.join(counted)} by position: "
                "make all but the first two keyword-only"
            )


def unexplained_dims(place, tree):
    """A line for each capital of a tensor's dims that the file's docstring does not explain."""
    legend = ast.get_docstring(tree) or ""
    used: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.arg):
            continue
        name = node.id if isinstance(node, ast.Name) else node.arg
        if match := DIMS.fullmatch(name):
            for letter in re.findall("[A-Z]", match[1]):
                used.setdefault(letter, f"{place}:{node.lineno}: {name}")
    for letter, where in sorted(used.items()):
        # "B rows", and "N = K * G".
        if not re.search(rf"(?<!\w){letter} (?:=|(?!and\b|or\b)[a-z])", legend):
            yield f"{where}: the docstring at the top does not say what {letter} is"


def violations(root):
    """Lines 'path:line: what is wrong'."""
    lines = []
    for path in source_files(root):
        place, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text(), str(path))
        lines += [*long_signatures(place, tree), *unexplained_dims(place, tree)]
    return lines


def test_signatures_are_short_and_dims_are_explained():
    assert violations(ROOT) == []


def test_every_callback_is_there():
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{name}"
        for path in source_files(ROOT)
        for name, _ in functions_of(ast.parse(path.read_text()))
    }
    assert CALLBACKS.keys() - found == set()


GOOD = {
    "two": "def f(a, b, *, c, d): pass",
    "tensors": '"""B rows, S sequence, N = 3."""\ndef f(q_BSN, k_BSN, x, scale, window=None): pass',
    "a method": "class A:\n    def f(self, a, b): pass",
    "dunder": "class A:\n    def __exit__(self, kind, error, traceback): pass",
    "a block": '"""B rows."""\ndef block(x_B, weights, shared, execution): pass',
    "any number": "def f(*a, **b): pass",
    "constants and types": "MAX_SIZE: Some_Type = 3",
}
BAD = {
    "three": "def f(a, b, c): pass",
    "defaults": "def f(a, b=1, c=2): pass",
    "positional only": "def f(a, b, /, c): pass",
    "a method": "class A:\n    def f(self, a, b, c): pass",
    "nested": "def f():\n    def g(a, b, c): pass",
    "no legend": "def f(x_B): pass",
    "a letter of the legend": '"""B rows, S sequence."""\ny_BD = 1',
    "no explanation": '"""B and D are axes, D model."""\ny_B = 1',
}


@pytest.mark.parametrize("case", GOOD)
def test_what_keeps_the_rules_passes(case, tmp_path):
    write(tmp_path, GOOD[case])
    assert violations(tmp_path) == []


@pytest.mark.parametrize("case", BAD)
def test_a_planted_violation_is_reported_once_with_its_line(case, tmp_path):
    write(tmp_path, BAD[case])
    (line,) = violations(tmp_path)
    last = len(BAD[case].splitlines())
    assert line.startswith(f"scripts/planted.py:{last}: ")


def write(root, text):
    (root / "scripts").mkdir()
    (root / "scripts" / "planted.py").write_text(text)
