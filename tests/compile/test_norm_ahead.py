"""The 8B step with norms by our kernel, compiled for an H100 that is not here."""

import dataclasses
from pathlib import Path

import jax
import pytest

from jaxscale.command_line import read_config
from jaxscale.compile import ahead, fit
from jaxscale.config import Norm, Remat
from jaxscale.kernels import triton_calls

pytestmark = [
    pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing())),
    pytest.mark.skipif(triton_calls.missing() is not None, reason=str(triton_calls.missing())),
    # XLA's plugin for CUDA reports on machines without CUDA's libraries.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("without_bodies"),
]
CONFIG = Path(__file__).parents[2] / "configs" / "llama3_8b.py"
LAYERS = 2


def compiled_8b(**changes) -> jax.stages.Compiled:
    """So many layers of it on one GPU."""
    config = read_config([f"--config={CONFIG}"])
    config.model = dataclasses.replace(config.model, num_layers=LAYERS)
    config.data.max_documents_per_row, config.batch_size = 8, 2
    config = dataclasses.replace(config, **changes)
    return ahead.compile_update(config, ahead.devices_of("h100", hosts=1, gpus_per_host=1))


def launches(compiled: jax.stages.Compiled) -> int:
    return (compiled.as_text() or "").count('custom_call_target="triton_kernel_call"')


@pytest.mark.slow
def test_a_layer_has_two_launches_forward_and_two_back_and_xlas_memory():
    changes = dict(remat=Remat.GEMMS, scan_unroll=LAYERS)
    ours, xla = compiled_8b(**changes), compiled_8b(**changes, norm=Norm.XLA)
    assert (launches(ours), launches(xla)) == (4 * LAYERS, 0)
    # 6 layers: 46.8 GiB both.
    assert fit.predicted_memory_gib(ours) < 1.01 * fit.predicted_memory_gib(xla)


def test_a_loop_makes_both_norms_again():
    assert launches(compiled_8b(remat=Remat.GEMMS, scan_unroll=1)) == 6
