"""Kernels of Mosaic GPU where no GPU is: interpreted, with their races looked for."""

import contextlib
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu

plgpu: Any = mosaic_gpu  # jax 0.10.2 has no interpreter there
IS_GPU = jax.default_backend() == "gpu"


@contextlib.contextmanager
def interpreted():
    """Where there is no GPU. Fails for two warpgroups that meet in memory unprotected."""
    if IS_GPU:
        yield
        return
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    assert not gpu_callbacks.get_races().races_found
