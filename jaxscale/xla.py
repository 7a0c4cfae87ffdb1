"""What XLA and JAX are told before and around a run, in one place."""

import os
from pathlib import Path

# The share of a GPU's memory that JAX takes; the rest is for NCCL, cuDNN and the CUDA context (3-5 GB on H100).
MEMORY_FRACTION = "0.92"


def set_environment() -> None:
    """Sets what must be in the environment before JAX starts; whatever the user has set stays. Call before any device is used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)


def enable_compilation_cache() -> None:
    """Keeps programs compiled for GPUs for the next start, in JAX_COMPILATION_CACHE_DIR or the user's cache folder.

    Not on a CPU: train steps read back from the cache have deadlocked in their collectives there (jax 0.10.2 and 0.11.2, 8
    virtual devices), and a CPU's programs are quick to compile.
    """
    import jax

    if jax.default_backend() == "cpu":
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or cache / "jaxscale" / "jax"
    jax.config.update("jax_compilation_cache_dir", str(folder))
