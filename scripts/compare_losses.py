"""Losses of runs beside each other.

    python scripts/compare_losses.py bf16=runs/a fp8=runs/b [...] [--output=losses.png]

Prints the last held-out loss that all have (`config.evaluation.every`), and by how much each is off
the first run's; --output draws all losses. A run is its folder, with a name before it or without.
"""

from pathlib import Path

from absl import app, flags

from jaxscale.command_line import exit_code_of, parse_own_flags
from jaxscale.perf import loss_plot
from jaxscale.perf.records import Record, read_records

OUTPUT = flags.DEFINE_string("output", "", "A PNG to draw.")


def main(argv: list[str]) -> int:
    return exit_code_of(lambda: compare(argv[1:]))


def compare(words: list[str]) -> None:
    if len(words) < 2:
        raise ValueError("name at least two runs, such as bf16=runs/a fp8=runs/b; see --help")
    runs = dict(map(_run, words))
    if len(runs) < len(words):
        raise ValueError(f"{' '.join(words)}: two runs have one name; write other=DIR")
    print(loss_plot.table(runs))
    if OUTPUT.value:
        loss_plot.plot(runs, OUTPUT.value)


def _run(word: str) -> tuple[str, list[Record]]:
    name, _, folder = word.rpartition("=")
    path = Path(folder).expanduser() / "metrics.jsonl"
    records = read_records(path)
    if not records:
        raise ValueError(f"{word!r}: {path} holds no records; name the folder of a run")
    return name or folder, records


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
