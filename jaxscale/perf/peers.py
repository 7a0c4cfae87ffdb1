"""jaxscale beside torchtitan, on this machine's GPUs, one after the other."""

import contextlib
import dataclasses
import json
import logging
import math
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jaxscale.command_line import read_config
from jaxscale.config import Config
from jaxscale.perf import context_speed, gpus, processes, torchtitan
from jaxscale.perf.peer_cases import Variant
from jaxscale.perf.provenance import provenance, shown
from jaxscale.perf.records import RATE, Record

log = logging.getLogger(__name__)

# A GPU that holds more is at work for somebody; the driver alone takes up to 0.6 GiB.
IDLE_GIB = 2.0
# Of a start that measures nothing: not worth beginning with less left.
LEAST_SECONDS = 60
OURS = "jaxscale"
# How processes.run says that a process ended.
FATE = re.compile(r"^(took over .* s and was stopped|failed with exit code .*?);", re.MULTILINE)
# How a script of ours says why it failed, and how another one quotes that.
MISTAKE = re.compile(r"^error: (.*)$", re.MULTILINE)
QUOTED = re.compile(r"^\| error: (.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """bench_step: the script that measures jaxscale. order: who runs, one after the other.

    rounds: how often the order is gone through. variants: of torchtitan, by the name that `order`
    and the record have. has_long_text: train on text whose rows are one document. ends: when all
    has to be over, by time.monotonic(). workdir: where the logs stay; a temporary folder if None.
    commit: to put on record where there is no git.
    """

    bench_step: Path
    order: list[str]
    rounds: int
    peer: torchtitan.Options
    variants: Mapping[str, Variant] = dataclasses.field(
        default_factory=lambda: {"torchtitan": Variant()}
    )
    has_long_text: bool = False
    ends: float = math.inf
    workdir: str | None = None
    commit: str = ""


def compare(settings: list[str], options: Options) -> Record:
    """The record of a config that these words of a command line name, on both.

    A run that fails, or for which no time is left, is on record as one. Raises ValueError and
    torchtitan.MissingPeerError before anything runs.
    """
    with _folder(options.workdir) as folder:
        return _compare_in(folder, settings=settings, options=options)


def check_order(options: Options) -> None:
    """Raises ValueError for a name that nothing has."""
    names = (OURS, *options.variants)
    if unknown := set(options.order) - set(names):
        raise ValueError(f"--order: {min(unknown)!r} is not one of {', '.join(names)}")


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
    """One that is measured; run: makes a record of one run of at most so many seconds.

    instead_of: another system, which has to have failed for this one to run.
    """

    command: list[str]
    run: Callable[[Path, float], Record]
    instead_of: str = ""


def _compare_in(folder: Path, *, settings: list[str], options: Options) -> Record:
    check_order(options)
    if options.has_long_text:
        path = context_speed.write_long_text(folder / "long_text")
        # A case begins with its config; the user's own settings come last, and count.
        settings = [settings[0], f"--config.data.path={path}", *settings[1:]]
    config = read_config(settings)
    torchtitan.flavor_of(config.model)
    versions = torchtitan.versions_in(options.peer.python)
    cards = gpus.gpu_names()
    if not cards:
        raise ValueError(
            "no GPU here: nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides them all"
        )
    systems = {OURS: _ours(settings, options)} | _theirs(
        config, options, num_gpus=len(cards), text=folder / "text"
    )
    torchtitan.write_text(folder / "text", config)
    figures = _take_turns(systems, folder, options=options)
    return {
        "name": "peers",
        "settings": settings,
        "device_kind": cards[0],
        "num_devices": len(cards),
        "order": options.order,
        "rounds": options.rounds,
        **_ratio(figures),
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
        f"--commit={options.commit}",
    ]

    def run(output: Path, seconds: float) -> Record:
        # bench_step.py stops its run by itself, and tells more.
        limited = [*command, f"--timeout={seconds:.0f}"]
        processes.run(limited, output=output, timeout_seconds=seconds + 30)
        return json.loads(output.read_text().splitlines()[-1])

    return _System(command, run)


def _theirs(config: Config, options: Options, *, num_gpus: int, text: Path) -> dict[str, _System]:
    """torchtitan's variants of the order. Raises ValueError where one cannot train the config."""

    def system_of(variant: Variant) -> _System:
        more = shlex.join(variant.options)
        peer = dataclasses.replace(options.peer, more=f"{more} {options.peer.more}".strip())
        command = torchtitan.command_of(config, peer, num_gpus=num_gpus, text=text)

        def run(output: Path, seconds: float) -> Record:
            limited = dataclasses.replace(peer, timeout_seconds=seconds)
            return torchtitan.run(command, output, options=limited)

        return _System(command, run, variant.instead_of)

    return {
        name: system_of(variant)
        for name, variant in options.variants.items()
        if name in options.order
    }


def _take_turns(
    systems: dict[str, _System], folder: Path, *, options: Options
) -> dict[str, Record]:
    """By name, what `_summarize` makes of each one's runs; of those that had a turn."""
    runs: dict[str, list[Record]] = {name: [] for name in options.order}
    failures: dict[str, list[str]] = {name: [] for name in options.order}
    for number in range(1, options.rounds + 1):
        for name in options.order:
            if not _has_a_turn(systems[name], failures):
                continue
            output = folder / f"{name}_{number}.log"
            output.unlink(missing_ok=True)  # of an earlier start in the same folder
            log.info("%s, round %d of %d ...", name, number, options.rounds)
            try:
                runs[name].append(_run(systems[name], output, options=options))
            except processes.FailedError as error:
                log.error("%s: %s", name, error)
                failures[name].append(_told_in_a_line(error, output))
            else:
                log.info("%s: %s tokens/s/GPU", name, f"{runs[name][-1][RATE]:,.0f}")
    return {
        name: _summarize(runs[name])
        | {"failures": failures[name], "command": shown(systems[name].command)}
        for name in runs
        if runs[name] or failures[name]
    }


def _has_a_turn(system: _System, failures: dict[str, list[str]]) -> bool:
    """A system that stands in for one that is not asked for is wanted for itself."""
    return system.instead_of not in failures or bool(failures[system.instead_of])


def _run(system: _System, output: Path, *, options: Options) -> Record:
    """Raises processes.FailedError."""
    left = options.ends - time.monotonic()
    if left < LEAST_SECONDS:
        raise processes.FailedError(f"left out, {max(left, 0):.0f} s are left")
    wait_until_idle()
    return system.run(output, min(options.peer.timeout_seconds, left))


def _told_in_a_line(error: processes.FailedError, output: Path) -> str:
    """That the time was up, or else the last error that the run printed."""
    text = output.read_text(errors="replace") if output.exists() else ""
    fates = FATE.findall(f"{text}\n{error}")
    if late := [fate for fate in fates if fate.startswith("took over")]:
        return late[0]
    told = [
        *QUOTED.findall(text)[-1:],
        torchtitan.last_exception(text),
        *MISTAKE.findall(text)[-1:],
        *fates[-1:],
    ]
    return next((line for line in told if line), str(error).splitlines()[0])[:300]


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
    if not runs:
        return {"runs": []}
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


def _ratio(systems: dict[str, Record]) -> Record:
    """Of jaxscale's rate to that of torchtitan's fastest variant."""
    rates = {name: system[RATE] for name, system in systems.items() if system["runs"]}
    ours = rates.pop(OURS, None)
    if ours is None or not rates:
        return {"ratio": None, "ratio_to": None}
    fastest = max(rates, key=lambda name: rates[name])
    return {"ratio": ours / rates[fastest], "ratio_to": fastest}


def has_failed(record: Record) -> bool:
    """Whether any run did, or was left out."""
    return any(system["failures"] for system in record["systems"].values())


def table(record: Record) -> str:
    """What a person reads."""
    systems = record["systems"]
    width = max(map(len, (*systems, "torchtitan"))) + 2
    lines = [
        f"{record['num_devices']} x {record['device_kind']}, {shlex.join(record['settings'])}",
        f"{'':{width}}{'tokens/s/GPU':>14}{'min':>9}{'max':>9}{'MFU full':>10}{'memory':>12}",
    ]
    for name, system in systems.items():
        if system["runs"]:
            lines.append(f"{name:{width}}{_cells(system)}")
        lines += [f"{name:{width}}  {failure}" for failure in system["failures"]]
    if record["ratio"] is not None:
        lines.append(f"{'ratio':{width}}{record['ratio']:14.3f} to {record['ratio_to']}")
    return "\n".join(lines)


def _cells(system: Record) -> str:
    mfu = "n/a" if system["mfu_full"] is None else f"{system['mfu_full']:.1%}"
    low, high = (system[f"{RATE}_{end}"] for end in ("min", "max"))
    memory = f"{system['peak_memory_gib']:8.1f} GiB"
    return f"{system[RATE]:14,.0f}{low:9,.0f}{high:9,.0f}{mfu:>10}{memory}"
