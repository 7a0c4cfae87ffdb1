"""Examines the machines of a cluster before a run: what scripts/doctor.py does.

Every process looks at its own host and cards; all measure together, cards at once and collectives
as the mesh has them; each then has what all found, and comes to the same verdicts.
"""

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxscale import distributed
from jaxscale.checkpoint.stored import CheckpointError
from jaxscale.perf import doctor_facts, doctor_table
from jaxscale.perf import doctor_speed as speed
from jaxscale.perf.doctor_speed import Sizes
from jaxscale.perf.doctor_table import Section
from jaxscale.perf.doctor_verdicts import Finding, Verdict
from jaxscale.train import preflight

Facts = dict[str, Any]

log = logging.getLogger(__name__)

NOT_SHARED = "not every process sees what process 0 writes in --workdir: name a shared folder"


def examine(
    workdir: Path | None, *, is_quick: bool, patience: float, file_bytes: int | None = None
) -> list[Section]:
    """The report, the same on every process; all call it.

    workdir: a shared folder whose disk is measured, with files of file_bytes: one a host, and one
    checkpoint of so many a device. patience: seconds that one measurement may take; the process
    ends with 1 where it takes longer. Raises ValueError for a workdir that cannot be written to.
    """
    is_alone = not jax.distributed.is_initialized() or jax.process_count() == 1
    # Before a process that is alone touches its devices: then all that uses them is another's.
    facts = preflight.facts_of(None, data={}, is_alone=is_alone)
    everyone = [facts]
    if not is_alone:
        with speed.stage("the processes tell each other what they are", seconds=patience):
            everyone = preflight.gather(facts, workdir)
    # Told now, too: what is wrong may end the measurements.
    for finding in _between(everyone, workdir):
        log.warning("%s: %s", finding.verdict, finding.text)
    sizes = speed.CPU if jax.default_backend() == "cpu" else speed.QUICK if is_quick else speed.FULL
    file_bytes = file_bytes or sizes.file_bytes
    own = {
        "libraries": doctor_facts.libraries(),
        "machine": doctor_facts.host(),
        "devices": _devices(sizes, patience=patience),
        "collectives": _collectives(everyone, sizes, patience=patience),
        "disk": None,
        "checkpoint": None,
    }
    if workdir is not None:
        with speed.stage("disk", seconds=patience):
            own["disk"] = _disk(everyone, workdir, num_bytes=file_bytes)
        with speed.stage("checkpoint", seconds=patience):
            own["checkpoint"] = _checkpoint(everyone, workdir, num_bytes=file_bytes)
    said = distributed.every_process_says(json.dumps(own))
    return report(everyone, [json.loads(text) for text in said], workdir=workdir)


def report(
    everyone: Sequence[Facts], measured: Sequence[Facts], *, workdir: Path | None
) -> list[Section]:
    """everyone: what each process is (`preflight.facts_of`). measured: what `examine` added."""
    joined = [facts | found for facts, found in zip(everyone, measured, strict=True)]
    for process in joined:
        beside = [other for other in joined if other["host"] == process["host"]]
        process["host_devices"] = sum(len(other["devices"]) for other in beside)
    return doctor_table.sections(joined, _between(everyone, workdir))


def _between(everyone: Sequence[Facts], workdir: Path | None) -> list[Finding]:
    """What is wrong with processes beside process 0, and with who else uses their GPUs."""
    errors, warnings = preflight.compare(everyone, workdir=workdir or Path())
    gpu_errors, gpu_warnings = preflight.of_gpus(everyone)
    return [
        *(Finding(Verdict.FAIL, line) for line in errors + gpu_errors),
        *(Finding(Verdict.WARN, line) for line in warnings + gpu_warnings),
    ]


def _devices(sizes: Sizes, *, patience: float) -> list[Facts]:
    devices = sorted(jax.local_devices(), key=lambda device: (device.local_hardware_id, device.id))
    is_cpu = devices[0].platform == "cpu"
    cards = [] if is_cpu else doctor_facts.cards()
    if len(cards) != len(devices):  # no nvidia-smi, or it sees others
        cards = [{"links": {}} for _ in devices]
    load = doctor_facts.Load()
    # All cards of the cluster draw their power at the same time, as in a run.
    with speed.stage("matrix products and memory", seconds=patience):
        distributed.every_process_says("")
        figures = speed.of_devices(
            devices, sizes, at_work=contextlib.nullcontext() if is_cpu else load
        )
    return [
        {
            "name": f"GPU {card['index']}" if "index" in card else f"{device.platform} {number}",
            "kind": device.device_kind,
            "platform": device.platform,
            "card": card,
            "load": load.of(card.get("uuid", "")),
            **figure,
        }
        for number, (device, card, figure) in enumerate(zip(devices, cards, figures, strict=True))
    ]


def _collectives(everyone: Sequence[Facts], sizes: Sizes, *, patience: float) -> list[Facts]:
    hosts = [facts["host"] for facts in everyone]
    mesh = speed.mesh_of(jax.devices(), lambda device: hosts[device.process_index])
    groups = speed.groups_of(mesh, num_hosts=len(set(hosts)))
    return speed.of_collectives(mesh, sizes, groups=groups, patience=patience)


def _disk(everyone: Sequence[Facts], workdir: Path, *, num_bytes: int) -> Facts | None:
    """Of the first process of each host, all hosts at once."""
    mine = everyone[jax.process_index()]
    first = next(facts for facts in everyone if facts["host"] == mine["host"])
    distributed.every_process_says("")
    if first["process"] != mine["process"]:
        return None
    try:
        return speed.of_disk(workdir, num_bytes)
    except OSError as error:
        return {"error": f"--workdir={workdir}: {error.strerror}"}


def _checkpoint(everyone: Sequence[Facts], workdir: Path, *, num_bytes: int) -> Facts:
    if not all(facts.get("sees", True) for facts in everyone):
        return {"error": NOT_SHARED}
    # Named by process 0, as all of them write to it.
    (name, *_) = distributed.every_process_says(f"doctor-{os.getpid()}")
    try:
        return speed.of_checkpoint(workdir / name, num_bytes)
    except (CheckpointError, OSError) as error:
        # Where a process of several fails alone, the others wait for it.
        if jax.process_count() > 1:
            raise
        return {"error": str(error)}
