"""Autotune entries: what XLA chose for a config's update by timing it on this machine.

They are XLA's AutotuneResults as text. An entry is known by a hash of its product's shapes, layouts
and dtypes: fewer layers or more GPUs have the same ones as long as the tokens a GPU are the same.
"""

import dataclasses
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxscale.compile import fit
from jaxscale.config import Config
from jaxscale.files import write_atomically
from jaxscale.step.plan import corpus_of_run, plan_of_run
from jaxscale.step.update import update
from jaxscale.xla import targets


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A file with its numbers of entries, of this config and of others before."""

    path: Path
    num_recorded: int
    num_kept: int


def path_for(cards: Sequence[str], *, asked: str | None) -> Path:
    """The file to add to: `asked`, or the one of this card in jaxscale/xla/targets.

    cards: as nvidia-smi names them. Raises ValueError where XLA times nothing, or there is nowhere
    to write.
    """
    if not cards:
        raise ValueError(
            "XLA times kernels on GPUs only, and there is none here: run this on the card to record"
        )
    path = Path(asked) if asked else targets.autotune_path(cards[0])
    if path is None:
        raise ValueError(
            f"{cards[0]!r} has no short name such as H200: name the file, --output=FILE"
        )
    if not path.parent.is_dir():
        raise ValueError(f"--output={path}: there is no folder {path.parent}; make it first")
    return path


def record(config: Config, path: Path) -> Recorded:
    """Compiles the config's update with nothing kept from before, and adds the entries to the file.

    Entries of other products stay. Turns JAX's compilation cache off for this process. Raises
    ValueError for a config that cannot be, and where XLA times nothing.
    """
    old = entries_in(path.read_text()) if path.exists() else {}
    new = entries_in(_timed_anew(config))
    # In the order of their keys, as XLA writes them.
    merged = [entry for _, entry in sorted((old | new).items())]
    write_atomically(path, "".join(merged).encode())
    return Recorded(path, num_recorded=len(new), num_kept=len(merged) - len(new))


def entries_in(text: str) -> dict[str, str]:
    """Key to the whole entry."""
    parts = re.findall(r"^entries \{$.*?^\}\n", text, re.MULTILINE | re.DOTALL)
    return {part.partition("  value {")[0]: part for part in parts}


def _timed_anew(config: Config) -> str:
    """What XLA writes down when it compiles the update with no earlier entries at hand."""
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "entries.txtpb"
        options = (
            "xla_gpu_load_autotune_results_from=",
            f"xla_gpu_dump_autotune_results_to={written}",
        )
        _compile(dataclasses.replace(config, xla_options=(*config.xla_options, *options)))
        if not written.exists():
            raise ValueError(
                "XLA wrote no choices: config.xla_options or XLA_FLAGS turn its autotuning off"
            )
        return written.read_text()


def _compile(config: Config) -> None:
    """The update, as `train` makes it."""
    corpus = corpus_of_run(config)
    fit.compile_update(update, plan_of_run(config, corpus=corpus))
