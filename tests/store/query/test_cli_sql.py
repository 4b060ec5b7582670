"""`rft sql`, `rft query` and the other verbs that read a buffer, as a person calls them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import rftdata
from rftcore.cli import run_command
from rftdata.segments.codec import SCHEMA
from rftdata.sql_session import psql_command
from tests.support.command_line import rft_environment
from tests.support.preloaded import Preloaded
from tests.support.stored_run import StoredRun
from tests.support.waiting import wait_until

Result = tuple[int, str, str]


@pytest.fixture
def run(buffer: rftdata.Buffer, monkeypatch: pytest.MonkeyPatch) -> StoredRun:
    """Two experiences with rewards 0 and 1 in a buffer that the environment names."""
    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    monkeypatch.setenv("RFT_AUTHOR", "ada")
    run = StoredRun(buffer)
    run.attempt()
    run.group(0, [0.0, 1.0])
    _store_arrays(buffer)
    return run


SQL_ROWS = "select n, repeat('x', 80) as text from generate_series(1, 20000) as n"
QUERY_ROWS = "select unnest(range(20000)) as n, repeat('x', 80) as text"


@pytest.mark.parametrize(
    ("arguments", "num_read"),
    [
        (["sql", SQL_ROWS], 0),
        (["sql", SQL_ROWS, "--json"], 1),
        (["query", QUERY_ROWS], 1),
        (["query", QUERY_ROWS, "--json"], 1),
        (["status"], 0),
    ],
)
def test_a_reader_that_closes_the_pipe_ends_a_verb_with_0(run: StoredRun, arguments: list[str], num_read: int) -> None:
    with Preloaded(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=rft_environment()) as process:
        assert process.stdout is not None and process.stderr is not None
        if num_read:
            process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def _store_arrays(buffer: rftdata.Buffer) -> None:
    """Give every experience of the run the same nine tokens, five of them sampled."""
    row = {
        "token_ids": list(range(9)),
        "loss_mask": [0] * 4 + [1] * 5,
        "behavior_logprobs": [0.0] * 4 + [-0.5] * 5,
        "policy_spans": [{"start": 4, "policy_version_id": 1}],
    }
    appender = buffer.segments.appender()
    appended = appender.append(pa.RecordBatch.from_pylist([row], schema=SCHEMA))
    appender.close()
    buffer.sql(
        "INSERT INTO rft.segment_file (file_id, uri, size_bytes) VALUES (1, %s, %s)",
        [appended.uri, appended.length_bytes],
    )
    buffer.sql(
        "INSERT INTO rft.segment (segment_id, file_id, offset_bytes, length_bytes, num_rows, checksum)"
        " VALUES (1, 1, %s, %s, 1, %s)",
        [appended.offset_bytes, appended.length_bytes, appended.checksum],
    )


def rft(capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    code = run_command(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_query_prints_a_table(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rft(capsys, "sql", "select reward, response from rft.v_experience order by experience_id")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["reward", "response"],
        ["0", "3"],
        ["1", "3"],
        ["(2", "rows)"],
    ]


@pytest.mark.parametrize("verb", ["sql", "query"])
def test_columns_of_the_same_name_are_all_shown(run: StoredRun, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    query = "select 1 as id, 2 as id, 3 as id_2, 4 as id, 5 as other"
    code, out, _ = rft(capsys, verb, query)
    assert code == 0 and [line.split() for line in out.splitlines()][:2] == [
        ["id", "id", "id_2", "id", "other"],
        ["1", "2", "3", "4", "5"],
    ]
    code, out, _ = rft(capsys, verb, query, "--json")
    assert code == 0 and json.loads(out) == [{"id": 1, "id_3": 2, "id_2": 3, "id_4": 4, "other": 5}]
    assert rft(capsys, verb, "select 1 as id, 2 as id where false")[1].split() == ["id", "id", "(0", "rows)"]


def test_vectors_that_cannot_be_compared_yet_are_explained(
    run: StoredRun, capsys: pytest.CaptureFixture[str], has_pgvector: bool
) -> None:
    query = "select a.embedding <=> b.embedding from task_embedding a, task_embedding b"
    code, _, err = rft(capsys, "sql", query)
    assert code == 2 and "once the stage diversity_score has run" in err and "rft.similar_tasks" in err
    run.buffer.sql("select rft.use_pgvector()")
    assert rft(capsys, "sql", query)[0] == (0 if has_pgvector else 2)


def test_an_arrow_table_has_every_column_of_a_query(buffer: rftdata.Buffer) -> None:
    assert buffer.sql("select 1 as id, 2 as id").to_pylist() == [{"id": 1, "id_2": 2}]


def test_a_query_prints_json(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rft(
        capsys, "sql", "--json", "select count(*) as n, avg(reward) as mean, null as nothing from experience"
    )
    assert code == 0 and json.loads(out) == [{"n": 2, "mean": 0.5, "nothing": None}]


def test_per_cent_signs_are_themselves(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rft(capsys, "sql", "--json", "select count(*) as n from v_experience where prompt like '1%'")
    assert code == 0 and json.loads(out) == [{"n": 2}]


def test_a_wrong_column_name_shows_the_hint_of_the_database(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = rft(capsys, "sql", "select rewrd from rft.v_experience")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert 'column "rewrd" does not exist' in err and "v_experience.reward" in err


def test_an_unknown_table_states_how_to_list_them(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = rft(capsys, "sql", "select * from rft.experiences")
    assert code == 2 and "information_schema" in err


def test_a_relabel_in_sql_carries_its_author(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rft(
        capsys, "sql", f"update rft.experience set reward = 0.5 where experience_id = {run.experiences()[0]}"
    )
    assert (code, out) == (0, "UPDATE 1\n")
    code, out, _ = rft(capsys, "label", "history", "--json", str(run.experiences()[0]))
    (label,) = json.loads(out)
    assert (label["author"], label["source"], label["new_value"]) == ("ada", "sql", 0.5)


def test_a_relabel_in_sql_prints_the_command_that_undoes_it(
    run: StoredRun, buffer: rftdata.Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = "update experience set reward = 0.5; update experience set reward = 0.25 where reward = 0.5"
    code, out, err = rft(capsys, "sql", two)
    assert (code, out) == (0, "UPDATE 2\nUPDATE 2\n")
    found = re.findall(r"^label batch (\d+): 2 changed; undo with `rft (label undo \1)`$", err, re.MULTILINE)
    assert len(found) == 2 and len(err.splitlines()) == 2, err
    for _, command in reversed(found):
        assert rft(capsys, *command.split())[0] == 0
    rewards = buffer.sql("SELECT reward FROM rft.experience ORDER BY experience_id")["reward"].to_pylist()
    assert rewards == [0.0, 1.0]
    assert rft(capsys, "sql", "update experience set reward = 1 where reward = 1")[2] == ""
    # Elsewhere the command needs the buffer's place.
    monkeypatch.delenv("RFT_BUFFER")
    _, _, err = rft(capsys, "sql", "--buffer", buffer.config.uri, "update experience set reward = 2 where reward = 1")
    assert err.endswith(f" --buffer {shlex.quote(buffer.location)}`\n")


def test_changing_a_fact_is_refused_with_what_to_do_instead(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = rft(capsys, "sql", "update rft.experience set response = 'x'")
    assert code == 2 and "UPDATE rft.experience SET reward" in err


def test_psql_gets_the_password_by_its_environment_only(run: StoredRun) -> None:
    program, arguments, environment = psql_command(run.buffer.database, "ada")
    assert environment["PGPASSWORD"] not in " ".join(arguments)
    done = subprocess.run(
        [program, *arguments[1:], "-Atc", "select current_setting('rft.author'), count(*) from experience"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ada|2\n"), done.stderr


def test_duckdb_sees_experiences_with_their_arrays(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rft(
        capsys,
        "query",
        "--json",
        "select reward, len(token_ids) as tokens, list_sum(behavior_logprobs) as logprob,"
        " len(list_filter(loss_mask, lambda m: m = 1)) as sampled"
        " from experience order by experience_id",
    )
    assert code == 0
    assert json.loads(out) == [{"reward": reward, "tokens": 9, "logprob": -2.5, "sampled": 5} for reward in (0.0, 1.0)]


def test_duckdb_joins_the_other_tables_by_their_names(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rft(
        capsys,
        "query",
        "--json",
        "select run.name, task.payload ->> '$.answer' as answer, count(*) as n from experience join run using (run_id)"
        " join task using (task_key) group by all",
    )
    assert code == 0 and json.loads(out) == [{"name": "sums", "answer": "3", "n": 2}]


def test_selecting_everything_includes_the_arrays(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("select * from experience limit 1", "from experience limit 1"):
        code, out, _ = rft(capsys, "query", "--json", text)
        assert code == 0 and json.loads(out)[0]["token_ids"] == list(np.arange(9))


@pytest.mark.parametrize("column", ["token_ids", "loss_mask", "behavior_logprobs"])
def test_arrays_can_be_asked_for_before_there_is_an_experience(
    buffer: rftdata.Buffer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    StoredRun(buffer)
    code, out, err = rft(capsys, "query", "--json", f"select avg(list_sum({column})) as mean from experience")
    assert (code, err) == (0, "") and json.loads(out) == [{"mean": None}]
    code, out, _ = rft(capsys, "query", "--json", "select * from experience")
    assert code == 0 and json.loads(out) == []


def test_tables_without_rows_can_be_queried(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    text = "select count(*) as n, avg(staleness) as s from draw, verdict, evaluation, task_stat"
    code, out, _ = rft(capsys, "query", "--json", text)
    assert code == 0 and json.loads(out) == [{"n": 0, "s": None}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("select rewrd from experience", "reward"),
        ("select * from nonsense", "nonsense"),
        ("selec 1", "syntax error"),
        ("select 1; select 2", "one statement"),
    ],
)
def test_what_duckdb_refuses_is_one_paragraph(
    run: StoredRun, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    code, _, err = rft(capsys, "query", text)
    assert (code, err.count("\n")) == (2, 1)
    assert words in err


def test_a_label_can_be_set_to_a_negative_reward_and_undone(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    key = run.experiences()[1]
    code, out, _ = rft(capsys, "label", "set", str(key), "-0.5", "--reason", "rude", "--json")
    assert code == 0
    batch = json.loads(out)["label_batch_id"]
    assert rft(capsys, "label", "undo", str(batch))[0] == 0
    code, out, _ = rft(capsys, "label", "history", str(key), "--json")
    assert [row["new_value"] for row in json.loads(out)] == [1.0, -0.5]


def test_labels_are_imported_from_a_file(run: StoredRun, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text(f"experience_id,reward\n{run.experiences()[0]},0.25\n")
    code, out, _ = rft(capsys, "label", "import", str(file), "--author", "bob")
    assert code == 0 and "1 changed" in out
    code, out, _ = rft(capsys, "label", "history")
    assert "bob" in out


def test_a_reward_that_is_no_finite_number_is_refused_with_the_value_and_what_is_allowed(
    run: StoredRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "nan.csv").write_text("experience_id,reward\n1,0.5\n2,nan\n")
    refused = {
        (
            "label",
            "set",
            "1",
            "nan",
        ): "the reward of experience 1 is not a finite number (got nan); allowed: a finite number",
        (
            "label",
            "import",
            str(tmp_path / "nan.csv"),
        ): "row 2 of .* has a reward for experience 2 .*got nan.*allowed: a finite number",
        ("sql", "update rft.experience set reward = 'NaN' where experience_id = 2"): (
            "the reward of experience 2 cannot be NaN; allowed: a finite number between -3.4e.38 and 3.4e.38, or NULL while it is awaited"
        ),
        (
            "sql",
            "update rft.experience set reward = '-Infinity'",
        ): "the reward of experience . cannot be -Infinity; allowed: a finite number",
        (
            "sql",
            "update rft.experience set reward = -1e39",
        ): r"the reward of experience . cannot be -1e\+39; allowed: a finite number",
    }
    for arguments, words in refused.items():
        code, _, err = rft(capsys, *arguments)
        assert code == 2 and re.search(words.replace("(got nan)", r"\(got nan\)"), err), err
    assert "Infinity" not in rft(capsys, "sql", "select reward from rft.experience")[1]


def test_a_missing_history_is_reported_in_words(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    said = {
        ("label", "history"): "nothing was labelled in this buffer",
        ("label", "history", "1"): "experience 1 was never labelled: it still has its first reward",
        ("label", "history", "--batch", "7"): "batch 7 has no label: `rft label history` lists the newest batches",
        ("lineage", "1"): "experience 1 has not been trained on: no step drew it",
        ("lineage", "1", "--origin"): "experience 1 was not imported: it was first stored in this buffer",
        ("lineage", "1", "--pipeline"): "experience 1 has not been decided on by any pipeline",
    }
    run.buffer.sql("DELETE FROM rft.worklist")
    for arguments, words in said.items():
        assert rft(capsys, *arguments) == (0, f"{words}\n", ""), arguments
        assert json.loads(rft(capsys, *arguments, "--json")[1]) == []
    code, out, err = rft(capsys, "label", "history", "99")
    assert (code, out) == (2, "") and "unknown experience (got 99)" in err


def test_help_states_which_of_the_two_is_postgresql_and_which_is_duckdb(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("sql", "query"):
        lines = rft(capsys, verb, "--help")[1]
        assert "PostgreSQL" in lines and "DuckDB" in lines and "token arrays" in lines


def test_status_states_what_decides_on_groups_relabelled_after_the_end_of_a_run(
    run: StoredRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.group(1, [0.0, 1.0], status="sealed")
    assert "1 await verdicts" in rft(capsys, "status")[1]
    run.buffer.database.run("finish_run", run_id=run.run_id, status="finished", outcome="done")
    out = " ".join(rft(capsys, "status")[1].split())
    assert "await verdicts" not in out
    assert "1 undecided group: the run has ended, so no process decides on them" in out
    assert "`rft run --resume sums --set steps=8` decides first and then continues" in out
    assert "exports and stored selections (sampling.source) read the rewards as they are" in out
    run.buffer.database.run("finish_run", run_id=run.run_id, status="interrupted", outcome="stopped")
    run.buffer.sql("UPDATE rft.run SET status = 'interrupted'")
    assert "`rft run --resume sums` decides first" in " ".join(rft(capsys, "status")[1].split())


def test_status_and_report_show_the_newest_run(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.worker("trainer", state="waits", waiting_for="4 ready groups for step 1")
    code, out, _ = rft(capsys, "status")
    assert code == 0 and "sums: running" in out and "waits for 4 ready groups for step 1" in out
    code, out, _ = rft(capsys, "status", "--json")
    assert code == 0 and json.loads(out)["planned_steps"] == 4
    code, out, _ = rft(capsys, "report", "--json")
    assert code == 0 and json.loads(out)["sampled_tokens"] == 10


@pytest.mark.parametrize("option", ["--json", "--all"])
def test_watching_refuses_what_it_would_ignore(run: StoredRun, capsys: pytest.CaptureFixture[str], option: str) -> None:
    code, out, err = rft(capsys, "status", "--watch", option)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--watch" in err and option in err


def test_an_unknown_run_names_the_nearest(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = rft(capsys, "report", "sumz")
    assert code == 2 and "did you mean 'sums'?" in err


def test_two_reports_side_by_side(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    StoredRun(run.buffer, "other").attempt()
    code, out, _ = rft(capsys, "report", "sums", "other")
    assert code == 0 and "sums" in out and "other" in out
    code, out, _ = rft(capsys, "report", "sums", "other", "--json")
    assert [one["run"] for one in json.loads(out)["runs"]] == ["sums", "other"]


def test_lineage_is_shown_in_both_directions(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    key = run.experiences()[0]
    run.buffer.sql(
        "INSERT INTO rft.draw (attempt_id, trainer_step, slot, item_id, experience_id, reward_used, staleness)"
        " VALUES (%s, 1, 0, 1, %s, 0, 0)",
        [run.attempt_id, key],
    )
    run.checkpoint(2)
    run.buffer.sql("UPDATE rft.experience SET reward = 1 WHERE experience_id = %s", [key])
    code, out, _ = rft(capsys, "lineage", str(key), "--json")
    (use,) = json.loads(out)
    assert (code, use["trainer_step"], use["checkpoint_step"], use["corrected_since"]) == (0, 1, 2, True)
    code, out, _ = rft(capsys, "lineage", "--checkpoint", "2", "--json")
    assert [row["experience_id"] for row in json.loads(out)] == [key]
    code, _, err = rft(capsys, "lineage", "--checkpoint", "3")
    assert code == 2 and "allowed: 2" in err
    assert rft(capsys, "lineage", "99999")[0] == 2
    assert rft(capsys, "lineage")[0] == 2


def test_doctor_finds_a_damaged_segment(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = rft(capsys, "doctor")
    assert code == 0 and "1 segments with 1 rows match" in out
    (file,) = (path for path in Path(run.buffer.config.segments or "").rglob("*") if path.is_file())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(bytes(data))
    code, out, _ = rft(capsys, "doctor", "--json")
    assert code == 1
    assert [f["text"] for f in json.loads(out)["findings"] if not f["ok"]]


def test_the_embedded_server_starts_stops_and_is_not_stopped_under_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFT_BUFFER", raising=False)
    buffer = rftdata.open("./buffer", application="a notebook")
    try:
        assert rft(capsys, "db", "status")[1].splitlines()[0].endswith("running")
        assert rft(capsys, "db", "uri")[1].startswith("postgresql://")
        buffer.sql("SELECT 1")
        code, _, err = rft(capsys, "db", "stop")
        assert code == 1 and "a notebook" in err
        buffer.close()
        server = buffer.server
        assert server is not None
        wait_until(lambda: not server.sessions(), "the end of the closed sessions")
        assert rft(capsys, "db", "stop")[0] == 0
        assert rft(capsys, "db", "status")[1].strip().endswith("stopped")
        assert rft(capsys, "db", "start")[0] == 0
        assert rft(capsys, "sql", "--json", "select count(*) as n from run")[1].split() == [
            "[",
            "{",
            '"n":',
            "0",
            "}",
            "]",
        ]
    finally:
        buffer.close()
        run_command(["db", "stop", "--force"])


READING = (
    ["sql", "select 1"],
    ["query", "select count(*) from experience"],
    ["status"],
    ["label", "history"],
    ["report"],
    ["lineage", "1"],
    ["tasks", "list"],
)


def test_verbs_that_read_the_buffer_load_no_training_stack(run: StoredRun) -> None:
    """One process for all: what a verb loads is still there after the others."""
    program = (
        "import sys; from rftcore.cli import run_command\n"
        f"codes = [run_command(arguments) for arguments in {READING!r}]\n"
        "print(codes, sorted({'torch', 'ray', 'vllm', 'transformers', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{[0] * len(READING)} []"
