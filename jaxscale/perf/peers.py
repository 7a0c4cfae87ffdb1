"""jaxscale beside torchtitan, on this machine's GPUs, one after the other."""

import contextlib
import dataclasses
import json
import logging
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxscale.command_line import read_config
from jaxscale.perf import gpus, processes, torchtitan
from jaxscale.perf.provenance import provenance, shown
from jaxscale.perf.records import RATE, Record

log = logging.getLogger(__name__)

# A GPU that holds more is at work for somebody; the driver alone takes up to 0.6 GiB.
IDLE_GIB = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """bench_step: the script that measures jaxscale. order: who runs, one after the other.

    rounds: how often the order is gone through. workdir: where the logs stay; a temporary folder if
    None. commit: to put on record where there is no git.
    """

    bench_step: Path
    order: list[str]
    rounds: int
    peer: torchtitan.Options
    workdir: str | None = None
    commit: str = ""


def compare(settings: list[str], options: Options) -> Record:
    """The record of a config that these words of a command line name, on both.

    Raises ValueError and torchtitan.MissingPeerError before anything runs, processes.FailedError
    after.
    """
    with _folder(options.workdir) as folder:
        return _compare_in(folder, settings=settings, options=options)


@contextlib.contextmanager
def _folder(workdir: str | None) -> Iterator[Path]:
    folder = Path(workdir or tempfile.mkdtemp(prefix="bench_peers_")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if not workdir:
            shutil.rmtree(folder, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class _System:
    """One of the two; run: makes a record of one run, and writes its output to a file."""

    command: list[str]
    run: Callable[[Path], Record]


def _compare_in(folder: Path, *, settings: list[str], options: Options) -> Record:
    names = ("jaxscale", "torchtitan")
    if unknown := set(options.order) - set(names):
        raise ValueError(f"--order: {min(unknown)!r} is not one of {', '.join(names)}")
    config = read_config(settings)
    torchtitan.flavor_of(config.model)
    versions = torchtitan.versions_in(options.peer.python)
    cards = gpus.gpu_names()
    if not cards:
        raise ValueError(
            "no GPU here: nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides them all"
        )
    text = folder / "text"
    torchtitan.write_text(text, config)
    peer = torchtitan.command_of(config, options.peer, num_gpus=len(cards), text=text)
    systems = {"jaxscale": _ours(settings, options), "torchtitan": _theirs(peer, options)}
    figures = _take_turns(systems, folder, options=options)
    return {
        "name": "peers",
        "settings": settings,
        "device_kind": cards[0],
        "num_devices": len(cards),
        "order": options.order,
        "rounds": options.rounds,
        "ratio": _ratio(figures),
        "systems": figures,
        "peer_versions": versions,
        **provenance(commit=options.commit),
    }


def _ours(settings: list[str], options: Options) -> _System:
    peer = options.peer
    command = [
        *(sys.executable, str(options.bench_step), *settings, "--nowarm", "--noprofile"),
        f"--steps={peer.num_steps}",
        f"--skip={peer.skip}",
        f"--timeout={peer.timeout_seconds}",
        f"--commit={options.commit}",
    ]

    def run(output: Path) -> Record:
        # bench_step.py stops its run by itself, and tells more.
        processes.run(command, output=output, timeout_seconds=peer.timeout_seconds + 60)
        return json.loads(output.read_text().splitlines()[-1])

    return _System(command, run)


def _theirs(command: list[str], options: Options) -> _System:
    return _System(command, lambda output: torchtitan.run(command, output, options=options.peer))


def _take_turns(
    systems: dict[str, _System], folder: Path, *, options: Options
) -> dict[str, Record]:
    """By name, what `_summarize` makes of each one's runs."""
    runs: dict[str, list[Record]] = {name: [] for name in options.order}
    for number in range(1, options.rounds + 1):
        for name in options.order:
            wait_until_idle()
            log.info("%s, round %d of %d ...", name, number, options.rounds)
            runs[name].append(systems[name].run(folder / f"{name}_{number}.log"))
            log.info("%s: %s tokens/s/GPU", name, f"{runs[name][-1][RATE]:,.0f}")
    return {
        name: _summarize(runs[name]) | {"command": shown(systems[name].command)} for name in runs
    }


def wait_until_idle() -> None:
    """Until no GPU holds much memory: what ran before may still be leaving.

    Raises processes.FailedError after a minute.
    """
    for _ in range(60):
        used = gpus.used_memory_gib()
        if used is None or used < IDLE_GIB:
            return
        time.sleep(1)
    raise processes.FailedError(
        f"a GPU holds {used:.1f} GiB of somebody else's: nothing is measured beside other work"
    )


def _summarize(runs: list[Record]) -> Record:
    """Median of the runs' medians, and the spread of all their steps (of torchtitan: its lines)."""
    # MFU is not known of every GPU.
    shares = [run["mfu_full"] for run in runs if run["mfu_full"] is not None]
    return {
        RATE: statistics.median(run[RATE] for run in runs),
        f"{RATE}_min": min(run[f"{RATE}_min"] for run in runs),
        f"{RATE}_max": max(run[f"{RATE}_max"] for run in runs),
        "mfu_full": statistics.median(shares) if shares else None,
        "peak_memory_gib": max(run["peak_memory_gib"] for run in runs),
        "runs": runs,
    }


def _ratio(systems: dict[str, Record]) -> float | None:
    if len(systems) < 2:
        return None
    return systems["jaxscale"][RATE] / systems["torchtitan"][RATE]


def table(record: Record) -> str:
    """What a person reads."""
    lines = [
        f"{record['num_devices']} x {record['device_kind']}, {shlex.join(record['settings'])}",
        f"{'':12}{'tokens/s/GPU':>14}{'min':>9}{'max':>9}{'MFU full':>10}{'memory':>12}",
    ]
    for name, system in record["systems"].items():
        mfu = "n/a" if system["mfu_full"] is None else f"{system['mfu_full']:.1%}"
        low, high = (system[f"{RATE}_{end}"] for end in ("min", "max"))
        lines.append(
            f"{name:12}{system[RATE]:14,.0f}{low:9,.0f}{high:9,.0f}"
            f"{mfu:>10}{system['peak_memory_gib']:8.1f} GiB"
        )
    if record["ratio"] is not None:
        lines.append(f"{'ratio':12}{record['ratio']:14.3f}")
    return "\n".join(lines)
