"""What is measured on a host's GPUs: commands that exist, and configs that its GPUs divide."""

import math

import pytest

from jaxscale import gpu_facts
from jaxscale.command_line import read_config
from jaxscale.perf import node_parts, peer_cases, torchtitan
from jaxscale.perf.node_parts import PARTS
from tests.perf.scripts import ROOT, Script

# How ml_collections loads a config file.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the load_module\\(\\) method is deprecated:DeprecationWarning"
)
AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")


@pytest.mark.parametrize("num", [2, 4, 8])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_of_scripts_that_exist_and_configs_for_all_gpus(name, num):
    part = PARTS[name](num)
    for command in part.commands:
        assert (ROOT / "scripts" / command[0]).is_file() and len(command) > 1
    for words in part.programs.values():
        mesh = read_config(list(words)).mesh
        sizes = [getattr(mesh, axis) for axis in AXES]
        known = math.prod(size for size in sizes if size != -1)
        assert known == num or (-1 in sizes and num % known == 0)


@pytest.mark.parametrize("num", [2, 4, 8])
@pytest.mark.parametrize("name", PARTS)
def test_torchtitan_has_the_layouts_that_it_runs_beside(name, num, tmp_path):
    options = torchtitan.Options(python="python", num_steps=8, skip=4)
    for script, *words in PARTS[name](num).commands:
        if script != "bench_peers.py":
            continue
        cases = [word.removeprefix("--cases=") for word in words if word.startswith("--cases=")]
        of_case = [node_parts.CONFIG_8B, *peer_cases.CASES[cases[0]].settings] if cases else []
        own = [word for word in words if word.startswith("--config")]
        config = read_config([*of_case, *own])
        command = torchtitan.command_of(config, options, num_gpus=num, text=tmp_path)
        assert f"--nproc_per_node={num}" in command


def test_long_rows_keep_their_products_where_a_gpu_has_few_of_their_tokens():
    def policy(name: str, num: int) -> tuple[str, int]:
        (words,) = PARTS[name](num).programs.values()
        config = read_config(list(words))
        return config.remat.value, config.leaner_layers

    assert policy("context_64k", 4) == ("gemms_lean", 0)
    assert policy("context_128k", 4) == ("attention_mlp", 0)
    assert policy("context_128k", 8) == ("gemms_lean", 0)
    assert policy("context_128k", 2) == ("attention_mlp", 28)


def test_torchtitan_keeps_products_where_they_fit():
    def peer(name: str, num: int) -> str:
        ((*_, order),) = [command[:3] for command in PARTS[name](num).commands]
        return order.removeprefix("--order=jaxscale,")

    assert peer("context_64k", 2) == peer("context_128k", 2) == "allgather"
    assert peer("context_64k", 4) == peer("context_128k", 4) == "allgather_selective"


@pytest.fixture(scope="module")
def script():
    return Script("bench_node")


def test_without_a_part_it_lists_them(script, capsys):
    assert script.run() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PARTS)


@pytest.mark.parametrize(
    "words, said",
    [
        (["speed"], "'speed': name one of bf16, default"),
        (["bf16"], "no GPU here; --gpus=4 compiles"),
        (["bf16", "fp8"], "name one of bf16"),
    ],
)
def test_a_mistake_is_told_in_a_line(script, words, said, capsys):
    assert script.run(*words) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_commands_run_one_after_the_other_and_a_failure_is_told(
    script, tmp_path, monkeypatch, capsys
):
    """Those of a part of two, of which the first fails."""
    (tmp_path / "fails.py").write_text("raise SystemExit('no luck')")
    (tmp_path / "works.py").write_text("import sys; print('measured', sys.argv[-1])")
    part = node_parts.Part([("fails.py", "--a"), ("works.py", "--b=1")], {})
    monkeypatch.setattr(script.module, "HERE", tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(gpu_facts, "query", lambda fields: [dict.fromkeys(fields, "H200")] * 2)
    monkeypatch.setitem(PARTS, "bf16", lambda num: part)
    assert script.run("bf16", f"--workdir={tmp_path / 'w'}") == 1
    out = capsys.readouterr().out
    assert "$ python scripts/fails.py --a" in out and "| no luck" in out
    assert "measured --b=1" in out and (tmp_path / "w" / "2.log").is_file()
