"""Which stored run a configuration continues, how roles join and leave it, and the paths that they receive."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest
import yaml

from rftcore.cli import run_command
from rftcore.config.run import RunConfig, parse_config
from rftcore.launch.by_hand import join_by_hand
from rftcore.launch.launcher import reachable
from rftcore.launch.preparation import find_resumable, named_resumable, stored_config
from rftcore.launch.supervisor import await_earlier_processes
from rftcore.launch.terminal.views import LineView
from rftcore.resolved import ResolvedRun
from rftcore.run.commands import buffer_option
from rftcore.run.join import HandStartedRole, join_run
from rftdata import Buffer, exchange
from rftdata.errors import ConfigError, QueryError, RftError
from rftdata.postgres.database import Database
from rftdata.workers.worker import Worker
from tests.support.checking import refuse_start
from tests.support.models import make_unopened_model
from tests.support.store_roles import own_group
from tests.support.waiting import wait_until


def configured(name: str, buffer: Buffer, model: Path | str = "none") -> RunConfig:
    return parse_config(
        {
            "run": {"name": name},
            "buffer": {"uri": buffer.config.uri, "segments": buffer.config.segments},
            "model": {"path": str(model)},
            "tasks": [{"name": "t", "source": "./none.py:none"}],
            "algorithm": {"name": "sft", "group_size": 1},
            "explorer": {},
            "trainer": {},
            "steps": 1,
        },
        Path(),
        "the test",
    )


def store(buffer: Buffer, name: str) -> str:
    """Store a run of a configured name; return the name it received."""
    config = stored_config(configured(name, buffer))
    return buffer.create_run(name=name, config=config, seed=1, steps=1, pipeline_version="p").name


def test_a_configuration_continues_its_own_newest_run(buffer: Buffer) -> None:
    assert [store(buffer, "exp") for _ in range(2)] == ["exp", "exp-2"]
    assert find_resumable(configured("exp", buffer), buffer, None).name == "exp-2"


def test_a_free_name_is_given_although_numbered_ones_exist(buffer: Buffer) -> None:
    long = f"exp-{'9' * 30}"
    assert [store(buffer, name) for name in ("exp-1", "exp", "exp")] == ["exp-1", "exp", "exp-2"]
    assert [store(buffer, name) for name in (long, "exp", "exp")] == [long, f"exp-1{'0' * 30}", f"exp-1{'0' * 29}1"]


def test_a_role_started_by_hand_counts_groups_as_the_others_do(buffer: Buffer, tmp_path: Path) -> None:
    make_unopened_model(tmp_path)
    config = configured("shared", buffer, tmp_path)
    run = buffer.create_run(name="shared", config=stored_config(config), seed=1, steps=1, pipeline_version="p")
    other = config.model_copy(update={"trainer": config.trainer.model_copy(update={"batch_groups": 3})})
    for role in ("pipeline", "trainer"):
        with pytest.raises(
            ConfigError,
            match=rf"share trainer.batch_groups, and this {role} has another value.*got 3.*{config.trainer.batch_groups}.*--resume shared",
        ):
            join_by_hand(other, None, role)  # type: ignore[arg-type]
    assert run.end("interrupted", "for the test")
    joined = join_by_hand(other, "shared", "trainer")  # it continues the run, with what it has
    joined.buffer.close()
    assert buffer.find_run("shared").config["trainer"]["batch_groups"] == 3
    joined = join_by_hand(other, "shared", "pipeline")
    joined.buffer.close()


def test_a_role_that_is_suspended_within_a_transaction_keeps_its_locks_for_no_longer_than_a_minute(
    buffer: Buffer, tmp_path: Path
) -> None:
    make_unopened_model(tmp_path)
    store(buffer, "suspended")
    joined = join_run(configured("suspended", buffer, tmp_path), "suspended")
    with contextlib.closing(joined.buffer), joined.buffer.database.connection() as connection:
        assert list(connection.execute("SHOW idle_in_transaction_session_timeout")) == [
            {"idle_in_transaction_session_timeout": "1min"}
        ]


def test_a_forked_process_has_to_open_the_buffer_again(buffer: Buffer) -> None:
    uses = (
        lambda: buffer.sql("SELECT 1"),
        buffer.database.dedicated,
        lambda: buffer.read_arrays([1], ["token_ids"]),
        lambda: buffer.reader.batches([1]),
    )
    buffer.sql("SELECT 1")
    for use in uses:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                use()
            except RftError as error:
                code = 0 if "opened in another process" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert buffer.sql("SELECT 2 AS x")["x"].to_pylist() == [2]


def test_no_statement_is_compiled_by_a_server_that_does_so_by_default(buffer: Buffer) -> None:
    with buffer.database.connection() as connection:
        connection.execute(f'ALTER DATABASE "{connection.info.dbname}" SET jit = on')
    with contextlib.closing(Database(buffer.database.uri)) as database, database.connection() as connection:
        assert list(connection.execute("SHOW jit")) == [{"jit": "off"}]
        with contextlib.closing(database.dedicated()) as listening:
            assert list(listening.execute("SHOW jit")) == [{"jit": "off"}]


def test_an_experiment_whose_name_looks_numbered_is_another_one(buffer: Buffer, tmp_path: Path) -> None:
    make_unopened_model(tmp_path)
    assert [store(buffer, name) for name in ("exp", "exp-1", "exp-7")] == ["exp", "exp-1", "exp-7"]
    assert find_resumable(configured("exp", buffer), buffer, None).name == "exp"
    joined = join_by_hand(configured("exp", buffer, tmp_path), None, "pipeline")
    joined.buffer.close()
    assert joined.run.name == "exp"


def test_a_run_that_was_stored_without_a_configuration_is_known_by_its_name(buffer: Buffer) -> None:
    for name in ("mine", "mine-3"):
        buffer.create_run(name=name, config={}, seed=1, steps=1, pipeline_version="p")
    assert find_resumable(configured("mine", buffer), buffer, None).name == "mine"
    with pytest.raises(QueryError, match="no such run"):
        find_resumable(configured("yours", buffer), buffer, None)


@pytest.mark.parametrize("by_name", [False, True])
def test_an_imported_run_of_the_same_name_is_not_continued(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_name: bool
) -> None:
    elsewhere = buffer.create_run(name="sums", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.writer(elsewhere) as writer:
        writer.insert(own_group())
    exchange.export(buffer, tmp_path / "sums.parquet")
    buffer.sql('UPDATE rft.run SET name = \'other\', config = \'{"run": {"name": "other"}}\'')
    imported = "mine" if by_name else "sums"
    exchange.load(buffer, tmp_path / "sums.parquet", run=imported if by_name else None)
    refused = rf"the run '{imported}' was imported: .*start a run of another name"
    with pytest.raises(ConfigError, match=refused):
        find_resumable(configured(imported, buffer), buffer, None)
    with pytest.raises(ConfigError, match=refused):
        find_resumable(configured("sums", buffer), buffer, imported)
    monkeypatch.setenv("RFT_BUFFER", buffer.config.uri)
    monkeypatch.setenv("RFT_SEGMENTS", str(buffer.config.segments))
    assert run_command(["run", "--resume", imported]) == 2
    assert "was imported" in capsys.readouterr().err
    # The newest run is the imported one; the newest run that was started here is continued.
    assert named_resumable(buffer, None).name == "other"
    store(buffer, imported)
    assert find_resumable(configured(imported, buffer), buffer, None).name == f"{imported}-2"


def end(buffer: Buffer, name: str, status: str) -> None:
    buffer.database.run("finish_run", run_id=buffer.find_run(name).run_id, status=status, outcome="it ended")


def runs(buffer: Buffer) -> list[str]:
    return [str(name) for name in buffer.sql("SELECT name FROM rft.run ORDER BY run_id")["name"].to_pylist()]


@pytest.mark.parametrize("verb", ["explore", "process", "train"])
@pytest.mark.parametrize("named", [[], ["--run", "exp"]], ids=["of-its-name", "by-run"])
def test_a_role_started_by_hand_makes_no_run_beside_one_that_has_finished(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, named: list[str]
) -> None:
    make_unopened_model(tmp_path)
    store(buffer, "exp")
    end(buffer, "exp", "finished")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configured("exp", buffer, tmp_path).model_dump(mode="json")))
    assert run_command([verb, str(tmp_path / "run.yaml"), *named]) == 2
    said = capsys.readouterr().err
    assert "the run 'exp' has finished its 1 step:" in said and "rft run CONFIG --resume exp --set steps=2" in said
    assert ("rft pipeline replay CONFIG" in said) == (verb == "process")
    assert runs(buffer) == ["exp"]


def test_only_a_trainer_started_by_hand_continues_an_interrupted_run(buffer: Buffer, tmp_path: Path) -> None:
    make_unopened_model(tmp_path)
    store(buffer, "exp")
    end(buffer, "exp", "interrupted")
    config = configured("exp", buffer, tmp_path)
    with pytest.raises(ConfigError, match="rft train CONFIG --run exp first"):
        join_by_hand(config, "exp", "explorer")
    with pytest.raises(ConfigError, match="has ended"):
        join_by_hand(config, None, "trainer")  # the newest may not be the one that is meant
    joined = join_by_hand(config, "exp", "trainer")
    joined.buffer.close()
    assert joined.run.name == "exp" and runs(buffer) == ["exp"]


def test_a_role_joins_the_run_that_is_open_beside_one_that_has_ended(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_unopened_model(tmp_path)
    for _ in range(2):
        store(buffer, "exp")
    end(buffer, "exp", "finished")
    joined = join_by_hand(configured("exp", buffer, tmp_path), None, "pipeline")
    joined.buffer.close()
    assert joined.run.name == "exp-2"
    assert capsys.readouterr().out.startswith("joins the run exp-2 in the buffer")


def test_a_role_started_by_hand_needs_none_of_the_others_gpus(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unopened_model(tmp_path)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '0, GPU-1, 80000'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    store(buffer, "exp")
    config = configured("exp", buffer, tmp_path)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"num_gpus": 2})})
    joined = join_by_hand(config, None, "pipeline")
    joined.buffer.close()
    with pytest.raises(ConfigError, match="is more than there are GPUs"):
        refuse_start(ResolvedRun(config))


def test_a_role_whose_terminal_is_closed_continues(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(buffer, "exp")
    messages = HandStartedRole(buffer, configured("exp", buffer, tmp_path), buffer.find_run("exp"), "pipeline")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        messages.report("this is not read")
        messages.report_waiting("waits for sealed groups")
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def test_a_waiting_role_reports_what_it_waits_for_and_which_roles_are_missing(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(buffer, "exp")
    row, config = buffer.find_run("exp"), configured("exp", buffer, tmp_path)
    messages = HandStartedRole(buffer, config, row, "pipeline")
    with Worker(row, "pipeline", on_waiting=messages.report_waiting) as worker:
        worker.set_state("waits", "sealed groups")
        said = io.StringIO()

        def is_said() -> bool:
            said.write(capsys.readouterr().out)
            return said.getvalue().endswith("\n")

        wait_until(is_said, "a report")
        assert said.getvalue() == (
            "the pipeline waits for sealed groups; no explorer and no trainer is at work in the run exp "
            "(start with rft explore CONFIG and rft train CONFIG)\n"
        )
    messages.report_waiting("waits for sealed groups")
    assert capsys.readouterr().out == ""  # said already
    with Worker(row, "explorer"):
        messages.report_waiting("waits for sealed groups")
        assert "no trainer is at work in the run exp (start with rft train CONFIG)" in capsys.readouterr().out


def test_a_replay_is_not_a_missing_role_and_does_not_prevent_a_resume(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(buffer, "exp")
    row, config = buffer.find_run("exp"), configured("exp", buffer, tmp_path)
    with Worker(row, "replay"):
        assert HandStartedRole(buffer, config, row, "trainer").missing_roles() == ["explorer", "pipeline"]
        await_earlier_processes(row, LineView())
    assert capsys.readouterr().out == ""


def test_a_role_that_leaves_its_run_reports_why(
    buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(buffer, "exp")
    messages = HandStartedRole(buffer, configured("exp", buffer, tmp_path), buffer.find_run("exp"), "explorer")
    option = buffer_option(buffer.location)
    messages.report_end()
    assert capsys.readouterr().out == (
        f"the explorer leaves: the run exp was asked to stop; continue it with rft run --resume exp{option}\n"
    )
    assert buffer.location in option
    end(buffer, "exp", "finished")
    messages.report_end()
    assert "the run exp has ended (finished: it ended); rft report exp --buffer" in capsys.readouterr().out


def test_a_run_that_has_finished_stays_so(buffer: Buffer) -> None:
    run_id = buffer.find_run(store(buffer, "exp")).run_id
    assert buffer.database.run("finish_run", run_id=run_id, status="interrupted", outcome="stopped") == 1
    assert buffer.database.run("finish_run", run_id=run_id, status="finished", outcome="1 step done") == 1
    assert buffer.database.run("finish_run", run_id=run_id, status="failed", outcome="too late") == 0
    assert buffer.find_run(run_id).outcome == "1 step done"


def test_processes_started_elsewhere_find_buffer_and_segments(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = configured("exp", buffer)
    relative = config.buffer.model_copy(update={"uri": "./buffer", "segments": "arrays"})
    places = reachable(config.model_copy(update={"buffer": relative})).buffer
    assert (places.uri, places.segments) == (str(tmp_path / "buffer"), str(tmp_path / "arrays"))
    remote = config.buffer.model_copy(update={"uri": "postgresql://there/db", "segments": None})
    assert reachable(config.model_copy(update={"buffer": remote})).buffer == remote


def test_the_commands_at_the_end_name_the_buffer_unless_they_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RFT_BUFFER", raising=False)
    assert buffer_option(str(tmp_path / "buffer")) == ""
    assert buffer_option("/elsewhere/buffer") == " --buffer /elsewhere/buffer"
    assert buffer_option("/else where/buffer") == " --buffer '/else where/buffer'"
    monkeypatch.setenv("RFT_BUFFER", "/elsewhere/buffer")
    assert buffer_option("/elsewhere/buffer") == ""
    assert buffer_option(str(tmp_path / "buffer")) == f" --buffer {tmp_path / 'buffer'}"
