"""Which attention runs, and that it says no rather than run out of memory."""

import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import warned
from jaxscale.config import Attention
from jaxscale.kernels import cudnn_attention, flash_attention, hopper, xla_attention
from jaxscale.ops.attention import attention
from jaxscale.ops.attention import choose as choose_kernel
from jaxscale.ops.documents import Documents, documents_of
from jaxscale.ops.execution import Execution


def shapes(seq=8192, dtype=jnp.bfloat16, heads=8, kv_heads=2, size=64):
    return jax.ShapeDtypeStruct((1, seq, heads, size), dtype), jax.ShapeDtypeStruct(
        (1, seq, kv_heads, size), dtype
    )


def choose(kind, *shapes, cap=None, v_head_size=None, **hardware):
    execution = Execution(attention=kind, **hardware)
    return choose_kernel(*shapes, execution=execution, cap=cap, v_head_size=v_head_size)


def choose_in_parts(kind=Attention.AUTO, **settings):
    execution = Execution(attention=kind, platform="gpu", **settings)
    return choose_kernel(*shapes(), execution=execution, in_parts=True)


HAS_FLASH = jax.__version_info__ >= hopper.JAX


def test_a_cpu_gets_xla_and_a_hopper_gpu_gets_the_kernel_of_ours_and_others_cudnn():
    ours = flash_attention if HAS_FLASH else cudnn_attention
    assert choose(Attention.AUTO, *shapes(), platform="cpu") == xla_attention
    assert choose(Attention.AUTO, *shapes(), platform="gpu") == ours
    assert choose(Attention.AUTO, *shapes(size=256), platform="gpu") == ours
    assert choose_in_parts() == ours
    blackwell = dict(platform="gpu", compute_capability="10.0")
    assert choose(Attention.AUTO, *shapes(), **blackwell) == cudnn_attention


@pytest.mark.skipif(not HAS_FLASH, reason="the jax is too old for the kernel of ours")
def test_what_must_repeat_its_bits_has_no_parts_by_cudnn():
    assert choose_in_parts(deterministic=True) == flash_attention
    with pytest.raises(ValueError, match=r"config\.attention='cudnn' cannot run: .*deterministic"):
        choose_in_parts(Attention.CUDNN, deterministic=True)


@pytest.mark.skipif(not HAS_FLASH, reason="says no for another reason: the jax is too old")
@pytest.mark.parametrize(
    ("shape", "hardware", "reason"),
    [
        (dict(), dict(platform="cpu"), "needs an NVIDIA GPU, not cpu"),
        (dict(), dict(compute_capability="8.0"), "compute capability 9.0, not 8.0"),
        (dict(dtype=jnp.float32), {}, "takes bfloat16, not float32"),
        (dict(size=96), {}, "head sizes 64, 128, 192/128, 256, not 96"),
        (dict(size=192), {}, "head sizes 64, 128, 192/128, 256, not 192"),
        (dict(heads=9), {}, "num_heads=9 is not a multiple of num_kv_heads=2"),
    ],
)
def test_asking_for_flash_where_it_cannot_run_is_refused_with_the_reason(shape, hardware, reason):
    with pytest.raises(ValueError, match=rf"config\.attention='flash' cannot run: .*{reason}"):
        choose(Attention.FLASH, *shapes(**shape), **({"platform": "gpu"} | hardware))


@pytest.mark.parametrize("bad", [dict(dtype=jnp.float32), dict(size=60), dict(size=512)])
def test_a_long_sequence_on_a_gpu_never_falls_back_to_quadratic_memory(bad):
    assert cudnn_attention.supported(*shapes(**bad), platform="gpu")
    with pytest.raises(ValueError, match=r"config\.seq_len=8192.*config\.attention='xla'"):
        choose(Attention.AUTO, *shapes(**bad), platform="gpu")
    assert choose(Attention.AUTO, *shapes(seq=1024, **bad), platform="gpu") == xla_attention
    assert choose(Attention.XLA, *shapes(**bad), platform="gpu") == xla_attention


def test_a_gpu_before_hopper_is_told_why_it_gets_no_cudnn():
    with pytest.raises(ValueError, match="compute capability 9.0.*not 8.0"):
        choose(Attention.AUTO, *shapes(), platform="gpu", compute_capability="8.0")


def test_a_short_sequence_that_runs_as_xla_on_a_gpu_says_so_once(caplog):
    warned.once.cache_clear()
    for _ in range(2):
        choose(Attention.AUTO, *shapes(seq=256, size=60), platform="gpu")
    (record,) = caplog.records
    assert record.message.startswith("attention runs as plain XLA operations: flash attention ")
    assert record.message.endswith("; head_size=60 is not a multiple of 8 up to 256")


def test_asking_for_cudnn_where_it_cannot_run_is_refused_with_the_reason():
    with pytest.raises(
        ValueError,
        match=r"config\.attention='cudnn' cannot run: cuDNN needs an NVIDIA GPU, not cpu",
    ):
        choose(Attention.CUDNN, *shapes(), platform="cpu")


def test_document_lengths_count_tokens_and_leave_padding_out():
    segments = jnp.array([[1, 1, 2, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]], jnp.int32)
    assert documents_of(segments, segments, max_documents=4).lengths_BM.tolist() == [
        [2, 3, 1, 0],
        [8, 0, 0, 0],
    ]


def test_heads_that_key_heads_do_not_divide_run_nowhere():
    for kind in (Attention.CUDNN, Attention.XLA):
        with pytest.raises(ValueError, match="num_heads=9 is not a multiple of num_kv_heads=2"):
            choose(kind, *shapes(heads=9), platform="gpu")


def test_a_soft_cap_runs_as_xla_and_is_refused_where_that_takes_quadratic_memory():
    blackwell = dict(platform="gpu", compute_capability="10.0")
    assert choose(Attention.AUTO, *shapes(seq=1024), cap=50.0, **blackwell) == xla_attention
    with pytest.raises(ValueError, match="seq_len=8192: .*cuDNN attention has no soft cap"):
        choose(Attention.AUTO, *shapes(), cap=50.0, **blackwell)
    with pytest.raises(ValueError, match="config.attention='cudnn' cannot run: .* no soft cap"):
        choose(Attention.CUDNN, *shapes(), cap=50.0, platform="gpu")


@pytest.mark.skipif(not HAS_FLASH, reason="this jax is too old for the kernel of ours")
def test_on_a_hopper_gpu_a_soft_cap_or_values_of_another_head_size_get_the_kernel_of_ours():
    for size in (64, 128, 256):
        assert choose(Attention.AUTO, *shapes(size=size), cap=50.0, platform="gpu") == (
            flash_attention
        )
    latent = dict(v_head_size=128, platform="gpu")
    assert choose(Attention.AUTO, *shapes(size=192), **latent) == flash_attention
    with pytest.raises(ValueError, match="cuDNN attention is bound for one head size.*192/128"):
        choose(Attention.CUDNN, *shapes(size=192), **latent)
    assert choose(Attention.FLASH, *shapes(size=256), platform="gpu") == flash_attention
    with pytest.raises(ValueError, match="seq_len=8192: .*head sizes .*, not 96; .*no soft cap"):
        choose(Attention.AUTO, *shapes(size=96), cap=50.0, platform="gpu")


def test_values_may_have_a_head_size_of_their_own():
    key = jax.random.key(0)
    q, k = (jax.random.normal(key, (1, 16, n, 12)) for n in (4, 2))
    v = jax.random.normal(key, (1, 16, 2, 8))
    segments = jnp.ones((1, 16), jnp.int32)
    documents = documents_of(segments, segments, max_documents=1)
    options: dict[str, Any] = dict(documents=documents, execution=Execution(platform="cpu"))
    out = attention(q, k, v, **options)
    padded = attention(q, k, jnp.pad(v, [(0, 0)] * 3 + [(0, 4)]), **options)
    assert out.shape == (1, 16, 4, 8)
    np.testing.assert_allclose(out, padded[..., :8], rtol=1e-6)


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


def rows(*rows, dtype=jnp.int32):
    return jnp.asarray(rows, dtype)


# What stands in place of an array or option that fits.
MISTAKES: dict[str, dict[str, Any]] = {
    "q has the shape (8, 4, 64); it must be [rows, tokens, heads,": dict(q=zeros(8, 4, 64)),
    "q is int32; it must be of floats": dict(q=zeros(2, 8, 4, 64, dtype=jnp.int32)),
    "k is float32; it must be bfloat16 as q": dict(k=zeros(2, 8, 2, 64, dtype=jnp.float32)),
    "k has 2 rows of 9 tokens; it must have those of q, 2 rows of 8": dict(k=zeros(2, 9, 2, 64)),
    "k has the head size 32; it must have that of q, 64": dict(k=zeros(2, 8, 2, 32)),
    "v has 2 rows of 8 tokens and 1 heads; it must have": dict(v=zeros(2, 8, 1, 64)),
    "q has 3 heads and k 2; those of q must be a multiple": dict(q=zeros(2, 8, 3, 64)),
    "segments has the shape (2, 4); it must be (2, 8)": dict(segments=rows([1] * 4, [1] * 4)),
    "segments is float32": dict(segments=rows([1] * 8, [1] * 8, dtype=jnp.float32)),
    "document 1 in 2 places of row 1": dict(segments=rows([1] * 8, [1, 1, 2, 2, 1, 1, 0, 0])),
    "the number -1 in row 0; documents are": dict(segments=rows([-1] * 8, [1] * 8)),
    "document 1 behind 2 in row 1": dict(segments=rows([1] * 8, [2, 2, 2, 1, 1, 3, 0, 0])),
    "v has the shape (2, 8, 2, 0); no size": dict(v=zeros(2, 8, 2, 0)),
    "scale=0.0; it must be over 0": dict(scale=0.0),
    "scale=-0.125; it must be over 0": dict(scale=-0.125),
    "window=0; it must be 1 or more": dict(window=0),
    "cap=0.0; it must be over 0": dict(cap=0.0),
}


@pytest.mark.parametrize("is_kernel", [False, True])
@pytest.mark.parametrize("message", MISTAKES)
def test_arrays_that_do_not_belong_together_are_refused_by_name(message, is_kernel):
    fitting = dict(q=zeros(2, 8, 4, 64), k=zeros(2, 8, 2, 64), v=zeros(2, 8, 2, 64))
    fitting["segments"] = rows([1] * 8, [1, 1, 2, 2, 2, 3, 0, 0])
    options = dict(scale=0.125) | MISTAKES[message]
    *arrays, segments = (options.pop(name, fits) for name, fits in fitting.items())
    options["documents"] = Documents(segments, segments, segments)
    attend = flash_attention.attention if is_kernel else attention
    if not is_kernel:
        options["execution"] = Execution(platform="cpu")
    with pytest.raises(ValueError, match=re.escape(message)):
        attend(*arrays, **options)


NOT_HAD: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "head sizes 64, 128, 192/128, 256, not 96": (flash_attention, dict(size=96)),
    "takes bfloat16, not float16": (flash_attention, dict(dtype=jnp.float16)),
    "takes bfloat16 or float16, not float32": (cudnn_attention, dict(dtype=jnp.float32)),
    "head_size=264 is not a multiple": (cudnn_attention, dict(size=264)),
    "no soft cap on its scores": (cudnn_attention, dict(cap=2.0)),
}


@pytest.mark.parametrize("message", NOT_HAD)
def test_a_kernel_that_is_called_directly_refuses_what_it_does_not_have(message):
    kernel, case = NOT_HAD[message]
    q = zeros(2, 8, 2, case.get("size", 64), dtype=case.get("dtype", jnp.bfloat16))
    segments = rows([1] * 8, [1] * 8)
    documents = documents_of(segments, segments, max_documents=2)
    with pytest.raises(ValueError, match=re.escape(message)):
        kernel.attention(q, q, q, documents=documents, scale=0.125, cap=case.get("cap"))


def test_padding_before_a_document_is_refused():
    """Kernels that go by the documents' lengths would take it for a part of one."""
    q = zeros(2, 8, 2, 64)
    segments = rows([1] * 8, [1, 1, 0, 0, 2, 2, 2, 0])
    documents = Documents(segments, segments, segments)
    with pytest.raises(ValueError, match="padding before a document in row 1; it must end the row"):
        attention(q, q, q, documents=documents, execution=Execution(platform="cpu"))
