"""Triton programs where no GPU is: jax-triton's call, answered by Triton's interpreter.

Triton chooses between compiling and interpreting when it is imported, by TRITON_INTERPRET. So a
test file runs itself once more in a process of its own (`run_interpreted`), where `install` has
taken jax-triton's place; on a GPU the same tests call the compiled programs.

Rounding is ml_dtypes', as the interpreter's own rounds ties upwards; of inline assembly it knows
what `quantize_triton._word` does, and roots and quotients, which it rounds as NumPy does.
"""

import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

IS_GPU = jax.default_backend() == "gpu"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = bool(importlib.util.find_spec("triton") and importlib.util.find_spec("jax_triton"))

runs_programs = pytest.mark.skipif(
    not (HAS_TRITON and (IS_GPU or IS_INTERPRETED)),
    reason="needs a GPU or TRITON_INTERPRET=1, and jax-triton",
)
# In a process that is none of the interpreter's.
starts_interpreter = pytest.mark.skipif(
    not HAS_TRITON or IS_GPU or IS_INTERPRETED, reason="needs triton, and no GPU"
)

NAMES: dict[str, Any] = dict(
    bf16=ml_dtypes.bfloat16,
    fp16=np.float16,
    fp32=np.float32,
    fp8e4nv=ml_dtypes.float8_e4m3fn,
    fp8e5=ml_dtypes.float8_e5m2,
    i8=np.int8,
    u8=np.uint8,
    i32=np.int32,
    u32=np.uint32,
)


def run_interpreted(path: str) -> None:
    """The tests of this file that `runs_programs` marks, interpreted. Fails as they do."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    pytest_path = Path(sys.executable).with_name("pytest")
    command = [str(pytest_path), "-q", "-x", path]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout


def install() -> None:
    """Takes jax-triton's place in this process, where IS_INTERPRETED."""
    if not (IS_INTERPRETED and HAS_TRITON):
        return
    from triton.runtime import interpreter

    module: Any = types.ModuleType("jax_triton")
    module.triton_call = _triton_call
    sys.modules["jax_triton"] = module
    interpreter._convert_float = _converted
    interpreter.InterpreterBuilder.create_inline_asm = _assembled
    interpreter.ReduceOps.generic_reduce = _reduced


class _Array:
    """What the interpreter asks of a tensor, around NumPy's."""

    def __init__(self, values: np.ndarray):
        self.values = np.array(values, order="C")
        by_dtype = {np.dtype(dtype): name for name, dtype in NAMES.items()}
        self.dtype = by_dtype[self.values.dtype]

    def data_ptr(self) -> int:
        return self.values.ctypes.data_as(ctypes.c_void_p).value or 0

    # As a storage of its own, which is on the CPU already.
    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return _View(self)

    def copy_(self, other):
        assert other is self

    def storage_offset(self):
        return 0

    size = stride = storage_offset


class _View:
    def __init__(self, array: _Array):
        self.array, self.dtype = array, array.dtype

    def set_(self, *_):
        pass

    def data_ptr(self) -> int:
        return self.array.data_ptr()

    def untyped_storage(self):
        return self.array


def _triton_call(*args, kernel, out_shape, grid, input_output_aliases=None, **settings):
    for name in ("num_warps", "num_stages", "compute_capability", "name"):
        settings.pop(name, None)
    shapes, tree = jax.tree.flatten(out_shape)
    given = [a if isinstance(a, int | float) else _Array(np.asarray(a)) for a in args]
    # Filled with what no program writes: what is left of it is seen.
    made = [_Array(np.full(s.shape, 77, np.uint8).astype(s.dtype)) for s in shapes]
    for source, target in (input_output_aliases or {}).items():
        made[target] = given[source]
    kernel[grid](*given, *made, **settings)
    return jax.tree.unflatten(tree, [jax.numpy.asarray(array.values) for array in made])


def _converted(values, source, target, _):
    wide = np.asarray(values).view(NAMES[source.name])
    with np.errstate(all="ignore"):
        narrow = wide.astype(np.float32).astype(NAMES[target.name])
    return narrow.view(getattr(np, f"uint{target.primitive_bitwidth}")).reshape(values.shape)


def _assembled(self, assembly, _, values, kinds, *__):
    from triton.runtime.interpreter import TensorHandle

    numbers = [value.data for value in values]
    if assembly.startswith("sqrt."):
        made = np.sqrt(*numbers)
    elif assembly.startswith("div."):
        made = np.divide(*numbers)
    else:
        made = _word(assembly, numbers)
    return types.SimpleNamespace(get_result=lambda _: TensorHandle(made, kinds[0].scalar))


def _word(assembly: str, numbers: list[np.ndarray]) -> np.ndarray:
    dtype = ml_dtypes.float8_e4m3fn if "e4m3x2" in assembly else ml_dtypes.float8_e5m2
    assert assembly.count(".rn.satfinite.e") == 2
    word = np.zeros(numbers[0].shape, np.uint32)
    for place, value in enumerate(numbers):
        word |= value.astype(dtype).view(np.uint8).astype(np.uint32) << (8 * place)
    return word


def _reduced(self, inputs):
    """By slices; the interpreter goes from number to number, a second a tile."""
    (x,) = inputs
    parts = np.moveaxis(x.handle.data, self.axis, 0)
    tensors = (self.to_tensor(part, x.dtype) for part in parts)
    data = functools.reduce(self.combine_fn.fn, tensors).handle.data
    return [self.to_tensor(np.expand_dims(data, self.axis) if self.keep_dims else data, x.dtype)]
