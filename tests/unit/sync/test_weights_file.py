"""Published weights are read back bit for bit, and nothing incomplete or altered is ever loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rftcore.engines.weights_fit import WeightsFit
from rftcore.sync.base import Publication
from rftcore.sync.files.publishers import FolderPublisher, MemoryPublisher
from rftcore.sync.files.shared_memory import SHARED_MEMORY, hold_folder
from rftcore.sync.files.weights_file import (
    checksum_file,
    hold,
    iterate_weights,
    open_weights,
    prune,
    read_shapes,
    write_atomically,
)
from rftcore.sync.files.weights_stream import begin_file, layout, stream_weights, write_rows
from rftcore.sync.tensors import HeldRows, Part, WireTensor, shapes_of
from rftdata.errors import DiskFullError, FencedError, ModelError
from tests.support.weights import complete_state, write_weights

EMBEDDING = "model.embed_tokens.weight"


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        EMBEDDING: torch.randn(7, 4, generator=generator),
        "model.layers.0.mlp.up_proj.weight": torch.randn(6, 4, generator=generator).to(torch.bfloat16),
        "model.norm.weight": torch.randn(4, generator=generator),
    }


def publish(path: Path, seed: int = 0) -> Publication:
    return write_atomically(path, lambda draft: write_weights(some_tensors(seed).items(), draft))


def test_tensors_come_back_bit_for_bit_with_their_types(tmp_path: Path) -> None:
    tensors = some_tensors()
    publication = publish(tmp_path / "a.safetensors")
    back = dict(iterate_weights(open_weights(publication.uri, publication.checksum)))
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
    assert publication.num_bytes == (tmp_path / "a.safetensors").stat().st_size


def test_tensors_are_written_one_at_a_time_in_the_engine_s_type(tmp_path: Path) -> None:
    tensors = some_tensors()
    matrix = next(name for name, tensor in tensors.items() if tensor.ndim == 2 and name != EMBEDDING)
    places = layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, "bfloat16", in_float32={matrix})
    alive: list[weakref.ref[torch.Tensor]] = []

    def produced() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in reversed(tensors.items()):
            assert sum(one() is not None for one in alive) <= 1, "the last one only"
            made = tensor.float() + 0
            alive.append(weakref.ref(made))
            yield name, made

    published = write_atomically(tmp_path / "a.safetensors", lambda draft: stream_weights(places, produced(), draft))
    back = dict(iterate_weights(open_weights(published.uri, published.checksum)))
    assert published.num_bytes == places.num_bytes + len_of_header(Path(published.uri))
    assert {*back} == {*tensors, "lm_head.weight"}
    for name, tensor in back.items():
        whole = tensors[EMBEDDING if name == "lm_head.weight" else name].float()
        kept = torch.float32 if tensor.ndim < 2 or name == matrix else torch.bfloat16
        assert tensor.dtype == kept and torch.equal(tensor, whole.to(kept)), name


def test_tensors_that_are_not_those_of_the_layout_are_refused(tmp_path: Path) -> None:
    places = layout({name: tuple(tensor.shape) for name, tensor in some_tensors().items()}, "float32")
    with pytest.raises(ModelError, match=r"incomplete.*lm_head"):
        stream_weights(places, [], tmp_path / "a")
    for wrong in (torch.zeros(9, 4), torch.zeros(5, 4), torch.zeros(7, 5), torch.zeros(28)):
        with pytest.raises(ModelError, match="is not that of the file's layout"):
            stream_weights(places, [(EMBEDDING, wrong)], tmp_path / "b")
    with pytest.raises(ModelError, match="another is not that of the file's layout"):
        stream_weights(places, [("another", torch.zeros(7, 4))], tmp_path / "c")


TIED = WireTensor("lm_head.weight", (7, 4), (), same_as=EMBEDDING)


@pytest.mark.parametrize("tied", [(), (TIED,)])
def test_ranks_write_their_rows_under_every_name_of_a_tensor(tmp_path: Path, tied: tuple[WireTensor, ...]) -> None:
    tensors = some_tensors() | {"scale": torch.tensor(0.5)}
    parts = {EMBEDDING: [(0, 0, 3), (1, 3, 2), (2, 5, 2)], "model.norm.weight": [(2, 0, 4)], "scale": [(1, 0, 1)]}
    wire = [
        WireTensor(name, tuple(tensor.shape), tuple(Part(*part) for part in parts.get(name) or [(0, 0, len(tensor))]))
        for name, tensor in tensors.items()
    ]
    wire += tied
    places = layout(dict(shapes_of(tuple(wire))), "bfloat16")
    path = tmp_path / "a.safetensors"
    begin_file(places, path)
    done: list[int] = []
    for rank in (2, 0, 1):
        # Ranks may hold more than they write.
        held = [HeldRows(name, 0, tensor) for name, tensor in tensors.items()]
        write_rows(places, wire, rank, held, path, lambda rank=rank: done.append(rank))
    assert [done.count(rank) for rank in range(3)] == [len(tensors)] * 3
    back = dict(iterate_weights(path))
    assert back.keys() == {*tensors, "lm_head.weight"}
    for name, tensor in back.items():
        whole = tensors[EMBEDDING if name == "lm_head.weight" else name]
        assert torch.equal(tensor, whole.to(torch.float32 if whole.ndim < 2 else torch.bfloat16)), name


def test_tied_tensors_may_have_types_of_their_own(tmp_path: Path) -> None:
    embedding = torch.randn(7, 4)
    wire = [WireTensor(EMBEDDING, (7, 4), (Part(0, 0, 7),)), TIED]
    places = layout(dict(shapes_of(tuple(wire))), "bfloat16", in_float32=[EMBEDDING])
    begin_file(places, path := tmp_path / "a.safetensors")
    write_rows(places, wire, 0, [HeldRows(EMBEDDING, 0, embedding)], path, lambda: None)
    back = dict(iterate_weights(path))
    assert torch.equal(back[EMBEDDING], embedding) and torch.equal(back["lm_head.weight"], embedding.bfloat16())


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([], "the weights are incomplete"),
        ([HeldRows(EMBEDDING, 2, torch.zeros(5, 4))], "other rows of the weight"),
        ([HeldRows(EMBEDDING, 0, torch.zeros(5, 4))], "other rows of the weight"),
        ([HeldRows(EMBEDDING, 0, torch.zeros(6, 3))], "is not that of the file's layout"),
    ],
)
def test_a_rank_without_the_rows_that_it_has_to_write_is_refused(
    tmp_path: Path, held: list[HeldRows], message: str
) -> None:
    wire = [WireTensor(EMBEDDING, (7, 4), (Part(0, 0, 6), Part(1, 6, 1))), TIED]
    places = layout(dict(shapes_of(tuple(wire))), "float32")
    begin_file(places, path := tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=message):
        write_rows(places, wire, 0, held, path, lambda: None)


def test_a_full_disk_ends_a_rank_after_the_last_tensor(tmp_path: Path) -> None:
    """The ranks of a trainer produce tensors together: one that stopped early would block the others."""
    tensors = some_tensors()
    places = layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, "float32")
    wire = [WireTensor(name, tuple(each.shape), (Part(0, 0, len(each)),)) for name, each in tensors.items()]
    held = iter([HeldRows(name, 0, tensor) for name, tensor in tensors.items()])
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match="no space for the weights file"):
        write_rows(places, wire, 0, held, tmp_path / "full", lambda: None)
    assert list(held) == []


def len_of_header(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_the_output_head_of_a_tied_model_is_written_as_a_copy_of_the_embedding(tmp_path: Path) -> None:
    publication = publish(tmp_path / "a.safetensors")
    back = dict(iterate_weights(publication.uri))
    assert torch.equal(back["lm_head.weight"], back[EMBEDDING])


def test_an_output_head_of_its_own_is_kept() -> None:
    places = layout({EMBEDDING: (7, 4), "lm_head.weight": (7, 4)}, "float32")
    assert places.head_of is None and len(places.slots) == 2


def test_tensors_that_share_memory_or_are_transposed_can_be_written(tmp_path: Path) -> None:
    embedding = torch.randn(7, 4)
    tensors = {EMBEDDING: embedding, "lm_head.weight": embedding, "model.t.weight": torch.randn(3, 5).T}
    places = layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, "float32")
    stream_weights(places, tensors.items(), tmp_path / "a.safetensors")
    back = dict(iterate_weights(tmp_path / "a.safetensors"))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_a_state_without_head_and_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        layout({"model.norm.weight": (4,)}, "float32")


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    publication = publish(tmp_path / "a.safetensors")
    content = bytearray(Path(publication.uri).read_bytes())
    content[-1] ^= 1
    Path(publication.uri).write_bytes(content)
    with pytest.raises(ModelError, match="checksum differs"):
        open_weights(publication.uri, publication.checksum)


def test_a_removed_file_is_an_error_that_reports_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_weights(str(tmp_path / "gone.safetensors"))


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    before = publish(path)

    def fail(draft: Path) -> None:
        draft.write_bytes(b"half")
        raise ValueError("the trainer was interrupted")

    with pytest.raises(ValueError, match="interrupted"):
        write_atomically(path, fail)
    assert os.listdir(tmp_path) == ["a.safetensors"] and checksum_file(path) == before.checksum


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    def fill(draft: Path) -> None:
        draft.touch()
        Path("/dev/full").write_bytes(b"x")

    with pytest.raises(DiskFullError, match="no space"):
        write_atomically(tmp_path / "a.safetensors", fill)
    assert os.listdir(tmp_path) == []


def test_the_header_alone_contains_the_shapes(tmp_path: Path) -> None:
    publication = publish(tmp_path / "a.safetensors")
    assert read_shapes(Path(publication.uri))[EMBEDDING] == (7, 4)


def test_a_file_in_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        read_shapes(tmp_path / "a.safetensors")


@pytest.mark.parametrize("missing", [EMBEDDING, "model.norm.weight", "lm_head.weight"])
def test_a_file_that_would_leave_a_tensor_as_it_was_is_refused(tmp_path: Path, missing: str) -> None:
    from safetensors.torch import save_file

    state = complete_state(some_tensors().items())
    expected = {name: tuple(tensor.shape) for name, tensor in some_tensors().items()}
    del state[missing]
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match=missing):
        WeightsFit(expected, None).refuse_file(tmp_path / "a.safetensors")


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    publication = publish(tmp_path / "a.safetensors")
    with pytest.raises(ModelError, match="does not fit the model"):
        WeightsFit({EMBEDDING: (9, 4)}, None).refuse_file(Path(publication.uri))


def test_only_the_newest_files_stay_and_drafts_of_dead_writers_go(tmp_path: Path) -> None:
    for step in range(4):
        path = tmp_path / f"step-{step}.safetensors"
        write_weights(some_tensors(step).items(), path)
        os.utime(path, ns=(step, step))
    mine = tmp_path / f".step-4.safetensors.{os.getpid()}.draft"
    mine.touch()
    (tmp_path / ".step-4.safetensors.999999999.draft").touch()
    prune([tmp_path], keep=2)
    assert sorted(os.listdir(tmp_path)) == [mine.name, "step-2.safetensors", "step-3.safetensors"]


def test_a_reader_keeps_a_file_that_is_removed_meanwhile(tmp_path: Path) -> None:
    publication = publish(tmp_path / "a.safetensors")
    reader = iterate_weights(publication.uri)
    next(reader)
    prune([tmp_path], keep=0)
    assert len(list(reader)) == 3


def export(draft: Path) -> None:
    write_weights(some_tensors().items(), draft)


def names(folder: Path) -> list[str]:
    """Return the files below a folder, by their paths in it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def run_name() -> Iterator[str]:
    """A name that no other run of this host has; its files in shared memory are removed afterwards."""
    name = f"test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    shutil.rmtree(in_shared_memory(name), ignore_errors=True)


def in_shared_memory(run_name: str) -> Path:
    return SHARED_MEMORY / f"rftdata-{os.getuid()}" / run_name


def test_a_file_that_is_held_can_be_opened_after_its_name_was_removed(tmp_path: Path) -> None:
    publication = publish(tmp_path / "a.safetensors")
    with hold(Path(publication.uri)) as held:
        Path(publication.uri).unlink()
        assert {name for name, _ in iterate_weights(held)} >= set(some_tensors())
        assert open_weights(str(held), publication.checksum) == held
    with pytest.raises(ModelError, match="cannot be opened"), hold(Path(publication.uri)):
        pass


def test_a_folder_publisher_replaces_old_weights(tmp_path: Path) -> None:
    publisher = FolderPublisher(tmp_path, "run", 7, num_bytes=1000, keep=1)
    for step in range(3):
        publication = publisher.publish(f"step-{step:06}", export)
    assert names(tmp_path / "weights") == ["attempt-7/step-000002.safetensors"]
    assert open_weights(publication.uri, publication.checksum).is_file()


def test_shared_memory_without_room_falls_back_to_the_run_folder(tmp_path: Path, run_name: str) -> None:
    publisher = MemoryPublisher(tmp_path, run_name, 1, num_bytes=10**18)
    assert publisher.folders == [tmp_path / "weights" / "attempt-1"]


def test_weights_that_an_evaluation_needs_stay_until_it_is_answered(tmp_path: Path) -> None:
    publisher = FolderPublisher(tmp_path, "run", 1, num_bytes=1000, keep=1)
    needed = publisher.publish("step-0", export).uri
    for step in (1, 2):
        publisher.publish(f"step-{step}", export, in_use={needed})
    folder = tmp_path / "weights" / "attempt-1"
    assert names(folder) == ["step-0.safetensors", "step-2.safetensors"]
    publisher.publish("step-3", export)
    assert names(folder) == ["step-3.safetensors"]


def test_shared_memory_that_fills_during_a_run_sends_later_weights_to_the_run_folder(
    tmp_path: Path, run_name: str
) -> None:
    publisher = MemoryPublisher(tmp_path, run_name, 1, num_bytes=1000)
    assert publisher.folders[0].is_relative_to(SHARED_MEMORY)
    publisher.num_bytes = 10**18
    uri = publisher.publish("step-1", export).uri
    assert Path(uri).is_relative_to(tmp_path / "weights")
    publisher.close()
    assert Path(uri).is_file()


def test_the_folder_in_shared_memory_is_private(tmp_path: Path) -> None:
    held = hold_folder("a/run", 1, 1, root=tmp_path)
    assert held is not None and held.path.is_dir()
    assert (tmp_path / f"rftdata-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_a_publisher_of_any_run_removes_files_that_a_killed_process_left_in_shared_memory(tmp_path: Path) -> None:
    publishes = """
import sys, time
from pathlib import Path
from rftcore.sync.files.shared_memory import hold_folder

held = hold_folder(sys.argv[1], 1, 1, root=Path(sys.argv[2]))
(held.path / "step-1.safetensors").write_bytes(b"weights")
print(held.path, flush=True)
time.sleep(600)
"""
    publishers = [
        subprocess.Popen([sys.executable, "-c", publishes, name, tmp_path], stdout=subprocess.PIPE, text=True)
        for name in ("killed", "alive")
    ]
    try:
        left, kept = (Path(process.stdout.readline().strip()) for process in publishers if process.stdout)
        publishers[0].kill()
        publishers[0].wait()
        mine = hold_folder("mine", 1, 1, root=tmp_path)
        assert mine is not None and mine.path.is_dir()
        assert not left.parent.exists()
        assert (kept / "step-1.safetensors").read_bytes() == b"weights"
        mine.release()
        assert not mine.path.exists()
    finally:
        for process in publishers:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("kind", [FolderPublisher, MemoryPublisher])
def test_a_trainer_that_was_replaced_leaves_its_successors_weights_alone(
    kind: type[FolderPublisher], tmp_path: Path, run_name: str
) -> None:
    replaced = kind(tmp_path, run_name, 1, num_bytes=1000, keep=1)
    replaced.publish("step-1", export)
    successor = kind(tmp_path, run_name, 2, num_bytes=1000, keep=1)
    publication = successor.publish("step-1", export)
    replaced.publish("step-2", export)  # it does not know yet
    replaced.close()
    kind(tmp_path, run_name, 1, num_bytes=1000).close()  # nor does one that starts late
    assert open_weights(publication.uri, publication.checksum).is_file()


def test_files_that_a_killed_trainer_left_in_shared_memory_are_removed_by_its_successor(
    tmp_path: Path, run_name: str
) -> None:
    for attempt_id in (1, 2):
        MemoryPublisher(tmp_path, run_name, attempt_id, num_bytes=1000).publish("step-1", export)
    last = MemoryPublisher(tmp_path, run_name, 10, num_bytes=1000)
    last.publish("step-2", export)
    assert names(in_shared_memory(run_name)) == ["attempt-10/step-2.safetensors"]
    last.close()
    assert not in_shared_memory(run_name).exists()


def test_a_trainer_whose_weights_its_successor_removed_gets_an_error_that_it_was_replaced(tmp_path: Path) -> None:
    slow = FolderPublisher(tmp_path, "run", 1, num_bytes=8)

    def export(path: Path) -> None:
        FolderPublisher(tmp_path, "run", 2, num_bytes=8)  # while the first one stood still
        write_weights({EMBEDDING: torch.zeros(2)}, path)

    with pytest.raises(FencedError, match="another trainer has taken over the run"):
        slow.publish("step-1", export)

    def broken(path: Path) -> None:
        raise ModelError("of its own")

    with pytest.raises(ModelError, match="of its own"):
        slow.publish("step-2", broken)
