"""Synthesised tasks and experiences: which rows are used, what is asked, what is created, and that it is repeatable."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from operators.base import CreatedGroup, CreatedTask, Messages, StageContext
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.llm.synthesis import same_answer
from rftdata.errors import ConfigError, OperatorError, PluginError
from rftdata.pipeline.records import Verdicts
from rftdata.pipeline.task_batches import TASK_BATCH_SCHEMA
from tests.support.batches import batch_of_groups, batch_of_tasks


def prepared(policy: Callable[[Messages], str] | None = None, base_dir: Path | None = None, **arguments: Any) -> Chain:
    """A chain of one synthesize stage."""
    endpoint = {} if policy is None else {"endpoint": "policy"}
    chain = build_chain([{"synthesize": {**endpoint, **arguments}}], base_dir, require_reward=False)

    def generate(chats: Sequence[Messages], max_tokens: int, temperature: float) -> list[str]:
        return [policy(chat) for chat in chats] if policy else []

    chain.prepare(StageContext(generate=generate))
    return chain


def batch(*groups: Sequence[float | None], **columns: Any) -> pa.Table:
    """Groups of questions of their own, so that none is taken for another."""
    rows = [group for group, rewards in enumerate(groups) for _ in rewards]
    defaults = {
        "messages": [None] * len(rows),
        "metadata": [None] * len(rows),
        "prompt": [f"What is {group} + 1?" for group in rows],
        "answer": [str(group + 1) for group in rows],
    }
    return batch_of_groups(*groups, **{**defaults, **columns})


def errors(chain: Chain, table: pa.Table) -> list[str | None]:
    outcome = chain.stages[0].operator.apply(table)
    found: list[str | None] = outcome.columns["synthesis_error"].to_pylist()
    return found


def tasks(result: Verdicts) -> list[CreatedTask]:
    assert all(isinstance(new, CreatedTask) for new in result.created)
    return [new for new in result.created if isinstance(new, CreatedTask)]


def groups(result: Verdicts) -> list[CreatedGroup]:
    assert all(isinstance(new, CreatedGroup) for new in result.created)
    return [new for new in result.created if isinstance(new, CreatedGroup)]


def say(**values: Any) -> Callable[[Messages], str]:
    return lambda _: json.dumps(values)


def test_a_task_in_other_words_keeps_answer_and_metadata_and_names_its_parent() -> None:
    asked: list[str] = []

    def rephrase(chat: Messages) -> str:
        asked.append(chat[-1]["content"])
        return json.dumps({"question": "Add one to zero."})

    chain = prepared(rephrase, kind="rephrase")
    table = batch([1, 0, 1], metadata=[json.dumps({"level": 2})] * 3)
    result = chain.run(table)
    (task,) = tasks(result)
    assert len(asked) == 1, "once for a task, whatever the number of its rollouts"
    assert "<task>\nWhat is 0 + 1?\n</task>" in asked[0]
    origin = {"kind": "rephrase", "generation": 1, "parent_id": 100}
    assert task.payload == {"prompt": "Add one to zero.", "answer": "1", "metadata": {"level": 2, "synthesis": origin}}
    assert (task.taskset, task.parent_id) == ("sums", 100)
    assert all(result.decisions["kept"].to_pylist()), "the rows themselves pass"
    assert result.stages[0].rows_created == 1


def test_the_same_input_makes_the_same_key_and_another_another() -> None:
    def keys(table: pa.Table, **arguments: Any) -> list[str]:
        return [task.task_key for task in tasks(prepared(say(question="q"), kind="rephrase", **arguments).run(table))]

    first = keys(batch([1], [1]))
    assert keys(batch([1], [1])) == first
    assert len(set(first)) == 2
    assert set(keys(batch([0], experience_id=[7]))) < set(first), "ids, rewards and siblings are no part of it"
    assert not set(keys(batch([1]), template="Other words for {question}")) & set(first)
    assert not set(keys(batch([1], answer=["5"]))) & set(first)


def test_a_harder_task_is_made_where_its_answer_is_found_again() -> None:
    def harder(chat: Messages) -> str:
        text = chat[-1]["content"]
        if text.startswith("Solve"):
            return '{"answer": "2.0"}'
        return json.dumps({"question": "What is 1 + 1?", "answer": "2" if "0 + 1" in text else "3"})

    table = batch([1, 1], [1, 0])
    chain = prepared(harder, kind="harder")
    (task,) = tasks(chain.run(table))
    assert (task.payload["prompt"], task.payload["answer"]) == ("What is 1 + 1?", "2")
    assert errors(chain, table) == [None, None, "its answer '3' was not found again: '2.0'", None]
    assert len(tasks(prepared(harder, kind="harder", verify=False).run(table))) == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2", "2.0", True),
        ("1,000", "1000", True),
        ("Paris.", "paris", True),
        ("2", "3", False),
        ("2", "two", False),
        ("$5", "5", True),
    ],
)
def test_short_answers_are_compared_as_numbers_or_words(one: str, other: str, same: bool) -> None:
    assert same_answer(one, other) is same


@pytest.mark.parametrize(
    ("limits", "chosen"),
    [
        ({}, [0, 1, 2]),
        ({"min_reward": 0.5}, [0, 1]),
        ({"max_reward": 0.5}, [1]),
        ({"min_reward": 0.4, "max_reward": 0.6}, [1]),
    ],
)
def test_tasks_are_chosen_by_the_mean_reward_of_their_group(limits: dict[str, float], chosen: list[int]) -> None:
    result = prepared(say(question="q"), kind="rephrase", **limits).run(batch([1, 1], [0, 1], [None, None]))
    assert sorted(task.payload["answer"] for task in tasks(result)) == [str(group + 1) for group in chosen]


def test_a_share_is_picked_by_digest_and_a_limit_is_kept() -> None:
    table = batch(*[[1]] * 200)
    quarter = tasks(prepared(say(question="q"), kind="rephrase", fraction=0.25).run(table))
    assert 25 < len(quarter) < 80
    again = tasks(prepared(say(question="q"), kind="rephrase", fraction=0.25).run(table.take(list(range(199, -1, -1)))))
    assert [task.task_key for task in again] == [task.task_key for task in quarter]
    assert len(tasks(prepared(say(question="q"), kind="rephrase", max_per_batch=3).run(table))) == 3


def test_what_was_synthesised_is_used_up_to_the_generation_allowed() -> None:
    def noted(generation: int) -> str:
        return json.dumps({"synthesis": {"kind": "rephrase", "generation": generation}})

    table = batch(
        [1], [1], [1], [1], metadata=[None, noted(1), noted(2), None], source=["explorer"] * 3 + ["synthesis"]
    )
    made = {n: tasks(prepared(say(question="q"), kind="rephrase", max_generations=n).run(table)) for n in (1, 2, 3)}
    assert {n: sorted(task.payload["answer"] for task in new) for n, new in made.items()} == {
        1: ["1"],
        2: ["1", "2", "4"],
        3: ["1", "2", "3", "4"],
    }
    generations = {task.payload["answer"]: task.payload["metadata"]["synthesis"]["generation"] for task in made[3]}
    assert generations == {"1": 1, "2": 2, "3": 3, "4": 2}


def test_a_wrong_answer_becomes_an_experience_with_the_corrected_one(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def right(row, response):\n    return float(response == row['answer'])\n")
    asked: list[Messages] = []

    def correct(chat: Messages) -> str:
        asked.append(chat)
        return "1"

    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 0 + 1?"}]
    stored = json.dumps([*chat, {"role": "assistant", "content": "5"}])
    table = batch([0, 1, None], messages=[stored] * 3, response=["5", "1", "?"])
    result = prepared(correct, tmp_path, kind="self_correct", reward="./rewards.py:right").run(table)
    (group,) = groups(result)
    assert [turn["role"] for turn in asked[0]] == ["system", "user", "assistant", "user"]
    assert asked[0][2]["content"] == "5"
    (answer,) = group.answers
    assert (answer.messages, answer.response, answer.reward) == (chat, "1", 1.0)
    assert (group.parent_id, group.task, answer.metrics) == (100, None, {"generation": 1.0})


def test_a_correction_is_corrected_up_to_the_generation_allowed() -> None:
    chain = prepared(lambda _: "better", kind="self_correct", max_generations=2)
    generations = [json.dumps({"generation": n}) for n in (1.0, 2.0)]
    table = batch([0], [0], [0], source=["explorer", "synthesis", "synthesis"], metrics=["{}", *generations])
    made = sorted((group.parent_id, group.answers[0].metrics["generation"]) for group in groups(chain.run(table)))
    assert made == [(100, 1.0), (101, 2.0)]
    assert len({group.key for group in groups(chain.run(table))}) == 2


def test_without_a_reward_function_the_reward_is_awaited() -> None:
    (group,) = groups(prepared(lambda _: "better", kind="self_correct").run(batch([0])))
    assert group.answers[0].reward is None


def test_a_call_that_fails_makes_nothing_and_states_why() -> None:
    def fails(_: Messages) -> str:
        raise RuntimeError("gone")

    chain = prepared(fails, kind="rephrase")
    assert chain.run(batch([1])).created == []
    assert errors(chain, batch([1])) == ["the policy did not answer: RuntimeError: gone"]
    chain = prepared(say(quest="q"), kind="rephrase")
    assert chain.run(batch([1])).created == []
    assert "it contains no question" in str(errors(chain, batch([1]))[0])


@pytest.mark.parametrize(
    "answer", ['{"question": {"text": "1 + 1?"}}', 'I could not make {"question": "1 + 1?"} any harder, sorry.']
)
def test_a_question_is_a_text_and_the_last_word_of_an_answer(answer: str) -> None:
    chain = prepared(lambda _: answer, kind="rephrase")
    assert chain.run(batch([1])).created == []
    assert "it contains no question" in str(errors(chain, batch([1]))[0])


def test_the_error_is_a_column_that_later_stages_may_read() -> None:
    stages = [
        {"synthesize": {"kind": "rephrase", "endpoint": "policy"}},
        {"sql": "SELECT * FROM batch WHERE synthesis_error IS NULL"},
    ]
    chain = build_chain(stages)
    chain.prepare(StageContext(generate=lambda chats, *_: ["?" for _ in chats]))
    assert chain.run(batch([1, 1])).decisions["kept"].to_pylist() == [False, True]


VARIANTS = '''
def swapped(row, count=1):
    """The same sum with its terms the other way round."""
    return [{"prompt": f"{row['prompt']} ({n})", "answer": row["answer"], "features": {"n": n}} for n in range(count)]

def corrected(row):
    return [{"response": row["answer"], "reward": 1.0}, {"response": "?", "reward": 0.0}]

def broken(row):
    return [{"text": "?"}]
'''


def test_a_function_makes_tasks_offline_and_the_same_ones_again(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text(VARIANTS)
    arguments = {"kind": "./variants.py:swapped", "args": {"count": 2}, "taskset": "more"}
    first, again = (tasks(prepared(None, tmp_path, **arguments).run(batch([1], [0]))) for _ in range(2))
    assert first == again
    assert len({task.task_key for task in first}) == 4
    assert {task.taskset for task in first} == {"more"}
    assert min(task.payload["prompt"] for task in first) == "What is 0 + 1? (0)"
    assert {task.features["n"] for task in first} == {0, 1}


def test_a_function_makes_experiences(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text(VARIANTS)
    (group,) = groups(prepared(None, tmp_path, kind="./variants.py:corrected").run(batch([0])))
    assert [(answer.response, answer.reward) for answer in group.answers] == [("1", 1.0), ("?", 0.0)]
    assert group.answers[0].messages == [{"role": "user", "content": "What is 0 + 1?"}]


def test_a_function_that_returns_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text(VARIANTS)
    with pytest.raises(OperatorError, match=r"variants.py:broken returned something other than .* experience 100"):
        prepared(None, tmp_path, kind="./variants.py:broken").run(batch([0]))


def test_an_edited_function_is_another_pipeline_version(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text(VARIANTS)
    before = build_chain([{"synthesize": {"kind": "./variants.py:corrected"}}], tmp_path).version
    (tmp_path / "variants.py").write_text(VARIANTS + "\n# edited\n")
    assert build_chain([{"synthesize": {"kind": "./variants.py:corrected"}}], tmp_path).version != before


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"kind": "rephrse"}, ConfigError, "none of rephrase, harder, easier, self_correct"),
        ({"kind": "rephrase"}, ConfigError, "asks a model: give endpoint"),
        ({"kind": "harder", "endpoint": "policy", "args": {"a": 1}}, ConfigError, "args are for a function"),
        ({"kind": "./v.py:f", "endpoint": "policy"}, ConfigError, "uses no endpoint"),
        ({"kind": "./no.py:f"}, PluginError, "does not exist"),
        (
            {"kind": "harder", "endpoint": "policy", "reward": "./r.py:f"},
            ConfigError,
            "reward is for kind self_correct",
        ),
        ({"kind": "self_correct", "endpoint": "policy", "taskset": "t"}, ConfigError, "creates no tasks"),
        ({"kind": "harder", "endpoint": "policy", "template": "{prompt}"}, ConfigError, "unknown placeholder {prompt}"),
        ({"kind": "harder", "endpoint": "policy", "fraction": 0}, ConfigError, "fraction"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], kind: type[ConfigError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        build_chain([{"synthesize": arguments}], tmp_path)


def test_arguments_that_a_function_does_not_take_are_refused(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text(VARIANTS)
    with pytest.raises(ConfigError, match="cannot be called with a row and these args"):
        build_chain([{"synthesize": {"kind": "./variants.py:swapped", "args": {"number": 2}}}], tmp_path)


def test_tasks_are_made_of_tasks_before_any_was_tried(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text(VARIANTS)
    stages = [
        {"synthesize": {"kind": "rephrase", "endpoint": "policy"}},
        {"synthesize": {"kind": "./variants.py:swapped"}},
    ]
    chain = build_chain(stages, tmp_path, schema=TASK_BATCH_SCHEMA, require_reward=False)
    chain.prepare(StageContext(generate=lambda chats, *_: ['{"question": "Add one and one."}' for _ in chats]))
    assert all(stage.operator.rowwise for stage in chain.stages), "so that new tasks are decided on alone"
    result = chain.run(batch_of_tasks("What is 1 + 1?", "What is 1 + 2?"))
    made = {(task.payload["prompt"], task.parent_id) for task in tasks(result)}
    assert made == {
        ("Add one and one.", 0),
        ("Add one and one.", 1),
        ("What is 1 + 1? (0)", 0),
        ("What is 1 + 2? (0)", 1),
    }
    assert len({task.task_key for task in tasks(result)}) == 4


def test_experiences_cannot_be_made_of_tasks() -> None:
    with pytest.raises(ConfigError, match="reads the column 'response', which the batch does not have"):
        build_chain([{"synthesize": {"kind": "self_correct", "endpoint": "policy"}}], schema=TASK_BATCH_SCHEMA)
