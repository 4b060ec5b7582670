"""Files of annotations and the verbs of `rft label` for them: tables, Label Studio and Argilla, in both directions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rftcore.cli import run_command
from rftdata import Buffer, Group, labels
from rftdata.annotations import Annotation, AnnotationBatch, LabelKind, annotate, define_kinds, history, standing
from rftdata.annotations.files import export_annotations, import_annotations
from rftdata.errors import QueryError
from tests.store.annotations.test_annotations import KINDS, VALUES
from tests.store.writing.test_turns import TASK, single, walk
from tests.support.store_roles import publish_versions

FILES = ["all.jsonl", "all.csv", "all.parquet", "studio.json", "argilla.json"]


@pytest.fixture
def labelled(buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Buffer:
    """As the fixture of the tests of annotations, with a mathematical letter before the marked word."""
    monkeypatch.setenv("RFT_SEGMENTS", str(tmp_path / "segments"))
    publish_versions(buffer, 8)
    run = buffer.create_run(name="walks", config={}, seed=1, steps=3, pipeline_version="none")
    rollout = walk()
    rollout.sequences[0].response = "𝑥 is bad"
    with buffer.writer(run) as writer:
        writer.insert(Group([rollout, single()], **TASK))
    define_kinds(buffer, KINDS, author="owner")
    return buffer


def values() -> dict[str, Any]:
    spans = [{"start": 5, "end": 8, "unit": "char", "label": "wrong", "note": "rude"}]
    return VALUES | {"marks": spans}


def stands(buffer: Buffer) -> dict[tuple[str, str], Any]:
    return {(row["kind"], row["author"]): row["value"] for row in standing(buffer)}


def written(buffer: Buffer, folder: Path, name: str) -> Path:
    export_annotations(buffer, folder / name, to="argilla" if name.startswith("argilla") else None)
    return folder / name


def rft(buffer: Buffer, *words: str) -> int:
    return run_command(["label", *words, "--buffer", buffer.config.uri])


@pytest.mark.parametrize("name", FILES)
def test_what_is_exported_is_imported_as_one_batch_and_once(labelled: Buffer, tmp_path: Path, name: str) -> None:
    given = values()
    batches = [
        annotate(labelled, [Annotation(kind, 1, value) for kind, value in given.items()], author="ada"),
        annotate(labelled, [Annotation("score", 1, 0.7)], author="bob"),
    ]
    file = written(labelled, tmp_path, name)
    # What a person says in this buffer does not stand a second time, as an import.
    before = len(history(labelled))
    num_unlike = int(name.startswith("argilla"))  # its spans have no notes
    assert import_annotations(labelled, file, author="importer").num_unchanged == 11 - num_unlike
    assert len(history(labelled)) == before + num_unlike
    if num_unlike:
        batches.append(AnnotationBatch(history(labelled)[0]["label_batch_id"], ()))
    for batch in batches:
        labels.undo(labelled, batch.label_batch_id, author="ada")
    if num_unlike:
        given["marks"] = [{key: value for key, value in given["marks"][0].items() if key != "note"}]
    before = len(history(labelled))
    first = import_annotations(labelled, file, author="importer")
    assert (len(first.annotation_ids), first.num_unchanged, len(history(labelled)) - before) == (11, 0, 11)
    found = {(row["kind"], row["author"]): row["value"] for row in standing(labelled) if row["source"] == "import"}
    assert found == {**{(kind, "ada"): value for kind, value in given.items()}, ("score", "bob"): 0.7}
    again = import_annotations(labelled, file, author="importer")
    assert (again.num_unchanged, again.annotation_ids, len(history(labelled)) - before) == (
        11,
        first.annotation_ids,
        11,
    )
    labels.undo(labelled, first.label_batch_id, author="ada")
    assert "import" not in {row["source"] for row in standing(labelled)}
    assert import_annotations(labelled, file, author="importer").num_unchanged == 0


def test_of_several_values_of_a_person_in_a_file_the_last_one_counts(labelled: Buffer, tmp_path: Path) -> None:
    file = tmp_path / "twice.jsonl"
    row = {"kind": "score", "target_id": 1, "author": "ada"}
    file.write_text("".join(json.dumps(row | {"value": value}) + "\n" for value in (0.1, 0.9)))
    first = import_annotations(labelled, file, author="importer")
    assert first.annotation_ids[0] == first.annotation_ids[1] and stands(labelled) == {("score", "ada"): 0.9}
    again = import_annotations(labelled, file, author="importer")
    assert (again.num_superseded, len(history(labelled))) == (0, 1)


@pytest.mark.parametrize("name", ["all.jsonl", "studio.json", "argilla.json"])
def test_a_label_given_about_another_kind_of_target_is_refused(labelled: Buffer, tmp_path: Path, name: str) -> None:
    annotate(labelled, [Annotation("score", 1, 0.5), Annotation("order", 1, VALUES["order"])], author="ada")
    file = written(labelled, tmp_path, name)
    whole = file.read_text()
    # An answer about experience 1 where group 1 is shown.
    file.write_text(whole.replace('"experience"', '"group"'))
    with pytest.raises(QueryError, match="about a target of the kind group, and labels of score are about another"):
        import_annotations(labelled, file, author="importer")
    assert len(history(labelled)) == 2


def test_answers_of_models_are_predictions_and_come_back_as_those_of_judges(labelled: Buffer, tmp_path: Path) -> None:
    judged = Annotation("score", 1, 0.4, model="judge-1", confidence=0.8)
    annotate(labelled, [judged], author="judge", source="judge")
    for name in ("studio.json", "argilla.json"):
        file = written(labelled, tmp_path, name)
        (item,) = json.loads(file.read_text())
        assert "judge-1" in json.dumps(item.get("predictions") or item["suggestions"])
        with pytest.raises(QueryError, match="has no annotation"):
            import_annotations(labelled, file, author="me")
        batch = import_annotations(labelled, file, author="me", with_judges=True)
        (row,) = [row for row in history(labelled) if row["annotation_id"] == batch.annotation_ids[0]]
        assert (row["source"], row["model"], row["confidence"], row["value"]) == ("judge", "judge-1", 0.8, 0.4)


def test_offsets_of_label_studio_are_in_utf_16_and_tokens_are_left_out(labelled: Buffer, tmp_path: Path) -> None:
    marks = [{"start": 0, "end": 1, "label": "wrong"}, *values()["marks"]]
    annotate(labelled, [Annotation("marks", 1, marks)], author="ada")
    done = export_annotations(labelled, tmp_path / "studio.json")
    assert done.left_out == ("1 left out: spans of tokens, whose characters are not known",)
    (task,) = json.loads((tmp_path / "studio.json").read_text())
    (result,) = task["annotations"][0]["result"]
    assert result["value"] == {"start": 6, "end": 9, "text": "bad", "labels": ["wrong"]}
    view = ElementTree.parse(tmp_path / "studio.xml").getroot()
    assert {item.get("name") for item in view} >= {"good", "verdict", "grades.clear", "steps.0", "order", "marks"}


def studio(*results: dict[str, Any]) -> str:
    """A file of Label Studio with one annotation."""
    data = {"target_id": 1}
    given = {"completed_by": 7, "result": [{"to_name": "response", **result} for result in results]}
    return json.dumps([{"data": data, "annotations": [given]}])


def region(start: Any, end: Any, *names: str, **more: Any) -> dict[str, Any]:
    value = {"start": start, "end": end, "labels": list(names)}
    return {"from_name": "marks", "type": "labels", "value": value, **more}


def test_values_of_label_studio_are_read_whole(labelled: Buffer, tmp_path: Path) -> None:
    marks = LabelKind("marks", "spans", spec={"labels": ["wrong", "rude"]})
    define_kinds(labelled, [marks, LabelKind("note", "text")], author="owner")
    results = [
        region(6, 9, "wrong", "rude"),
        {"from_name": "note", "type": "textarea", "value": {"text": "abc"}},
        {"from_name": "better", "type": "textarea", "value": {"text": "def"}},
    ]
    file = tmp_path / "a.json"
    file.write_text(studio(*results))
    import_annotations(labelled, file, author="me")
    found = {row["kind"]: row["value"] for row in standing(labelled)}
    assert found["note"] == "abc" and found["better"] == {"response": "def"}
    place = {"start": 5, "end": 8, "unit": "char"}
    assert found["marks"] == [{**place, "label": "wrong"}, {**place, "label": "rude"}]


@pytest.mark.parametrize(
    ("results", "told"),
    [
        ([region(6, 99999, "wrong")], "the offset 99999 is no place in the response, which has 9"),
        ([region(-1, 9, "wrong")], "the offset -1 is no place"),
        ([region(1, 9, "wrong")], "the offset 1 is no place"),  # within a character
        ([region(6.5, 9, "wrong")], "the offset 6.5 is no whole number"),
        ([region(6, 9)], "its region has no label"),
        ([region(6, 9, "wrong", to_name="prompt")], "its region is of prompt"),
        ([{"from_name": "good", "value": {"choices": ["true", "false"]}}], "it has 2 values"),
        ([{"from_name": "good", "value": {"choices": [x]}} for x in ("true", "false")], "it is a second one"),
        ([{"from_name": "good", "value": {"choices": ["false"]}}] * 2, "it is a second one"),
        ([{"from_name": "grades.clear", "value": {"number": x}} for x in (1, 2)], "it is a second one"),
        ([{"from_name": "steps.0", "value": {"number": x}} for x in (0, 1)], "it is a second one"),
        ([{"from_name": "good.x", "value": {"choices": ["true"]}}], "good.x is no control of it"),
        ([{"from_name": "better", "value": {"text": ["a", "b"]}}], "it has 2 values"),
        ([{"from_name": "note", "value": {"text": [["a"]]}}], "neither a text nor a list of texts"),
        ([{"from_name": "order", "value": {"ranker": {"best": ["1"], "2": ["2"]}}}], "none of the type ranking"),
    ],
)  # fmt: skip
def test_what_label_studio_could_only_store_in_part_is_refused(
    labelled: Buffer, tmp_path: Path, results: list[dict[str, Any]], told: str
) -> None:
    define_kinds(labelled, [LabelKind("note", "text")], author="owner")
    file = tmp_path / "a.json"
    file.write_text(studio(*results))
    with pytest.raises(QueryError, match=re.escape(told)):
        import_annotations(labelled, file, author="me")
    assert standing(labelled) == []


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.jsonl", '{"kind": "score", "target_id": 1, "value": 2}', "must be a number from 0 up to 1"),
        ("a.jsonl", '{"kind": "score", "target_id": 1, "value": NaN}', "is not a finite number"),
        ("a.jsonl", '{"kind": "score", "target_id": "1_0", "value": 0}', "target_id that is no id"),
        ("a.jsonl", '{"kind": "score", "target_id": 1}', "lacks value"),
        ("a.jsonl", '{"kind": "score"', "cannot be read"),
        ("a.csv", "kind,target_id,value\nscore,1,high\n", "is not JSON"),
        ("a.csv", "kind,target_id,value\nscore,1\n", "has 2 cells"),
        ("a.csv", "kind,target_id,value\nscore,999,0.5\n", "there is no experience 999"),
        ("a.json", '[{"data": {"target_id": 1}, "annotations": [{"result": [{"from_name": "x", "value": {}}]}]}]', "has a result of x"),
        ("a.json", '[{"data": {"target_id": 1}, "annotations": [{"result": [{"from_name": "good", "value": {}}]}]}]', "that is none of the type bool"),
        ("a.json", '[{"data": {}}]', "has no data.target_id"),
        ("a.json", '[{"fields": {}, "metadata": {}}]', "has no metadata.target_id"),
        ("a.json", '{"a": 1}', "is no list"),
        ("a.json", '[{"data": {"target_id": 1}, "annotations": "x"}]', "has not the shape"),
        ("a.json", '[{"fields": {}, "metadata": {"target_id": 1}, "responses": [1]}]', "has not the shape"),
    ],
)  # fmt: skip
def test_a_wrong_file_stores_nothing(labelled: Buffer, tmp_path: Path, name: str, text: str, told: str) -> None:
    good = {".jsonl": '{"kind": "score", "target_id": 2, "value": 0.5}\n', ".csv": "", ".json": ""}
    file = tmp_path / name
    file.write_text(good[file.suffix] + text)
    with pytest.raises(QueryError, match="") as caught:
        import_annotations(labelled, file, author="me")
    assert told in str(caught.value)
    assert history(labelled) == []


def test_the_verbs_annotate_show_undo_and_move(
    labelled: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rft(labelled, "annotate", "verdict", "1", "drop", "--reason", "rude", "--key", "k1", "--author", "ada") == 0
    assert "1 stored" in capsys.readouterr().out
    assert rft(labelled, "annotate", "verdict", "1", "drop", "--key", "k1", "--author", "ada") == 0
    assert "1 stored before under the same key" in capsys.readouterr().out
    assert rft(labelled, "annotate", "better", "1", "a better one", "--author", "ada", "--json") == 0
    batch = json.loads(capsys.readouterr().out)["label_batch_id"]
    assert rft(labelled, "annotate", "score", "1", "high") == 2
    assert "is not JSON" in capsys.readouterr().err
    assert stands(labelled) == {("verdict", "ada"): "drop", ("better", "ada"): {"response": "a better one"}}
    assert rft(labelled, "history", "1") == 0
    assert "a better one" in capsys.readouterr().out
    assert rft(labelled, "history") == 0
    assert "verdict" in capsys.readouterr().out
    assert rft(labelled, "export", str(tmp_path / "a.csv"), "--kind", "verdict", "--run", "walks") == 0
    assert "1 annotations written" in capsys.readouterr().out
    assert rft(labelled, "undo", "--key", "k1") == 0
    assert "1 annotations undone" in capsys.readouterr().out
    assert rft(labelled, "import", str(tmp_path / "a.csv"), "--author", "me") == 0
    assert rft(labelled, "undo", str(batch)) == 0
    assert [row["source"] for row in standing(labelled)] == ["import"]
    assert rft(labelled, "undo") == 2
