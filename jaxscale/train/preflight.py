"""Before a run begins: whether its processes agree on what it is, and whether their GPUs are free.

Every process says what it found (`facts_of`), all compare it alike (`compare`, `of_gpus`), and all
raise the same error. Two agreements: the second is for what only the first makes possible, to look
for the file that the lead has written, and to read the clocks at one moment.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxscale
from jaxscale import config as run_config
from jaxscale import distributed
from jaxscale.checkpoint.leaves import different_keys
from jaxscale.config import Config
from jaxscale.train import free_gpus

ROOT = Path(jaxscale.__file__).resolve().parents[1]
# Where each host has files of its own. What is in them is compared: `data`.
OWN_KEYS = ("data.path", "data.cache_dir", "checkpoint.local")
# All leave an agreement within a moment, on a busy machine within a second or two.
CLOCK_SECONDS = 10.0
# What a network file system may take to show one host what another has written.
PROBE_SECONDS = 10.0
PROBE = ".preflight"
MOST_LINES = 8

log = logging.getLogger(__name__)

Facts = dict[str, Any]


class BusyGpuError(RuntimeError):
    """A GPU that others use, or without room. Nothing the user typed: it may be free later."""


def check(config: Config, workdir: Path, *, data: dict[str, Any]) -> None:
    """Raises ValueError where processes are not of one run, BusyGpuError for a GPU without room.

    data: what makes it this data (`Corpus.description`). What only may be wrong is a warning: other
    code, another driver, clocks, a GPU that is shared. Every process calls it, before its first
    collective; touches no device of a process that is alone. Under 1 ms there, without GPUs.
    """
    # Counting the processes touches the devices, so one that is alone is not asked.
    is_alone = not jax.distributed.is_initialized() or jax.process_count() == 1
    facts = facts_of(config, data=data, is_alone=is_alone)
    everyone = [facts] if is_alone else gather(facts, workdir)
    errors, warnings = compare(everyone, workdir=workdir)
    gpu_errors, gpu_warnings = of_gpus(everyone)
    for line in shortened(warnings + gpu_warnings):
        log.warning(line)
    if errors:
        raise ValueError("\n  ".join(shortened(errors + gpu_errors)))
    if gpu_errors:
        raise BusyGpuError("\n  ".join(shortened(gpu_errors)))


def gather(facts: Facts, workdir: Path | None) -> list[Facts]:
    """The facts of each process; with `clock`, and `sees`: whether it has the lead's workdir."""
    with _probe(workdir) as token:
        said = distributed.every_process_says(json.dumps(facts | {"probe": token}))
        everyone = [json.loads(text) for text in said]
        second = {"clock": time.time(), "sees": _sees(workdir, everyone[0]["probe"])}
        seconds = distributed.every_process_says(json.dumps(second))
    for mine, text in zip(everyone, seconds, strict=True):
        mine |= json.loads(text)
    return everyone


# What a process finds.


def facts_of(config: Config | None, *, data: dict[str, Any], is_alone: bool) -> Facts:
    """Of this process. JSON; what only a comparison needs is left out of one that is alone."""
    facts: Facts = {
        "process": 0 if is_alone else jax.process_index(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "gpus": free_gpus.own_gpus(),
    }
    if is_alone:
        return facts
    return facts | {
        "versions": versions(),
        "driver": next((gpu["driver"] for gpu in facts["gpus"]), None),
        "cards": sorted({gpu["name"] for gpu in facts["gpus"]}),
        "commit": commit(ROOT),
        "code": code_digest(ROOT),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "config": {} if config is None else _shared_part(config),
        "data": data,
    }


def versions() -> dict[str, str | None]:
    """Of what compiles and runs the update; the CUDA plugin's name has CUDA's version."""
    names = ("jax", "jaxlib", *(name for name in free_gpus.PLUGINS if free_gpus.installed(name)))
    return {name: free_gpus.installed(name) for name in names}


def _shared_part(config: Config) -> dict[str, Any]:
    found = run_config.to_json(config)
    for key in OWN_KEYS:
        part, _, name = key.rpartition(".")
        found[part].pop(name, None)
    return found


def commit(root: Path) -> str | None:
    """The commit of a checkout, as its files say it: git need not be there. None for none."""
    folder = root / ".git"
    try:
        if folder.is_file():  # of a worktree, or a submodule
            folder = root / folder.read_text().removeprefix("gitdir:").strip()
        head = (folder / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        common = folder / "commondir"
        shared = folder / common.read_text().strip() if common.exists() else folder
        for place in (folder, shared):
            if (place / name).is_file():
                return (place / name).read_text().strip()
        lines = (shared / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
    except (OSError, UnicodeDecodeError):
        return None


def code_digest(root: Path) -> str:
    """Hex, of the modules of jaxscale: changes that are in no commit, and copies without git."""
    digest, package = hashlib.sha256(), root / "jaxscale"
    # In a checkout kernels is a link, which rglob followed before Python 3.13.
    paths = [path for path in package.rglob("*.py") if "kernels" not in path.parts[-2:]]
    for path in [*sorted(paths), *sorted((package / "kernels").resolve().glob("*.py"))]:
        digest.update(path.name.encode())
        with contextlib.suppress(OSError):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# A file of the lead's, for the others to see.


@contextlib.contextmanager
def _probe(workdir: Path | None) -> Iterator[str]:
    """Yields the token that the file is named after; "" on the others, or if it cannot be made."""
    if workdir is None or not distributed.is_lead():
        yield ""
        return
    token = secrets.token_hex(8)
    path = workdir / f"{PROBE}-{token}"
    try:
        path.write_text(token)
    except OSError:
        token = ""
    try:
        yield token
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _sees(workdir: Path | None, token: str) -> bool:
    """Whether the lead's file is in this process's workdir; looks for PROBE_SECONDS."""
    if workdir is None or not token:
        return True
    path, deadline = workdir / f"{PROBE}-{token}", time.monotonic() + PROBE_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


# Comparing. Every process gets the same from the same facts.


def compare(everyone: Sequence[Facts], *, workdir: Path) -> tuple[list[str], list[str]]:
    """Errors and warnings: a line for each process that is not like the lead, the first."""
    lead, errors, warnings = everyone[0], [], []
    for mine in everyone[1:]:
        fatal = _fatal_differences(mine, lead, workdir=workdir)
        harmless = _harmless_differences(mine, lead)
        for differences, lines in ((fatal, errors), (harmless, warnings)):
            if differences:
                found = "; ".join(differences)
                lines.append(f"{who(mine)}, unlike {who(lead)}: {found}")
    return errors, warnings


def who(facts: Facts) -> str:
    return f"process {facts['process']} (host {facts['host']})"


def _fatal_differences(mine: Facts, lead: Facts, *, workdir: Path) -> list[str]:
    found = []
    if changed := _changed_versions(mine["versions"], lead["versions"]):
        found.append(f"{changed}: install the same on every host")
    if changed := _changed(mine["config"], lead["config"], prefix="config"):
        found.append(f"{changed}: start all with the same command")
    if changed := _changed(mine["data"], lead["data"], prefix="data"):
        found.append(
            f"{changed}: config.data.path is to be the same text or store on every host, and "
            "config.data.tokenizer the same file"
        )
    if not mine["sees"]:
        found.append(
            f"it does not see in --workdir={workdir} what process 0 has written there: name a "
            "folder that all hosts share"
        )
    return found


def _harmless_differences(mine: Facts, lead: Facts) -> list[str]:
    found = []
    if mine["commit"] != lead["commit"]:
        found.append(
            f"commit {_short(mine)} instead of {_short(lead)}: start all from the same checkout"
        )
    elif mine["code"] != lead["code"]:
        found.append(
            f"the files of jaxscale are others, at the same commit {_short(lead)}: start all from "
            "the same checkout"
        )
    if mine["driver"] != lead["driver"]:
        found.append(f"driver {mine['driver']} instead of {lead['driver']}")
    if mine["cards"] != lead["cards"]:
        cards = [", ".join(facts["cards"]) or "no GPU" for facts in (mine, lead)]
        found.append(f"{cards[0]} instead of {cards[1]}: the slower ones set the pace")
    if mine["xla_flags"] != lead["xla_flags"]:
        found.append(
            f"XLA_FLAGS={mine['xla_flags']!r} instead of {lead['xla_flags']!r}: programs that "
            "differ may wait for each other for ever; set the same"
        )
    ahead = mine["clock"] - lead["clock"]
    if abs(ahead) > CLOCK_SECONDS:
        found.append(
            f"its clock is {abs(ahead):,.0f} s {'ahead' if ahead > 0 else 'behind'}: times in logs "
            "cannot be compared; let NTP or chrony set it"
        )
    return found


def _short(facts: Facts) -> str:
    return (facts["commit"] or "unknown")[:10]


def _changed_versions(mine: dict[str, str], lead: dict[str, str]) -> str:
    names = sorted(name for name in mine | lead if mine.get(name) != lead.get(name))
    return ", ".join(
        f"{name} {mine[name]} instead of {lead.get(name, 'none')}"
        if name in mine
        else f"no {name} instead of {lead[name]}"
        for name in names
    )


def _changed(mine: dict, lead: dict, *, prefix: str) -> str:
    """`config.steps=20 instead of 10, ...`, of the first few that differ."""
    keys = [line.partition(":")[0] for line in different_keys(lead, mine, prefix=prefix)]
    paths = [key.split(".")[1:] for key in keys]
    shown = [
        f"{key}={_at(mine, path)} instead of {_at(lead, path)}"
        for key, path in list(zip(keys, paths, strict=True))[:3]
    ]
    return ", ".join(shown) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _at(tree: Any, path: Sequence[str]) -> str:
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return run_config.shown(tree)


def of_gpus(everyone: Sequence[Facts]) -> tuple[list[str], list[str]]:
    """Errors and warnings about cards that others use, or that have too little free memory."""
    errors, warnings = [], []
    for mine in everyone:
        own_pids = [facts["pid"] for facts in everyone if facts["host"] == mine["host"]]
        for gpu in mine["gpus"]:
            error, warning = free_gpus.remarks(gpu, own_pids=own_pids)
            errors += [f"{who(mine)}: {error}"] if error else []
            warnings += [f"{who(mine)}: {warning}"] if warning else []
    return errors, warnings


def shortened(lines: Sequence[str]) -> list[str]:
    """The first of them, and how many more there are."""
    if len(lines) <= MOST_LINES:
        return list(lines)
    return [*lines[: MOST_LINES - 1], f"and {len(lines) - MOST_LINES + 1} more such lines"]
