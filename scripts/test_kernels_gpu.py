"""Tests every kernel, and products in 8 bits, on the GPU of this machine, against plain NumPy.

    python scripts/test_kernels_gpu.py [words for pytest]
    python scripts/test_kernels_gpu.py --sanitize [words for pytest]

The same tests run in `make test`, which skips what a CPU cannot run. A few minutes; compiling is
most of it, so with pytest-xdist six processes share the GPU.

--sanitize runs some tests of each kernel for training under NVIDIA's compute-sanitizer (memcheck),
which says where one reads or writes outside of its arrays; the exit status is 99 then. Each array
is an allocation of its own for it, and CUDA graphs are off.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/kernels", "tests/inference/test_fused.py", "tests/ops/test_fp8.py")
# A module of tests/kernels, and which of its tests, as words of pytest's -k.
SANITIZED = {
    "test_flash_programs": "head_size_64 or 128_backward or other_head_sizes or step_late",
    "test_grouped_matmul": "each_group or rows_of_no_group",
    "test_grouped_fp8": "each_group",
    "test_block_scaled_matmul": "product",
    "test_quantize": "to_the_bit or multiple_of_16",
    "test_quantize_grouped": "to_the_bit",
    "test_adamw8bit": "to_the_bit",
    "test_rms_norm": "reference or rounded",
}
SANITIZER = "compute-sanitizer"
CUDA = "/usr/local/cuda/bin"


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
    if "--sanitize" in words:
        return sanitize([word for word in words if word != "--sanitize"], environment)
    together = (
        ["--numprocesses=6", "-p", "no:benchmark"] if importlib.util.find_spec("xdist") else []
    )
    command = [sys.executable, "-m", "pytest", "-q", "-ra", *together, *TESTS, *words]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def sanitize(words: list[str], environment: dict[str, str]) -> int:
    path = f"{os.environ.get('PATH', '')}:{CUDA}"
    sanitizer = shutil.which(SANITIZER, path=path)
    if sanitizer is None:
        sys.stderr.write(f"\nerror: {SANITIZER} is neither on PATH nor in {CUDA}; it is CUDA's\n")
        return 2
    environment |= {
        "XLA_FLAGS": f"{environment['XLA_FLAGS']} --xla_gpu_enable_command_buffer=",
        # Out of JAX's own pool a neighbour's memory would be as good.
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    }
    chosen = " or ".join(f"({module} and ({tests}))" for module, tests in SANITIZED.items())
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "tests/kernels", "-k", chosen, *words]
    command = [sanitizer, "--tool=memcheck", "--error-exitcode=99", *pytest]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
