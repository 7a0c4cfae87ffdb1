"""8B on rows of 131,072 tokens, compiled for 4 H200 that are not here, by each exchange.

2 of its 32 layers: they are scanned, so the program is the same but for the loop's count.
"""

import dataclasses
import re
from pathlib import Path

import jax
import pytest

from jaxscale.command_line import read_config
from jaxscale.compile import ahead
from jaxscale.compile.traffic import FUSION, collectives_of, computations
from jaxscale.config import Attention, ContextConfig, Exchange, MeshConfig, Remat
from jaxscale.kernels import hopper
from tests.compile.calls import IS_CALL, attention_calls

pytestmark = [
    pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing())),
    # XLA's plugin for CUDA reports on machines without CUDA's libraries.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("without_bodies"),
]
CONFIG = Path(__file__).parents[2] / "configs" / "llama3_8b.py"
LAYERS, TOKENS, SIZE = 2, 131_072, 4


@pytest.fixture(scope="module")
def compiled():
    """`compiled(exchange)`: that update."""
    devices = ahead.devices_of("h200", hosts=1, gpus_per_host=SIZE)

    def compile(exchange: Exchange, **settings):
        config = read_config([f"--config={CONFIG}"])
        for name, value in settings.items():
            setattr(config, name, value)
        config.model = dataclasses.replace(config.model, num_layers=LAYERS, max_seq_len=TOKENS)
        config.data.max_documents_per_row = 8
        config.seq_len, config.batch_size = TOKENS, 1
        config.scan_unroll, config.remat = 1, Remat.ATTENTION
        config.mesh = MeshConfig(fsdp=1, context=SIZE)
        config.context = ContextConfig(exchange=exchange)
        return ahead.compile_update(config, devices)

    return compile


def operations(hlo: str, kind: str) -> list[str]:
    """The types of what a kind of collective makes, those of its operands with them."""
    return re.findall(rf"= (.*?) {kind}(?:-start)?\(", hlo)


def gathered_activations(hlo: str) -> list[str]:
    """All-gathers of arrays with a sequence, whole or a device's, in bfloat16 or float32."""
    lengths = rf"\b({TOKENS}|{TOKENS // SIZE}|{TOKENS // SIZE // 2})\b"
    return [
        found
        for found in operations(hlo, "all-gather")
        if "s32" not in found and re.search(lengths, found)
    ]


def calls_beside(hlo: str, kind: str) -> list[int]:
    """How many calls of attention are scheduled between the start and the end of each, in order."""
    found, begun = [], {}
    parts = computations(hlo)
    fused = {name for name, each in parts.items() if any(re.search(IS_CALL, line) for line in each)}

    def is_call(line):
        fusion = FUSION.search(line)
        return fusion[1] in fused if fusion else bool(re.search(IS_CALL, line))

    lines = hlo.splitlines()
    for number, line in enumerate(lines):
        if start := re.match(rf"\s*%(\S+) = .* {kind}-start\(", line):
            begun[start[1]] = number
        elif end := re.match(rf"\s*%\S+ = .* {kind}-done\(.*?%([\w.-]+)\)", line):
            between = lines[begun[end[1]] : number]
            found.append(sum(map(is_call, between)))
    return found


def assert_sends_beside_work(hlo: str) -> None:
    """Of a ring: but the first forward, for which weights are gathered instead, and the last."""
    sent = [each for each in collectives_of(hlo) if each.operation == "collective-permute"]
    # Keys and values go on SIZE - 1 times forward and again backward, their gradients SIZE times.
    assert len(sent) == 2 * (SIZE - 1) + SIZE
    assert sum(each.work_beside > 0 for each in sent) >= len(sent) - 2


def test_all_to_all_sends_heads_and_gathers_no_activation(compiled):
    update = compiled(Exchange.ALL_TO_ALL)
    hlo = ahead.text_of(update)
    counts = ahead.count_calls(hlo)
    # The kernel of whole rows, and not run again for the backward pass.
    assert attention_calls(hlo) == (1, 1)
    # q, k, v: forward, and again backward; their gradients, the output's two ways and the table's.
    assert counts["all-to-all-start"] + counts["all-to-all"] == 3 + 1 + 3 + 1 + 3 + 1 + 2
    assert gathered_activations(hlo) == []
    # 11.4 GiB; whole rows on one device would be four times that.
    assert update.memory_analysis().temp_size_in_bytes < 13 * 2**30


def test_a_ring_sends_keys_and_their_gradients_beside_its_kernels(compiled):
    update = compiled(Exchange.RING)
    hlo = ahead.text_of(update)
    assert attention_calls(hlo) == (1 + 2 * SIZE, 1 + 2 * SIZE)
    assert gathered_activations(hlo) == []
    assert_sends_beside_work(hlo)
    # Of attention itself.
    beside = calls_beside(hlo, "collective-permute")
    assert sum(calls >= 1 for calls in beside) >= 2 * (SIZE - 1), beside
    assert update.memory_analysis().temp_size_in_bytes < 14 * 2**30


@pytest.mark.skipif(jax.__version_info__ < hopper.JAX, reason="has no kernel of ours: the same")
@pytest.mark.parametrize(
    ("settings", "other"),
    [(dict(attention=Attention.CUDNN), "mosaic_gpu"), (dict(deterministic=True), "fmha")],
)
def test_so_does_a_ring_of_other_kernels(compiled, settings, other):
    hlo = ahead.text_of(compiled(Exchange.RING, **settings))
    assert attention_calls(hlo) == (1 + 2 * SIZE, 1 + 2 * SIZE) and other not in hlo
    assert_sends_beside_work(hlo)


def test_all_gather_gathers_keys_alone_and_calls_the_kernel_four_times(compiled):
    update = compiled(Exchange.ALL_GATHER)
    hlo = ahead.text_of(update)
    assert attention_calls(hlo) == (4, 4)
    key_heads = f"bf16[1,2,{TOKENS // SIZE},8,128]"
    assert gathered_activations(hlo) and all(
        key_heads in found for found in gathered_activations(hlo)
    )
    assert update.memory_analysis().temp_size_in_bytes < 14 * 2**30
