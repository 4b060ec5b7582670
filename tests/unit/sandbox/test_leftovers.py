"""What programs leave: folders that are hard to count or to remove, files without a name, control groups of supervisors that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rftcore.sandbox.cgroups import ControlGroup, group_name, remove_left_groups
from rftcore.sandbox.process_tree import unlinked_bytes
from rftcore.sandbox.work_folder import disk_bytes, remove_folder

MIB = 1 << 20


def test_a_folder_of_any_depth_is_counted_and_removed_and_its_links_are_not_followed(tmp_path: Path) -> None:
    outside, work = tmp_path / "outside", tmp_path / "work"
    for folder in (outside, work):
        folder.mkdir()
    (outside / "kept").write_text("kept")
    (work / "link").symlink_to(outside)
    for place in range(40):
        (work / f"empty{place}").touch()
    assert 40 * 4096 <= disk_bytes(str(work), MIB) < MIB
    top = os.open(work, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("nested", 0o300, dir_fd=top)
        inner = os.open("nested", os.O_PATH, dir_fd=top)
        os.close(top)
        top = inner
    os.symlink(outside, "link", dir_fd=top)
    os.close(top)
    assert disk_bytes(str(work), MIB) > MIB
    remove_folder(str(work))
    assert not work.exists()
    assert (outside / "kept").read_text() == "kept"


def test_an_open_file_without_a_name_counts(tmp_path: Path) -> None:
    before = unlinked_bytes(os.getpid())
    with (tmp_path / "file").open("wb", buffering=0) as file:
        os.unlink(file.name)
        file.write(bytes(MIB))
        os.fsync(file.fileno())
        assert unlinked_bytes(os.getpid()) - before >= MIB


def test_control_groups_of_supervisors_that_were_killed_are_removed() -> None:
    ended = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    ended.wait()
    try:
        left, used = (ControlGroup(group_name(process), 64 * MIB, 8) for process in (ended.pid, os.getpid()))
    except OSError as error:
        pytest.skip(f"no control groups: {error}")
    try:
        remove_left_groups()
        assert not any(map(os.path.exists, left._folders))
        assert all(map(os.path.exists, used._folders))
    finally:
        used.remove()
