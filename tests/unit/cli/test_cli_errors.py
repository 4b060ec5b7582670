"""Error output: one paragraph, a matching exit code, no stack trace unless requested."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rftcore.cli import EXIT_DEFECT, explain, run_command
from rftcore.cli.configuration import split_targets
from rftdata.errors import ConfigError, FencedError, QueryError

CONFIG = """
run: {name: sums, seed: 7}
model: {path: somebody/model}
tasks: [{name: a, source: "reasoning_gym:chain_sum"}]
algorithm: {name: grpo}
explorer: {reward: exact_match}
trainer: {}
steps: 3
"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RFT_BUFFER", "RFT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was printed on stderr, which must be one paragraph without a stack trace."""
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.startswith("rft: "), text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sql", "select 1"], ["no buffer", "--buffer", "RFT_BUFFER"]),
        (["status"], ["no buffer"]),
        (["sql", "select 1", "--buffer", "./elsewhere"], ["elsewhere", "no buffer here"]),
        (["label", "set", "1", "0.5"], ["no buffer"]),
        (["db", "status", "--buffer", "postgresql://me:secret@there/db"], ["embedded servers only"]),
    ],
)
def test_a_missing_buffer_is_one_paragraph(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) != 0
    text = said(capsys)
    assert all(word in text for word in words)
    assert "secret" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("algorithm.group_sise=4", []),
        ("trainer.learning_rat=1", ["trainer.learning_rat", "did you mean 'learning_rate'?"]),
        ("stepz=4", ["no key 'stepz'", "did you mean 'steps'?"]),
        ("workflow=single_turn", ["no key 'workflow'", "did you mean 'explorer.workflow'?"]),
        ("buffer.listen=localhost", ["buffer.listen", "HOST:PORT", "127.0.0.1:5433"]),
        ("model.path=./nowhere", ["the model's folder does not exist", "nowhere", "correct model.path"]),
        ("steps=0", ["'steps'", "greater than 0", "got 0"]),
        ("steps", ["a.b=value"]),
        ("run.name.x=1", ["not a section"]),
    ],
)
def test_a_bad_setting_names_the_key_and_the_nearest(
    change: str, words: list[str], empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "config.yaml").write_text(CONFIG)
    assert run_command(["check", "config.yaml", "--set", change]) == 2
    text = said(capsys)
    assert all(word in text for word in words)


def test_everything_that_is_wrong_in_a_configuration_is_named_at_once(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "config.yaml").write_text(
        CONFIG.replace("trainer: {}", "trainer: {lerning_rate: 3, batch_groups: zero}")
        .replace("steps: 3", "steps: -3\nbuffr: 1")
        .replace("{name: a, source:", "{name: a, weight: hello, timeout_s: -1, limit: -1, source:")
    )
    assert run_command(["check", "config.yaml"]) == 2
    text = said(capsys)
    for words in (
        "config.yaml: 7 settings are wrong: ",
        "there is no key 'trainer.lerning_rate' (did you mean 'learning_rate'?)",
        "there is no key 'buffr' (did you mean 'buffer'?)",
        "the key 'steps' is wrong: Input should be greater than 0 (got -3)",
        "'trainer.batch_groups'",
        "(got 'zero')",
        "'tasks.0.timeout_s'",
        "'tasks.0.limit'",
        "a weight is a number above 0",
    ):
        assert words in text, (words, text)


def test_a_file_that_is_not_utf8_is_one_paragraph(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty_folder / "wide.yaml").write_text(CONFIG, encoding="utf-16")
    assert run_command(["check", "wide.yaml"]) == ConfigError.exit_code
    assert "wide.yaml is not UTF-8 text" in said(capsys)
    (empty_folder / "wide.jsonl").write_text("{}", encoding="utf-16")
    assert run_command(["import", "wide.jsonl", "--buffer", "new"]) == QueryError.exit_code
    assert "wide.jsonl cannot be read" in said(capsys) and not (empty_folder / "new").exists()
    (empty_folder / "marked.yaml").write_text(CONFIG, encoding="utf-8-sig")  # as some editors save it
    assert run_command(["check", "marked.yaml"]) == 0


def test_ctrl_c_while_the_command_line_is_imported_ends_it_in_good_order() -> None:
    program = """
import importlib.abc, os, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "rftcore.cli.status":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from rftcore.command import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "rft: interrupted.\n")


def test_the_package_runs_as_a_program_too() -> None:
    done = subprocess.run([sys.executable, "-m", "rftcore", "status"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("rft: no buffer is named"), done.stderr


@pytest.mark.parametrize("verb", ["run", "explore", "process", "train", "check"])
def test_a_missing_configuration_file_is_one_paragraph(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([verb, "absent.yaml"]) == 2
    assert "absent.yaml" in said(capsys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("algorithm.name=grop", ["unknown algorithm", "did you mean 'grpo'?"]),
        ("algorithm.loss.clipp=0.2", ["grpo: there is no key", "algorithm.loss.clipp", "did you mean 'clip'?"]),
        ("pipelines.experience=[{drop_truncatd: {}}]", ["drop_truncatd"]),
        ("explorer.reward=exact_macth", ["exact_macth", "did you mean 'exact_match'?"]),
        ("explorer.reward=./absent.py:score", ["absent.py", "does not exist"]),
        ("selector.type=shufle", ["shufle"]),
        ("monitor=[tensorbord]", ["tensorbord"]),
    ],
)
def test_a_plug_in_that_does_not_exist_names_the_nearest(
    change: str, words: list[str], empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "config.yaml").write_text(CONFIG)
    assert run_command(["check", "config.yaml", "--set", change]) == 2
    text = said(capsys)
    assert all(word in text for word in words), text


def test_check_prints_what_differs_from_the_defaults(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty_folder / "config.yaml").write_text(CONFIG)
    assert run_command(["check", "config.yaml", "--set", "steps=9", "--set", "sync.offset=0"]) == 0
    short = capsys.readouterr().out
    assert "steps: 9" in short and "max_num_seqs: 64" in short, "given, and chosen for this machine"
    assert "max_staleness" not in short and "sync" not in short
    assert run_command(["check", "config.yaml", "--all"]) == 0
    assert "max_staleness: 4" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["buffer.uri=./b", "buffer={uri: ./b}"])
@pytest.mark.parametrize("verb", ["run", "check", "train"])
def test_two_different_buffers_are_refused(
    verb: str, change: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "config.yaml").write_text(CONFIG)
    assert run_command([verb, "config.yaml", "--buffer", "./a", "--set", change]) == 2
    text = said(capsys)
    assert "./a" in text and "./b" in text and "two buffers" in text


def test_the_same_buffer_may_be_named_twice(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty_folder / "config.yaml").write_text(CONFIG)
    assert run_command(["check", "config.yaml", "--buffer", "./a", "--set", f"buffer.uri={empty_folder / 'a'}"]) == 0


def test_resuming_refuses_to_look_in_one_buffer_and_work_in_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--resume", "--buffer", "./a", "--set", "buffer.uri=./b"]) == 2
    assert "two buffers" in said(capsys)


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["report", "--nonsense"], ["label", "set", "one", "2"], ["label", "set", "1"], ["query"]],
)
def test_a_wrong_command_line_is_one_paragraph(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(arguments) == 2
    assert "--help` shows what is allowed" in said(capsys)


@pytest.mark.parametrize(("arguments", "verbs"), [([], ["run", "sql", "label"]), (["label"], ["set", "undo"])])
def test_without_a_verb_all_are_listed(
    arguments: list[str], verbs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == 2
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert {line[0] for line in lines if line} >= {*verbs, "Usage:", "Commands:"}


def test_help_before_a_verb_lists_all_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help", "sql"]) == 0
    before = capsys.readouterr().out
    assert run_command(["--help"]) == 0
    assert before == capsys.readouterr().out and "  lineage " in before


def test_each_of_our_errors_has_its_own_exit_code() -> None:
    assert explain(ConfigError("bad"))[1] == 2
    assert explain(QueryError("bad"))[1] == 2
    assert explain(FencedError("another process has it")) == ("another process has it.", 1)


def test_a_full_disk_is_not_a_defect_of_ours() -> None:
    paragraph, code = explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x"))
    assert code == 1 and "disk is full" in paragraph


def test_any_other_error_is_reported_as_a_defect() -> None:
    paragraph, code = explain(ZeroDivisionError("division\nby zero"))
    assert code == EXIT_DEFECT
    assert (
        paragraph.startswith("this is a defect of rftdata: ZeroDivisionError: division by zero")
        and "\n" not in paragraph
    )


@pytest.mark.parametrize("arguments", [["--debug", "sql", "select 1"], ["sql", "select 1", "--debug"]])
def test_debug_anywhere_on_the_line_shows_the_stack_trace(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_environment_can_ask_for_the_stack_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RFT_DEBUG", "1")
    run_command(["sql", "select 1"])
    assert "Traceback" in capsys.readouterr().err


def test_the_process_exits_with_the_code() -> None:
    program = "import sys; sys.argv = ['rft', 'sql', 'select 1']; from rftcore.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("rft: no buffer")


@pytest.mark.parametrize(
    ("targets", "resume", "expected"),
    [
        (["c.yaml"], False, (Path("c.yaml"), None)),
        ([], True, (None, None)),
        (["sums-2"], True, (None, "sums-2")),
        (["c.yaml"], True, (Path("c.yaml"), None)),
        (["c.yaml", "sums-2"], True, (Path("c.yaml"), "sums-2")),
    ],
)
def test_resume_takes_a_file_a_run_both_or_neither(
    targets: list[str], resume: bool, expected: tuple[Path | None, str | None]
) -> None:
    assert split_targets(targets, resume) == expected


@pytest.mark.parametrize(("targets", "resume"), [([], False), (["c.yaml", "sums-2"], False), (["a", "b", "c"], True)])
def test_any_other_combination_is_refused(targets: list[str], resume: bool) -> None:
    with pytest.raises(ConfigError):
        split_targets(targets, resume)


@pytest.mark.parametrize("way", ["folder", "PYTHONPATH"])
def test_a_package_that_hides_ours_is_named(way: str, empty_folder: Path) -> None:
    other = empty_folder / "mine" / "operators"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": str(other.parent)} if way == "PYTHONPATH" else None
    done = subprocess.run(
        [sys.executable, "-m", "rftcore", "check", "c.yaml"],
        cwd=other.parent if way == "folder" else empty_folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        f"is hidden by {other}," in done.stderr and "rename that one" in done.stderr and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize("verb", ["check", "run", "explore"])
def test_all_mistakes_are_reported_at_once(verb: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "explorer.reward": "[exact_macth, exactmatch]",
        "selector.type": "shufle",
        "monitor": "[tensorbord, wandbb]",
        "algorithm.name": "grop",
        "model.path": "./absent",
        "explorer.engine_args": "{no_such: 1}",
        "pipelines.experience": "[drop_truncatd, drop_stalee]",
    }
    (empty_folder / "config.yaml").write_text(CONFIG)
    changes = [argument for key, value in wrong.items() for argument in ("--set", f"{key}={value}")]
    assert run_command([verb, "config.yaml", *changes]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == f"rft: {len(wrong) + 3} things are wrong:"
    names = (
        "exact_macth",
        "exactmatch",
        "shufle",
        "tensorbord",
        "wandbb",
        "grop",
        "absent",
        "no_such",
        "drop_truncatd",
        "drop_stalee",
    )
    for name in names:
        assert len([line for line in lines if name in line]) == 1, name
    assert not (empty_folder / "buffer").exists()


def test_mistakes_in_several_stages_are_reported_at_once(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "config.yaml").write_text(
        CONFIG + "stages: [{name: a, trainer: {batch_gropus: 1}}, {name: b, explorer: {max_tokenz: 4}}]\n"
    )
    assert run_command(["check", "config.yaml"]) == 2
    error = capsys.readouterr().err
    assert "stage 'a'" in error and "batch_gropus" in error and "stage 'b'" in error and "max_tokenz" in error


def test_a_selection_from_a_buffer_that_does_not_exist_makes_none(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ["--set", "sampling.source={sql: select 1}", "--set", "algorithm.name=sft", "--set", "tasks=[]"]
    (empty_folder / "config.yaml").write_text(CONFIG)
    assert run_command(["run", "config.yaml", *source]) > 0
    assert "there is no buffer here" in capsys.readouterr().err
    assert not (empty_folder / "buffer").exists()


def test_a_folder_of_the_user_that_cannot_be_imported_is_explained(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "operators").mkdir()
    (empty_folder / "operators" / "mine.py").write_text("def score(turn, task): return 1.0\n")
    (empty_folder / "reward.py").write_text("from operators.mine import score\n")
    (empty_folder / "config.yaml").write_text(CONFIG.replace("exact_match", "./reward.py:score"))
    assert run_command(["check", "config.yaml"]) == 2
    assert "`operators` is a package of rftdata" in said(capsys)
    (empty_folder / "config.yaml").write_text(CONFIG.replace("exact_match", "./operators/mine.py:score"))
    assert run_command(["check", "config.yaml"]) == 0
