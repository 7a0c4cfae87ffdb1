"""Examines machines before a run: versions, cards, links, network, disk, and how fast they are.

    python scripts/doctor.py [--workdir=DIR] [--quick] [--json=FILE]
    srun --ntasks-per-node=8 python scripts/doctor.py --workdir=/shared/x
    python scripts/launch_local.py -n 2 -- scripts/doctor.py

Under srun, mpirun and scripts/launch_local.py the processes compare each other, and one slow GPU is
named (docs/clusters.md). Prints a table with pass, warn or FAIL a line, and what to do. Ends with 1
if something failed. Needs no root, and changes nothing but files of its own in --workdir.
"""

import json
import logging
import sys
from pathlib import Path

from absl import app, flags

from jaxscale.command_line import (
    EXIT_FAILED,
    EXIT_MISTAKE,
    command_to_repeat,
    file_of,
    folder_of,
    parse_flags,
    tell,
)
from jaxscale.files import require_writable, telling, write_atomically
from jaxscale.launch import bind_to_numa_node, detect, gpus_of

WORKDIR = flags.DEFINE_string(
    "workdir", None, "A folder that all hosts share; its disk and checkpoints are measured."
)
QUICK = flags.DEFINE_bool("quick", False, "Fewer sizes and repeats.")
JSON = flags.DEFINE_string("json", None, "Writes the table to this file as well.")
GIB = flags.DEFINE_float(
    "gib", None, "Of the file on each host, and of a checkpoint for each device.", lower_bound=1e-3
)
PATIENCE = flags.DEFINE_float(
    "patience", 300, "Seconds after which a measurement that does not end is told.", lower_bound=1
)


def main(argv: list[str]) -> int:
    del argv
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr, force=True)
    try:
        workdir = None if WORKDIR.value is None else Path(folder_of("workdir", WORKDIR.value))
        if workdir is not None:
            with telling(f"--workdir={workdir} cannot be written to", "choose another folder"):
                require_writable(workdir)
        file_of("json", JSON.value)
        launch = detect()
        if launch is not None:
            bind_to_numa_node(gpus_of(launch))
        import jax

        from jaxscale import distributed
        from jaxscale.xla.environment import set_environment

        set_environment()
        distributed.initialize(command_to_repeat())
        distributed.describe()  # refuses a platform that is not here
        is_lead = not jax.distributed.is_initialized() or distributed.is_lead()
        logging.getLogger("jaxscale.perf").setLevel(logging.INFO if is_lead else logging.ERROR)
        with distributed.faults_end_all(_tell):
            return _examine(workdir, is_lead=is_lead)
    except (ValueError, OSError, RuntimeError) as error:
        return _tell(error)


def _examine(workdir: Path | None, *, is_lead: bool) -> int:
    # Imported late: they import jax, whose environment is set now.
    from jaxscale.perf import doctor, doctor_table

    num_bytes = None if GIB.value is None else int(GIB.value * 2**30)
    found = doctor.examine(
        workdir, is_quick=QUICK.value, patience=PATIENCE.value, file_bytes=num_bytes
    )
    if is_lead:
        for line in doctor_table.text(found):
            print(line, flush=True)
        if JSON.value:
            records = json.dumps(doctor_table.to_json(found), indent=2)
            write_atomically(Path(JSON.value), f"{records}\n".encode())
    return EXIT_FAILED if doctor_table.has_failed(found) else 0


def _tell(error: BaseException) -> int:
    if not isinstance(error, Exception):
        return EXIT_FAILED
    return tell(error, EXIT_MISTAKE if isinstance(error, ValueError) else EXIT_FAILED)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
