"""The findings of scripts/doctor.py as text: a section for each kind of thing, a verdict a line."""

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from jaxscale import gpu_facts
from jaxscale.perf import doctor_verdicts as verdicts
from jaxscale.perf.doctor_verdicts import Finding, Verdict

Facts = dict[str, Any]

MIB, GIB = 2**20, 2**30
NOT_HERE = "-"


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of a table, and what is not well about it. is_judged: there was something to judge."""

    cells: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    is_judged: bool = True

    @property
    def verdict(self) -> Verdict:
        return verdicts.worst(self.findings, is_judged=self.is_judged)


@dataclasses.dataclass(frozen=True)
class Section:
    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]


def sections(everyone: Sequence[Facts], between: Sequence[Finding]) -> list[Section]:
    """everyone: what each process found. between: what was found by comparing them."""
    return [
        _processes(everyone, between),
        _devices(everyone),
        *_collectives(everyone),
        _hosts(everyone),
        *_checkpoint(everyone),
    ]


def text(found: Sequence[Section]) -> Iterator[str]:
    """Lines of the whole report, and how many findings there were."""
    for section in found:
        yield section.title
        yield from _aligned(section)
        yield ""
    counts = collections.Counter(
        finding.verdict for section in found for line in section.lines for finding in line.findings
    )
    failed, warned = counts[Verdict.FAIL], counts[Verdict.WARN]
    if failed or warned:
        yield f"{failed} failed, {warned} to look at"
    else:
        yield "nothing to do"


def has_failed(found: Sequence[Section]) -> bool:
    return any(line.verdict == Verdict.FAIL for section in found for line in section.lines)


def to_json(found: Sequence[Section]) -> list[Facts]:
    """A record for each line: section, its columns, verdict, findings."""
    return [
        {
            "section": section.title,
            **dict(zip(section.columns, line.cells, strict=True)),
            "verdict": line.verdict.value.lower(),
            "findings": [
                {"verdict": finding.verdict.value.lower(), "text": finding.text}
                for finding in line.findings
            ],
        }
        for section in found
        for line in section.lines
    ]


def _aligned(section: Section) -> Iterator[str]:
    rows = [(*section.columns, ""), *((*line.cells, line.verdict.value) for line in section.lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def shown(row: Sequence[str]) -> str:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        return ("  " + "  ".join(cells)).rstrip()

    yield shown(rows[0])
    for row, line in zip(rows[1:], section.lines, strict=True):
        yield shown(row)
        yield from (f"      {finding.verdict}: {finding.text}" for finding in line.findings)


def _processes(everyone: Sequence[Facts], between: Sequence[Finding]) -> Section:
    lead = everyone[0]
    found = ", ".join(f"{name} {version}" for name, version in lead["libraries"].items())
    driver = next((gpu["driver"] for gpu in lead["gpus"]), None)
    drivers = f", driver {driver}" if driver else ""
    line = Line((f"{found}{drivers}",), tuple(between))
    num = len(everyone)
    title = "process 0" if num > 1 else "process"
    return Section(f"{num} process{'es' if num > 1 else ''}", (title,), (line,))


def _devices(everyone: Sequence[Facts]) -> Section:
    devices = [device for process in everyone for device in process["devices"]]
    medians = verdicts.medians(devices)
    lines = []
    for process in everyone:
        for device in process["devices"]:
            findings = tuple(verdicts.of_device(device, medians=medians))
            where = (str(process["process"]), process["host"], device["name"])
            is_judged = device["platform"] != "cpu" or len(devices) > 1
            lines.append(Line((*where, *_device_cells(device)), findings, is_judged))
    kinds = ", ".join(sorted({device["kind"] for device in devices}))
    columns = ("process", "host", "device", "bf16 TFLOP/s", "memory GB/s", "MHz", "W", "C")
    return Section(
        f"devices: {len(devices)} x {kinds} (expected in brackets)",
        (*columns, "memory errors", "links", "held back by"),
        tuple(lines),
    )


def _device_cells(device: Facts) -> Iterator[str]:
    expected, load, card = verdicts.card_of(device["kind"]), device["load"], device["card"]
    for key in verdicts.MEASURED:
        wanted = f" ({getattr(expected, key):,.0f})" if expected else ""
        yield _figure(device[key]) + wanted
    for now, most in (
        (load.get("clock_mhz"), card.get("clocks.max.sm")),
        (load.get("power_w"), card.get("power.limit")),
    ):
        limit = gpu_facts.number(most)
        yield NOT_HERE if now is None else f"{now:,.0f}" + (f" of {limit:,.0f}" if limit else "")
    yield _or_dash(load.get("temperature_c"))
    yield _errors(card)
    yield _links(card)
    yield ", ".join(load.get("reasons", ())) or NOT_HERE


def _figure(value: float | None) -> str:
    if value is None:
        return NOT_HERE
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.4g}"


def _or_dash(value: float | None) -> str:
    return NOT_HERE if value is None else f"{value:,.0f}"


def _errors(card: Facts) -> str:
    """Corrected / uncorrected since the driver was loaded."""
    kinds = ("corrected", "uncorrected")
    counts = [gpu_facts.number(card.get(f"ecc.errors.{kind}.volatile.total")) for kind in kinds]
    return NOT_HERE if counts == [None, None] else " / ".join(map(_or_dash, counts))


def _links(card: Facts) -> str:
    """`NV18 x 7, NUMA 0`."""
    links = card.get("links", {})
    to_cards = [link for other, link in links.items() if other[:3] == "GPU" and other[3:].isdigit()]
    counts = collections.Counter(link for link in to_cards if link != "X")
    parts = [f"{link} x {count}" for link, count in counts.most_common()]
    if (numa := links.get("NUMA Affinity", "N/A")) != "N/A":
        parts.append(f"NUMA {numa}")
    return ", ".join(parts) or NOT_HERE


def _collectives(everyone: Sequence[Facts]) -> Iterator[Section]:
    """A line for each group of devices and collective, with the slowest host's figures."""
    figures = [figure for process in everyone for figure in process["collectives"]]
    if not figures:
        return
    sizes = sorted({figure["bytes"] for figure in figures})
    lines = []
    for group, collective in dict.fromkeys((f["group"], f["collective"]) for f in figures):
        by_host = _by_host(everyone, group, collective=collective)
        largest = {host: figures[-1][0] for host, figures in by_host.items()}
        median = statistics.median(figure["bus_gbs"] for figure in largest.values())
        findings, expected = [], None
        for host, figures_of_host in by_host.items():
            figure, process = figures_of_host[-1]
            expected = verdicts.expected_bus_gbs(group, process)
            is_cpu = process["devices"][0]["platform"] == "cpu"
            of_host = verdicts.of_collective(
                figure, median=median, expected=expected, is_cpu=is_cpu
            )
            findings += [
                dataclasses.replace(finding, text=f"host {host}: {finding.text}")
                for finding in of_host
            ]
        slowest = [
            min(f[0]["bus_gbs"] for f in of_size) for of_size in zip(*by_host.values(), strict=True)
        ]
        num = next(iter(largest.values()))["num"]
        cells = (group, collective, str(num), *(f"{value:,.4g}" for value in slowest))
        is_judged = expected is not None
        shown = f"{expected:,.0f}" if expected is not None else NOT_HERE
        lines.append(Line((*cells, shown), tuple(findings), is_judged))
    columns = ("among", "collective", "devices", *map(_bytes, sizes), "expected")
    yield Section("collectives: bus bandwidth in GB/s, slowest host", columns, tuple(lines))


def _by_host(
    everyone: Sequence[Facts], group: str, *, collective: str
) -> dict[str, list[tuple[Facts, Facts]]]:
    """For each host its slowest process's (figure, process), by size."""
    found: dict[str, dict[int, tuple[Facts, Facts]]] = {}
    for process in everyone:
        for figure in process["collectives"]:
            if (figure["group"], figure["collective"]) != (group, collective):
                continue
            of_host = found.setdefault(process["host"], {})
            known = of_host.get(figure["bytes"])
            if known is None or figure["bus_gbs"] < known[0]["bus_gbs"]:
                of_host[figure["bytes"]] = (figure, process)
    return {host: [by_size[size] for size in sorted(by_size)] for host, by_size in found.items()}


def _bytes(number: int) -> str:
    return f"{number // GIB} GiB" if number >= GIB else f"{number // MIB} MiB"


def _hosts(everyone: Sequence[Facts]) -> Section:
    """A line a host: of its first process, which has the disk's figures."""
    hosts: dict[str, list[Facts]] = {}
    for process in everyone:
        hosts.setdefault(process["host"], []).append(process)
    written = [process["disk"] for process in everyone if "write_gbs" in (process["disk"] or {})]
    median = statistics.median_high(disk["write_gbs"] for disk in written) if written else 0.0
    lines = []
    for host, processes in hosts.items():
        machine, disk = processes[0]["machine"], processes[0]["disk"]
        findings = verdicts.of_machine(
            processes[0] | {"devices": [d for process in processes for d in process["devices"]]},
            num_hosts=len(hosts),
        )
        findings += verdicts.of_disk(disk, median=median) if disk else []
        lines.append(Line((host, *_host_cells(processes, machine, disk=disk)), tuple(findings)))
    columns = ("host", "processes", "devices", "cores", "NUMA nodes", "GiB", "kernel", "network")
    return Section("hosts", (*columns, "disk GB/s write / read"), tuple(lines))


def _host_cells(processes: Sequence[Facts], machine: Facts, *, disk: Facts | None) -> Iterator[str]:
    yield str(len(processes))
    yield str(sum(len(process["devices"]) for process in processes))
    yield f"{machine['cores']}"
    yield f"{machine['numa_nodes']}"
    yield f"{machine['memory_gib']:,.0f}"
    yield machine["kernel"]
    rates = collections.Counter((nic["gbps"], nic["layer"]) for nic in machine["nics"])
    ports = (f"{count} x {gbps:g} Gb/s {layer}" for (gbps, layer), count in rates.items())
    yield ", ".join(ports) or NOT_HERE
    has_figures = disk is not None and "write_gbs" in disk
    yield f"{disk['write_gbs']:.2f} / {disk['read_gbs']:.2f}" if disk and has_figures else NOT_HERE


def _checkpoint(everyone: Sequence[Facts]) -> Iterator[Section]:
    figure = everyone[0]["checkpoint"]
    if figure is None:
        return
    if "error" in figure:
        failed = Finding(Verdict.FAIL, figure["error"])
        line = Line((NOT_HERE,) * 3, (failed,))
    else:
        values = (figure["gb"], figure["save_gbs"], figure["restore_gbs"])
        line = Line(tuple(f"{value:.3g}" for value in values), is_judged=False)
    columns = ("GB", "save GB/s", "restore GB/s")
    yield Section("checkpoint: of all processes together, checksums included", columns, (line,))
