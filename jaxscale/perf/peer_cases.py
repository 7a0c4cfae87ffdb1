"""What jaxscale and torchtitan are compared on besides a config of the user's own, on two GPUs.

A case is Llama 3 8B in a layout that both have, with the same rows in an update; torchtitan runs in
several variants of its own settings, as it is not known beforehand which is its best.
"""

import dataclasses
from collections.abc import Mapping

from jaxscale.perf import context_speed


@dataclasses.dataclass(frozen=True)
class Variant:
    """Of torchtitan. options: of torchtitan.train, after those that the config makes.

    instead_of: a variant that this one stands in for; it runs only where that one failed.
    """

    options: tuple[str, ...] = ()
    instead_of: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """settings: words of jaxscale's command line; those of the user follow them.

    num_steps: that count, after `skip`. has_long_text: a row is one document.
    """

    settings: tuple[str, ...]
    variants: Mapping[str, Variant]
    num_steps: int
    skip: int
    has_long_text: bool = False


EAGER = "--compile.no-enable"
FULL = "--activation_checkpoint.mode=full"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
LAYERS = "--parallelism.pipeline_parallel_layers_per_stage"
ROTATE = "--parallelism.context_parallel_rotate_method"
ONE_ROW = "--training.local_batch_size=1"

# Layers of a chunk, of which embedding and head count as four: 36 in 2 stages, as the config has
# them for `1f1b`, or in several chunks a stage.
INTERLEAVED_2 = (f"{SCHEDULE}=Interleaved1F1B", f"{LAYERS}=9")
INTERLEAVED_4 = (f"{SCHEDULE}=Interleaved1F1B", f"{LAYERS}=5")

PIPELINE = Case(
    settings=(
        "--config.mesh.stage=2",
        "--config.mesh.fsdp=1",
        "--config.mesh.reshard_after_forward=True",
        "--config.pipeline.schedule=one_f_one_b",
        "--config.batch_size=32",
        "--config.grad_accumulation=32",
        "--config.remat=gemms",
        "--config.schedule.warmup_steps=10",
        "--config.schedule.peak=3e-5",
    ),
    variants={
        "1f1b": Variant(),
        "interleaved_4": Variant(INTERLEAVED_4),
        "interleaved_2": Variant(INTERLEAVED_2),
        "gpipe": Variant((f"{SCHEDULE}=GPipe",)),
        "1f1b_eager": Variant((EAGER,), instead_of="1f1b"),
        "interleaved_4_eager": Variant((*INTERLEAVED_4, EAGER), instead_of="interleaved_4"),
    },
    num_steps=3,
    skip=2,
)


# What fits two H200 of 8B, with the layers unrolled.
UNROLLED = "--config.scan_unroll=32"
PRODUCTS = ("--config.remat=gemms_lean", "--config.grad_accumulation=2")


def _rich_but_for(leaner_layers: int) -> tuple[str, str]:
    return "--config.remat=attention_mlp", f"--config.leaner_layers={leaner_layers}"


def _context(ours: str, *settings: str, num_steps: int, skip: int) -> Case:
    """A case of context_speed.py, beside torchtitan's two ways to move keys and values.

    settings: ours, after those of context_speed.py. `allgather` gathers keys and values, `alltoall`
    sends them on from GPU to GPU. torchtitan takes one row at a time. Plain names recompute a layer
    whole, attention too; what `selective` keeps of a layer for 16,384 tokens of a GPU is 1 GiB.
    """
    by_method = {name: (f"{ROTATE}={name}", ONE_ROW) for name in ("allgather", "alltoall")}
    return Case(
        settings=(*context_speed.CASES[ours].settings, UNROLLED, *settings),
        variants={
            **{name: Variant((*options, FULL)) for name, options in by_method.items()},
            **{
                f"{name}_eager": Variant((*options, FULL, EAGER), instead_of=name)
                for name, options in by_method.items()
            },
            **{f"{name}_selective": Variant(options) for name, options in by_method.items()},
        },
        num_steps=num_steps,
        skip=skip,
        has_long_text=True,
    )


# Needs torchao in torchtitan's Python.
IN_8_BITS = (
    "--model.converters=quantize.linear.float8",
    "--quantize.linear.float8.filter_fqns=output",
    "--quantize.linear.float8.recipe_name",
)
GATHERS = (
    "--quantize.linear.float8.enable_fsdp_float8_all_gather",
    "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
)

FP8 = Case(
    settings=(
        UNROLLED,
        "--config.precision.recipe=fp8_tensorwise",
        "--config.batch_size=4",
        "--config.remat=gemms_lean",
    ),
    variants={
        "rowwise": Variant((*IN_8_BITS, "rowwise")),
        "tensorwise": Variant((*IN_8_BITS, "tensorwise", *GATHERS)),
        "bf16": Variant(),
    },
    num_steps=8,
    skip=4,
)

CASES = {
    "pipeline": PIPELINE,
    "context_32k": _context("all_to_all_32k", *PRODUCTS, num_steps=4, skip=2),
    "context_64k": _context("all_to_all_64k", *_rich_but_for(4), num_steps=4, skip=2),
    "context_128k": _context("all_to_all_128k", *_rich_but_for(28), num_steps=3, skip=2),
    "fp8": FP8,
}
