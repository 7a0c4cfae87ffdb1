"""What scripts/doctor.py thinks of what it found: pass, warn or fail, and what to do.

A figure is held to what such a card reached when it was well, and to the other cards of the run:
one slow GPU holds up all of them.
"""

import dataclasses
import enum
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from jaxscale import gpu_facts
from jaxscale.perf import doctor_speed as speed

Facts = dict[str, Any]


class Verdict(enum.StrEnum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "FAIL"
    NONE = "-"  # nothing to hold it to


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is not well. text: what it is, and what to do."""

    verdict: Verdict
    text: str


@dataclasses.dataclass(frozen=True)
class Card:
    """What one of these reaches when it is well. Bus bandwidth is of collectives inside a host."""

    matmul_tflops: float
    memory_gbs: float
    bus_gbs: float


# SXM, 700 W. Products of 8192^3 random bf16: 798 and 810 TFLOP/s on two H100, 788 on an H200, cool;
# 700 beside other work at the power cap. Memory read and written: 3.0 and 4.3 TB/s (of 3.35 and
# 4.8). Collectives over NVLink (NV18, 450 GB/s each way) without NVLS: all-gather 328 GB/s at 2
# GiB, all-reduce 298 at 0.5 GiB on 4 x H200.
CARDS = {"H100": Card(790, 3000, 300), "H200": Card(790, 4300, 300)}
OTHER_FORMS = ("PCIe", "NVL")

# Of the expectation. Products at the power cap are at 0.88 of it.
LEAST_PASS, LEAST_WARN = 0.82, 0.65
LEAST_PASS_BUS, LEAST_WARN_BUS = 0.75, 0.5
# Of what the network cards can carry; some may be for storage.
LEAST_PASS_NETWORK, LEAST_WARN_NETWORK = 0.6, 0.25
# Of the median. Four H200 of one host were within 3%.
LEAST_PASS_OTHERS, LEAST_WARN_OTHERS = 0.94, 0.85
# CPUs and disks have other things to do.
LEAST_PASS_CPUS = 0.33
# Of the highest clock: at the power cap 1,410 to 1,560 of 1,980 MHz.
LEAST_CLOCK = 0.6
HOT_C = 85
MANY_CORRECTED = 1000
BAD_REASONS = {
    "hardware slowdown": "power or heat; look at the supply and the cooling of this machine",
    "hardware thermal slowdown": "too hot; look at the cooling of this machine",
    "power brake": "the machine's supply asks for less; look at it",
}
ODD_REASONS = {
    "software thermal slowdown": "near its limit of heat; look at the cooling of this machine",
    "application clocks": "nvidia-smi -rac (as root) takes the limit away",
    "sync boost": "it runs at the clock of the slowest of its group",
    "display clocks": "a display is attached",
}


def card_of(device_kind: str) -> Card | None:
    """None where none of such a card was measured."""
    if any(form in device_kind for form in OTHER_FORMS):
        return None
    return next((card for name, card in CARDS.items() if name in device_kind), None)


def worst(findings: Sequence[Finding], *, is_judged: bool = True) -> Verdict:
    verdicts = {finding.verdict for finding in findings}
    for verdict in (Verdict.FAIL, Verdict.WARN):
        if verdict in verdicts:
            return verdict
    return Verdict.PASS if is_judged else Verdict.NONE


def _graded(ratio: float, *, least_pass: float, least_warn: float) -> Verdict:
    if ratio >= least_pass:
        return Verdict.PASS
    return Verdict.WARN if ratio >= least_warn else Verdict.FAIL


# Cards.


def of_device(device: Facts, *, medians: dict[str, float]) -> list[Finding]:
    """Of one device: its speed beside the medians of all, and what nvidia-smi says of it."""
    return [*_of_speed(device, medians), *_of_load(device), *_of_health(device["card"])]


MEASURED = {"matmul_tflops": ("matmul", "TFLOP/s"), "memory_gbs": ("memory", "GB/s")}


def medians(devices: Sequence[Facts]) -> dict[str, float]:
    """Of all devices that have figures; of two the faster, so that the slower one is told."""
    found = {key: [device[key] for device in devices if device[key]] for key in MEASURED}
    return {key: statistics.median_high(values) if values else 0.0 for key, values in found.items()}


def _of_speed(device: Facts, medians: dict[str, float]) -> Iterator[Finding]:
    card = card_of(device["kind"])
    if "error" in device:
        yield Finding(Verdict.FAIL, f"it cannot be used: {device['error']}")
    for key, (name, unit) in MEASURED.items():
        value, median = device[key], medians[key]
        if value is None:
            continue
        shown = f"{name} {value:,.4g} {unit}"
        if device["platform"] == "cpu":
            if value < LEAST_PASS_CPUS * median:
                text = f"{shown}, and {median:,.4g} is the median: something else runs on its cores"
                yield Finding(Verdict.WARN, text)
            continue
        ratio = value / median
        verdict = _graded(ratio, least_pass=LEAST_PASS_OTHERS, least_warn=LEAST_WARN_OTHERS)
        if verdict != Verdict.PASS:
            yield Finding(
                verdict,
                f"slow: {shown}, {ratio:.0%} of the median of all, {median:,.4g}: every step waits "
                "for it. If its clock is low look at heat and power, else leave the node out",
            )
        if card is None:
            continue
        wanted = getattr(card, key)
        verdict = _graded(value / wanted, least_pass=LEAST_PASS, least_warn=LEAST_WARN)
        if verdict != Verdict.PASS:
            yield Finding(
                verdict,
                f"{shown}, {value / wanted:.0%} of the {wanted:,.0f} that a {device['kind']} "
                "reaches: other processes on it, a power limit or heat",
            )


def _of_load(device: Facts) -> Iterator[Finding]:
    """How it was while it worked."""
    load, card = device["load"], device["card"]
    for name in load.get("reasons", ()):
        if name in BAD_REASONS:
            yield Finding(Verdict.FAIL, f"{name}: {BAD_REASONS[name]}")
        elif name in ODD_REASONS:
            yield Finding(Verdict.WARN, f"{name}: {ODD_REASONS[name]}")
    clock, highest = load.get("clock_mhz"), gpu_facts.number(card.get("clocks.max.sm"))
    if clock and highest and clock < LEAST_CLOCK * highest:
        yield Finding(
            Verdict.WARN,
            f"clock {clock:,.0f} of {highest:,.0f} MHz while it worked: its power limit, heat, or "
            "locked clocks (nvidia-smi -rgc as root)",
        )
    temperature = load.get("temperature_c")
    if temperature and temperature >= HOT_C:
        yield Finding(Verdict.WARN, f"{temperature:.0f} C: look at the cooling of this machine")
    for what, key in (("gen", "pcie_gen"), ("width", "pcie_width")):
        now, most = load.get(key), gpu_facts.number(card.get(f"pcie.link.{what}.max"))
        if now and most and now < most:
            yield Finding(
                Verdict.WARN,
                f"PCIe {what} {now:.0f} of {most:.0f} while it worked: reseat the card or restart "
                "the host; it slows copies from the host and, between hosts, NCCL",
            )


def _of_health(card: Facts) -> Iterator[Finding]:
    """Errors and modes."""

    def count(field: str) -> float:
        return gpu_facts.number(card.get(field)) or 0

    if errors := count("ecc.errors.uncorrected.volatile.total"):
        yield Finding(
            Verdict.FAIL,
            f"{errors:.0f} memory errors that ECC could not correct, since the driver was loaded: "
            "drain the node and reset the card; replace it if they come back",
        )
    if (errors := count("ecc.errors.corrected.volatile.total")) > MANY_CORRECTED:
        yield Finding(
            Verdict.WARN, f"{errors:,.0f} memory errors that ECC corrected: watch this card"
        )
    if card.get("ecc.mode.current") == "Disabled":
        yield Finding(Verdict.WARN, "ECC is off: a flipped bit goes into the weights unseen")
    if _is_yes(card.get("remapped_rows.failure")):
        yield Finding(Verdict.FAIL, "a row of its memory could not be remapped: replace the card")
    if _is_yes(card.get("remapped_rows.pending")):
        yield Finding(
            Verdict.WARN, "a row of its memory is to be remapped: reset the card between two jobs"
        )
    if card.get("mig.mode.current") == "Enabled":
        yield Finding(Verdict.FAIL, "MIG is on: training wants whole cards (nvidia-smi -mig 0)")
    limit, default = (
        gpu_facts.number(card.get(field)) for field in ("power.limit", "power.default_limit")
    )
    if limit and default and limit < default - 1:
        yield Finding(
            Verdict.WARN,
            f"its power limit is {limit:.0f} W of {default:.0f}: products are slower by that; "
            f"nvidia-smi -pl {default:.0f} (as root)",
        )
    if card.get("persistence_mode") == "Disabled":
        yield Finding(
            Verdict.WARN, "persistence mode is off, and each start is slower: nvidia-persistenced"
        )


def _is_yes(text: str | None) -> bool:
    return text == "Yes" or bool(gpu_facts.number(text))


def of_links(cards: Sequence[Facts]) -> list[Finding]:
    """Of the cards of a host: each is to reach each other by as many NVLinks."""
    found = []
    kinds: dict[str, list[str]] = {}
    for card in cards:
        for other, link in card["links"].items():
            if other.startswith("GPU") and other[3:].isdigit() and link != "X":
                kinds.setdefault(link, []).append(f"GPU{card['index']}-{other}")
    for link, pairs in kinds.items():
        if not link.startswith("NV"):
            found.append(
                Finding(
                    Verdict.WARN,
                    f"{_some(pairs)} by {link}, without NVLink: collectives inside the host go "
                    "over PCIe. On a machine with NVSwitch: nvidia-fabricmanager runs?",
                )
            )
    bonded = {link: len(pairs) for link, pairs in kinds.items() if link.startswith("NV")}
    if len(bonded) > 1:
        usual = max(bonded, key=lambda link: bonded[link])
        for link in sorted(set(bonded) - {usual}):
            text = f"{_some(kinds[link])} by {link}, the others by {usual}: a link is down"
            found.append(Finding(Verdict.FAIL, text))
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Several devices, and disks.


def expected_bus_gbs(group: str, process: Facts) -> float | None:
    """Of a collective, from the cards and the network cards of a process's host."""
    card = card_of(process["devices"][0]["kind"]) if process["devices"] else None
    if group == speed.INSIDE:
        return card.bus_gbs if card else None
    rates = [nic["gbps"] for nic in process["machine"]["nics"]]
    if not rates or card is None:
        return None
    all_gbs = sum(rates) / 8
    if group == speed.BETWEEN:  # each GPU of the host at once
        return all_gbs / max(process["host_devices"], 1)
    return min(card.bus_gbs, all_gbs)


def of_collective(
    figure: Facts, *, median: float, expected: float | None, is_cpu: bool
) -> list[Finding]:
    """Of a figure of one host or process, beside the median of all."""
    name = f"{figure['collective']} {figure['group']}"
    value, found = figure["bus_gbs"], []
    if is_cpu:
        return []
    if median and value < LEAST_WARN_OTHERS * median:
        text = f"{name}: {value:,.0f} GB/s, and the median of all is {median:,.0f}"
        found.append(Finding(Verdict.WARN, f"{text}: its links or network cards"))
    if expected:
        inside = figure["group"] == speed.INSIDE
        verdict = _graded(
            value / expected,
            least_pass=LEAST_PASS_BUS if inside else LEAST_PASS_NETWORK,
            least_warn=LEAST_WARN_BUS if inside else LEAST_WARN_NETWORK,
        )
        if verdict != Verdict.PASS:
            fix = (
                "look at NVLink above (nvidia-smi topo -m)"
                if inside
                else "NCCL_DEBUG=INFO says whether NET/IB is used; docs/clusters.md has the rest"
            )
            text = f"{name}: {value:,.0f} of {expected:,.0f} GB/s"
            found.append(Finding(verdict, f"{text}: {fix}"))
    return found


def of_machine(process: Facts, *, num_hosts: int) -> list[Finding]:
    """Of a host."""
    found = of_links([device["card"] for device in process["devices"] if device["card"]])
    if num_hosts > 1 and not process["machine"]["nics"] and not _is_cpu(process):
        found.append(
            Finding(
                Verdict.WARN,
                "no InfiniBand or RoCE port is up: NCCL goes over TCP. In a container, is "
                "/dev/infiniband there?",
            )
        )
    return found


def _is_cpu(process: Facts) -> bool:
    return all(device["platform"] == "cpu" for device in process["devices"])


def of_disk(figure: Facts, *, median: float) -> list[Finding]:
    """Of a host's file, beside the median of all hosts. Disks have no expectation."""
    if "error" in figure:
        return [Finding(Verdict.FAIL, f"{figure['error']}: choose another --workdir, or mend it")]
    if figure["write_gbs"] < LEAST_PASS_CPUS * median:
        text = f"{figure['write_gbs']:.2f} GB/s written, and the median of all is {median:.2f}"
        return [Finding(Verdict.WARN, f"{text}: this host's mount or network")]
    return []
