"""The checks of a run's integrity, compiled for H100s that are not here: what they cost there."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from jaxscale import sharding as shd
from jaxscale.command_line import read_config
from jaxscale.compile import ahead, fit
from jaxscale.step.feed import abstract_batch
from jaxscale.step.plan import plan_of_run
from jaxscale.step.replay import Replay
from jaxscale.step.replicas import replicas_of
from jaxscale.step.state import to_flat
from jaxscale.step.update import update

pytestmark = [
    pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing())),
    # XLA's plugin for CUDA reports on machines without CUDA's libraries.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("without_bodies"),
]
CONFIG = Path(__file__).parents[2] / "configs" / "llama3_8b.py"
OPTIONS: Any = ahead.COMPILER_OPTIONS
SCATTER = re.compile(r"^.* scatter\(.*$", re.MULTILINE)


@pytest.fixture(scope="module")
def plan():
    """8 layers of 8B, HSDP 2 x 4: all of the state has a copy."""
    config = read_config([f"--config={CONFIG}"])
    config.model = dataclasses.replace(config.model, num_layers=8)
    config.data.max_documents_per_row, config.scan_unroll = 8, 1
    config.mesh.data, config.mesh.fsdp, config.mesh.reshard_after_forward = 2, 4, True
    return plan_of_run(config, devices=ahead.devices_of("h100", hosts=1, gpus_per_host=8))


def memory_of(program):
    memory = program.memory_analysis()
    assert memory is not None
    return memory


def test_copies_are_compared_without_a_collective_and_without_memory(plan):
    with shd.use(plan.mesh, plan.rules):
        checked = replicas_of(plan)
        arrays = [to_flat(plan.state)[name] for name in checked.leaves]
        compiled = checked.sums.lower(arrays).compile(compiler_options=OPTIONS)
    memory = memory_of(compiled)
    assert checked.num_bytes > 7.8 * 2**30
    assert not ahead.count_calls(compiled.as_text() or "")
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2**20


def test_a_replay_needs_no_more_memory_than_the_update_and_scatters_in_one_order(plan):
    with shd.use(plan.mesh, plan.rules):
        lowered = Replay(plan).sums.lower(plan.state, abstract_batch(plan))
        replay = lowered.compile(compiler_options=OPTIONS)
    usual = fit.compile_only(update, plan, compiler_options=OPTIONS)
    temps = [memory_of(program).temp_size_in_bytes for program in (replay, usual)]
    assert temps[0] <= 1.01 * temps[1]
    assert memory_of(replay).output_size_in_bytes < 2**20
    in_order = [
        ["unique_indices=true" in line for line in SCATTER.findall(program.as_text() or "")]
        for program in (replay, usual)
    ]
    assert in_order[0] and all(in_order[0]) and not all(in_order[1])
