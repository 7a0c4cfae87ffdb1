"""Trains a language model, as a config file says.

python scripts/train.py --config configs/tiny.py --workdir runs/tiny [--config.steps=500 ...]

One process, or one of several: SLURM's tasks, those of scripts/launch_local.py, of mpirun or of an
indexed job of Kubernetes find each other (docs/clusters.md).
"""

if __name__ == "__main__":
    # Before the rest is imported, which takes seconds.
    from jaxscale.train import stop

    stop.end_at_once()

import logging
import sys
import traceback

from absl import app, flags

from jaxscale import config as run_config
from jaxscale.command_line import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_MISTAKE,
    command_to_repeat,
    define_config,
    folder_of,
    parse_flags,
    steady_output,
    tell,
)
from jaxscale.launch import bind_to_numa_node, detect, gpus_of

CONFIG = define_config()
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where config.json, metrics, checkpoints and TensorBoard files go."
)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> int:
    del argv
    steady_output()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    try:
        run_config.validate(CONFIG.value)
        workdir = folder_of("workdir", WORKDIR.value)
        join_processes()
        from jaxscale import distributed
        from jaxscale.train import stop
        from jaxscale.train.loop import train

        stop.end_in_order()
        advice = f"continue with: {command_to_repeat()}"
        with distributed.faults_end_all(tell_fault, advice=advice):
            return train(CONFIG.value, workdir, command=command_to_repeat()).exit_code
    except (Exception, KeyboardInterrupt) as error:
        return tell_fault(error)


def join_processes() -> None:
    """Sets what must be set before JAX starts, and finds the other processes of the run."""
    launch = detect()
    bound = None if launch is None else bind_to_numa_node(gpus_of(launch))
    import jax

    from jaxscale import distributed
    from jaxscale.xla.environment import leave_ends_to_the_watchdog, set_environment

    set_environment()
    leave_ends_to_the_watchdog()
    distributed.initialize(command_to_repeat())
    # Asking who leads touches the devices, so a process that is alone is not asked.
    is_lead = not jax.distributed.is_initialized() or distributed.is_lead()
    logger = logging.getLogger("jaxscale")
    logger.setLevel(logging.INFO if is_lead else logging.ERROR)
    if bound is not None:
        logger.info("process 0 runs %s", bound)


def tell_fault(error: BaseException) -> int:
    """Prints what the user is to know of it, and returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FAILED
    if isinstance(error, ValueError | RuntimeError) and raised_here(error):
        failed = getattr(error, "exit_code", EXIT_FAILED)
        return tell(error, EXIT_MISTAKE if isinstance(error, ValueError) else failed)
    traceback.print_exception(error)
    return EXIT_FAILED


def raised_here(error: BaseException) -> bool:
    """True if jaxscale itself raised it: a message for the user, not a fault deep in a library."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_globals.get("__name__", "").split(".")[0] == "jaxscale"


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
