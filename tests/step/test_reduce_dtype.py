"""Gradients summed over devices in float32: `config.mesh.reduce_dtype`."""

from typing import Any

import numpy as np
import pytest

from jaxscale import config as run_config
from jaxscale import sharding as shd
from jaxscale.compile import fit
from jaxscale.models import llama
from jaxscale.optim import adamw
from jaxscale.schedules import cosine
from jaxscale.step.feed import abstract_batch
from jaxscale.step.plan import plan_of_run
from jaxscale.step.update import update
from tests.step.conftest import SIZES

# With both norms and biases, so that there is a leaf of each kind.
MODEL = llama.Config(**SIZES, num_layers=2, qk_norm=True, qkv_bias=True)
BFLOAT16: dict[str, Any] = dict(dtype="bfloat16", model=MODEL)

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": dict(fsdp=8),
    "zero3 auto": dict(fsdp=8, axis_types="auto"),
    "zero3 unrolled, weights kept": dict(fsdp=8, scan_unroll=2, reshard_after_forward=False),
    "zero1": dict(fsdp=8, zero=1),
    "zero1 unrolled, lean": dict(fsdp=8, zero=1, scan_unroll=2, remat="attention"),
    "zero2 without remat": dict(fsdp=8, zero=2, remat="none"),
    "hsdp": dict(data=2, fsdp=4),
    "hsdp auto": dict(data=2, fsdp=4, axis_types="auto"),
}
TENSOR_LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp tp sp": dict(fsdp=4, tensor=2),
    "tp4 sp over 2 key heads": dict(fsdp=2, tensor=4),
    "tp4 sp over 2 key heads auto": dict(fsdp=2, tensor=4, axis_types="auto"),
}


@pytest.fixture
def errors(run):
    """`errors(**layout)`: how far each block weight's first gradient is from one device's.

    As a share of its norm.
    """

    def errors(**layout) -> dict[str, float]:
        alone = _first_gradients(run(1, **BFLOAT16, reduce_dtype="float32"))
        here = _first_gradients(run(8, **BFLOAT16, **layout))
        names = [name for name in alone if ".layers." in name]
        assert len(names) == 10
        return {name: _distance(here[name], alone[name]) for name in names}

    return errors


def _first_gradients(run) -> dict[str, np.ndarray]:
    """A tenth of them: Adam's first moments, without the clipping to a global norm of 1."""
    scale = max(run.grad_norms[0], 1.0)
    return {name: scale * moment for name, moment in run.first_moments.items()}


def _distance(here, there) -> float:
    return float(np.linalg.norm(here - there) / np.linalg.norm(there))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_in_float32_make_the_gradients_of_one_device(errors, layout):
    # The rows are split and no product is: nothing but the sums over devices differs, by 2e-7 (jax
    # 0.10.2 and 0.11.2).
    for name, error in errors(**LAYOUTS[layout], reduce_dtype="float32").items():
        assert error < 1e-6, name


def is_vector(name: str) -> bool:
    """Of each layer."""
    return "norm" in name or "bias" in name


def test_sums_in_bfloat16_do_not_make_those_of_matrices(errors):
    matrices = {name: error for name, error in errors(fsdp=8).items() if not is_vector(name)}
    assert len(matrices) == 5
    for name, error in matrices.items():
        assert 1e-3 < error < 1e-2, name


def test_gradients_of_vectors_are_summed_in_float32_always(errors):
    vectors = {name: error for name, error in errors(fsdp=8).items() if is_vector(name)}
    assert len(vectors) == 5
    for name, error in vectors.items():
        assert error < 1e-6, name


@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
def test_with_tensor_parallelism_the_gradients_round_as_its_activations_do(errors, layout):
    # Partial products are summed over `tensor` in bfloat16, which rounds at 4e-3: 1e-3 to 7e-3 is
    # left of a gradient.
    for name, error in errors(**TENSOR_LAYOUTS[layout], reduce_dtype="float32").items():
        assert error < 1e-2, name


def program(dtype: str, **mesh) -> str:
    """The update's, before XLA."""
    config = run_config.Config(
        model=MODEL,
        optim=adamw.Config(),
        schedule=cosine.Config(peak=1e-3, warmup_steps=2),
        steps=5,
        batch_size=16,
        seq_len=32,
        dtype=run_config.Dtype(dtype),
        mesh=run_config.MeshConfig(**mesh),
    )
    plan = plan_of_run(config)
    with shd.use(plan.mesh, plan.rules):
        lowered = fit.jit_update(update, plan).lower(plan.state, abstract_batch(plan))
    return lowered.as_text()


@pytest.mark.parametrize(
    "layout", [LAYOUTS["zero3"], LAYOUTS["hsdp auto"], *TENSOR_LAYOUTS.values()]
)
def test_a_float32_run_is_the_same_program(layout):
    assert program(dtype="float32", reduce_dtype="float32", **layout) == program(
        dtype="float32", **layout
    )


def test_a_bfloat16_run_is_not():
    assert program(dtype="bfloat16", reduce_dtype="float32", fsdp=8) != program(
        dtype="bfloat16", fsdp=8
    )
