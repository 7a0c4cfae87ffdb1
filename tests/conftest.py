"""Sets up JAX before any test imports it: 8 virtual CPU devices, strict dtype promotion, a compilation cache.

Everything goes through the environment, so the processes that tests start get the same. What is already set wins.
"""

import hashlib
import os
import platform
import sys
from pathlib import Path

assert "jax" not in sys.modules, "a pytest plugin imported jax before tests/conftest.py could set it up"

ROOT = Path(__file__).resolve().parents[1]

XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Compiling is most of the suite: 24 sharded train steps take 42 s instead of 78 s (2 cores) with these two. They
    # choose how hard LLVM works on each CPU kernel; XLA's own passes, sharding and collectives stay the same.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)


def cpu_name():
    """A short name for this CPU's instruction set.

    The cache key of jax 0.10 says only "cpu", and an executable compiled for AVX-512 dies on a machine without it.
    """
    try:
        features = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line[:5] in ("flags", "Featu")
        )
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # XLA takes the last of two equal flags: the caller's come last.
    os.environ["XLA_FLAGS"] = " ".join((*XLA_FLAGS, os.environ.get("XLA_FLAGS", "")))
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
if os.access(ROOT, os.W_OK):
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax" / cpu_name()))
# Both at their minimum, or most test programs are too small or too quick to be kept: 11 s warm instead of 42 s cold.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_report_header():
    import jax

    devices = jax.devices()
    return f"jax {jax.__version__}, {len(devices)} {devices[0].platform} devices, cache {os.environ.get('JAX_COMPILATION_CACHE_DIR')}"
