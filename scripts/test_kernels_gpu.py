"""Tests every kernel, and products in 8 bits, on the GPU of this machine, against plain NumPy.

    python scripts/test_kernels_gpu.py [words for pytest]

The same tests run in `make test`, which skips what a CPU cannot run. A few minutes; compiling is
most of it, so with pytest-xdist six processes share the GPU.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/kernels", "tests/inference/test_fused.py", "tests/ops/test_fp8.py")


def main(words: list[str]) -> int:
    environment = os.environ | {
        "JAX_PLATFORMS": "cuda",
        # Trying out ways to multiply the references' float32 takes 20 seconds a shape.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    shown = "import jax; print(jax.devices()[0].device_kind, 'jax', jax.__version__)"
    probe = subprocess.run([sys.executable, "-c", shown], env=environment, cwd=ROOT, check=False)
    if probe.returncode:
        sys.stderr.write("\nerror: JAX finds no GPU here; run this on a machine that has one\n")
        return probe.returncode
    together = (
        ["--numprocesses=6", "-p", "no:benchmark"] if importlib.util.find_spec("xdist") else []
    )
    command = [sys.executable, "-m", "pytest", "-q", "-ra", *together, *TESTS, *words]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
