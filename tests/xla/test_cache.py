"""The compilation cache is on where it is safe, in a folder that suits XLA."""

import errno
import os
import shutil
import types
from pathlib import Path

import jax
import pytest
from jax._src import compiler

from jaxscale.xla import cache
from jaxscale.xla.cache import enable_compilation_cache


@pytest.fixture
def updates(monkeypatch, environment, tmp_path):
    """What enable_compilation_cache tells JAX, on a machine with GPUs."""
    updates = {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        environment.pop(name, None)
    return updates


def test_the_cache_is_on_for_every_program_in_a_folder_of_this_version(
    updates, environment, tmp_path
):
    enable_compilation_cache()
    folder = tmp_path / "jaxscale" / "jax" / jax.__version__
    assert updates == {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    assert [path.name for path in folder.iterdir()] == ["xla_gpu_per_fusion_autotune_cache_dir"]
    updates.clear()
    environment.update(
        JAX_COMPILATION_CACHE_DIR="gs://bucket/cache",
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="3",
    )
    enable_compilation_cache()
    assert (
        updates == {"jax_compilation_cache_dir": "gs://bucket/cache"} and not Path("gs:").exists()
    )


def test_no_cache_on_a_cpu(updates, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    enable_compilation_cache()
    assert not updates


@pytest.mark.parametrize("why", ["Read-only file system", "No space left on device"])
def test_a_folder_that_nothing_can_be_kept_in_is_told_and_the_run_goes_on(
    updates, monkeypatch, caplog, why
):
    def refuse(folder):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    if why.startswith("Read"):
        monkeypatch.setattr(cache, "require_writable", refuse)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=1000))
    enable_compilation_cache()
    assert not updates and f"cannot be written to ({why}): every start" in caplog.text


def test_a_folder_that_cannot_be_made_is_told_and_the_run_goes_on(
    updates, environment, tmp_path, caplog
):
    (tmp_path / "file").touch()
    environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "file" / "cache")
    enable_compilation_cache()
    assert (
        not updates
        and "file/cache cannot be written to (Not a directory): every start compiles anew"
        in caplog.text
    )


def test_jax_has_xla_keep_its_timings_in_the_folder_that_was_made(updates, tmp_path, monkeypatch):
    enable_compilation_cache()
    monkeypatch.undo()
    saved = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    }
    try:
        jax.config.update("jax_compilation_cache_dir", updates["jax_compilation_cache_dir"])
        jax.config.update("jax_enable_compilation_cache", True)
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    finally:
        for name, value in saved.items():
            jax.config.update(name, value)
    folder = Path(
        options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir
    )
    assert folder.is_dir() and folder.is_relative_to(tmp_path)
