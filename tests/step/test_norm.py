"""With norms by a kernel a layout trains as one device does without: the kernel's arithmetic in
plain jnp, as no CPU runs it."""

import logging
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import warned
from jaxscale.compile.fit import compile_only
from jaxscale.config import Norm, PrecisionConfig, Recipe
from jaxscale.kernels import rms_norm, triton_calls
from jaxscale.ops import norm
from jaxscale.ops.execution import Execution
from jaxscale.ops.fp8 import fp8_of
from jaxscale.step.update import update
from tests.step.alike import assert_trains_like
from tests.step.conftest import make_plan, small_config
from tests.step.test_families import MODELS

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": dict(num_devices=1),
    "nothing made again": dict(num_devices=1, remat="none"),
    "zero1": dict(fsdp=8, zero=1),
    "zero3, unrolled": dict(fsdp=8, scan_unroll=2, remat="gemms_lean"),
    "unrolled, as XLA keeps it": dict(fsdp=8, scan_unroll=2, remat="gemms"),
    "hsdp zero2 accumulated": dict(data=4, fsdp=2, zero=2, grad_accumulation=2, remat="full"),
    "fsdp tp sp": dict(fsdp=4, tensor=2),
    "fsdp tp sp auto": dict(fsdp=4, tensor=2, axis_types="auto"),
    "async tensor": dict(fsdp=4, tensor=2, async_tensor="halves"),
    "in a ring": dict(fsdp=4, tensor=2, async_tensor="ring"),
    "fsdp context": dict(fsdp=4, context=2),
    "stages, data": dict(data=4, fsdp=1, stage=2, grad_accumulation=4),
    "stages, tensor": dict(fsdp=2, tensor=2, stage=2, grad_accumulation=4, remat="gemms_lean"),
}


@pytest.fixture
def kernel(monkeypatch):
    """Its functions in plain jnp, which count their calls."""

    def forward(x, scale, *, eps, compute_capability):
        assert compute_capability == "9.0"
        squares = jnp.square(x.astype(jnp.float32)).mean(axis=-1)
        return rms_norm.reference(x, scale, eps=eps), jax.lax.rsqrt(squares + eps)

    def forward_of_sum(x, added, scale, *, eps, compute_capability):
        x = x + added
        return x, forward(x, scale, eps=eps, compute_capability=compute_capability)

    def backward(x, scale, inverse, of_x, grad, *, compute_capability):
        assert compute_capability == "9.0"
        normed, of_normed = x * inverse[..., None], grad * scale
        dscale = (grad * normed).sum(axis=range(x.ndim - 1))
        mean = (of_normed * normed).mean(axis=-1, keepdims=True)
        return of_x + (of_normed - normed * mean) * inverse[..., None], dscale

    functions = dict(forward=forward, forward_of_sum=forward_of_sum, backward=backward)
    calls = {name: mock.Mock(wraps=function) for name, function in functions.items()}
    for name, call in calls.items():
        monkeypatch.setattr(rms_norm, name, call)
    monkeypatch.setattr(rms_norm, "supported", lambda *_, **__: None)
    return calls


def assert_same_start(here, alone):
    for name, value in alone.initial.items():
        np.testing.assert_array_equal(here.initial[name], value, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_device_without_the_kernel(run, layout, kernel):
    alone = run(1, norm=Norm.XLA)
    here = run(**LAYOUTS[layout], norm=Norm.TRITON)
    assert all(call.called for call in kernel.values())
    assert_same_start(here, alone)
    assert_trains_like(here, alone)


@pytest.mark.parametrize("model", ["gemma 2", "qwen 2"])
def test_so_does_another_family(run, model, kernel):
    alone = run(1, model=MODELS[model], norm=Norm.XLA)
    here = run(model=MODELS[model], fsdp=4, tensor=2, norm=Norm.TRITON)
    assert all(call.called for call in kernel.values())
    assert_same_start(here, alone)
    assert_trains_like(here, alone)


def num_products(**changes) -> int:
    """Of the compiled update."""
    compiled = compile_only(update, make_plan(small_config(**changes), 1))
    return (compiled.as_text() or "").count(" dot(")


@pytest.mark.parametrize("remat", ["full", "attention", "gemms"])
@pytest.mark.parametrize("scan_unroll", [1, 2])
def test_no_product_is_made_again_for_a_norm(kernel, remat, scan_unroll):
    """The norm behind a sum is made again from the sum, not from what was added."""
    changes: dict[str, Any] = dict(remat=remat, scan_unroll=scan_unroll)
    expected = num_products(**changes, norm=Norm.XLA)
    assert 20 < num_products(**changes, norm=Norm.TRITON) <= expected


# Which it is.

BFLOAT16 = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
FP8 = fp8_of(PrecisionConfig(recipe=Recipe.FP8_ROWWISE))


def chosen(*, wanted=Norm.AUTO, platform="gpu", fp8=None):
    return norm.choose(BFLOAT16, Execution(norm=wanted, platform=platform, fp8=fp8))


def test_auto_is_the_kernel_where_it_runs_and_xla_with_products_in_8_bits(monkeypatch):
    monkeypatch.setattr(triton_calls, "missing", lambda: None)
    assert chosen() == Norm.TRITON
    assert chosen(fp8=FP8) == Norm.XLA
    assert chosen(fp8=FP8, wanted=Norm.TRITON) == Norm.TRITON
    assert chosen(wanted=Norm.XLA) == Norm.XLA


def test_auto_is_xla_elsewhere_and_says_so_on_a_gpu(monkeypatch, caplog):
    monkeypatch.setattr(triton_calls, "missing", lambda: "it needs triton")
    warned.once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert chosen(platform="cpu") == Norm.XLA
        assert caplog.messages == []
        assert chosen() == chosen() == Norm.XLA
    assert caplog.messages == [
        "XLA norms the residual stream, in more than one pass back: it needs triton"
    ]


def test_a_kernel_that_cannot_run_is_refused():
    with pytest.raises(ValueError) as raised:
        compile_only(update, make_plan(small_config(norm=Norm.TRITON), 1))
    assert str(raised.value) == (
        "config.norm='triton' cannot run: it needs an NVIDIA GPU, not cpu; set config.norm='auto'"
    )
