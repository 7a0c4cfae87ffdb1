"""Compiling updates for GPUs that are elsewhere: memory, launches and collectives, from a laptop.

Needs the `[aot]` extra (XLA's CUDA compiler, without NVIDIA's libraries). Nothing is autotuned
there, so Triton matrix products are off, and no recorded autotune entries are loaded: XLA loads one
file in the life of a process, and here may be updates for several cards. Nor is anything compiled
to be tried, which is a third of compiling the 8B update (13 s of a core, or 9) and changes nothing
of it but the workspace of products, 32 MiB instead of 4 (jax 0.11.2).
"""

import collections
import os
import re
from importlib import metadata

import jax
from jax.experimental import topologies

from jaxscale.compile import fit
from jaxscale.config import Config
from jaxscale.step.plan import plan_of_run
from jaxscale.step.update import update
from jaxscale.xla import environment, targets

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
# Of a card's description; jaxlib 0.10.2 refuses fields it does not know.
FIELDS_SINCE_JAX_0_11 = (
    "mem_clock_ghz",
    "reserved_shared_memory_per_block",
    "max_blocks_per_multiprocessor",
    "collective_memory_granularity",
)
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
COMPILER_OPTIONS = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_load_autotune_results_from": "",
}
# XLA plans for JAX's pool on a GPU that is there, and for this much of one that it has only a
# description of.
XLA_SHARE = 0.8
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def missing() -> str | None:
    """None if this machine can compile for GPUs, else the reason and what to install."""
    for plugin in PLUGINS:
        try:
            metadata.version(plugin)
            return None
        except metadata.PackageNotFoundError:
            continue
    return "XLA's CUDA compiler is not installed; pip install 'jaxscale[aot]'"


def devices_of(target: str, *, hosts: int, gpus_per_host: int) -> list[jax.Device]:
    """Devices that can be compiled for but not used.

    target: a name in jaxscale/xla/targets, such as 'h100'. Raises ValueError for an unknown target,
    or without the CUDA compiler.
    """
    # Near its limit XLA recomputes and gives up overlap, so the limit must be the one of a run.
    size = round(pool_gib(target) * 2**30 / XLA_SHARE)
    text = re.sub(
        r"device_memory_size: \d+", f"device_memory_size: {size}", targets.description(target)
    )
    if reason := missing():
        raise ValueError(reason)
    if jax.__version_info__ < (0, 11):
        lines = [
            line
            for line in text.splitlines()
            if line.split(":")[0].strip() not in FIELDS_SINCE_JAX_0_11
        ]
        text = "\n".join(lines)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=text, topology=f"1x{hosts}x{gpus_per_host}"
    )  # slices, hosts, GPUs
    return topology.devices


def pool_gib(target: str) -> float:
    """GiB that JAX takes of such a card."""
    size = re.search(r"device_memory_size: (\d+)", targets.description(target))
    assert size is not None, target
    defaults = {variable.name: variable.value for variable in environment.VARIABLES}
    return int(size[1]) / 2**30 * float(os.environ.get(MEMORY_FRACTION, defaults[MEMORY_FRACTION]))


def compile_update(config: Config, devices: list[jax.Device]) -> jax.stages.Compiled:
    """What `train` would run on these devices, whether it fits their memory or not.

    Raises ValueError for a config that these devices do not divide.
    """
    plan = plan_of_run(config, devices=devices)
    return fit.compile_only(update, plan, compiler_options=COMPILER_OPTIONS)


def compile_to_fit(
    config: Config, devices: list[jax.Device], *, pool_gib: float
) -> fit.CompiledUpdate:
    """As a run on these devices would: remat is chosen if it is `auto`.

    Raises ValueError for an update that does not fit.
    """
    plan = plan_of_run(config, devices=devices)
    return fit.compile_to_fit(update, plan, pool_gib=pool_gib, compiler_options=COMPILER_OPTIONS)


def text_of(compiled: jax.stages.Compiled) -> str:
    """A compiled program's HLO without the code of our kernels, which is 0.4 MB a call."""
    kernel = r'(custom_call_target="mosaic_gpu.*?, backend_config=)\{.*'
    return re.sub(kernel, r"\1{}", compiled.as_text() or "")


def count_calls(hlo: str) -> collections.Counter[str]:
    """How often a compiled module's text calls each cuDNN function, each kernel of ours and each
    collective.

    Collectives that overlap are counted as 'NAME-start', kernels of ours by their name.
    """
    counts: collections.Counter[str] = collections.Counter(
        re.findall(r'custom_call_target="__cudnn\$(\w+)"', hlo)
    )
    counts.update(re.findall(r'custom_call_target="mosaic_gpu.*?op_name="[^"]*?(\w+)/\w+"', hlo))
    pattern = rf"^\s*(?:ROOT )?%\S+ = .*? ((?:{'|'.join(COLLECTIVES)})(?:-start)?)\("
    counts.update(re.findall(pattern, hlo, re.MULTILINE))
    return counts
