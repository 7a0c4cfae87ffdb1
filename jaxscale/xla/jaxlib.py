"""What the installed jaxlib says of a compiler option: whether it knows it, and by which name."""

import difflib
import functools
import mmap
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxscale import warned

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
# How much the compiler may do, as jax.config.jax_optimization_level. JAX reads it, not XLA; before
# jax 0.11 as XLA's number.
LEVELS = {"O0": 9, "O1": 19, "O2": 29, "O3": 39}
# The refusal of an option of which jaxlib does not know the name.
UNKNOWN = "unknown"


def installed() -> str:
    """Its name and version, as messages say it."""
    return f"jaxlib {metadata.version('jaxlib')}"


def as_installed(name: str, value: Any) -> dict[str, Any]:
    """The option as the installed jaxlib names it; empty, with a line in the log, if it has none.

    Raises ValueError for a value that XLA cannot read.
    """
    if name == "optimization_level":
        return _optimization_level(value)
    for spelling in spellings(name, value):
        said = refusal(*spelling)
        if said not in (None, UNKNOWN):
            raise ValueError(said)
        if said is None:
            if spelling != (name, value):
                new_name, new_value = spelling
                warned.once(
                    f"compiler option {name}={value} is {new_name}={new_value} in {installed()}"
                )
            return dict([spelling])
    warned.once(
        f"compiler option {name}: {installed()} has none of this name; it is ignored{hint(name)}"
    )
    return {}


def _optimization_level(value: Any) -> dict[str, Any]:
    import jax

    if value not in LEVELS:
        raise ValueError(f"{value!r} is not one of {', '.join(LEVELS)}")
    return {"optimization_level": value if jax.__version_info__ >= (0, 11) else LEVELS[value]}


def spellings(name: str, value: Any) -> list[tuple[str, Any]]:
    """As given, then as another jaxlib has it."""
    return [(name, value)] + [TRANSLATIONS[key] for key in [(name, value)] if key in TRANSLATIONS]


# Options are read in order, and this one ends the reading: nothing is compiled, and none of them
# has an effect here.
_LAST = "xla_jaxscale_reads_no_further"
_PROGRAM = """func.func public @main() -> tensor<i32> {
  %c = stablehlo.constant dense<0> : tensor<i32>
  return %c : tensor<i32>
}"""


@functools.lru_cache(maxsize=None, typed=True)
def refusal(name: str, value: Any) -> str | None:
    """What it has against a compiler option: None, UNKNOWN, or XLA's words about the value.

    Touches no device: its CPU compiler reads the option, 4 ms, and compiles nothing.
    """
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    options.env_option_overrides = [(name, value), (_LAST, True)]
    # A client of its own: JAX's would start those of all platforms. jaxlib and its GPU plugin have
    # the same options.
    client: Any = xla_client.make_cpu_client()
    try:
        client.compile_and_load(
            _PROGRAM, xla_client.DeviceList(tuple(client.local_devices())), options
        )
    # If a later jaxlib cannot be asked this way, it says what is wrong when the step is compiled.
    except Exception as error:
        said = str(error)
        if f"No such compile option: '{name}'" in said:
            return UNKNOWN
        wrong = re.search(r"While setting option \w+, (.*)", said)
        return wrong[1].rstrip(".") if wrong else None
    return None


def hint(name: str) -> str:
    """The name that was probably meant by an unknown one, as the end of a message; or nothing."""
    renamed = [other for (mine, _), (other, _) in TRANSLATIONS.items() if name == mine]
    # 0.85: a slip of the finger is beyond 0.95; below 0.8 are options that only share words.
    near = difflib.get_close_matches(name, known_names(), n=1, cutoff=0.85)
    found = [other for other in renamed if other in known_names()] + near
    return f"; did you mean {found[0]}?" if found else ""


@functools.cache
def known_names() -> frozenset[str]:
    """Its compiler options, from protobuf's description in it (20 ms); empty if not found."""
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
