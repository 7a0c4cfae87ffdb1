"""Compiles a config's step for GPUs that are elsewhere.

    python scripts/compile_step.py --config configs/llama3_8b.py [--config.remat=auto ...] \\
        --gpus=8 [--hosts=4] [--target=h100]

Prints whether it fits their memory, its calls of cuDNN and of our kernels, and what a GPU sends in
an update: over which mesh axes, inside a host or between hosts, and how much of it has no work
beside it. Needs `pip install 'jaxscale[aot]'`. --gpus: of one host. A step that does not fit is
refused, with settings that would (exit code 2, after minutes).
"""

import os
import time

os.environ["JAX_PLATFORMS"] = "cpu"

from absl import app, flags

from jaxscale.command_line import EXIT_MISTAKE, define_config, file_of, parse_flags, tell

CONFIG = define_config()
TARGET = flags.DEFINE_string("target", "h100", "The card: a name in jaxscale/xla/targets.")
GPUS = flags.DEFINE_integer("gpus", 8, "GPUs of one host.", lower_bound=1)
HOSTS = flags.DEFINE_integer("hosts", 1, "Hosts.", lower_bound=1)
DUMP = flags.DEFINE_string("dump", "", "A file to write the optimised HLO to.")
flags.mark_flags_as_required(["config"])

# What a run finds out from its data; rows of 8192 tokens of the Python standard library need 8.
DOCUMENTS_PER_ROW = 8


def main(argv: list[str]) -> int | None:
    del argv
    from jaxscale.compile import ahead, traffic
    from jaxscale.step.remarks import remarks

    config = CONFIG.value
    config.data.max_documents_per_row = config.data.max_documents_per_row or DOCUMENTS_PER_ROW
    began = time.perf_counter()
    try:
        dump = file_of("dump", DUMP.value)
        devices = ahead.devices_of(TARGET.value, hosts=HOSTS.value, gpus_per_host=GPUS.value)
        pool_gib = ahead.pool_gib(TARGET.value)
        update = ahead.compile_to_fit(config, devices, pool_gib=pool_gib)
    except ValueError as error:
        return tell(error, EXIT_MISTAKE)
    assert update.compiled is not None
    seconds = time.perf_counter() - began
    print(f"{len(devices)} x {devices[0].device_kind}, compiled in {seconds:.1f} s")
    print(f"remat: {update.plan.execution.remat.value}")
    print(
        f"fits: {update.memory_gib:.1f} of {pool_gib:.1f} GiB a GPU, besides NCCL, cuDNN and the "
        "CUDA context"
    )
    for remark in remarks(update.plan, host_of=lambda device: device.process_index):
        print(remark)
    hlo = ahead.text_of(update.compiled)
    for name, count in sorted(ahead.count_calls(hlo).items()):
        print(f"{count:5d}  {name}")
    print(traffic.table_of(traffic.traffic_of(hlo, update.plan.mesh)))
    dump.write_text(hlo)
    return None


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
