"""The tests' own sharing of programs gives what compiling gives."""

import jax
import numpy as np
import pytest
from jax._src import compiler

from tests.compiled_once import compiled_once


@pytest.fixture
def compiled(monkeypatch):
    """Names of the programs that are compiled."""
    compile, names = compiler.backend_compile_and_load, []

    def noting(backend, module, *arguments):
        names.append(module.operation.attributes["sym_name"].value)
        return compile(backend, module, *arguments)

    monkeypatch.setattr(compiler, "backend_compile_and_load", noting)
    with compiled_once():
        yield names


def times(factor):
    def product(x):
        return x * np.float32(factor)

    return product


def test_equal_programs_are_compiled_once_and_others_are_not_taken_for_them(compiled):
    given = [float(jax.jit(times(factor))(np.float32(3))) for factor in (1.25, 1.5, 1.25)]
    assert given == [3.75, 4.5, 3.75] and compiled == ["jit_product"] * 2


def test_another_option_of_the_compiler_another_device_or_shape_makes_another_program(compiled):
    options = {"xla_cpu_enable_fast_min_max": False}
    for _ in range(2):
        jax.jit(times(2))(np.float32(3))
        jax.jit(times(2), compiler_options=options)(np.float32(3))
        with jax.default_device(jax.devices()[-1]):
            x = jax.jit(times(2))(np.float32(3))
        assert x.devices() == {jax.devices()[-1]}
        jax.jit(times(2))(np.ones(2, np.float32))
    assert len(compiled) == 4
