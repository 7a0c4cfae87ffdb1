"""Compiling the training step for GPUs that are elsewhere: its memory, kernels and collectives, from a laptop.

Needs the `[aot]` extra (XLA's CUDA compiler, without NVIDIA's libraries). Nothing is autotuned there, so Triton matrix
products are off; memory of NCCL, cuDNN and the CUDA context is not in the prediction (3 to 5 GiB on H100).
"""

import collections
import re
from importlib import metadata, resources

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxscale import config as run_config
from jaxscale import sharding as shd
from jaxscale.config import Config
from jaxscale.data.batch import Batch
from jaxscale.train.state import abstract_state, make_plan
from jaxscale.train.step import BATCH_AXES, make_train_step

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
# Of a card's description; jaxlib 0.10.2 refuses fields it does not know.
FIELDS_SINCE_JAX_0_11 = (
    "mem_clock_ghz", "reserved_shared_memory_per_block", "max_blocks_per_multiprocessor", "collective_memory_granularity",
)  # fmt: skip
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
    """Devices that can be compiled for but not used; target: a name in jaxscale/targets, 'h100'.

    Raises ValueError for an unknown target, or without the CUDA compiler.
    """
    if reason := missing():
        raise ValueError(reason)
    folder = resources.files("jaxscale") / "targets"
    names = sorted(file.name.removesuffix(".txtpb") for file in folder.iterdir() if file.name.endswith(".txtpb"))
    if target not in names:
        raise ValueError(f"target={target!r} is not one of {', '.join(names)}")
    text = (folder / f"{target}.txtpb").read_text()
    if jax.__version_info__ < (0, 11):
        lines = [line for line in text.splitlines() if line.split(":")[0].strip() not in FIELDS_SINCE_JAX_0_11]
        text = "\n".join(lines)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=text, topology=f"1x{hosts}x{gpus_per_host}"
    )  # slices, hosts, GPUs
    return topology.devices


def compile_step(config: Config, devices: list[jax.Device]) -> jax.stages.Compiled:
    """The step that `train` would run on these devices. Raises ValueError for a config that does not fit them."""
    run_config.validate(config)
    plan = make_plan(config, run_config.validate_on(config, len(devices)), devices=devices)
    rows = config.batch_size // config.grad_accumulation
    sharding = jax.sharding.NamedSharding(plan.mesh, plan.rules.spec(BATCH_AXES))
    array = jax.ShapeDtypeStruct((config.grad_accumulation, rows, config.seq_len), jnp.int32, sharding=sharding)
    with shd.use(plan.mesh, plan.rules):
        lowered = make_train_step(plan).lower(abstract_state(plan), Batch(array, array, array, array))
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def predicted_memory_gib(compiled: jax.stages.Compiled) -> float:
    """State, batch and temporaries on the fullest device, GiB; the donated state is counted once."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    new_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return (analysis.argument_size_in_bytes + new_outputs + analysis.temp_size_in_bytes) / 2**30


def count_calls(hlo: str) -> collections.Counter[str]:
    """How often the text of a compiled module has each cuDNN kernel and each collective, those that overlap as 'NAME-start'."""
    counts: collections.Counter[str] = collections.Counter(re.findall(r'custom_call_target="__cudnn\$(\w+)"', hlo))
    pattern = rf"^\s*(?:ROOT )?%\S+ = .*? ((?:{'|'.join(COLLECTIVES)})(?:-start)?)\("
    counts.update(re.findall(pattern, hlo, re.MULTILINE))
    return counts
