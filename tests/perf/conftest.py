"""Traces, and the machine that the benchmarks find."""

import dataclasses
import os

import pytest

from tests.perf.traces import STEP, steps, write_trace

NVIDIA_SMI = """#!/bin/sh
case "$1" in
  *name*) echo "NVIDIA H200"; echo "NVIDIA H200";;
  *driver*) echo 580.1; echo 580.1;;
  *memory*) echo 300; echo 300;;
esac
"""


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory):
    """GPU 1 computes longest; GPU 0 waits in its reduce-scatter."""
    waiting = [dataclasses.replace(x, end=150) if x.name.startswith("nvjet") else x for x in STEP]
    file = tmp_path_factory.mktemp("trace") / "plugins" / "profile" / "2026" / "host.xplane.pb"
    return write_trace(file, {0: steps(3, waiting), 1: steps(3)})


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """A machine with two GPUs, as far as nvidia-smi goes."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(NVIDIA_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("JAX_PLATFORMS", "")
