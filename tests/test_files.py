"""A file is replaced whole or not at all, and a folder that cannot be written to is refused."""

import os
from pathlib import Path

import pytest

from jaxscale import files


def test_the_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / "jaxscale"
    for unset in (lambda name: monkeypatch.setenv(name, ""), monkeypatch.delenv):
        unset("XDG_CACHE_HOME")
        assert files.cache_folder() == Path.home() / ".cache" / "jaxscale"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ValueError, match="no home folder: set XDG_CACHE_HOME"):
        files.cache_folder()


def test_what_the_disk_refuses_is_told_with_what_and_fix(tmp_path):
    with pytest.raises(ValueError, match="a cannot be read: No such file or directory; copy it"):
        with files.telling("a cannot be read", "copy it"):
            open(tmp_path / "a")


def test_a_file_is_there_or_not_or_that_cannot_be_known(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "link").symlink_to(tmp_path / "link")
    assert files.is_file(tmp_path / "a")
    for name in ("", "b", "a/b"):
        assert not files.is_file(tmp_path / name)
    with pytest.raises(OSError):
        files.is_file(tmp_path / "link")


def test_a_folder_is_made_and_left_empty_by_the_check(tmp_path):
    for _ in range(2):
        files.require_writable(tmp_path / "a" / "b")
        assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        files.require_writable(tmp_path / "file" / "folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        files.require_writable(tmp_path)


def test_a_file_is_written_and_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    for data in (b"first", b"2"):
        files.write_atomically(path, data)
        assert path.read_bytes() == data
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("moment", ["while writing", "before all is on the disk"])
def test_a_file_stays_as_it_was_when_its_replacement_is_cut_short(tmp_path, monkeypatch, moment):
    def killed(descriptor):
        raise KeyboardInterrupt

    path = tmp_path / "a.json"
    files.write_atomically(path, b"first")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as file:
        file.write(b"sec")
        if moment == "while writing":
            raise KeyboardInterrupt
        monkeypatch.setattr(os, "fsync", killed)
    assert path.read_bytes() == b"first"
    monkeypatch.undo()
    files.write_atomically(path, b"second")
    assert path.read_bytes() == b"second" and list(tmp_path.iterdir()) == [path]
