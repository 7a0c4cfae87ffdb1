"""Which attention runs, and that it says no rather than run out of memory."""

import jax
import jax.numpy as jnp
import pytest

from jaxscale.config import Attention
from jaxscale.kernels import cudnn_attention
from jaxscale.ops.attention import _say_once, choose, document_lengths


def shapes(seq=8192, dtype=jnp.bfloat16, heads=8, kv_heads=2, size=64):
    return jax.ShapeDtypeStruct((1, seq, heads, size), dtype), jax.ShapeDtypeStruct(
        (1, seq, kv_heads, size), dtype
    )


def test_a_cpu_gets_xla_and_a_gpu_gets_cudnn():
    assert choose(Attention.AUTO, *shapes(), platform="cpu") == Attention.XLA
    assert choose(Attention.AUTO, *shapes(), platform="gpu") == Attention.CUDNN


@pytest.mark.parametrize(
    "bad", [dict(dtype=jnp.float32), dict(size=60), dict(size=512), dict(heads=9)]
)
def test_a_long_sequence_on_a_gpu_never_falls_back_to_quadratic_memory(bad):
    assert cudnn_attention.supported(*shapes(**bad), platform="gpu")
    with pytest.raises(ValueError, match=r"config\.seq_len=8192.*config\.attention='xla'"):
        choose(Attention.AUTO, *shapes(**bad), platform="gpu")
    assert choose(Attention.AUTO, *shapes(seq=1024, **bad), platform="gpu") == Attention.XLA
    assert choose(Attention.XLA, *shapes(**bad), platform="gpu") == Attention.XLA


def test_a_gpu_before_hopper_is_told_why_it_gets_no_cudnn():
    with pytest.raises(ValueError, match="compute capability 9.0.*not 8.0"):
        choose(Attention.AUTO, *shapes(), platform="gpu", compute_capability="8.0")


def test_a_short_sequence_that_runs_as_xla_on_a_gpu_says_so_once(caplog):
    _say_once.cache_clear()
    for _ in range(2):
        choose(Attention.AUTO, *shapes(seq=256, size=60), platform="gpu")
    assert [record.message for record in caplog.records] == [
        "attention runs as plain XLA operations: head_size=60 is not a multiple of 8 up to 256"
    ]


def test_asking_for_cudnn_where_it_cannot_run_is_refused_with_the_reason():
    with pytest.raises(
        ValueError,
        match=r"config\.attention='cudnn' cannot run: cuDNN needs an NVIDIA GPU, not cpu",
    ):
        choose(Attention.CUDNN, *shapes(), platform="cpu")


def test_document_lengths_count_tokens_and_leave_padding_out():
    segments = jnp.array([[1, 1, 2, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]], jnp.int32)
    assert document_lengths(segments, 4).tolist() == [[2, 3, 1, 0], [8, 0, 0, 0]]
