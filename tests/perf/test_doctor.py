"""scripts/doctor.py reads what nvidia-smi says, names what is not well, and says what to do."""

import contextlib
import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxscale import gpu_facts
from jaxscale.compile import ahead
from jaxscale.perf import doctor, doctor_facts, doctor_table
from jaxscale.perf import doctor_speed as speed
from jaxscale.perf import doctor_verdicts as verdicts
from jaxscale.perf.doctor_verdicts import Verdict
from tests.perf.scripts import ROOT, with_devices

# As drivers of release 580 print them on a host of eight H100 SXM: the name of a GPU is in colours.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPXB\tSYS\t0-51,104-155\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tPXB\tSYS\t0-51,104-155\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPXB\t52-103,156-207\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tPXB\t52-103,156-207\t1\t\tN/A\n"
    "NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n\n"
    "NIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
CARDS = """\
0, GPU-aaa, NVIDIA H100 80GB HBM3, 580.95.05, 96.00.99.00.01, Enabled, Disabled, Enabled, 0, 0, \
0, 700.00, 700.00, 1980, 5, 16
1, GPU-bbb, NVIDIA H100 80GB HBM3, 580.95.05, 96.00.99.00.01, Disabled, [N/A], Disabled, 4096, 2, \
2, 500.00, 700.00, 1980, 5, 16
"""
LOAD = """\
GPU-aaa, 1425, 698.12, 61, 5, 16, 0x0000000000000004, 0x0000000000000004
GPU-bbb, 990, [N/A], 88, 4, 16, 0x0000000000000048, 0x0000000000000048
"""
REMAPPED = "GPU-aaa, 0, 0, No, No\nGPU-bbb, 1, 0, Yes, No\n"
NVIDIA_SMI = """#!/bin/sh
cd "$(dirname "$0")"
case "$1" in
  --query-remapped-rows=*) cat remapped;;
  --query-gpu=index*) cat cards;;
  --query-gpu=uuid*) cat load;;
  topo) cat topology;;
esac
"""


@pytest.fixture
def two_cards(tmp_path, monkeypatch):
    """A host on which nvidia-smi says the above; its folder."""
    texts = {"cards": CARDS, "load": LOAD, "remapped": REMAPPED, "topology": TOPOLOGY}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def under_load(uuid):
    rows = [row for row in gpu_facts.query(doctor_facts.LOAD_FIELDS) if row["uuid"] == uuid]
    return doctor_facts.summary(rows)


def test_the_matrix_of_links_is_read():
    found = doctor_facts.links(TOPOLOGY)
    assert list(found) == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert found["GPU2"]["GPU0"] == "NV18" and found["GPU2"]["NIC1"] == "PXB"
    assert found["GPU2"]["NUMA Affinity"] == "1" and found["GPU0"]["NUMA Affinity"] == "0"
    assert doctor_facts.links("") == {}
    # One card; and a driver that says why it cannot.
    assert doctor_facts.links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n")["GPU0"]["GPU0"] == "X"
    assert doctor_facts.links("Failed to initialize NVML") == {}


def test_cards_are_read_with_their_rows_and_links(two_cards):
    first, second = doctor_facts.cards()
    assert first["name"] == "NVIDIA H100 80GB HBM3" and first["links"]["GPU1"] == "NV18"
    assert second["remapped_rows.pending"] == "Yes" and second["power.limit"] == "500.00"
    load = under_load("GPU-aaa")
    assert (load["clock_mhz"], load["power_w"], load["temperature_c"]) == (1425, 698.12, 61)
    assert load["reasons"] == ["power cap"] and load["pcie_gen"] == 5
    load = under_load("GPU-bbb")
    assert load["reasons"] == ["hardware slowdown", "hardware thermal slowdown"]
    assert load["power_w"] is None


def test_cards_are_read_while_they_work(two_cards):
    with doctor_facts.Load() as load:
        threading.Event().wait(1.2)
    assert load.of("GPU-aaa")["clock_mhz"] == 1425 and load.of("GPU-zzz") == {}


@pytest.mark.parametrize("answer", ["[N/A]", "[Not Supported]", "[Unknown Error]", ""])
def test_what_a_card_does_not_say_is_no_finding(two_cards, answer):
    fields = ", ".join(["0", "GPU-aaa", *[answer] * (len(doctor_facts.CARD_FIELDS) - 2)])
    (two_cards / "cards").write_text(f"{fields}\n")
    values = ", ".join([answer] * (len(doctor_facts.LOAD_FIELDS) - 1))
    (two_cards / "load").write_text(f"GPU-aaa, {values}\n")
    (two_cards / "remapped").write_text(f"GPU-aaa, {', '.join([answer] * 4)}\n")
    (two_cards / "topology").write_text("")
    (card,) = doctor_facts.cards()
    sound = device(card=card, load=under_load("GPU-aaa"))
    assert verdicts.of_device(sound, medians=verdicts.medians([sound])) == []
    assert "GPU 0" in shown([process(devices=[sound])])


def test_without_nvidia_smi_there_are_no_cards(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor_facts.cards() == []
    with doctor_facts.Load() as load:
        pass
    assert load.of("GPU-aaa") == {}


# Verdicts, and the table.

LINKS = {"GPU0": "X", "GPU1": "NV18", "NIC0": "PXB", "NUMA Affinity": "0"}
DEVICE: dict[str, Any] = {
    "name": "GPU 0",
    "kind": "NVIDIA H100 80GB HBM3",
    "platform": "gpu",
    "matmul_tflops": 740.0,
    "memory_gbs": 2980.0,
    "load": {"clock_mhz": 1450.0, "power_w": 698.0, "temperature_c": 60.0, "reasons": []},
    "card": {
        "index": "0",
        "clocks.max.sm": "1980",
        "power.limit": "700.00",
        "ecc.errors.corrected.volatile.total": "0",
        "ecc.errors.uncorrected.volatile.total": "0",
        "links": LINKS,
    },
}
NICS = [{"name": f"mlx5_{n}:1", "gbps": 400.0, "layer": "InfiniBand"} for n in range(2)]


def device(**others):
    return copy.deepcopy(DEVICE) | others


def process(number=0, *, host="node0", **others):
    devices = [device(), device(name="GPU 1", card=DEVICE["card"] | {"index": "1"})]
    facts = {
        "process": number,
        "host": host,
        "pid": 100 + number,
        "gpus": [],
        "libraries": {"jax": "0.11.2", "NCCL": "22805"},
        "machine": {
            "cores": 208,
            "own_cores": 104,
            "numa_nodes": 2,
            "memory_gib": 2015.0,
            "kernel": "6.8",
            "nics": NICS,
        },
        "devices": devices,
        "host_devices": len(devices),
        "collectives": [],
        "disk": None,
        "checkpoint": None,
    }
    return facts | others


def shown(everyone, between=()):
    return "\n".join(doctor_table.text(doctor_table.sections(everyone, between)))


def has_failed(everyone):
    return doctor_table.has_failed(doctor_table.sections(everyone, []))


def test_a_sound_cluster_passes():
    everyone = [process(number, host=f"node{number}") for number in range(4)]
    text = shown(everyone)
    assert not has_failed(everyone) and "warn" not in text and text.endswith("nothing to do")
    assert re.search(
        r"3 +node3 +GPU 1 +740 \(790\) +2,980 \(3,000\) .* NV18 x 1, NUMA 0 .*pass", text
    )


@pytest.mark.parametrize(
    ("tflops", "verdict"), [(720.0, None), (690.0, Verdict.WARN), (610.0, Verdict.FAIL)]
)
def test_one_slow_gpu_of_a_cluster_is_named(tflops, verdict):
    everyone = [process(number, host=f"node{number}") for number in range(4)]
    everyone[2]["devices"][1]["matmul_tflops"] = tflops
    text = shown(everyone)
    lines = text.splitlines()
    (place,) = (n for n, line in enumerate(lines) if re.match(r"  2 +node2 +GPU 1 ", line))
    assert lines[place].endswith("pass" if verdict is None else verdict)
    assert text.count("slow: matmul") == (verdict is not None)
    if verdict:
        words = f"{verdict}: slow: matmul {tflops:.0f} TFLOP/s, {tflops / 740:.0%} of the median"
        assert words in lines[place + 1]
    assert has_failed(everyone) == (verdict == Verdict.FAIL)


def test_of_two_gpus_the_slower_is_named():
    everyone = [process()]
    everyone[0]["devices"][0]["memory_gbs"] = 2700.0
    (line,) = (line for line in shown(everyone).splitlines() if "slow: memory" in line)
    assert "2,700 GB/s, 91% of the median of all, 2,980" in line


def test_a_cluster_that_is_slow_throughout_is_told_by_what_such_a_card_reaches():
    slow = [device(matmul_tflops=500.0), device(matmul_tflops=501.0)]
    text = shown([process(devices=slow)])
    assert text.count("63% of the 790 that a NVIDIA H100 80GB HBM3 reaches") == 2
    assert has_failed([process(devices=slow)])
    # Of another card nothing is expected.
    others = [device(matmul_tflops=500.0, kind="NVIDIA H100 PCIe") for _ in range(2)]
    assert "reaches" not in shown([process(devices=others)])


SICK: dict[str, tuple[dict, Verdict, str]] = {
    "uncorrected": (
        {"card": {"ecc.errors.uncorrected.volatile.total": "2"}},
        Verdict.FAIL,
        "2 memory errors that ECC could not correct",
    ),
    "corrected": (
        {"card": {"ecc.errors.corrected.volatile.total": "4096"}},
        Verdict.WARN,
        "4,096 memory errors",
    ),
    "ecc": ({"card": {"ecc.mode.current": "Disabled"}}, Verdict.WARN, "ECC is off"),
    "rows": ({"card": {"remapped_rows.failure": "Yes"}}, Verdict.FAIL, "replace the card"),
    "pending": ({"card": {"remapped_rows.pending": "1"}}, Verdict.WARN, "reset the card"),
    "mig": ({"card": {"mig.mode.current": "Enabled"}}, Verdict.FAIL, "nvidia-smi -mig 0"),
    "power": (
        {"card": {"power.limit": "500.00", "power.default_limit": "700.00"}},
        Verdict.WARN,
        "power limit is 500 W of 700",
    ),
    "persistence": ({"card": {"persistence_mode": "Disabled"}}, Verdict.WARN, "persistenced"),
    "brake": ({"load": {"reasons": ["power brake"]}}, Verdict.FAIL, "power brake: "),
    "heat": ({"load": {"reasons": ["software thermal slowdown"]}}, Verdict.WARN, "cooling"),
    "hot": ({"load": {"temperature_c": 88.0}}, Verdict.WARN, "88 C"),
    "clock": ({"load": {"clock_mhz": 990.0}}, Verdict.WARN, "clock 990 of 1,980 MHz"),
    "pcie": (
        {"load": {"pcie_gen": 4.0}, "card": {"pcie.link.gen.max": "5"}},
        Verdict.WARN,
        "PCIe gen 4 of 5",
    ),
}


@pytest.mark.parametrize("case", SICK)
def test_what_nvidia_smi_says_of_a_card_that_is_not_well_is_told(case):
    changes, verdict, words = SICK[case]
    sick = {key: DEVICE[key] | value for key, value in changes.items()}
    (finding,) = verdicts.of_device(device(**sick), medians=verdicts.medians([device()]))
    assert finding.verdict == verdict and words in finding.text


def test_the_power_cap_is_where_a_card_is_meant_to_be():
    busy = device(load=DEVICE["load"] | {"reasons": ["power cap"]})
    assert verdicts.of_device(busy, medians=verdicts.medians([busy])) == []
    assert re.search(r"power cap +pass", shown([process(devices=[busy])]))


def cards(matrix):
    """Cards with these links to each other."""
    return [
        {"index": str(n), "links": {f"GPU{m}": link for m, link in enumerate(row)}}
        for n, row in enumerate(matrix)
    ]


def test_links_that_differ_or_are_none_are_told():
    assert verdicts.of_links(cards([["X", "NV18"], ["NV18", "X"]])) == []
    (lost,) = verdicts.of_links(
        cards([["X", "NV18", "NV12"], ["NV18", "X", "NV18"], ["NV12", "NV18", "X"]])
    )
    assert lost.verdict == Verdict.FAIL and "GPU0-GPU2, GPU2-GPU0 by NV12" in lost.text
    (bus,) = verdicts.of_links(cards([["X", "SYS"], ["SYS", "X"]]))
    assert bus.verdict == Verdict.WARN and "without NVLink" in bus.text


def collective(group, gbs, **others):
    figure = {"group": group, "collective": "all-gather", "num": 4, "bytes": 2**30, "bus_gbs": gbs}
    return [figure | others]


@pytest.mark.parametrize(
    ("group", "gbs", "verdict"),
    [
        (speed.INSIDE, 320.0, Verdict.PASS),
        (speed.INSIDE, 200.0, Verdict.WARN),
        (speed.INSIDE, 20.0, Verdict.FAIL),
        (speed.BETWEEN, 42.0, Verdict.PASS),  # two GPUs share two ports of 400 Gb/s
        (speed.BETWEEN, 1.1, Verdict.FAIL),
    ],
)
def test_collectives_are_held_to_links_and_network_cards(group, gbs, verdict):
    everyone = [process(n, host=f"node{n}", collectives=collective(group, gbs)) for n in range(2)]
    text = shown(everyone)
    (line,) = (line for line in text.splitlines() if line.startswith(f"  {group}  "))
    assert line.endswith(verdict)
    assert text.count(f"host node1: all-gather {group}: ") == (verdict != Verdict.PASS)


def test_a_host_whose_collectives_are_slow_is_named():
    everyone = [
        process(
            n, host=f"node{n}", collectives=collective(speed.INSIDE, 240.0 if n == 1 else 330.0)
        )
        for n in range(3)
    ]
    text = shown(everyone)
    assert "host node1: all-gather inside a host: 240 GB/s, and the median of all is 330" in text
    assert "host node0:" not in text and "host node2:" not in text


def test_hosts_without_a_fast_network_are_told_if_there_are_several():
    machine = process()["machine"] | {"nics": []}
    assert "NCCL goes over TCP" not in shown([process(machine=machine)])
    others = [process(n, host=f"node{n}", machine=machine) for n in range(2)]
    assert shown(others).count("NCCL goes over TCP") == 2


def test_a_slow_disk_of_one_host_and_one_that_cannot_be_written_to_are_told():
    disks = [{"write_gbs": 2.0, "read_gbs": 4.0}] * 3 + [{"write_gbs": 0.2, "read_gbs": 4.0}]
    everyone = [process(n, host=f"node{n}", disk=disk) for n, disk in enumerate(disks)]
    assert "0.20 GB/s written, and the median of all is 2.00" in shown(everyone)
    everyone[0]["disk"] = {"error": "--workdir=/x: No space left on device"}
    assert has_failed(everyone) and "No space left on device: choose another" in shown(everyone)


def test_processes_that_differ_are_in_the_table():
    facts = [
        {"process": n, "host": f"node{n}", "pid": n, "gpus": [], "config": {}, "data": {}}
        | {"versions": {"jax": f"0.1{n}.2"}, "driver": None, "cards": [], "commit": None}
        | {"code": "c", "xla_flags": "", "clock": 0.0, "sees": True}
        for n in range(2)
    ]
    measured = [process(n, host=f"node{n}") for n in range(2)]
    found = doctor.report(facts, measured, workdir=None)
    assert doctor_table.has_failed(found)
    text = "\n".join(doctor_table.text(found))
    assert "FAIL: process 1 (host node1), unlike process 0 (host node0): jax 0.11.2 instead" in text
    records = doctor_table.to_json(found)
    assert records[0]["verdict"] == "fail" and json.loads(json.dumps(records)) == records


# Measuring.


@pytest.mark.parametrize("per_host", [2, 4, 8])
def test_devices_are_grouped_by_host(per_host):
    mesh = speed.mesh_of(jax.devices(), lambda device: str(device.id // per_host))
    assert mesh.shape == {"host": 8 // per_host, "gpu": per_host}
    groups = speed.groups_of(mesh, num_hosts=8 // per_host)
    assert list(groups) == (
        [speed.INSIDE, speed.BETWEEN, speed.ALL] if per_host < 8 else ["inside a host"]
    )


def test_hosts_of_different_sizes_are_one_group():
    mesh = speed.mesh_of(jax.devices(), lambda device: str(device.id // 5))
    assert speed.groups_of(mesh, num_hosts=2) == {speed.ALL: ("gpu",)}


@pytest.mark.parametrize("name", speed.COLLECTIVES)
def test_a_turn_of_each_collective_leaves_the_buffer_as_it_was(name):
    mesh = speed.mesh_of(jax.devices(), lambda device: str(device.id // 4))
    loop, buffer = speed.collective_program(name, mesh, axes=("gpu",), num_bytes=4096)
    made = loop(jax.device_put(jnp.zeros(buffer.shape), buffer.sharding), jnp.int32(3))
    assert made.shape == buffer.shape and made.sharding == buffer.sharding
    assert float(jnp.abs(made).sum()) == 0
    of_a_device = 4096 if name != "all-gather" else 1024
    assert buffer.shape == (8 * of_a_device // 4,)


@pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing()))
@pytest.mark.parametrize("name", speed.COLLECTIVES)
def test_compiled_for_gpus_a_turn_is_one_collective_and_copies_nothing(name):
    devices = ahead.devices_of("h100", hosts=2, gpus_per_host=2)
    mesh = speed.mesh_of(devices, lambda device: str(device.process_index))
    assert mesh.shape == {"host": 2, "gpu": 2}
    loop, buffer = speed.collective_program(name, mesh, axes=("gpu",), num_bytes=2**20)
    text = loop.lower(buffer, jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()
    assert text is not None
    (body,) = re.findall(r"while\(.*body=(%[\w.-]+)", text)
    turn = re.search(rf"^{re.escape(body)} \(.*?^}}", text, re.MULTILINE | re.DOTALL)
    assert turn is not None
    assert len(re.findall(rf" {name}(?:-start)?\(|async-start\(", turn[0])) == 1
    assert not re.search(r" f32\[\d{4,}\]\S* copy\(", turn[0]), turn[0]


@pytest.mark.skipif(ahead.missing() is not None, reason=str(ahead.missing()))
def test_compiled_for_gpus_chains_are_neither_merged_nor_unrolled():
    (one, *_) = ahead.devices_of("h100", hosts=1, gpus_per_host=1)
    sharding = jax.sharding.SingleDeviceSharding(one)

    def compiled(function, *shapes):
        arrays = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
        options = {"xla_gpu_enable_triton_gemm": False}
        return function.lower(*arrays).compile(options).as_text()

    square, count = ((2048, 2048), jnp.bfloat16), ((), jnp.int32)
    products = compiled(speed.product_chain, square, square, count)
    assert products.count("__cublas$lt$matmul") == 2 and products.count(" while(") == 1
    passes = compiled(speed.scale_chain, ((2**24,), jnp.float32), ((), jnp.float32), count)
    assert passes.count(" multiply(") == 1 and passes.count(" while(") == 1


TINY = dataclasses.replace(speed.CPU, matrix=64, memory_bytes=2**16, seconds=0.0, turn_seconds=0.01)


def test_a_device_that_cannot_is_told_and_the_others_are_measured(monkeypatch):
    made = speed._scale_loop

    def fails_on_one(device, num_bytes):
        if device.id == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nBFC: ...")
        return made(device, num_bytes)

    monkeypatch.setattr(speed, "_scale_loop", fails_on_one)
    with contextlib.ExitStack() as at_work:
        figures = speed.of_devices(jax.devices()[:3], TINY, at_work=at_work)
    assert [figure["memory_gbs"] is None for figure in figures] == [False, True, False]
    assert all(figure["matmul_tflops"] > 0 for figure in figures)
    text = shown([process(devices=[device(platform="cpu", **figure) for figure in figures])])
    assert "FAIL: it cannot be used: RESOURCE_EXHAUSTED: Out of memory\n" in text
    nothing = device(matmul_tflops=None, memory_gbs=None, error="no")
    assert has_failed([process(devices=[nothing])])


def test_a_timing_takes_as_long_as_it_should():
    assert speed.turns(0.001, speed.FULL) == 200 and speed.turns(5.0, speed.FULL) == 1
    assert speed.turns(0.0, speed.FULL) == 1000


def test_a_measurement_that_does_not_end_ends_the_process(monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(speed.os, "_exit", lambda code: ended.set())
    with speed.stage("all-gather, between hosts", seconds=0.05):
        assert ended.wait(10)
    assert (
        "all-gather, between hosts did not end in 0.05 s (process 0 of 1" in capfd.readouterr()[1]
    )


# The script.


def run_doctor(*words, launcher=()):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, "scripts/doctor.py", "--gib=0.004", *words],
        cwd=ROOT,
        env=environment | {"XLA_FLAGS": with_devices(2)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_script_examines_this_machine(tmp_path):
    code, out, err = run_doctor(f"--workdir={tmp_path / 'x'}", f"--json={tmp_path / 'table.json'}")
    assert code == 0, out + err
    titles = re.findall(r"^(\w+)", out, re.MULTILINE)
    assert titles[:5] == ["1", "devices", "collectives", "hosts", "checkpoint"]
    assert len(re.findall(r"^  0 +\S+ +cpu [01] ", out, re.MULTILINE)) == 2
    assert re.search(r"^  inside a host  all-reduce +2 ", out, re.MULTILINE)
    records = json.loads((tmp_path / "table.json").read_text())
    assert {record["section"].partition(":")[0] for record in records} >= {"hosts", "checkpoint"}
    assert list((tmp_path / "x").iterdir()) == []
    assert "Traceback" not in err


def test_a_mistake_on_its_command_line_is_told_in_a_line(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    code, _, err = run_doctor(f"--workdir={file}")
    assert code in (1, 2) and "Traceback" not in err and str(file) in err


# Each process is on a host of its own, as far as it knows, and the devices of process 1 are slow.
TWO_HOSTS = """
import os, runpy, socket, sys
number = os.environ["JAXSCALE_PROCESS_ID"]
socket.gethostname = lambda: f"node{number}"
from jaxscale.perf import doctor_speed
measured = doctor_speed._sustained
if number == "1":
    doctor_speed._sustained = lambda run, sizes: 100 * measured(run, sizes)
sys.argv = ["scripts/doctor.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_processes_of_two_hosts_are_compared_and_the_slow_devices_named(tmp_path):
    script, workdir = tmp_path / "two_hosts.py", tmp_path / "run"
    script.write_text(TWO_HOSTS)
    launcher = ["scripts/launch_local.py", "-n", "2", "--cpu-devices=2", "--", str(script)]
    code, out, err = run_doctor(f"--workdir={workdir}", "--quick", launcher=launcher)
    assert code == 0, out + err
    assert "[0] 2 processes" in out and "devices: 4 x cpu" in out
    for number in range(2):
        rows = re.findall(rf"^\[0\]   {number} +node{number} +cpu [01] .*", out, re.MULTILINE)
        assert [row.split()[-1] for row in rows] == ["warn" if number else "pass"] * 2, out
        assert re.search(rf"^\[0\]   node{number} +1 +2 .* [\d.]+ / [\d.]+ ", out, re.MULTILINE)
    for group, num in (("inside a host", 2), ("between hosts", 2), ("all", 4)):
        for name in speed.COLLECTIVES:
            assert re.search(rf"^\[0\]   {group} +{name} +{num} ", out, re.MULTILINE), out
    assert "[1] devices" not in out and list(workdir.iterdir()) == []
