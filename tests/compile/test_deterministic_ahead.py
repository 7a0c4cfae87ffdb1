"""With config.deterministic, compiled for H100s that are not here, nothing adds atomically.

A layer of 1.5B width, or one of each stage, unrolled: the tables are those of the whole model.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from jaxscale.command_line import read_config
from jaxscale.compile import ahead
from jaxscale.config import Balance, ContextConfig, Exchange, MeshConfig

pytestmark = [
    pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing())),
    # XLA's plugin for CUDA reports on machines without CUDA's libraries.
    pytest.mark.filterwarnings("ignore"),
]
CONFIG = Path(__file__).parents[2] / "configs" / "llama3_1b.py"
BY_DOCUMENT = ContextConfig(exchange=Exchange.RING, balance=Balance.DOCUMENT)
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp and tensor": dict(mesh=MeshConfig(fsdp=2, tensor=2)),
    "fsdp and context": dict(mesh=MeshConfig(fsdp=2, context=2), context=BY_DOCUMENT),
    "fsdp and stage": dict(mesh=MeshConfig(fsdp=2, stage=2, zero=1), grad_accumulation=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_sorted_and_each_is_written_once(layout):
    config = read_config([f"--config={CONFIG}"])
    num_layers = LAYOUTS[layout]["mesh"].stage
    config.model = dataclasses.replace(config.model, num_layers=num_layers)
    config = dataclasses.replace(config, scan_unroll=num_layers, batch_size=8, **LAYOUTS[layout])
    config.deterministic, config.data.max_documents_per_row = True, 8
    devices = ahead.devices_of("h100", hosts=1, gpus_per_host=4)
    hlo = ahead.text_of(ahead.compile_update(config, devices))
    scatters = [line for line in hlo.splitlines() if " scatter(" in line]
    assert scatters and all("unique_indices=true" in line for line in scatters)
    # The tokens, and not each number of their gradients.
    sorted_sizes = [int(size) for size in re.findall(r"= \(?s32\[(\d+)\].* sort\(", hlo)]
    assert sorted_sizes and max(sorted_sizes) <= config.batch_size * config.seq_len
