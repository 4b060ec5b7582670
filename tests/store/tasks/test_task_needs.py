"""Tasks that lack what the rewards and the workflow need are named or refused: by `rft check --deep`, before a buffer is made, and at loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rftcore.config.run import RunConfig
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.pipeline import load_tasks
from rftdata import Buffer
from rftdata.errors import BufferUnavailableError, ConfigError, RftError, TaskSourceError
from tests.store.tasks import test_task_pipeline
from tests.support.checking import deep_sentences, refuse_names, refuse_new_buffer
from tests.support.models import make_tiny_model

OWN = """
def score(turn, task):
    return float(turn.response == task.answer)
score.needs_answer = True
def any_answer(turn, task):
    return 1.0
"""
SFT: dict[str, Any] = {
    "algorithm": {"name": "sft", "group_size": 1},
    "explorer": {"engine": "none", "workflow": "demonstration"},
}
CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def configuration(folder: Path, stages: list[Any], **changes: Any) -> RunConfig:
    """With a reward that needs answers, unless another one is named."""
    return test_task_pipeline.configuration(folder, stages, **{"explorer": {"reward": ["exact_match"]}, **changes})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def place(tmp_path: Path, tiny: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "model").symlink_to(tiny)
    return tmp_path


def write(folder: Path, answers: list[Any]) -> None:
    rows = [{"question": f"q{n}", "answer": answer, "task_key": f"k{n}"} for n, answer in enumerate(answers)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_chats(folder: Path, chats: list[Any]) -> None:
    (folder / "sums.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def opened(config: RunConfig, folder: Path) -> list[str]:
    """Return the sentences of `rft check --deep` without a buffer."""
    found = config.model_copy(update={"buffer": config.buffer.model_copy(update={"uri": str(folder / "none")})})
    found._base_dir = folder
    resolved = ResolvedRun(found)
    refuse_names(resolved)
    return list(deep_sentences(resolved))


def stored(buffer: Buffer) -> int:
    return int(buffer.sql("SELECT count(*) AS n FROM rft.task")["n"].to_pylist()[0])


@pytest.mark.parametrize("reward", ["exact_match", "./own.py:score"])
def test_tasks_without_an_answer_are_counted_and_named(
    buffer: Buffer, place: Path, capsys: pytest.CaptureFixture[str], reward: str
) -> None:
    write(place, ["1", None, "", " ", "2", None])
    config = configuration(place, [], explorer={"reward": [reward]})
    words = f"4 of 6 tasks have no answer, which the reward {reward!r} needs: task keys k1, k2, k3, …; add"
    assert any(sentence.startswith(f"taskset sums: {words}") for sentence in opened(config, place))
    for _ in range(2):  # when it is loaded, and when it is stored already
        load_tasks(ResolvedRun(config), buffer)
        assert f"tasks: sums: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("reward", ["exact_match", "./own.py:score"])
@pytest.mark.parametrize("count", [3, 100])
def test_a_set_in_which_no_task_has_an_answer_is_refused_and_not_stored(
    buffer: Buffer, place: Path, reward: str, count: int
) -> None:
    write(place, [None] * count)
    config = configuration(place, [], explorer={"reward": [reward]})
    words = f"no task of the taskset 'sums' has an answer \\(column 'answer'\\), which the reward '{reward}' needs.*`answer: …`"
    with pytest.raises(TaskSourceError, match=words):
        opened(config, place)
    with pytest.raises(TaskSourceError, match=words):
        load_tasks(ResolvedRun(config), buffer)
    assert stored(buffer) == 0


def test_a_reward_that_needs_no_answer_asks_for_none(
    buffer: Buffer, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(place, [None] * 3)
    load_tasks(ResolvedRun(configuration(place, [], explorer={"reward": ["./own.py:any_answer"]})), buffer)
    assert stored(buffer) == 3 and "answer" not in capsys.readouterr().err


def test_a_set_that_was_stored_for_another_reward_is_checked_too(buffer: Buffer, place: Path) -> None:
    write(place, [None] * 3)
    load_tasks(ResolvedRun(configuration(place, [], explorer={"reward": ["./own.py:any_answer"]})), buffer)
    with pytest.raises(TaskSourceError, match="no task of the taskset 'sums' has an answer"):
        load_tasks(ResolvedRun(configuration(place, [])), buffer)


def test_an_evaluation_set_needs_answers_too(buffer: Buffer, place: Path) -> None:
    write(place, ["1"])
    (place / "held.jsonl").write_text('{"question": "a", "solution": "1"}\n')
    held: dict[str, Any] = {"every": 20, "tasks": [{"name": "held", "source": "held.jsonl"}]}
    with pytest.raises(
        TaskSourceError, match=r"'held' has an answer .*allowed: other columns: solution; name the column"
    ):
        load_tasks(ResolvedRun(configuration(place, [], eval=held)), buffer)
    held["tasks"][0]["answer"] = "solution"
    load_tasks(ResolvedRun(configuration(place, [], eval=held)), buffer)
    assert stored(buffer) == 2


def test_stages_may_write_answers_and_drop_tasks_without_one(
    buffer: Buffer, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(place, [None, "", None])
    (place / "fill.py").write_text("def fill(row):\n    return {'answer': '1'}\n")
    load_tasks(ResolvedRun(configuration(place, ["./fill.py:fill"])), buffer)
    assert stored(buffer) == 3 and "no answer" not in capsys.readouterr().err
    write(place, ["1", None, "2"])
    tasks = [{"name": "other", "source": "sums.jsonl"}]
    load_tasks(
        ResolvedRun(configuration(place, [{"sql": "SELECT * FROM batch WHERE answer IS NOT NULL"}], tasks=tasks)),
        buffer,
    )
    assert "no answer" not in capsys.readouterr().err


def test_a_chat_without_an_answer_is_refused_with_its_row_before_anything_is_made(buffer: Buffer, place: Path) -> None:
    write_chats(place, [CHAT, CHAT + CHAT, CHAT[:1]])
    config = configuration(place, [], **SFT)
    words = r"row 3 of the taskset 'sums': task .* has a chat without a turn of the assistant; add a message .*or remove the row"
    for check in (
        lambda: opened(config, place),
        lambda: refuse_new_buffer(ResolvedRun(config)),
        lambda: load_tasks(ResolvedRun(config), buffer),
    ):
        with pytest.raises(TaskSourceError, match=words):
            check()
    assert stored(buffer) == 0


def test_a_chat_deep_in_a_file_is_looked_at_too(buffer: Buffer, place: Path) -> None:
    chats = [[{"role": "user", "content": f"{n}"}, *CHAT] for n in range(150)]
    write_chats(place, [*chats, CHAT[:1]])
    with pytest.raises(TaskSourceError, match="row 151 of the taskset 'sums'"):
        load_tasks(ResolvedRun(configuration(place, [], **SFT)), buffer)
    assert stored(buffer) == 0
    write_chats(place, chats)
    load_tasks(ResolvedRun(configuration(place, [], **SFT)), buffer)
    assert stored(buffer) == 150


def test_a_template_that_does_not_fit_is_found_before_the_run(buffer: Buffer, place: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    strict = AutoTokenizer.from_pretrained(place / "model")
    strict.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ 'think:' }}{% endif %}"
    )
    (place / "model").unlink()
    for file in make_tiny_model(tmp_path / "other").iterdir():
        file.rename(place / file.name)
    strict.save_pretrained(place)
    write_chats(place, [CHAT])
    config = configuration(place, [], **SFT, model={"path": "."})
    for check in (lambda: opened(config, place), lambda: load_tasks(ResolvedRun(config), buffer)):
        with pytest.raises(TaskSourceError, match=r"row 1 .*before message 2 differently when that answer follows"):
            check()


def test_arguments_that_the_workflow_does_not_take_are_refused(buffer: Buffer, place: Path) -> None:
    write_chats(place, [CHAT])
    config = configuration(place, [], **{**SFT, "explorer": {**SFT["explorer"], "workflow_args": {"turn": "last"}}})
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'turn'.*allowed: column, .*turns"):
        load_tasks(ResolvedRun(config), buffer)


@pytest.mark.parametrize("uri", ["/proc/rft/buffer", "/dev/null"])
def test_a_buffer_folder_that_cannot_be_made_is_refused_by_check_and_by_run(place: Path, uri: str) -> None:
    write(place, ["1"])
    config = configuration(place, [], buffer={"uri": uri})
    words = f"the buffer's folder cannot be created or written: .*{uri}.*; correct buffer.uri"
    refuse_names(resolved := ResolvedRun(config))
    with pytest.raises(BufferUnavailableError, match=words):
        list(deep_sentences(resolved))
    with pytest.raises(BufferUnavailableError, match=words):
        refuse_new_buffer(ResolvedRun(config))


@pytest.mark.parametrize(
    ("name", "words"), [("raises", "raised ZeroDivisionError"), ("hangs", "did not return within 1 s")]
)
def test_a_check_of_tasks_that_raises_or_hangs_is_named(buffer: Buffer, place: Path, name: str, words: str) -> None:
    (place / "odd.py").write_text(
        "async def raises(model, task, rng):\n    pass\n\n\nasync def hangs(model, task, rng):\n    pass\n\n\n"
        "def wait(task, tokenizer):\n    while True:\n        pass\n\n\n"
        "raises.check_task = lambda task, tokenizer: 1 / 0\nhangs.check_task = wait\n"
    )
    write(place, ["1"])
    config = configuration(place, [], explorer={"workflow": f"./odd.py:{name}"})
    config = config.model_copy(update={"tasks": [config.tasks[0].model_copy(update={"timeout_s": 1.0})]})
    config._base_dir = place
    with pytest.raises(
        RftError, match=f"check_task of the workflow './odd.py:{name}' on row 1 of the taskset .* {words}"
    ):
        load_tasks(ResolvedRun(config), buffer)
