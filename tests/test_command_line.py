"""A mistake on a script's command line is told in a line, with exit code 2."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale import command_line

ROOT = Path(__file__).resolve().parents[1]
CONFIG = f"--config={ROOT}/configs/tiny.py"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([], "name a config"),
        (["--config=nowhere.py"], "nowhere.py: no such file"),
        ([CONFIG, "--config.modle=1"], "config.modle is not a setting; did you mean config.model?"),
        ([CONFIG, "--config.seq_len=many"], "seq_len"),
        ([CONFIG, "--config.seq_len=0"], "config.seq_len=0: set it to 1 or more"),
        ([CONFIG, "--stepz=3"], "stepz"),
        ([CONFIG, "word"], "'word' is no flag"),
    ],
)
def test_a_mistake_in_the_config_is_a_value_error(settings, told):
    with pytest.raises(ValueError, match=told):
        command_line.read_config(settings)


def test_a_config_is_read_with_its_settings_as_often_as_asked():
    assert [
        command_line.read_config([CONFIG, f"--config.steps={steps}"]).steps for steps in (300, 400)
    ] == [300, 400]
    assert command_line.read_config([CONFIG, "--config.model.window=none"]).model.window is None


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("bench_step", [CONFIG, "--steps=few"], "--steps=few"),
        ("bench_peers", [CONFIG, "--steps=2"], "--steps=2: 2 is not integer >= 5"),
        ("compile_step", [CONFIG, "--gpus=0"], "--gpus=0"),
        ("compile_step", [CONFIG, "--config.modle=1"], "did you mean config.model?"),
        ("compile_step", ["--config=nowhere.py"], "nowhere.py: no such file"),
    ],
)
def test_a_scripts_flag_that_is_wrong_is_told_without_a_traceback(forks, script, arguments, told):
    answer = forks.run(script, *arguments)
    assert answer.code == 2, answer.err
    assert "\nerror: " in answer.err and told in answer.err and "Traceback" not in answer.err


def test_help_shows_the_config_among_a_scripts_flags():
    answer = subprocess.run(
        [sys.executable, ROOT / "scripts" / "train.py", "--help"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "--config:" in answer.stdout and "--workdir:" in answer.stdout


@pytest.mark.parametrize(
    "typed",
    ["--config.steps=5", "-config.steps=0x10", "--config.steps 1_000", "--config.steps=2 --a=b"],
)
def test_a_setting_takes_the_place_of_what_was_typed_for_it(typed):
    told = command_line.with_setting(
        f"cd '/a b' && python train.py --config.steps_x=1 {typed} --config.seed=0x10",
        "steps",
        value=7,
    )
    kept = " --a=b" if "--a" in typed else ""
    assert told == (
        f"cd '/a b' && python train.py --config.steps_x=1{kept} --config.seed=0x10 --config.steps=7"
    )


def test_the_command_is_repeated_for_a_shell_in_any_folder(monkeypatch, tmp_path):
    folder = tmp_path / "with space"
    (folder / ".venv").mkdir(parents=True)
    monkeypatch.chdir(folder)
    words = ["train.py", "--config.sample.prompt=it's $HOME", "--config.steps=1_000"]
    monkeypatch.setattr(sys, "argv", words)
    told = command_line.command_to_repeat()
    assert shlex.split(told) == ["cd", str(folder), "&&", sys.executable, *words]
    monkeypatch.setattr(sys, "executable", str(folder / ".venv" / "python"))
    assert shlex.split(command_line.command_to_repeat())[3] == ".venv/python"


@pytest.mark.parametrize("value", ["", "a\0b"])
def test_a_folder_without_a_name_is_refused(value):
    with pytest.raises(ValueError, match="--workdir=.* names no folder; write one, such as"):
        command_line.folder_of("workdir", value)


PRINTS = """
import logging, sys
from jaxscale.command_line import steady_output
steady_output()
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
for number in range(3):
    print("café \\udcff", number, flush=True)
    logging.info("logged 日本 %d", number)
"""


def printed(**options):
    return subprocess.run(
        [sys.executable, "-c", PRINTS], stderr=subprocess.PIPE, timeout=600, **options
    )


def test_a_reader_that_leaves_stops_nothing_and_is_told_once():
    reader, writer = os.pipe()
    os.close(reader)
    answer = printed(stdout=writer)
    os.close(writer)
    assert (answer.returncode, answer.stderr) == (0, b"stdout: Broken pipe; going on without it\n")


def test_a_disk_that_is_full_stops_no_output():
    with open("/dev/full", "w") as full:
        answer = printed(stdout=full)
    assert answer.returncode == 0
    assert answer.stderr == b"stdout: No space left on device; going on without it\n"


def test_a_closed_output_stops_nothing():
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, PRINTS]
    answer = subprocess.run(command, stderr=subprocess.PIPE, timeout=600)
    assert (answer.returncode, answer.stderr) == (0, b"")


def test_what_an_output_cannot_show_is_written_as_an_escape():
    answer = printed(
        stdout=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    )
    assert (answer.returncode, answer.stderr) == (0, b"")
    assert answer.stdout.splitlines()[:2] == [b"caf\\xe9 \\udcff 0", b"logged \\u65e5\\u672c 0"]
