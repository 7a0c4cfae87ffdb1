"""Times a kernel of ours beside its rivals, and checks all against float32.

    python scripts/bench_kernel.py attention [--cases=causal_8k,packed,...]
    python scripts/bench_kernel.py parts [--cases=ring_long,ring_files,...]
    python scripts/bench_kernel.py matmul [--cases=up,down,...]
    python scripts/bench_kernel.py grouped [--cases=e64,top8,...]
    python scripts/bench_kernel.py quantize [--cases=gate,qkv,...]
    python scripts/bench_kernel.py adamw8bit [--cases=gate,qkv,...]
    python scripts/bench_kernel.py rms_norm [--cases=1b,8b,70b]
    python scripts/bench_kernel.py collective [--cases=qkv,down,...]

Kernels take turns on the same random arrays; a figure is the median of seven timings, each 0.15 s
of calls behind 0.15 s of the same (grouped products: of one program of eight). Attention's TFLOP/s
count the pairs of a query and a key that it sees; GB/s count what has to be read and written at
least, beside a copy in the same run.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
from absl import app, flags

from jaxscale.command_line import EXIT_MISTAKE, parse_flags_and_words, tell
from jaxscale.perf import (
    adamw8bit_speed,
    attention_speed,
    collective_speed,
    grouped_speed,
    matmul_speed,
    parts_speed,
    quantize_speed,
    rms_norm_speed,
)

CASES = flags.DEFINE_list("cases", [], "which, of those that the kernel has; all but tiny")

KERNELS: dict[str, tuple[Callable[[Sequence[str]], Iterator[str]], Sequence[str]]] = {
    "adamw8bit": (adamw8bit_speed.measure, list(adamw8bit_speed.CASES)),
    "attention": (attention_speed.measure, list(attention_speed.CASES)),
    "collective": (collective_speed.measure, list(collective_speed.CASES)),
    "grouped": (grouped_speed.measure, list(grouped_speed.CASES)),
    "matmul": (matmul_speed.measure, list(matmul_speed.CASES)),
    "parts": (parts_speed.measure, list(parts_speed.CASES)),
    "quantize": (quantize_speed.measure, list(quantize_speed.CASES)),
    "rms_norm": (rms_norm_speed.measure, list(rms_norm_speed.CASES)),
}


def main(argv: list[str]) -> int | None:
    if len(argv) != 2 or argv[1] not in KERNELS:
        return tell(ValueError(f"name one kernel of {', '.join(KERNELS)}"), EXIT_MISTAKE)
    measure, cases = KERNELS[argv[1]]
    if unknown := [name for name in CASES.value if name not in cases]:
        message = f"--cases={','.join(unknown)}: {argv[1]} has {', '.join(cases)}"
        return tell(ValueError(message), EXIT_MISTAKE)
    names = CASES.value or [name for name in cases if not _is_tiny(name)]
    is_large = not all(map(_is_tiny, names))
    if is_large and jax.default_backend() == "cpu":
        message = "JAX finds no GPU here, and CPUs have no memory for this: give --cases=tiny"
        return tell(ValueError(message), EXIT_MISTAKE)
    if is_large and argv[1] == "collective" and jax.device_count() == 1:
        message = "collective: it needs two GPUs of one host or more, and here is one"
        return tell(ValueError(message), EXIT_MISTAKE)
    for line in measure(names):
        print(line, flush=True)
    return None


def _is_tiny(name: str) -> bool:
    return name.startswith("tiny")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags_and_words)
