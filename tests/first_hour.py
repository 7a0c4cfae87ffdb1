"""A new user's first hour: every command of README.md, in order, on a clean clone, timed.

    python tests/first_hour.py

What asks for GPUs, or for data of the reader's own, runs with the stand-ins below, on this machine.
Needs what `make train` needs, and 10 minutes. Stops at the first command that fails.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = re.compile(r"^    ((?:make|python|\.venv/bin/python)\s.*)$", re.MULTILINE)

# In this order. A model of Hugging Face is the one that `make train` trained.
STAND_INS = (
    (r"^python ", ".venv/bin/python "),
    (r"^make venv .*", "make venv"),
    (r"^make test$", "make test ARGS=tests/data"),
    (r"(configs/(llama3_8b|tiny)\.py)", "configs/tiny.py --config.steps=25"),
    (r"--train_tokenizer=32768", "--train_tokenizer=400"),
    (r"\bDIR\b", "tiny-hf"),
)
# What a command needs, by a word in it.
BEFORE = {
    "data/corpus": "mkdir -p data/corpus && cp docs/*.md data/corpus/",
    "book.txt": "cat docs/*.md > book.txt",
    "tiny-hf": ".venv/bin/python scripts/convert_hf.py export --workdir=runs/tiny --output=tiny-hf",
}


def commands(text: str) -> list[str]:
    """README's commands, without the remarks behind them."""
    return [match.split("  #")[0].strip() for match in COMMAND.findall(text)]


def with_stand_ins(command: str) -> str:
    for pattern, stand_in in STAND_INS:
        command = re.sub(pattern, stand_in, command)
    before = [what for word, what in BEFORE.items() if word in command]
    return " && ".join([*before, command])


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "jaxscale"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        began = time.monotonic()
        for command in commands((clone / "README.md").read_text()):
            start = time.monotonic()
            done = subprocess.run(
                ["bash", "-c", with_stand_ins(command)],
                cwd=clone,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            print(f"{time.monotonic() - start:6.1f} s  {command}", flush=True)
            if done.returncode:
                print(done.stdout[-3000:])
                return 1
        print(f"{time.monotonic() - began:6.1f} s  in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
