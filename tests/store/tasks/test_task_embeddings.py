"""Diversity with a real language model on the CPU: near-duplicates are nearer than unrelated text, and vectors are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.encoder import Encoder, encoder_name
from rftcore.task_pipeline.pipeline import load_tasks
from rftdata import Buffer
from rftdata.config import BufferConfig
from rftdata.errors import ModelError
from rftdata.maintenance.backup import back_up, restore
from rftdata.tasks.embeddings import known_vectors, store_vectors
from tests.store.tasks.test_task_pipeline import configuration, write
from tests.support.models import make_tiny_model

TEXTS = [
    "A farmer has 12 sheep and buys 7 more. How many sheep does the farmer have now?",
    "A farmer has 14 sheep and buys 9 more. How many sheep does the farmer have now?",
    "Translate the following sentence into French: the library closes at noon.",
    "Write a Python function that reverses a linked list in place.",
    "Name three causes of the First World War.",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def similarities(buffer: Buffer, task_id: int) -> dict[int, float]:
    rows = buffer.sql("SELECT * FROM rft.similar_tasks(%s, 10)", [task_id]).to_pylist()
    return {row["task_id"]: row["similarity"] for row in rows}


def features(buffer: Buffer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = buffer.sql("SELECT features FROM rft.task ORDER BY task_id")["features"].to_pylist()
    return found


def test_vectors_do_not_depend_on_their_batch_and_long_texts_are_cut(tiny: Path) -> None:
    encoder = Encoder(str(tiny), 40)
    alone = np.stack([encoder.encode([text])[0] for text in TEXTS])
    assert encoder.encode(TEXTS) == pytest.approx(alone, abs=1e-5)
    assert alone.shape == (5, 128) and alone.dtype == np.float32
    assert encoder.encode([TEXTS[0][:30] + "x" * 100])[0] == pytest.approx(
        encoder.encode([TEXTS[0][:30] + "x" * 50])[0], abs=1e-5
    )
    assert not encoder.encode([""]).any()


def test_near_duplicates_are_nearer_than_unrelated_text_by_the_policy_model(buffer: Buffer, tmp_path: Path) -> None:
    """With the real model of the main example, mean-pooled."""
    from rftcore.model_folder import resolve_model

    try:
        smol = resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    except ModelError as error:
        pytest.skip(f"the model is not on this machine: {error}")
    write(tmp_path, [{"question": text} for text in TEXTS])
    config = configuration(tmp_path, [{"diversity_score": {"neighbours": 1}}], model={"path": str(smol)})
    load_tasks(ResolvedRun(config), buffer)
    near = similarities(buffer, 1)
    assert max(near, key=near.__getitem__) == 2
    assert near[2] > 0.95 > max(near[other] for other in (3, 4, 5))
    diversity = [row["diversity"] for row in features(buffer)]
    assert max(diversity[:2]) < 0.3 < 0.7 < min(diversity[2:]), diversity
    assert features(buffer)[0]["nearest_similarity"] == pytest.approx(1 - diversity[0])


def test_vectors_are_kept_by_pgvector_and_only_new_texts_are_encoded(
    buffer: Buffer, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str], has_pgvector: bool
) -> None:
    write(tmp_path, [{"question": text} for text in TEXTS[:4]])
    config = configuration(tmp_path, ["diversity_score", "task_priority"], model={"path": str(tiny)})
    load_tasks(ResolvedRun(config), buffer)
    assert "4 texts encoded" in capsys.readouterr().err
    kind = "SELECT format_type(atttypid, atttypmod) AS t FROM pg_attribute WHERE attrelid = 'rft.task_embedding'::regclass AND attname = 'embedding'"
    assert buffer.sql(kind)["t"].to_pylist() == ["vector" if has_pgvector else "real[]"]
    stored = buffer.sql("SELECT task_id, embedded_at FROM rft.task_embedding ORDER BY 1").to_pylist()
    write(tmp_path, [{"question": text} for text in TEXTS])
    load_tasks(ResolvedRun(config), buffer)
    assert "1 texts encoded" in capsys.readouterr().err
    assert buffer.sql("SELECT task_id, embedded_at FROM rft.task_embedding ORDER BY 1").to_pylist()[:4] == stored
    assert all(0 <= row["diversity"] <= 1 and "priority" in row for row in features(buffer))
    # pgvector's distance is the one that numpy computes.
    (name,) = buffer.sql("SELECT DISTINCT model AS m FROM rft.task_embedding")["m"].to_pylist()
    vectors = known_vectors(buffer.database, name, [1, 2, 3, 4, 5], TEXTS)
    unit = {place: vector / np.linalg.norm(vector) for place, vector in vectors.items()}
    for task_id, similarity in similarities(buffer, 1).items():
        assert similarity == pytest.approx(float(unit[0] @ unit[task_id - 1]), abs=1e-5)


def test_a_server_without_pgvector_keeps_arrays_with_the_same_content(buffer: Buffer, has_pgvector: bool) -> None:
    vectors = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 2]], np.float32)
    buffer.sql(
        "INSERT INTO rft.task (taskset, task_key, payload) SELECT 't', n::text, '{}' FROM generate_series(1, 3) n"
    )
    # As on a server that has no such extension.
    buffer.sql("CREATE OR REPLACE FUNCTION rft.use_pgvector() RETURNS text LANGUAGE sql AS $$ SELECT 'real[]' $$")
    assert store_vectors(buffer.database, "m", [1, 2, 3], ["a", "b", "c"], vectors) == "real[]"
    as_arrays = similarities(buffer, 1)
    assert as_arrays == {2: pytest.approx(0.5**0.5), 3: 0.0}
    assert known_vectors(buffer.database, "m", [1, 2, 3], ["a", "B", "c"]).keys() == {0, 2}
    if has_pgvector:
        buffer.sql("CREATE EXTENSION vector")
        buffer.sql("ALTER TABLE rft.task_embedding ALTER COLUMN embedding TYPE vector USING embedding::vector")
    assert similarities(buffer, 1) == pytest.approx(as_arrays)
    assert known_vectors(buffer.database, "m", [3], ["c"])[0].tolist() == [0, 0, 2]


def test_a_back_up_brings_vectors_and_verdicts_along(
    buffer: Buffer, server_folders: Path, tmp_path: Path, tiny: Path
) -> None:
    write(tmp_path, [{"question": text} for text in TEXTS])
    load_tasks(ResolvedRun(configuration(tmp_path, ["diversity_score"], model={"path": str(tiny)})), buffer)
    back_up(buffer, tmp_path / "copy")
    restored = restore(tmp_path / "copy", BufferConfig(uri=str(server_folders / "restored")))
    try:
        assert features(restored) == features(buffer)
        assert similarities(restored, 1) == pytest.approx(similarities(buffer, 1))
        assert restored.sql("SELECT count(*) AS n FROM rft.task_verdict")["n"].to_pylist() == [5]
    finally:
        restored.close()
        assert restored.server is not None
        restored.server.stop()


def test_a_changed_checkpoint_has_another_name(tiny: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / tiny.name, seed=1)
    assert encoder_name(str(tiny), 512) != encoder_name(str(other), 512)
    assert encoder_name(str(tiny), 512) == encoder_name(str(tiny), 512) != encoder_name(str(tiny), 64)


def test_an_encoder_that_does_not_exist_is_named(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, [{"question": text} for text in TEXTS])
    stage = {"diversity_score": {"embedding": {"model": "missing/encoder"}}}
    with pytest.raises(Exception, match=r"diversity_score.*missing/encoder"):
        load_tasks(ResolvedRun(configuration(tmp_path, [stage])), buffer)
    (tmp_path / "broken").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "broken" / name).write_text(json.dumps({"model_type": "none"}))
    stage = {"diversity_score": {"embedding": {"model": "./broken"}}}
    with pytest.raises(Exception, match=r"the model .*broken cannot be opened"):
        load_tasks(ResolvedRun(configuration(tmp_path, [stage])), buffer)
