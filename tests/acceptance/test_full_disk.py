"""A disk that fills up during a run: a clear end, nothing partly written, and `rft run --resume` once there is space.

In the first three tests a single run meets the end of one disk after the other; each test starts it if there is none. Runs have no end in sight until
they are given one, so that none is finished before its disk is full.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rftdata
from rftdata.config import BufferConfig
from rftdata.maintenance.verification import verify
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import Rft, report
from tests.support.small_disks import SmallDisk, small_disks
from tests.support.small_runs import RUN, settings, start
from tests.support.waiting import printed_by, wait_until
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

ENDLESS = "steps=1000000"
MIB = 2**20


@dataclass
class Walk:
    """One run that meets the end of one disk after the other.

    Attributes:
        segments, runs: the disks of its segments and of its checkpoints.
    """

    buffer: Path
    segments: SmallDisk
    runs: SmallDisk
    warm: Warm

    def begin(self, *overrides: str) -> subprocess.Popen[str]:
        return run(self.buffer, self.warm, f"buffer.segments={self.segments.folder}", *overrides)

    def begin_or_resume(self, *overrides: str) -> subprocess.Popen[str]:
        """Continue the run."""
        if not (self.buffer / "postgres").exists():
            return self.begin(*overrides)
        options = [part for override in overrides for part in ("--set", override)]
        return start("run", "--resume", "--plain", "--buffer", self.buffer, *options, config=None)


@pytest.fixture(scope="module")
def walk(server_folders: Path, warm: Warm) -> Iterator[Walk]:
    folder = Path(tempfile.mkdtemp(dir=server_folders))
    buffer = folder / "buffer"
    with small_disks() as mount:
        yield Walk(buffer, mount(folder / "segments", 16 * MIB), mount(buffer / "runs", 512 * MIB), warm)
        EmbeddedServer(buffer).stop()


@pytest.fixture
def buffer_disk(server_folders: Path) -> Iterator[Callable[[int], SmallDisk]]:
    """Mounts a disk for a whole buffer; a folder of its own for every test, since a mount that is still busy keeps its folder for a while."""
    buffer = Path(tempfile.mkdtemp(dir=server_folders)) / "buffer"
    with small_disks() as mount:
        yield lambda num_bytes: mount(buffer, num_bytes)
        EmbeddedServer(buffer).stop()


def opened(buffer: Path, segments: Path | None = None) -> rftdata.Buffer:
    config = BufferConfig(uri=str(buffer), segments=None if segments is None else str(segments), min_free_bytes=0)
    return rftdata.open(config, create=False)


def one(buffer: Path, query: str) -> object:
    with opened(buffer) as found:
        return found.sql(query).column(0)[0].as_py()


def run(buffer: Path, warm: Warm, *overrides: str) -> subprocess.Popen[str]:
    return start("run", "--plain", "--buffer", buffer, *settings(warm, ENDLESS, *overrides))


def num_steps(buffer: Path) -> int:
    done = one(buffer, "select coalesce(max(trainer_step), 0) from rft.v_train_step")
    assert isinstance(done, int)
    return done


def wait_for_step(buffer: Path, step: int, process: subprocess.Popen[str]) -> None:
    def is_done() -> bool:
        return (buffer / "host").exists() and num_steps(buffer) >= step

    wait_until(is_done, f"step {step}", process=process, pause_s=0.3)


def ended_with_a_clear_error(process: subprocess.Popen[str]) -> str:
    """Return the run's last output: one paragraph."""
    output = printed_by(process)
    assert process.returncode == 1, output
    assert "Traceback" not in output and "defect of rftdata" not in output, output
    last = output.rstrip().splitlines()[-1]
    assert last.startswith("rft: "), output
    return last


def assert_nothing_is_half_written(buffer: Path, segments: Path | None = None) -> None:
    with opened(buffer, segments) as found:
        assert list(verify(found)) == []
        checkpoints = found.sql("select uri from rft.checkpoint where deleted_at is null")["uri"].to_pylist()
    runs = buffer / "runs" / RUN / "checkpoints"
    assert all((Path(uri) / "training" / "state.json").is_file() for uri in checkpoints)
    assert sorted(map(str, runs.glob("*"))) == sorted(checkpoints)


def assert_resumed_to_the_end(rft: Rft, buffer: Path, *overrides: str) -> None:
    steps = num_steps(buffer) + 4
    options = [part for override in (*overrides, f"steps={steps}") for part in ("--set", override)]
    rft("run", "--resume", "--plain", "--buffer", buffer, *options)
    result = report(rft, buffer, RUN)
    assert result["status"] == "finished" and result["steps"]["done"] == steps
    with opened(buffer) as found:
        curve = found.sql("select trainer_step from rft.v_train_step order by 1")["trainer_step"].to_pylist()
        twice = found.sql("select experience_id from rft.v_consumption group by 1 having count(*) > 1").num_rows
    assert curve == list(range(1, steps + 1))
    assert twice == 0


def test_writers_stop_before_the_disk_is_full(walk: Walk) -> None:
    folder = walk.segments.folder
    said = ended_with_a_clear_error(walk.begin())
    assert f"the disk of the segments in {folder} has" in said
    assert f"buffer.min_free_bytes = {256 * MIB}" in said and "lower buffer.min_free_bytes" in said
    assert_nothing_is_half_written(walk.buffer, folder)


def test_the_disk_of_the_segments(walk: Walk) -> None:
    folder = walk.segments.folder
    process = walk.begin_or_resume("buffer.min_free_bytes=0")
    wait_for_step(walk.buffer, 3, process)
    walk.segments.fill()
    said = ended_with_a_clear_error(process)
    # Which of the two depends on whether the last write fitted by the page.
    assert f"the disk of the segments in {folder} has" in said or f"segments in {folder} is full" in said
    assert "free some space" in said and f"rft run --resume {RUN}" in said
    assert_nothing_is_half_written(walk.buffer, folder)


def test_the_disk_of_the_checkpoints(walk: Walk, rft: Rft) -> None:
    folder, disk = walk.segments.folder, walk.runs
    walk.segments.resize(64 * MIB)
    done = num_steps(walk.buffer) if (walk.buffer / "host").exists() else 0
    process = walk.begin_or_resume("buffer.min_free_bytes=0")
    wait_for_step(walk.buffer, done + 2, process)
    newest = "select coalesce(max(trainer_step), 0) from rft.checkpoint where deleted_at is null"
    wait_until(lambda: one(walk.buffer, newest) >= 2, "a checkpoint", process=process, pause_s=0.3)  # type: ignore[operator]
    disk.fill()
    said = ended_with_a_clear_error(process)
    assert f"the trainer of the run {RUN!r} ended before its work was done: no room for the checkpoint" in said
    assert "free space on the file system" in said and f"rft run --resume {RUN}" in said
    assert_nothing_is_half_written(walk.buffer, folder)
    kept = one(walk.buffer, newest)
    assert isinstance(kept, int) and kept >= 2
    disk.resize(1024 * MIB)
    assert_resumed_to_the_end(rft, walk.buffer, "buffer.min_free_bytes=0")
    assert_nothing_is_half_written(walk.buffer, folder)

    # What a run has reached is in the buffer: a picture that cannot be drawn takes nothing from it.
    disk.fill()
    output = rft("run", "--resume", "--plain", "--buffer", walk.buffer).stdout
    assert "warning: the image" in output and "cannot be written: No space left on device" in output
    assert f"rft report {RUN} --buffer {walk.buffer} --png FILE" in output
    picture = walk.buffer / "runs" / RUN / "learning_curve.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and not list(picture.parent.glob(".unfinished*"))


def test_the_disk_of_the_database(buffer_disk: Callable[[int], SmallDisk], warm: Warm, rft: Rft) -> None:
    """Segments and checkpoints are there, too; any of the roles may meet the end first."""
    disk = buffer_disk(512 * MIB)
    buffer = disk.folder
    process = run(buffer, warm, "buffer.min_free_bytes=0")
    wait_for_step(buffer, 3, process)
    disk.fill()
    said = ended_with_a_clear_error(process)
    # The last of these is the words for a write that would leave too little room.
    assert any(words in said for words in ("full", "no room", "No space left", "has 0 bytes free")), said
    assert "free" in said and f"rft run --resume {RUN}" in said
    disk.resize(1024 * MIB)
    assert_nothing_is_half_written(buffer)
    assert_resumed_to_the_end(rft, buffer)
    assert_nothing_is_half_written(buffer)


def test_a_disk_too_small_for_a_new_database(buffer_disk: Callable[[int], SmallDisk], warm: Warm) -> None:
    disk = buffer_disk(8 * MIB)
    buffer = disk.folder
    said = ended_with_a_clear_error(run(buffer, warm))
    assert f"the disk of {disk.folder} is full" in said and "free some space" in said
    assert not (buffer / "postgres").exists()
    # The same command works when there is room.
    disk.resize(512 * MIB)
    with rftdata.open(str(buffer)) as made:
        assert made.sql("select name from rft.run").num_rows == 0
