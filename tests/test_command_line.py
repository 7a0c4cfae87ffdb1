"""A mistake on a script's command line is told in a line, with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxscale import command_line

ROOT = Path(__file__).resolve().parents[1]
# ml_collections loads a config file by a way of importlib's that Python 3.15 removes.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the load_module\\(\\) method is deprecated:DeprecationWarning"
)
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
        ("bench_step.py", [CONFIG, "--steps=few"], "--steps=few"),
        ("bench_peers.py", [CONFIG, "--steps=2"], "--steps=2: 2 is not integer >= 5"),
        ("compile_step.py", [CONFIG, "--gpus=0"], "--gpus=0"),
        ("compile_step.py", [CONFIG, "--config.modle=1"], "did you mean config.model?"),
        ("compile_step.py", ["--config=nowhere.py"], "nowhere.py: no such file"),
    ],
)
def test_a_scripts_flag_that_is_wrong_is_told_without_a_traceback(script, arguments, told):
    command = [sys.executable, ROOT / "scripts" / script, *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert answer.returncode == 2, answer.stderr
    assert (
        "\nerror: " in answer.stderr and told in answer.stderr and "Traceback" not in answer.stderr
    )


def test_help_shows_the_config_among_a_scripts_flags():
    answer = subprocess.run(
        [sys.executable, ROOT / "scripts" / "train.py", "--help"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "--config:" in answer.stdout and "--workdir:" in answer.stdout
