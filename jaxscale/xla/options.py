"""What XLA and JAX are told before and around a run, in one place: environment, compiler options, compilation cache.

An option is set where it was measured to help, and says by how much; all else is left at its default. A user sets
options of the train step with `config.xla_options`, and of all programs with XLA_FLAGS; both win over those set here.
"""

import dataclasses
import difflib
import functools
import logging
import math
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Beside descriptions of cards: the kernels that XLA chose on them by timing, CARD-jaxlibVERSION.autotune.txtpb, as
# scripts/record_kernels.py writes them. Their keys are hashes of card, XLA's code generators, CUDA's version and operation:
# what is not in there is timed as ever.
TARGETS = Path(__file__).parent / "targets"

# The share of a GPU's memory that JAX takes.
MEMORY_FRACTION = "0.92"


@dataclasses.dataclass(frozen=True)
class Variable:
    """An environment variable that must be set before JAX starts; whatever the user has set stays."""

    name: str
    value: str
    default: str
    why: str


ENVIRONMENT = (
    Variable(
        "XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION, "0.75",
        "the share of a GPU's memory that JAX takes; NCCL, cuDNN and the CUDA context need 3 to 5 GB on H100",
    ),
    Variable(
        "NCCL_NVLS_ENABLE", "0", "on where the hardware has it",
        "no NVLink multicast: some shared machines forbid it, and no gain has been measured",
    ),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS", "1", "8",
        "kernels start in the order in which they were issued: a matrix product that was issued after a collective does not "
        "take all multiprocessors before it; 0.6% of the step (Llama-3-8B, 4 x H200, jax 0.11.2)",
    ),
)  # fmt: skip


def _always(config: Any, sizes: dict[str, int]) -> bool:
    return True


def _unrolled_fsdp(config: Any, sizes: dict[str, int]) -> bool:
    """FSDP and nothing else, all layers in one block of code."""
    return (
        sizes["fsdp"] == math.prod(sizes.values()) > 1
        and config.scan_unroll == config.model.num_layers
    )


def _a_layers_weights(config: Any, sizes: dict[str, int]) -> int:
    """Bytes that one layer's gathered weights fit in, and two layers' do not."""
    return _and_a_little(config.model.num_layer_params() * config.dtype.itemsize)


def _a_layers_gradients(config: Any, sizes: dict[str, int]) -> int:
    """Bytes that a GPU's part of one layer's gradients fits in, and of two layers' does not."""
    itemsize = max(config.dtype.itemsize, config.mesh.reduce_dtype.itemsize)
    return _and_a_little(config.model.num_layer_params() * itemsize // sizes["fsdp"])


def _and_a_little(num_bytes: int) -> int:
    """15% more, as it was measured: 501 and 125 MB for Llama-3-8B on 4 GPUs."""
    return max(_COMBINED_BY_DEFAULT, num_bytes * 115 // 100)


_COMBINED_BY_DEFAULT = 30 * 2**20


@dataclasses.dataclass(frozen=True)
class Option:
    """A compiler option that jaxscale sets on the train step.

    value: itself, or a function of the config (jaxscale.config.Config) and the sizes of the mesh axes. default: XLA's, which
    jaxlib does not tell. gain: as measured on the real step, with device and jax version. applies: whether it is for this
    config and these sizes.
    """

    name: str
    value: Any
    default: str
    why: str
    gain: str
    applies: Callable[[Any, dict[str, int]], bool] = _always

    def value_for(self, config: Any, sizes: dict[str, int]) -> Any:
        return self.value(config, sizes) if callable(self.value) else self.value


# Named as in the newest jaxlib. Each was measured alone and in pairs before it came here (docs/performance.md has those
# that did not help). What public recipes set lost 11 to 15% against XLA's defaults (stock JAX, Llama-3-8B on 4 x H200).
OPTIONS: tuple[Option, ...] = (
    Option(
        "xla_gpu_graph_min_graph_size", 1, "5",
        "cuDNN's attention over packed documents zero-fills 4 GiB of workspace a call, but not in a CUDA graph, and between two "
        "collectives there are too few kernels for a graph of five",
        "1.1% of the step (Llama-3-8B, 4 x H200, jax 0.11.2)",
    ),
    Option(
        "xla_gpu_all_gather_combine_threshold_bytes", _a_layers_weights, "30 MiB",
        "one gather a layer, with the whole layer before to hide behind. Each weight's own has only what runs between the use of "
        "the one before and its own, which may be an element-wise kernel",
        "0.5% of the step, with the next 1.9% (Llama-3-8B, 4 x H200, jax 0.11.2)",
        applies=_unrolled_fsdp,
    ),
    Option(
        "xla_gpu_reduce_scatter_combine_threshold_bytes", _a_layers_gradients, "30 MiB",
        "each reduce-scatter waits for the matrix product that runs when it becomes ready: with a quarter of them, a quarter of "
        "the waiting",
        "1.6% of the step, with the one before 1.9% (Llama-3-8B, 4 x H200, jax 0.11.2)",
        applies=_unrolled_fsdp,
    ),
)  # fmt: skip

# The same setting in jaxlib 0.10.2 and in 0.11.2.
_RENAMED = tuple(
    (
        (f"xla_gpu_enable_pipelined_{kind}", on),
        (f"xla_gpu_pipeline_{kind}", f"COLLECTIVE_PIPELINING_MODE_{mode}"),
    )
    for kind in ("all_gather", "all_reduce", "reduce_scatter")
    for on, mode in ((True, "ON"), (False, "OFF"))
)
# (name, value) in one jaxlib -> (name, value) in another.
TRANSLATIONS: dict[tuple[str, Any], tuple[str, Any]] = dict(_RENAMED) | {
    new: old for old, new in _RENAMED
}


def set_environment() -> None:
    """Sets ENVIRONMENT, and takes out of XLA_FLAGS what jaxlib would abort on. Call before any device is used.

    An unknown flag ends the process at XLA's start, in C++, so an old recipe in a job script would kill the run. What
    jaxlib says to XLA_FLAGS is asked in a process of its own (0.3 s, and only if there are any).
    Raises ValueError for a flag's value that XLA cannot read.
    """
    for variable in ENVIRONMENT:
        os.environ.setdefault(variable.name, variable.value)
    # XLA takes anything else than flags for the name of a file that holds them.
    if (flags := os.environ.get("XLA_FLAGS", "")).lstrip().startswith("--"):
        os.environ["XLA_FLAGS"] = _without_unknown(flags)


def enable_compilation_cache() -> None:
    """Keeps programs compiled for GPUs, and the timings that chose their kernels, for the next start.

    In JAX_COMPILATION_CACHE_DIR or the user's cache folder. Not on a CPU: train steps read back from the cache have
    deadlocked in their collectives there (jax 0.10.2 and 0.11.2, 8 virtual devices), and its programs compile quickly.
    """
    import jax

    if jax.default_backend() == "cpu":
        return
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # A folder for each version: XLA asks for it, as its autotuner does not look at the version of what it reads.
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(
        cache / "jaxscale" / "jax" / jax.__version__
    )
    if "://" not in folder:  # a bucket needs no folders
        try:
            # Where JAX has XLA's autotuner keep its results; XLA asks that it exist.
            (Path(folder) / "xla_gpu_per_fusion_autotune_cache_dir").mkdir(
                parents=True, exist_ok=True
            )
        except OSError as error:
            log.warning(
                "%s cannot be made (%s): every start compiles anew; set JAX_COMPILATION_CACHE_DIR to another folder",
                folder, error.strerror,
            )  # fmt: skip
            return
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # JAX leaves out what compiled in under a second. A run has about six programs, and all of them are kept.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def compiler_options(
    config: Any, sizes: dict[str, int], *, platform: str, device_kind: str = ""
) -> dict[str, Any]:
    """For jax.jit of the train step: OPTIONS that apply, and config.xla_options, as the installed jaxlib names them.

    sizes: of the mesh axes; platform and device_kind: of the devices ("gpu", "NVIDIA H200"). What this jaxlib has not, or is
    for another platform, is left out with a line in the log. Touches no device: jaxlib's CPU compiler reads the options,
    4 ms each, and compiles nothing. Raises ValueError for a user's option with a value that XLA cannot read.
    """
    options = (*OPTIONS, *chosen_kernels(device_kind))
    return _derived(options, config, sizes, platform) | _users(config.xla_options, platform)


def chosen_kernels(device_kind: str) -> list[Option]:
    """The option that loads what was chosen on such a card with this jaxlib, if it is in TARGETS."""
    path = kernels_path(device_kind)
    return [_loading(path)] if path is not None and path.exists() else []


def kernels_path(device_kind: str) -> Path | None:
    """Where kernels chosen on such a card with this jaxlib stand, if any do.

    None for a card whose name, as the driver gives it, has no word like the H100 of "NVIDIA H100 80GB HBM3".
    """
    words = re.split(r"[\s-]", device_kind.lower())
    card = next((word for word in words if re.fullmatch(r"[a-z]+\d+", word)), None)
    return TARGETS / f"{card}-jaxlib{metadata.version('jaxlib')}.autotune.txtpb" if card else None


def _loading(path: Path) -> Option:
    return Option(
        "xla_gpu_load_autotune_results_from", str(path), "none", "the same kernels in every run, without timing them first",
        "compile and first step 21.6 s instead of 34.5 with an empty cache (Llama-3-8B, 4 x H200, jax 0.11.2)",
    )  # fmt: skip


def _derived(
    options: Iterable[Option], config: Any, sizes: dict[str, int], platform: str
) -> dict[str, Any]:
    flags = os.environ.get("XLA_FLAGS", "")
    known: dict[str, Any] = {}
    for option in options:
        if (
            not option.applies(config, sizes)
            or not _is_for(option.name, platform)
            or f"--{option.name}=" in flags
        ):
            continue
        try:
            known |= _as_installed(option.name, value := option.value_for(config, sizes))
        except ValueError as error:  # not the user's mistake: this jaxlib is another than the one it was measured with
            _say(f"compiler option {option.name}={value} is left out: {error}")
    return known


def _users(texts: tuple[str, ...], platform: str) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            # XLA reads numbers and enums out of strings, but wants a bool as a bool.
            option = _as_installed(name, {"true": True, "false": False}.get(value.lower(), value))
        except ValueError as error:
            raise ValueError(
                f"config.xla_options={text!r}: {error}; correct it (a bool is true or false), or leave the option out"
            ) from None
        if option and not _is_for(name, platform):
            _say(f"config.xla_options={text!r} has no effect on {platform.upper()}s and is ignored")
        else:
            known |= option
    return known


def describe(options: dict[str, Any], config: Any, *, platform: str) -> str:
    """What differs from the defaults of JAX and XLA, a line each: value, default, why, gain. Empty if nothing does.

    options: `compiler_options` of this config.
    """
    return "\n".join(
        [*_variable_lines(platform), *_option_lines(options, _users(config.xla_options, platform))]
    )


def _variable_lines(platform: str) -> Iterator[str]:
    for variable in ENVIRONMENT if platform == "gpu" else ():
        value = os.environ.get(variable.name)
        if value == variable.value:
            yield f"environment: {variable.name}={value} (default: {variable.default}): {variable.why}"
        elif value is not None:
            yield f"environment: {variable.name}={value}, set by the user; without, {variable.value}: {variable.why}"
    if flags := os.environ.get("XLA_FLAGS", "").strip():
        yield f"environment: XLA_FLAGS={flags}, set by the user"


def _option_lines(options: dict[str, Any], users: dict[str, Any]) -> Iterator[str]:
    derived = {
        name: option
        for option in (*OPTIONS, _loading(TARGETS))
        for name, _ in _spellings(option.name, option.value)
    }
    for name, value in options.items():
        if name in users:
            yield f"compiler option: {name}={value}, from config.xla_options"
        else:
            option = derived[name]
            yield f"compiler option: {name}={value} (default: {option.default}): {option.why}; {option.gain}"


def _is_for(name: str, platform: str) -> bool:
    target = name.split("_")[1]
    return target == platform or target not in ("cpu", "gpu", "tpu")


def _as_installed(name: str, value: Any) -> dict[str, Any]:
    """The option as the installed jaxlib names it; empty, with a line in the log, if it has none like it.

    Raises ValueError for a value that XLA cannot read.
    """
    if name == "optimization_level":
        import jax

        if value not in _LEVELS:
            raise ValueError(f"{value!r} is not one of {', '.join(_LEVELS)}")
        return {name: value if jax.__version_info__ >= (0, 11) else _LEVELS[value]}
    here = f"jaxlib {metadata.version('jaxlib')}"
    for spelling in _spellings(name, value):
        refusal = _refusal(*spelling)
        if refusal not in (None, _UNKNOWN):
            raise ValueError(refusal)
        if refusal is None:
            if spelling != (name, value):
                _say(f"compiler option {name}={value} is {spelling[0]}={spelling[1]} in {here}")
            return dict([spelling])
    _say(f"compiler option {name}: {here} has none of this name; it is ignored{_hint(name)}")
    return {}


def _spellings(name: str, value: Any) -> list[tuple[str, Any]]:
    """As given, then as another jaxlib has it."""
    return [(name, value)] + [TRANSLATIONS[key] for key in [(name, value)] if key in TRANSLATIONS]


_UNKNOWN = "unknown"
# How much the compiler may do, as jax.config.jax_optimization_level. JAX reads it, not XLA; before 0.11 as XLA's number.
_LEVELS = {"O0": 9, "O1": 19, "O2": 29, "O3": 39}
# Options are read in order, and this one ends the reading: nothing is compiled, so that none has an effect here.
_LAST = "xla_jaxscale_reads_no_further"
_PROGRAM = "func.func public @main() -> tensor<i32> { %c = stablehlo.constant dense<0> : tensor<i32> return %c : tensor<i32> }"


@functools.lru_cache(maxsize=None, typed=True)
def _refusal(name: str, value: Any) -> str | None:
    """What the installed jaxlib has against a compiler option: None, _UNKNOWN, or XLA's words about the value."""
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    options.env_option_overrides = [(name, value), (_LAST, True)]
    # A client of its own: JAX's would start those of all platforms. jaxlib and its GPU plugin have the same options.
    client: Any = xla_client.make_cpu_client()
    try:
        client.compile_and_load(
            _PROGRAM, xla_client.DeviceList(tuple(client.local_devices())), options
        )
    except (
        Exception
    ) as error:  # if a later jaxlib says something else, it says it when the step is compiled
        said = str(error)
        if f"No such compile option: '{name}'" in said:
            return _UNKNOWN
        wrong = re.search(r"While setting option \w+, (.*)", said)
        return wrong[1].rstrip(".") if wrong else None
    return None


# Without a core file of the process that aborts.
_READ_FLAGS = """
import resource
from jaxlib import xla_client

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
xla_client.CompileOptions()
"""


def _without_unknown(flags: str) -> str:
    """XLA_FLAGS without those that the installed jaxlib has not, each named in the log."""
    said = _said_to(flags)
    if wrong := re.search(r"Couldn't interpret value (.*) for flag (\w+)", said):
        raise ValueError(
            f"XLA_FLAGS: {wrong[1]!r} is not a value of --{wrong[2]}; correct it or take it out"
        )
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", said)
    for name in re.findall(r"(?<!\S)--(\w+)", unknown[1]) if unknown else ():
        flags = re.sub(rf"""(?<!\S)--{name}(=("[^"]*"|'[^']*'|\S*))?(?!\S)""", "", flags)
        _say(
            f"XLA_FLAGS: jaxlib {metadata.version('jaxlib')} has no --{name}=...; it is ignored{_hint(name)}"
        )
    return flags.strip()


@functools.cache
def _said_to(flags: str) -> str:
    """What jaxlib writes when it reads these XLA_FLAGS; it aborts if it does not like them."""
    environment = os.environ | {"XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "0"}
    # -P: nothing of the current folder is imported.
    return subprocess.run(
        [sys.executable, "-P", "-c", _READ_FLAGS], env=environment, capture_output=True, text=True
    ).stderr


def _hint(name: str) -> str:
    renamed = [other for (mine, _), (other, _) in TRANSLATIONS.items() if name == mine]
    # 0.85: a slip of the finger is beyond 0.95; below 0.8 are options that only share words.
    near = difflib.get_close_matches(name, _known_names(), n=1, cutoff=0.85)
    found = [other for other in renamed if other in _known_names()] + near
    return f"; did you mean {found[0]}?" if found else ""


@functools.cache
def _known_names() -> frozenset[str]:
    """The compiler options of the installed jaxlib, from protobuf's description in it (20 ms); empty if not found."""
    import jaxlib

    library = Path(jaxlib.__path__[0]) / "libjax_common.so"
    if not library.exists():
        return frozenset()
    with (
        library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        start = content.find(b"\n\x0dxla/xla.proto")
        description = content[start : start + 400_000] if start >= 0 else b""
    return frozenset(name.decode() for name in re.findall(rb"\n.(xla_\w+)\x18", description))


@functools.cache  # a plan is made more than once in a process
def _say(line: str) -> None:
    log.warning("%s", line)
