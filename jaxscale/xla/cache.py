"""The cache of compiled programs, for the next start."""

import errno
import logging
import os
import shutil
from pathlib import Path

from jaxscale.files import cache_folder, require_writable

log = logging.getLogger(__name__)

# The programs of a run take some 10 MB.
LEAST_FREE_BYTES = 64 * 2**20


def enable_compilation_cache() -> None:
    """Keeps programs compiled for GPUs, and the timings behind their autotune entries.

    In JAX_COMPILATION_CACHE_DIR or the user's cache folder. Not on a CPU: train steps read back
    from the cache have deadlocked in their collectives there (jax 0.10.2 and 0.11.2, 8 virtual
    devices), and its programs compile quickly.
    """
    import jax

    if jax.default_backend() == "cpu":
        return
    # A folder for each version: XLA's autotuner does not look at the version of what it reads.
    own = cache_folder() / "jax" / jax.__version__
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(own)
    if not _make(folder):
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # JAX leaves out what compiled in under a second; of a run's few programs all are kept.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _make(folder: str) -> bool:
    """False, with a line in the log, where nothing can be kept in it."""
    if "://" in folder:  # a bucket needs no folders
        return True
    try:
        # Where JAX has XLA's autotuner keep its results; XLA asks that it exist.
        results = Path(folder) / "xla_gpu_per_fusion_autotune_cache_dir"
        require_writable(results)
        if shutil.disk_usage(results).free < LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        log.warning(
            "%s cannot be written to (%s): every start compiles anew; "
            "set JAX_COMPILATION_CACHE_DIR to another folder",
            folder,
            error.strerror,
        )
        return False
    return True
