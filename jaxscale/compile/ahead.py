"""Compiling the training step for GPUs that are elsewhere: its memory, kernels and collectives, from a laptop.

Needs the `[aot]` extra (XLA's CUDA compiler, without NVIDIA's libraries). Nothing is autotuned there, so Triton matrix
products are off, and no kernels that were chosen on a card are loaded: XLA loads one file in the life of a process, and here
may be steps for several cards.
"""

import collections
import os
import re
from importlib import metadata, resources

import jax
from jax.experimental import topologies

from jaxscale import config as run_config
from jaxscale.compile import fit
from jaxscale.config import Config
from jaxscale.step.state import Plan, make_plan
from jaxscale.xla import options as xla

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
# Of a card's description; jaxlib 0.10.2 refuses fields it does not know.
FIELDS_SINCE_JAX_0_11 = (
    "mem_clock_ghz", "reserved_shared_memory_per_block", "max_blocks_per_multiprocessor", "collective_memory_granularity",
)  # fmt: skip
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_load_autotune_results_from": ""}
# XLA plans for JAX's pool on a GPU that is there, and for this much of one that it has only a description of.
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
    """Devices that can be compiled for but not used; target: a name in jaxscale/xla/targets, 'h100'.

    Raises ValueError for an unknown target, or without the CUDA compiler.
    """
    if reason := missing():
        raise ValueError(reason)
    # Near its limit XLA recomputes and gives up overlap: for 2 H200 it compiled Llama-3-8B with `gemms` to 121 GiB and 37
    # synchronous gathers, where a run has 126 GiB; with the pool for a limit it is 125 and 3.
    size = round(pool_gib(target) * 2**30 / XLA_SHARE)
    text = re.sub(r"device_memory_size: \d+", f"device_memory_size: {size}", _description(target))
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


def _description(target: str) -> str:
    folder = resources.files("jaxscale.xla") / "targets"
    names = sorted(
        name.removesuffix(".txtpb")
        for file in folder.iterdir()
        if re.fullmatch(r"\w+\.txtpb", name := file.name)
    )
    if target not in names:
        raise ValueError(f"target={target!r} is not one of {', '.join(names)}")
    return (folder / f"{target}.txtpb").read_text()


def pool_gib(target: str) -> float:
    """GiB that JAX takes of such a card."""
    size = re.search(r"device_memory_size: (\d+)", _description(target))
    assert size is not None, target
    defaults = {variable.name: variable.value for variable in xla.ENVIRONMENT}
    return int(size[1]) / 2**30 * float(os.environ.get(MEMORY_FRACTION, defaults[MEMORY_FRACTION]))


def make_plan_on(config: Config, devices: list[jax.Device]) -> Plan:
    """Raises ValueError for a config that these devices do not divide."""
    run_config.validate(config)
    return make_plan(config, run_config.validate_on(config, len(devices)), devices=devices)


def compile_step(config: Config, devices: list[jax.Device]) -> jax.stages.Compiled:
    """The step that `train` would run on these devices, whether it fits their memory or not."""
    return fit.compile_step(make_plan_on(config, devices), compiler_options=COMPILER_OPTIONS)


def compile_to_fit(config: Config, devices: list[jax.Device], *, pool_gib: float) -> fit.Step:
    """As a run on these devices would: remat chosen if it is `auto`, and ValueError if the step does not fit."""
    return fit.compile_to_fit(
        make_plan_on(config, devices), pool_gib=pool_gib, compiler_options=COMPILER_OPTIONS
    )


def count_calls(hlo: str) -> collections.Counter[str]:
    """How often the text of a compiled module has each cuDNN kernel and each collective, those that overlap as 'NAME-start'."""
    counts: collections.Counter[str] = collections.Counter(
        re.findall(r'custom_call_target="__cudnn\$(\w+)"', hlo)
    )
    pattern = rf"^\s*(?:ROOT )?%\S+ = .*? ((?:{'|'.join(COLLECTIVES)})(?:-start)?)\("
    counts.update(re.findall(pattern, hlo, re.MULTILINE))
    return counts
