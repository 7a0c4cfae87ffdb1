"""The record of a contest as text."""

from collections.abc import Iterator, Sequence

from jaxscale.perf.records import RATE, Record


def table(record: Record) -> str:
    """What a person reads; a ratio under 1 is faster."""
    head = ("variant", "ms", "tokens/s/device", "time ratio", "(min - max)", "compile s", "GiB")
    rows = [head, *(_cells(name, each) for name, each in record["variants"].items())]
    lines = [
        f"{record['num_devices']} x {record['device_kind']}, {record['rounds']} rounds of "
        f"{record['steps']} steps; time ratio: to {record['ratio_to']}, of the same round"
    ]
    return "\n".join([*lines, *aligned(rows), *left_out_lines(record)])


def aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A line for each row: its name, then its numbers under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        cells = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
        yield "  ".join((name.ljust(widths[0]), *cells))


def left_out_lines(record: Record) -> Iterator[str]:
    """A line for each that did not run, with the reason."""
    return (f"{name}  left out: {reason}" for name, reason in record["left_out"].items())


def _cells(name: str, each: Record) -> tuple[str, ...]:
    return (
        name,
        f"{each['step_seconds'] * 1e3:,.1f}",
        f"{each[RATE]:,.0f}",
        f"{each['ratio']:.4f}",
        f"({each['ratio_min']:.4f} - {each['ratio_max']:.4f})",
        f"{each['compile_seconds']:.1f}",
        f"{each['predicted_memory_gib']:.1f}",
    )
