"""Sources beyond single files: folders, the hub's cache, SQL queries; and that a source that grows adds only what is new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet
import pytest

from rftdata import Buffer
from rftdata.config import TasksetConfig
from rftdata.errors import TaskSourceError
from rftdata.tasks import load_taskset, read_tasks
from rftdata.tasks.query import asks_buffer

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(6)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)


def config(source: str, **changes: Any) -> TasksetConfig:
    return TasksetConfig(name="t", source=source, **changes)


def prompts(found: TasksetConfig, folder: Path) -> list[str]:
    return [task["payload"]["prompt"] for task in read_tasks(found, folder)]


def stored(buffer: Buffer) -> list[tuple[int, str]]:
    rows = buffer.sql("SELECT task_id, payload ->> 'prompt' AS prompt FROM rft.task ORDER BY task_id").to_pylist()
    return [(row["task_id"], row["prompt"]) for row in rows]


def test_a_folder_of_files_is_read_in_the_order_of_names_whatever_their_format(tmp_path: Path) -> None:
    parquet(tmp_path / "data/part-1.parquet", ROWS[2:4])
    jsonl(tmp_path / "data/part-0.jsonl", ROWS[:2])
    jsonl(tmp_path / "data/README.md", ROWS)
    expected = [row["question"] for row in ROWS[:4]]
    assert prompts(config("data/"), tmp_path) == prompts(config("data"), tmp_path) == expected


def test_a_folder_as_the_hub_lays_it_out_gives_one_split_or_what_a_pattern_names(tmp_path: Path) -> None:
    parquet(tmp_path / "main/train-00000-of-00002.parquet", ROWS[:2])
    parquet(tmp_path / "main/train-00001-of-00002.parquet", ROWS[2:4])
    parquet(tmp_path / "main/test-00000-of-00001.parquet", ROWS[4:])
    assert prompts(config(".", args={"split": "test"}), tmp_path) == [row["question"] for row in ROWS[4:]]
    assert len(prompts(config(".", args={"files": "main/train-*.parquet"}), tmp_path)) == 4


@pytest.mark.parametrize("as_dict", [False, True])
def test_what_the_library_datasets_saved_is_read_in_its_order_and_selection(tmp_path: Path, as_dict: bool) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS).select([4, 1, 3])
    args = {}
    if as_dict:
        data, args = datasets.DatasetDict({"train": data, "test": data.select([0])}), {"split": "train"}
    data.save_to_disk(tmp_path / "saved")
    found = config("saved", args=args)
    assert prompts(found, tmp_path) == [ROWS[i]["question"] for i in (4, 1, 3)]
    if as_dict:
        with pytest.raises(TaskSourceError, match=r"no split of that name \(got 'dev'\); allowed: train, test"):
            prompts(config("saved", args={"split": "dev"}), tmp_path)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in the library's cache, laid out as a download leaves it, and no network."""
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "example___small_sums" / "main" / "0.0.0" / ("a" * 40)
    folder.mkdir(parents=True)
    data = datasets.Dataset.from_list(ROWS)
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "small_sums-train.arrow")) as writer:
        writer.write_table(data.data.table)
        num_examples, num_bytes = writer.finalize()
    split = datasets.SplitInfo("train", num_bytes=num_bytes, num_examples=num_examples, dataset_name="small_sums")
    info = datasets.DatasetInfo(
        features=data.features,
        builder_name="parquet",
        dataset_name="small_sums",
        config_name="main",
        version="0.0.0",
        splits=datasets.SplitDict({"train": split}, dataset_name="small_sums"),
    )
    info.write_to_directory(str(folder))
    return folder


def test_a_data_set_of_the_hub_is_read_from_the_cache_when_the_hub_is_unavailable(
    hub_cache: Path, buffer: Buffer, tmp_path: Path
) -> None:
    found = config("hf:example/small_sums", args={"config": "main"})
    assert load_taskset(buffer.database, found, tmp_path) == 6
    (hub_cache / "small_sums-train.arrow").unlink()
    # The stored tasks stay as they are, since the hub cannot be asked for newer ones.
    assert load_taskset(buffer.database, found, tmp_path) == 6
    assert [prompt for _, prompt in stored(buffer)] == [row["question"] for row in ROWS]


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        (
            "hf:missing/nothing",
            {},
            r"not available from the Hugging Face hub \(the hub does not answer, .*save_to_disk",
        ),
        ("hf:example/small_sums", {"split": "dev"}, r"not available from .*dev"),
        ("hf:example/small_sums", {"subset": "main"}, r"no argument 'subset'; allowed: config, split, revision"),
        ("hf:a/b/c", {}, "does not name a data set of the hub"),
    ],
)
def test_a_broken_hub_id_is_a_clear_error(
    hub_cache: Path, tmp_path: Path, source: str, args: dict[str, str], message: str
) -> None:
    with pytest.raises(TaskSourceError, match=message):
        prompts(config(source, args=args), tmp_path)


def test_a_query_on_the_buffer_itself_makes_tasks_of_what_is_stored(buffer: Buffer, tmp_path: Path) -> None:
    jsonl(tmp_path / "t.jsonl", ROWS)
    load_taskset(buffer.database, TasksetConfig(name="all", source="t.jsonl"), tmp_path)
    query = (
        "sql: SELECT payload ->> 'prompt' AS question, payload ->> 'answer' AS answer, 'copy of ' || task_key AS task_key,"
        " 1.5::numeric AS level, now()::date AS day FROM rft.task WHERE taskset = 'all' AND task_id % 2 = 0 ORDER BY task_id;"
    )
    assert load_taskset(buffer.database, config(query), tmp_path) == 3
    row = buffer.sql("SELECT task_key, payload FROM rft.task WHERE taskset = 't' LIMIT 1").to_pylist()[0]
    assert row["task_key"].startswith("copy of ")
    assert row["payload"]["metadata"]["level"] == 1.5 and len(row["payload"]["metadata"]["day"]) == 10


def test_a_query_is_asked_again_and_only_new_rows_are_added(buffer: Buffer, tmp_path: Path) -> None:
    buffer.sql("CREATE TABLE public.sums (question text, answer integer)")
    buffer.sql("INSERT INTO public.sums SELECT i || ' + 1', i + 1 FROM generate_series(1, 5) i")
    found = config("sql: SELECT * FROM public.sums ORDER BY answer")
    assert load_taskset(buffer.database, found, tmp_path) == 5
    before = stored(buffer)
    assert load_taskset(buffer.database, found, tmp_path) == 5
    buffer.sql("INSERT INTO public.sums VALUES ('7 + 7', 14)")
    assert load_taskset(buffer.database, found, tmp_path) == 6
    assert stored(buffer)[:5] == before


def test_another_database_is_asked_by_url_and_its_password_is_stored_nowhere(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = buffer.database.uri
    password = psycopg.conninfo.conninfo_to_dict(uri)["password"]
    by_url = config("sql: SELECT 'a' AS question", args={"url": uri})
    assert load_taskset(buffer.database, by_url, tmp_path) == 1
    assert load_taskset(buffer.database, by_url, tmp_path) == 1
    stored_args = buffer.sql("SELECT args::text AS a FROM rft.taskset")["a"].to_pylist()[0]
    assert "user=" in stored_args and str(password) not in stored_args
    assert str(password) not in json.dumps(by_url.model_dump(mode="json"))
    monkeypatch.setenv("SUMS_URL", uri)
    by_name = TasksetConfig(name="named", source="sql: SELECT 'a' AS question", args={"url_env": "SUMS_URL"})
    assert load_taskset(buffer.database, by_name, tmp_path) == 1


@pytest.mark.parametrize(
    ("query", "args", "message"),
    [
        (
            "SELECT nothing FROM nowhere",
            {},
            r"the query of the taskset 't' is refused: relation .nowhere. does not exist",
        ),
        ("DELETE FROM rft.task", {}, "is refused: .*DELETE"),
        ("SELECT 1 AS question; DROP TABLE rft.task", {}, "is refused: .*multiple commands"),
        ("SELECT nextval('rft.task_task_id_seq')::text AS question", {}, "refused: .*read-only"),
        ("SELECT 1 AS question, 2 AS question", {}, "returns the column 'question' twice"),
        ("SELECT 1 AS other", {}, r"no column 'question' \(row 1\); allowed: other"),
        ("SELECT 'a' AS question WHERE false", {}, "has no task"),
        ("SELECT 1 AS question", {"url": "postgresql://me:secret@127.0.0.1:1/x"}, "cannot be used: .*refused"),
        (
            "SELECT 1 AS question",
            {"url_env": "NOT_SET_AT_ALL"},
            "'NOT_SET_AT_ALL', which the taskset 't' gets its URL",
        ),
        ("SELECT 1 AS question", {"uri": "x"}, "a query has no argument 'uri'; allowed: url, url_env"),
        ("SELECT 1 AS question", {"url": "postgresql://h/x", "url_env": "X"}, "takes either url or url_env"),
    ],
)
def test_a_bad_query_is_a_clear_error_and_changes_nothing(
    buffer: Buffer, tmp_path: Path, query: str, args: dict[str, str], message: str
) -> None:
    with pytest.raises(TaskSourceError, match=message) as caught:
        load_taskset(buffer.database, config(f"sql: {query}", args=args), tmp_path)
    assert "secret" not in str(caught.value)
    assert "CURSOR" not in str(caught.value) and "LINE" not in str(caught.value)
    assert buffer.sql("SELECT count(*) AS n FROM rft.task")["n"].to_pylist() == [0]


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        ("empty", {}, "has no data file"),
        ("data", {"split": "dev"}, "has no data file .*'split': 'dev'"),
        ("data", {"pattern": "x"}, "a folder of data files has no argument 'pattern'; allowed: split, files"),
        ("missing/", {}, "the folder of the taskset 't' does not exist"),
        ("damaged", {}, "the data set of the taskset 't' is damaged"),
        ("broken", {}, "cannot be read: line 1 is not JSON"),
        ("torn", {}, "cannot be read: No such file"),
    ],
)
def test_a_bad_folder_is_a_clear_error(
    buffer: Buffer, tmp_path: Path, source: str, args: dict[str, str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    jsonl(tmp_path / "data/train.jsonl", ROWS)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/state.json").write_text("{")
    (tmp_path / "broken").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    (tmp_path / "broken/a.jsonl").write_text("{\n")
    with pytest.raises(TaskSourceError, match=message):
        load_taskset(buffer.database, config(source, args=args), tmp_path)
    assert buffer.sql("SELECT count(*) AS n FROM rft.task")["n"].to_pylist() == [0]


@pytest.mark.parametrize(
    ("args", "todo"),
    [({"delimiter": ";"}, "leave args out; a CSV file has commas"), ({"split": "train"}, "write split beside args")],
)
def test_arguments_of_a_file_are_refused_and_not_ignored(tmp_path: Path, args: dict[str, str], todo: str) -> None:
    (tmp_path / "sums.csv").write_text("question,answer\nWhy?,so\n")
    with pytest.raises(TaskSourceError, match=rf"'t' gives its file the argument '{next(iter(args))}'.*{todo}"):
        prompts(config("sums.csv", args=args), tmp_path)


def test_a_folder_that_grows_adds_only_new_rows(buffer: Buffer, tmp_path: Path) -> None:
    found = config("data")
    jsonl(tmp_path / "data/a.jsonl", ROWS[:3])
    assert load_taskset(buffer.database, found, tmp_path) == 3
    before = stored(buffer)
    jsonl(tmp_path / "data/b.jsonl", ROWS[2:])
    assert load_taskset(buffer.database, found, tmp_path) == 6
    assert stored(buffer)[:3] == before


def test_rows_stream_into_the_database_one_after_another(buffer: Buffer, tmp_path: Path) -> None:
    (tmp_path / "gen.py").write_text(
        "import gc\n"
        "class Row(dict):\n    alive = most = 0\n"
        "    def __init__(self, *a):\n        super().__init__(*a); Row.alive += 1; Row.most = max(Row.most, Row.alive)\n"
        "    def __del__(self):\n        Row.alive -= 1\n"
        "def rows(count):\n"
        "    for i in range(count):\n        yield Row({'question': f'task {i}', 'answer': 1})\n"
        "    assert Row.most < 10, Row.most\n"
    )
    assert load_taskset(buffer.database, config("./gen.py:rows", args={"count": 5000}), tmp_path) == 5000


def test_a_features_column_that_is_no_mapping_is_kept_like_any_other(buffer: Buffer, tmp_path: Path) -> None:
    jsonl(tmp_path / "t.jsonl", [{"question": "a", "features": [1, 2]}, {"question": "b", "features": {"level": 2}}])
    first, second = read_tasks(config("t.jsonl"), tmp_path)
    assert (first["features"], first["payload"]["metadata"]) == ({}, {"features": [1, 2]})
    assert (second["features"], second["payload"]["metadata"]) == ({"level": 2}, {})


def test_a_query_on_the_buffer_needs_the_buffer(tmp_path: Path) -> None:
    found = config("sql: SELECT 'a' AS question")
    assert asks_buffer(found) and not asks_buffer(config("sql: SELECT 1", args={"url_env": "X"}))
    assert not asks_buffer(config("t.jsonl"))
    with pytest.raises(TaskSourceError, match="queries the buffer, which is not open; load it with"):
        prompts(found, tmp_path)
