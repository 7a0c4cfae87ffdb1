"""Measures a part of what there is to know of the GPUs of one host, all of them.

    python scripts/bench_node.py PART --workdir=DIR [--seconds=570] [--commit=SHA]
    python scripts/bench_node.py PART --gpus=4 [--target=h200]

Without a PART it lists them (jaxscale/perf/node_parts.py). A part is one or more of the other
scripts, torchtitan beside where it has the same, in less than ten minutes; their tables and records
are printed, and kept in DIR. With --gpus nothing is measured: what jaxscale would run is compiled
for so many cards that are elsewhere (`pip install 'jaxscale[aot]'`), and a row of a table says what
it takes of a GPU's memory, and what it sends in an update over which axes, in brackets with no work
beside it.
"""

import collections
import shlex
import sys
import time
from pathlib import Path

import jax
from absl import app, flags

from jaxscale.command_line import (
    EXIT_FAILED,
    EXIT_MISTAKE,
    parse_flags_and_words,
    read_config,
    tell,
)
from jaxscale.perf import node_parts, processes
from jaxscale.perf.gpus import gpu_names
from jaxscale.perf.progress import show_progress

WORKDIR = flags.DEFINE_string("workdir", "", "Where the logs, the runs and the profiles go.")
SECONDS = flags.DEFINE_float("seconds", 570, "Of all commands of the part together.")
COMMIT = flags.DEFINE_string(
    "commit", "", "The commit to put on record where this is no git checkout."
)
GPUS = flags.DEFINE_integer("gpus", 0, "Compile for so many GPUs, and measure nothing.", 0)
TARGET = flags.DEFINE_string("target", "h200", "The card: a name in jaxscale/xla/targets.")

HERE = Path(__file__).resolve().parent
# How each script is told of the time that is left.
LIMITS = {
    "bench_peers.py": "seconds",
    "bench_pipeline.py": "seconds",
    "bench_step.py": "timeout",
    "bench_checkpoint.py": "timeout",
}
# Of a command that measures nothing: not worth beginning with less left.
LEAST_SECONDS = 60


def main(argv: list[str]) -> int:
    show_progress()
    if len(argv) == 1:
        for name, part in node_parts.PARTS.items():
            print(f"{name:20s}{(part.__doc__ or '').splitlines()[0]}")
        return 0
    if len(argv) > 2 or argv[1] not in node_parts.PARTS:
        names = ", ".join(node_parts.PARTS)
        return tell(ValueError(f"{shlex.join(argv[1:])!r}: name one of {names}"), EXIT_MISTAKE)
    part = node_parts.PARTS[argv[1]]
    try:
        if GPUS.value:
            return compile_all(part(GPUS.value))
        return measure(part(_num_gpus()))
    except ValueError as error:
        return tell(error, EXIT_MISTAKE)


def _num_gpus() -> int:
    """Raises ValueError without any, and without a folder for what they do."""
    if not (num := len(gpu_names())):
        raise ValueError("no GPU here; --gpus=4 compiles for some that are elsewhere")
    if not WORKDIR.value:
        raise ValueError("--workdir=DIR: name a folder for the runs")
    return num


def measure(part: node_parts.Part) -> int:
    ends, code = time.monotonic() + SECONDS.value, 0
    folder = Path(WORKDIR.value).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for number, (script, *words) in enumerate(part.commands, start=1):
        left = ends - time.monotonic()
        print(f"$ python scripts/{shlex.join([script, *words])}", flush=True)
        if left < LEAST_SECONDS:
            print(f"left out, {max(left, 0):.0f} s are left", flush=True)
            code = EXIT_FAILED
            continue
        output = folder / f"{number}.log"
        own = [f"--workdir={folder / str(number)}"]
        if script in LIMITS:
            own.append(f"--{LIMITS[script]}={left:.0f}")
        if script != "bench_checkpoint.py":
            own.append(f"--commit={COMMIT.value}")
        command = [sys.executable, str(HERE / script), *own, *words]
        try:
            # A script that knows its limit keeps to it, and tells what it has by then.
            processes.run(command, output=output, timeout_seconds=left + 30)
        except processes.FailedError as error:
            code = EXIT_FAILED
            print(error, flush=True)
        else:
            print(output.read_text(errors="replace"), flush=True)
    return code


def compile_all(part: node_parts.Part) -> int:
    """Rows of a Markdown table, as programs are compiled. Raises ValueError for an unknown card."""
    from jaxscale.compile import ahead

    jax.config.update("jax_platforms", "cpu")
    devices = ahead.devices_of(TARGET.value, hosts=1, gpus_per_host=GPUS.value)
    pool_gib = ahead.pool_gib(TARGET.value)
    print(f"| {GPUS.value} x {TARGET.value} | remat | GiB of {pool_gib:.1f} | GB an update |")
    print("|---|---|---|---|", flush=True)
    for name, words in part.programs.items():
        print(f"| {name} | {_row(list(words), devices=devices, pool_gib=pool_gib)} |", flush=True)
    return 0


def _row(words: list[str], *, devices, pool_gib: float) -> str:
    from jaxscale.compile import ahead, traffic

    config = read_config(words)
    config.data.max_documents_per_row = config.data.max_documents_per_row or 8
    try:
        update = ahead.compile_to_fit(config, devices, pool_gib=pool_gib)
    except ValueError as error:
        return f"refused | | {str(error).splitlines()[0]}"
    assert update.compiled is not None
    sent: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for each in traffic.traffic_of(ahead.text_of(update.compiled), update.plan.mesh):
        over = sent[" x ".join(each.axes)]
        over[0] += each.num_bytes / 1e9
        over[1] += each.exposed_bytes / 1e9
    cells = ", ".join(f"{axes} {all_:.1f} ({alone:.1f})" for axes, (all_, alone) in sent.items())
    return f"{update.plan.execution.remat.value} | {update.memory_gib:.1f} | {cells}"


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags_and_words)
