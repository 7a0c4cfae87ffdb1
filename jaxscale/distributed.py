"""Starting the processes of one run: under SLURM, from JAX's own environment variables, or alone."""

import os

import jax


def initialize() -> None:
    """Joins the other processes if the environment says there are any; call before any device is touched.

    SLURM: `SLURM_NTASKS` > 1 inside a job step. Elsewhere: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`. Otherwise this process is the whole run.
    """
    in_step = int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in os.environ
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize(
            num_processes=_environment_int("JAX_NUM_PROCESSES"),
            process_id=_environment_int("JAX_PROCESS_ID"),
        )
    elif in_step:
        jax.distributed.initialize()


def is_lead() -> bool:
    """True in the one process that prints and writes for all."""
    return jax.process_index() == 0


def _environment_int(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise ValueError(
            f"{name}={value!r} must be a whole number when JAX_COORDINATOR_ADDRESS is set"
        )
    return int(value)
