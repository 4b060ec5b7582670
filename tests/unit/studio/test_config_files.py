"""The studio reads and writes configurations of its folder only, as a whole, and never over what the writer has not seen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rftcore.studio.config_files import ConfigFolder, FileRefusedError
from rftdata.errors import ConfigError, ConflictError


@pytest.fixture
def folder(tmp_path: Path) -> ConfigFolder:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    (inside / "run.yaml").write_text("steps: 1\n")
    (inside / "sub" / "other.yml").write_text("steps: 2\n")
    (inside / "notes.txt").write_text("no configuration")
    (outside / "secret.yaml").write_text("password: x\n")
    (inside / "link.yaml").symlink_to(outside / "secret.yaml")
    (inside / "linked").symlink_to(outside)
    os.mkfifo(inside / "pipe.yaml")
    (inside / "folder.yaml").mkdir()
    return ConfigFolder(inside)


def test_files_of_the_folder_are_listed_without_links(folder: ConfigFolder) -> None:
    assert folder.names() == ["run.yaml", "sub/other.yml"]
    with pytest.raises(ConfigError, match="does not exist"):
        ConfigFolder(folder.path / "nowhere")


@pytest.mark.parametrize(
    "name",
    [
        "../outside/secret.yaml",
        "sub/../../outside/secret.yaml",
        "link.yaml",
        "linked/secret.yaml",
        "/etc/passwd.yaml",
        "//run.yaml",
        "./run.yaml",
        "notes.txt",
        "pipe.yaml",
        "folder.yaml",
        ".rft-studio/x.yaml",
        "run.yaml\0.yaml",
        "sub\\other.yml",
        "",
        "nowhere/run.yaml",
        "run.yaml/x.yaml",
        "a" * 300 + ".yaml",
    ],
)
def test_nothing_else_is_read_or_written(folder: ConfigFolder, name: str) -> None:
    with pytest.raises(FileRefusedError):
        folder.read(name)
    with pytest.raises(FileRefusedError):
        folder.write(name, "steps: 3\n", "0")
    assert (folder.path.parent / "outside" / "secret.yaml").read_text() == "password: x\n"


def test_a_file_is_replaced_as_a_whole_and_keeps_its_line_ends_and_mode(folder: ConfigFolder) -> None:
    path = folder.path / "run.yaml"
    path.write_bytes(b"steps: 1\r\n")
    path.chmod(0o640)
    found = folder.read("run.yaml")
    saved = folder.write("run.yaml", "steps: 2\n# new", found.digest)
    assert path.read_bytes() == b"steps: 2\r\n# new\r\n" and path.stat().st_mode & 0o777 == 0o640
    assert saved == folder.read("run.yaml") and saved.text == "steps: 2\n# new\n"
    assert not list(folder.path.glob(".run*"))


def test_a_file_that_another_has_changed_removed_or_created_is_not_overwritten(folder: ConfigFolder) -> None:
    found = folder.read("run.yaml")
    (folder.path / "run.yaml").write_text("steps: 9\n")
    with pytest.raises(ConflictError, match="changed on disk since you opened it"):
        folder.write("run.yaml", "steps: 2\n", found.digest)
    assert (folder.path / "run.yaml").read_text() == "steps: 9\n"
    with pytest.raises(ConflictError, match="there is a file"):
        folder.write("run.yaml", "steps: 2\n", "")
    (folder.path / "run.yaml").unlink()
    with pytest.raises(ConflictError):
        folder.write("run.yaml", "steps: 2\n", found.digest)
    assert folder.write("new.yaml", "steps: 2\n", "").text == "steps: 2\n"


def test_a_folder_for_records_that_is_a_link_is_refused(folder: ConfigFolder) -> None:
    (folder.path / ".rft-studio").symlink_to(folder.path.parent / "outside")
    with pytest.raises(FileRefusedError, match="cannot use its folder"), folder.locked():
        pass


def test_a_new_file_has_the_mode_of_its_source_or_of_the_umask(folder: ConfigFolder) -> None:
    (folder.path / "run.yaml").chmod(0o600)
    folder.write("copy.yaml", "steps: 1\n", "", source="run.yaml")
    assert (folder.path / "copy.yaml").stat().st_mode & 0o777 == 0o600
    before = os.umask(0o027)
    try:
        folder.write("new.yaml", "steps: 1\n", "")
        folder.write("other.yaml", "steps: 1\n", "", source="gone.yaml")
    finally:
        os.umask(before)
    assert (folder.path / "new.yaml").stat().st_mode & 0o777 == 0o640
    assert (folder.path / "other.yaml").stat().st_mode & 0o777 == 0o640


def test_what_is_no_file_leaves_no_descriptor_open(folder: ConfigFolder) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("folder.yaml", "pipe.yaml", "link.yaml", "nowhere.yaml", "sub/none.yaml"):
        for _ in range(3):
            with pytest.raises((FileRefusedError, OSError)):
                folder.read(name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_written_is_refused_in_words() -> None:
    with pytest.raises(FileRefusedError, match="cannot use its folder"), ConfigFolder(Path("/proc/self")).locked():
        pass


def test_the_ignore_file_of_the_records_is_written_again(folder: ConfigFolder) -> None:
    for _ in range(2):
        with folder.locked() as place:
            assert (place / ".gitignore").read_text() == "*\n"
            (place / ".gitignore").unlink()
