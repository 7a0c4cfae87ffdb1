"""The compiler options of a config's programs, as data.

An option is set where it was measured to help, and says by how much; all else is left at its
default. A user sets options of the update with `config.xla_options`, and of all programs with
XLA_FLAGS; both win over those set here.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxscale import warned
from jaxscale.config import AsyncTensor, num_weight_shards
from jaxscale.xla import environment, jaxlib, targets


def _always(config: Any, sizes: dict[str, int]) -> bool:
    return True


def _deterministic(config: Any, sizes: dict[str, int]) -> bool:
    return config.deterministic


def _in_a_ring(config: Any, sizes: dict[str, int]) -> bool:
    return config.mesh.async_tensor == AsyncTensor.RING


def _in_8_bits(config: Any, sizes: dict[str, int]) -> bool:
    return config.precision.recipe.value.startswith("fp8")


def _by_cublas_alone(config: Any, sizes: dict[str, int]) -> bool:
    """8 bits, or products beside what `tensor` sends, in one block of code."""
    is_async = config.mesh.async_tensor in (AsyncTensor.RING, AsyncTensor.HALVES)
    return _in_8_bits(config, sizes) or (is_async and _is_unrolled(config))


def _is_unrolled(config: Any) -> bool:
    return config.scan_unroll == config.model.num_layers


# With more, all-to-alls get the products that gathers would hide behind.
MOST_CONTEXT = 4


def _unrolled_gathers(config: Any, sizes: dict[str, int]) -> bool:
    """Weights gathered over all there is, or in each copy of HSDP; all layers in one block of code.

    Not where other collectives want the same places: `tensor`'s (70B width, fsdp 2 x tensor 2,
    compiled for 4 H200: 17.7 GB instead of 15.4 with nothing beside them), and the all-to-alls of
    more than a few `context` (8B, a row of 65,536 over 8: 21.4 GB instead of 14.4; over 4: 16.1
    instead of 25.8).
    """
    return (
        num_weight_shards(sizes) > 1
        and sizes["context"] <= MOST_CONTEXT
        and num_weight_shards(sizes) * sizes["data"] == math.prod(sizes.values())
        and _is_unrolled(config)
    )


def _unrolled_copies(config: Any, sizes: dict[str, int]) -> bool:
    """HSDP of that kind."""
    return sizes["data"] > 1 and _unrolled_gathers(config, sizes)


def _a_layers_weights(config: Any, sizes: dict[str, int]) -> int:
    """Bytes that one layer's gathered weights fit in, and two layers' do not."""
    itemsize = 1 if _in_8_bits(config, sizes) else config.dtype.itemsize
    return _and_a_little(config.model.num_layer_params() * itemsize)


def _a_layers_gradients(config: Any, sizes: dict[str, int]) -> int:
    """Bytes that a GPU's part of one layer's gradients fits in, and of two layers' does not."""
    itemsize = max(config.dtype.itemsize, config.mesh.reduce_dtype.itemsize)
    return _and_a_little(config.model.num_layer_params() * itemsize // num_weight_shards(sizes))


def _and_a_little(num_bytes: int) -> int:
    """15% more, as it was measured."""
    return max(_COMBINED_BY_DEFAULT, num_bytes * 115 // 100)


_COMBINED_BY_DEFAULT = 30 * 2**20


@dataclasses.dataclass(frozen=True)
class Option:
    """A compiler option that jaxscale sets on the update.

    value: itself, or a function of the config (jaxscale.config.Config) and the sizes of the mesh
    axes. default: XLA's, which jaxlib does not tell. gain: as measured on the real step, with
    device and jax version; or that it was not. applies: whether it is for this config and these
    sizes. is_shared: whether evaluation and samples are compiled with it too; so is what changes
    results, which then is for every mesh.
    """

    name: str
    value: Any
    default: str
    why: str
    gain: str
    applies: Callable[[Any, dict[str, int]], bool] = _always
    is_shared: bool = False

    def value_for(self, config: Any, sizes: dict[str, int]) -> Any:
        return self.value(config, sizes) if callable(self.value) else self.value


# Not xla_gpu_deterministic_ops: that chooses kernels without timing them as well, so that compiling
# is the same each time.
IN_ORDER = Option(
    "xla_gpu_exclude_nondeterministic_ops",
    True,
    default="false",
    why="scatters that add atomically and cuDNN's attention backwards, which adds the gradient of "
    "the queries in any order, give other bits each time",
    gain="none in speed: with our attention kernel it costs 0.5% of the step (1.5 B, one H200, jax "
    "0.11.2); with cuDNN's 28 GiB a row",
    applies=_deterministic,
)

# Named as in the newest jaxlib. Each was measured alone and in pairs before it came here;
# docs/performance.md has those that did not help.
OPTIONS: tuple[Option, ...] = (
    Option(
        "xla_allow_excess_precision",
        False,
        default="true",
        why="XLA leaves out roundings to bfloat16 where no collective stands between, so the loss "
        "would depend on the layout: 12.20831 with data parallelism and 12.21014 with FSDP for one "
        "model and batch",
        gain="none in speed and none lost: 47,451 against 47,321 tokens/s (6 layers of 8B width, "
        "one H200, jax 0.11.2)",
        is_shared=True,
    ),
    IN_ORDER,
    Option(
        "xla_gpu_enable_triton_gemm",
        False,
        default="true",
        why="cuBLASLt makes every product in 8 bits, and XLA times its own kernels for each first; "
        "with async_tensor it adds to the sums of other rows as it makes a product, which XLA "
        "leaves to kernels of its own where it may use them",
        gain="8 bits: none in speed (1%, within the noise), compiling took 4 s instead of 27 (6 "
        "layers of 8B width in plain JAX, one H100, jax 0.11.2); async_tensor: 0.4% of the step in "
        "a ring, twice, and 0.9% in halves (4 layers of Llama-3-70B, tensor=2, 2 x H200, jax "
        "0.11.2). Not in a scan, where it cost 11% (Llama-3-8B, 4 x H200, jax 0.11.2)",
        applies=_by_cublas_alone,
        is_shared=True,
    ),
    Option(
        "xla_gpu_graph_min_graph_size",
        1,
        default="5",
        why="cuDNN's attention over packed documents zero-fills 4 GiB of workspace a call, but not "
        "in a CUDA graph, and between two collectives there are too few launches for a graph of "
        "five",
        gain="1.1% of the step (Llama-3-8B, 4 x H200, jax 0.11.2)",
    ),
    Option(
        "xla_gpu_collective_permute_mode",
        "COLLECTIVES_PEER_MEMORY",
        default="COLLECTIVES_PRIVATE_MEMORY",
        why="copy engines pass rows on; NCCL's kernels take multiprocessors from the products "
        "beside them",
        gain="with it a ring takes 3.0% off the step with halves (6 layers of Llama-3-70B, "
        "tensor=4, 4 x H200, jax 0.11.2)",
        applies=_in_a_ring,
        is_shared=True,
    ),
    Option(
        "xla_gpu_all_gather_combine_threshold_bytes",
        _a_layers_weights,
        default="30 MiB",
        why="one gather a layer, with the whole layer before to hide behind. Each weight's own has "
        "only what runs between the use of the one before and its own, which may be an "
        "element-wise kernel",
        gain="0.5% of the step, with the next 1.9% (Llama-3-8B, 4 x H200, jax 0.11.2)",
        applies=_unrolled_gathers,
    ),
    Option(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        _a_layers_gradients,
        default="30 MiB",
        why="each reduce-scatter waits for the matrix product that runs when it becomes ready: "
        "with a quarter of them, a quarter of the waiting",
        gain="1.6% of the step, with the one before 1.9% (Llama-3-8B, 4 x H200, jax 0.11.2)",
        applies=_unrolled_gathers,
    ),
    Option(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        _a_layers_gradients,
        default="30 MiB",
        why="the same of the sums over `data` that follow: one a layer",
        gain="not timed; compiled with the two before, 2.7 GB of an update have nothing beside "
        "them, and 10.8 without the three (Llama-3-8B, data=2 x fsdp=2, 4 x H200, jax 0.11.2)",
        applies=_unrolled_copies,
    ),
)


def _loading(autotune: Path) -> Option:
    return Option(
        "xla_gpu_load_autotune_results_from",
        str(autotune),
        default="none",
        why="the same autotune entries in every run, without timing first",
        gain="compile and first step 21.6 s instead of 34.5 with an empty cache "
        "(Llama-3-8B, 4 x H200, jax 0.11.2)",
    )


def compiler_options(
    config: Any, sizes: dict[str, int], *, platform: str, device_kind: str = ""
) -> dict[str, Any]:
    """For jax.jit of the update: OPTIONS that apply, and config.xla_options.

    All are as the installed jaxlib names them. sizes: of the mesh axes; platform and device_kind:
    of the devices ("gpu", "NVIDIA H200"). What this jaxlib has not, or is for another platform, is
    left out with a line in the log. Touches no device. Raises ValueError for a user's option with a
    value that XLA cannot read.
    """
    autotune = targets.recorded_autotune(device_kind)
    options = OPTIONS if autotune is None else (*OPTIONS, _loading(autotune))
    derived = _derived(options, config, sizes=sizes, platform=platform)
    return derived | _users(config.xla_options, platform)


def shared_options(config: Any, platform: str) -> dict[str, Any]:
    """Those of `compiler_options` that every other program of the run has too.

    Evaluation and sampling that are compiled with them compute what the update does.
    """
    options = [option for option in OPTIONS if option.is_shared]
    derived = _derived(options, config, sizes={}, platform=platform)
    users = _users(config.xla_options, platform)
    names = {option.name for option in options}
    return derived | {name: value for name, value in users.items() if name in names}


def replay_options(update: dict[str, Any], config: Any, *, platform: str) -> dict[str, Any]:
    """For a program that gives the same bits each time it runs; update: the update's options."""
    always = dataclasses.replace(IN_ORDER, applies=_always)
    derived = _derived([always], config, sizes={}, platform=platform)
    return derived | update


def describe(options: dict[str, Any], config: Any, *, platform: str) -> str:
    """What differs from the defaults of JAX and XLA, a line each: value, default, why, gain.

    Empty if nothing does. options: `compiler_options` of this config.
    """
    users = _users(config.xla_options, platform)
    return "\n".join([*environment.lines(platform), *_lines(options, users)])


def _derived(
    options: Iterable[Option], config: Any, *, sizes: dict[str, int], platform: str
) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for option in options:
        if (
            not option.applies(config, sizes)
            or not _is_for(option.name, platform)
            or environment.has_flag(option.name)
        ):
            continue
        value = option.value_for(config, sizes)
        try:
            known |= jaxlib.as_installed(option.name, value)
        # Not the user's mistake: this jaxlib is another than the one it was measured with.
        except ValueError as error:
            warned.once(f"compiler option {option.name}={value} is left out: {error}")
    return known


def _users(texts: tuple[str, ...], platform: str) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            # XLA reads numbers and enums out of strings, but wants a bool as a bool.
            option = jaxlib.as_installed(
                name, {"true": True, "false": False}.get(value.lower(), value)
            )
        except ValueError as error:
            raise ValueError(
                f"config.xla_options={text!r}: {error}; correct it (a bool is true or false), "
                "or leave the option out"
            ) from None
        if option and not _is_for(name, platform):
            warned.once(
                f"config.xla_options={text!r} has no effect on {platform.upper()}s and is ignored"
            )
        else:
            known |= option
    return known


def _lines(options: dict[str, Any], users: dict[str, Any]) -> Iterator[str]:
    derived = {
        name: option
        for option in (*OPTIONS, _loading(targets.FOLDER))
        for name, _ in jaxlib.spellings(option.name, option.value)
    }
    for name, value in options.items():
        if name in users:
            yield f"compiler option: {name}={value}, from config.xla_options"
        else:
            option = derived[name]
            yield (
                f"compiler option: {name}={value} (default: {option.default}): "
                f"{option.why}; {option.gain}"
            )


def _is_for(name: str, platform: str) -> bool:
    target = name.split("_")[1]
    return target == platform or target not in ("cpu", "gpu", "tpu")
