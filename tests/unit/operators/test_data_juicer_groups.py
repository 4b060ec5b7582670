"""Groupers and aggregators of Data-Juicer: groups and results are columns, and on tasks each group becomes a task."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from operators.base import CreatedTask, StageContext
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.chain.stage import StageError
from rftdata.errors import ConfigError
from rftdata.pipeline.records import Verdicts
from rftdata.pipeline.task_batches import TASK_BATCH_SCHEMA
from tests.support.batches import batch_of_groups, batch_of_tasks, stored
from tests.support.chat_server import Body, ChatServer, Says
from tests.support.models import make_tiny_model
from tests.support.waiting import PATIENCE_S

PROMPTS = ["Rain fell on the hills.", "The river rose.", "A bell rang.", "The bridge held."]
TOPICS = ["river", "river", "bell", "river"]
BY_TOPIC: dict[str, Any] = {"key_value_grouper": {"group_by_keys": ["metadata.topic"]}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str], Says | str]], ChatServer]]:
    servers: list[ChatServer] = []

    def start(answer: Callable[[str], Says | str]) -> ChatServer:
        servers.append(ChatServer(lambda _, body: answer(asked(body))))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def asked(body: Body) -> str:
    return str(body["messages"][-1]["content"])


def endpoint(server: ChatServer, tokenizer: str, **args: Any) -> dict[str, Any]:
    params = {"base_url": server.url, "api_key": "none", "max_retries": 0}
    return {
        "api_model": "tiny",
        "try_num": 2,
        "sub_doc_template": "* {text}",
        "input_template": "{sub_docs}",
        "system_prompt": "Sum up.",
        "model_params": {**params, "processor_config": {"pretrained_model_name_or_path": tokenizer}},
        **args,
    }


def tasks(topics: list[str] = TOPICS, prompts: list[str] = PROMPTS, **columns: Any) -> pa.Table:
    metadata = [json.dumps({"topic": topic, "level": len(topic)}) for topic in topics]
    return batch_of_tasks(*prompts, metadata=metadata, **columns)


def task_chain(*stages: Any) -> Chain:
    return build_chain(stages, schema=TASK_BATCH_SCHEMA, require_reward=False)


def columns_after(chain: Chain, table: pa.Table, *names: str) -> list[list[Any]]:
    seen: list[pa.Table] = []
    chain.run(table, watch=lambda _, before, after, outcome: seen.append(after))
    return [seen[-1][name].to_pylist() for name in names]


def made(result: Verdicts) -> list[CreatedTask]:
    return [task for task in result.created if isinstance(task, CreatedTask)]


def test_a_grouper_names_the_group_of_every_row() -> None:
    chain = task_chain(BY_TOPIC)
    river, bell = '{"metadata.topic": "river"}', '{"metadata.topic": "bell"}'
    assert columns_after(chain, tasks(), "dj_group") == [[river, river, bell, river]]
    assert chain.run(tasks()).decisions["kept"].to_pylist() == [True] * 4
    by_two = {"key_value_grouper": {"group_by_keys": ["taskset", "__dj__stats__.text_len"]}}
    (names,) = columns_after(task_chain({"text_length_filter": {}}, by_two), tasks(), "dj_group")
    assert names[0] == '{"__dj__stats__.text_len": 23.0, "taskset": "sums"}'
    assert columns_after(task_chain("naive_grouper"), tasks(), "dj_group") == [["{}"] * 4]
    (names,) = columns_after(task_chain("key_value_grouper"), tasks(prompts=["a", "b", "a", "c" * 999]), "dj_group")
    assert names[:3] == ['{"text": "a"}', '{"text": "b"}', '{"text": "a"}'] and re.fullmatch(r"[0-9a-f]{32}", names[3])


def test_groups_are_those_that_the_operator_makes_by_hand() -> None:
    from data_juicer.ops import OPERATORS

    rows = [{"metadata": {"topic": topic}, "row": row} for row, topic in enumerate(TOPICS)]
    by_hand = OPERATORS.modules["key_value_grouper"](group_by_keys=["metadata.topic"]).process(rows)
    (names,) = columns_after(task_chain(BY_TOPIC), tasks(), "dj_group")
    ours = [[row for row, name in enumerate(names) if name == wanted] for wanted in dict.fromkeys(names)]
    assert ours == [group["row"] for group in by_hand]


def test_an_aggregator_makes_one_task_of_every_group(serve: Any, tokenizer: str) -> None:
    server = serve(lambda text: f"in short: {text.count('* ')} of them")
    aggregator = {"nested_aggregator": endpoint(server, tokenizer, input_key="prompt", output_key="summary")}
    chain = task_chain(BY_TOPIC, aggregator)
    result = chain.run(tasks())
    of_three = "nested_aggregator made one task of its group of 3"
    assert result.decisions["reason"].to_pylist() == [
        of_three,
        of_three,
        "nested_aggregator made one task of its group of 1",
        of_three,
    ]
    assert result.decisions["stage"].to_pylist() == ["nested_aggregator"] * 4
    assert [(run.stage, run.rows_in, run.rows_kept, run.rows_created) for run in result.stages] == [
        ("key_value_grouper", 4, 4, 0),
        ("nested_aggregator", 4, 0, 2),
    ]
    rivers, bells = made(result)
    assert rivers.payload == {
        "prompt": "in short: 3 of them",
        "metadata": {"group": {"metadata.topic": "river"}, "summary": "in short: 3 of them"},
    }
    assert (rivers.parent_id, rivers.features, rivers.taskset) == (0, {"parent_task_ids": [0, 1, 3]}, "sums")
    # A group of one is its own summary: the endpoint is not asked.
    assert (bells.payload["prompt"], bells.features) == ("A bell rang.", {"parent_task_ids": [2]})
    assert [asked(body) for body in server.requests] == [
        "* Rain fell on the hills.\n* The river rose.\n* The bridge held."
    ]
    assert chain.passed_by(["nested_aggregator"]).stages == []


def test_a_group_that_stays_the_same_is_not_asked_about_again(serve: Any, tokenizer: str) -> None:
    server = serve(lambda text: f"{len(text)} characters")
    chain = task_chain(BY_TOPIC, {"nested_aggregator": endpoint(server, tokenizer, input_key="prompt")})
    first = chain.run(tasks(["a", "a", "b", "b"]))
    assert len(server.requests) == 2
    known = stored(first.scores)
    again = chain.run(tasks(["a", "a", "b", "b"]), stored_scores=known)
    assert len(server.requests) == 2 and made(again) == made(first)
    # Another row in one of the groups: that one is aggregated anew, into another task, and the other is not.
    grown = chain.run(tasks(["a", "a", "b", "b", "b"], [*PROMPTS, "A dam broke."]), stored_scores=known)
    assert len(server.requests) == 3
    assert made(grown)[0] == made(first)[0]
    assert made(grown)[1].task_key != made(first)[1].task_key
    assert made(grown)[1].features == {"parent_task_ids": [2, 3, 4]}
    # And another text in it.
    chain.run(tasks(["a", "a", "b", "b"], ["Snow fell.", *PROMPTS[1:]]), stored_scores=known)
    assert len(server.requests) == 4


def test_several_aggregators_end_in_one_task_with_all_that_they_found(serve: Any, tokenizer: str) -> None:
    def answer(text: str) -> str:
        return "## 列表\nthe rain, the bridge" if "相关的一些" in text else "# river\n## course\nIt rises in the hills."

    server = serve(answer)
    usual = endpoint(server, tokenizer, input_key="prompt")
    common = {key: usual[key] for key in ("api_model", "model_params", "try_num", "input_key")}
    chain = task_chain(
        BY_TOPIC,
        {"most_relevant_entities_aggregator": {**common, "entity": "river", "query_entity_type": "thing"}},
        {"entity_attribute_aggregator": {**common, "entity": "river", "attribute": "course"}},
    )
    result = chain.run(tasks(["river"] * 4))
    (task,) = made(result)
    assert task.payload["prompt"] == "It rises in the hills."
    assert task.payload["metadata"] == {
        "group": {"metadata.topic": "river"},
        "most_relevant_entities": ["the rain", "the bridge"],
        "entity_attribute": "It rises in the hills.",
    }
    assert [run.rows_kept for run in result.stages] == [4, 4, 0]
    assert chain.passed_by(["entity_attribute_aggregator"]).stages == []


def test_a_reverse_grouper_leaves_the_rows_with_what_was_found(serve: Any, tokenizer: str) -> None:
    server = serve(lambda text: "a summary")
    chain = task_chain(
        BY_TOPIC,
        {"nested_aggregator": endpoint(server, tokenizer, input_key="prompt", output_key="summary")},
        "naive_reverse_grouper",
        {"sql": "FROM batch WHERE dj_summary = 'a summary'"},
    )
    result = chain.run(tasks())
    assert result.decisions["kept"].to_pylist() == [True, True, False, True]
    assert result.created == []


def test_tags_of_a_group_are_unified_and_the_rows_continue(serve: Any, tokenizer: str) -> None:
    server = serve(lambda text: "**joy归类为happy**\n**glad归类为happy**")
    tags = {
        "sql": "SELECT *, metadata->>'topic' AS dj_mood, json_array(metadata->>'topic', 'calm') AS dj_moods FROM batch"
    }
    usual = endpoint(server, tokenizer)
    args = {key: usual[key] for key in ("api_model", "model_params", "try_num")}
    one = task_chain(tags, "naive_grouper", {"meta_tags_aggregator": {**args, "meta_tag_key": "dj_mood"}})
    table = tasks(["joy", "glad", "sad", "joy"])
    assert columns_after(one, table, "dj_mood") == [["happy", "happy", "sad", "happy"]]
    assert one.run(table).decisions["kept"].to_pylist() == [True] * 4
    many = task_chain(tags, "naive_grouper", {"meta_tags_aggregator": {**args, "meta_tag_key": "dj_moods"}})
    (found,) = columns_after(many, table, "dj_moods")
    assert [json.loads(tags) for tags in found] == [
        ["happy", "calm"],
        ["happy", "calm"],
        ["sad", "calm"],
        ["happy", "calm"],
    ]


def test_a_group_that_the_endpoint_fails_is_dropped_with_the_reason_and_asked_about_again(
    serve: Any, tokenizer: str
) -> None:
    server = serve(lambda text: Says("busy", 500) if "bell" in text else "a summary")
    chain = task_chain(BY_TOPIC, {"nested_aggregator": endpoint(server, tokenizer, input_key="prompt")})
    topics, prompts = ["river", "bell", "bell", "river"], [*PROMPTS[:2], "A bell rang.", PROMPTS[3]]
    result = chain.run(tasks(topics, prompts))
    failed = "nested_aggregator made nothing of its group: the endpoint gave no answer that the operator understands"
    assert result.decisions["reason"].to_pylist()[1:3] == [failed, failed]
    assert [task.payload["prompt"] for task in made(result)] == ["a summary"]
    assert len(server.requests) == 3  # try_num is 2
    (scores,) = result.scores
    assert scores.table["dj_nested_aggregator_error"].is_null().to_pylist() == [True, False, False, True]


def test_a_summary_that_lacks_a_part_of_its_group_is_none(serve: Any, tokenizer: str) -> None:
    server = serve(lambda text: Says("busy", 500) if "bell" in text else "a summary")
    # A few tokens a call: every text has a separate call, and the operator continues without one that fails.
    args = endpoint(server, tokenizer, input_key="prompt", max_token_num=30)
    result = task_chain(BY_TOPIC, {"nested_aggregator": args}).run(
        tasks(["x", "x", "x", "x", "y", "y"], [*PROMPTS, "One.", "Two."])
    )
    assert [task.features["parent_task_ids"] for task in made(result)] == [[4, 5]]
    assert result.decisions["reason"][0].as_py().startswith("nested_aggregator made nothing of its group")


def test_an_endpoint_that_never_answers_fails_the_batch(serve: Any, tokenizer: str) -> None:
    server = serve(lambda text: Says("busy", 500))
    chain = task_chain("naive_grouper", {"nested_aggregator": endpoint(server, tokenizer, input_key="prompt")})
    with pytest.raises(StageError, match=r"nested_aggregator got no answer that it understands for any of 1 groups"):
        chain.run(tasks())
    # A group of one sends no request, so it proves nothing about the endpoint.
    by_topic = task_chain(BY_TOPIC, {"nested_aggregator": endpoint(server, tokenizer, input_key="prompt")})
    with pytest.raises(StageError, match=r"for any of 1 groups"):
        by_topic.run(tasks())


def test_groups_are_asked_about_at_the_same_time(serve: Any, tokenizer: str) -> None:
    meet = threading.Barrier(4)  # broken, and the group without an answer, unless all four come at once

    def answer(text: str) -> str:
        meet.wait(PATIENCE_S)
        return text[:6]

    server = serve(answer)
    args = endpoint(server, tokenizer, input_key="prompt", num_proc=4)
    result = task_chain(BY_TOPIC, {"nested_aggregator": args}).run(
        tasks(["a", "a", "b", "b", "c", "c", "d", "d"], [f"{n} is a number." for n in range(8)])
    )
    assert [task.payload["prompt"] for task in made(result)] == ["* 0 is", "* 2 is", "* 4 is", "* 6 is"]
    assert server.busiest == 4


def test_the_runs_model_counts_tokens_where_nothing_else_does(serve: Any, tokenizer: str) -> None:
    server = serve(lambda text: "a summary")
    args = endpoint(server, tokenizer, input_key="prompt")
    del args["model_params"]["processor_config"]
    chain = task_chain(BY_TOPIC, {"nested_aggregator": args})
    with pytest.raises(ConfigError, match=r"finds no tokenizer for its model \(got 'tiny'\).*processor_config"):
        chain.prepare()
    chain.prepare(StageContext(Path(tokenizer).parent, model_path=f"./{Path(tokenizer).name}"))
    assert made(chain.run(tasks()))[0].payload["prompt"] == "a summary"


def test_a_recipe_groups_and_aggregates(serve: Any, tokenizer: str) -> None:
    server = serve(lambda text: "a summary")
    process = [
        {"key_value_grouper": {"group_by_keys": ["meta.topic"]}},
        {"nested_aggregator": endpoint(server, tokenizer, input_key="text")},
    ]
    chain = task_chain({"data_juicer": {"process": process, "keys": {"meta": "metadata", "text": "prompt"}}})
    assert [task.features["parent_task_ids"] for task in made(chain.run(tasks()))] == [[0, 1, 3], [2]]


def test_on_experiences_a_rollout_group_is_aggregated_into_a_column(serve: Any, tokenizer: str) -> None:
    server = serve(lambda text: f"{text.count('* ')} answers")
    stages: list[Any] = [
        {"key_value_grouper": {"group_by_keys": ["group_id"]}},
        {"nested_aggregator": endpoint(server, tokenizer, input_key="response", output_key="summary")},
        {"sql": "FROM batch WHERE dj_summary = '2 answers'"},
    ]
    chain = build_chain(stages)
    table = batch_of_groups([0, 1], [1, 1, 0])
    result = chain.run(table)
    assert result.decisions["kept"].to_pylist() == [True, True, False, False, False]
    assert result.created == [] and len(server.requests) == 2
    # However batches are cut, groups are whole: what is stored is used again.
    alone = chain.run(table.slice(2, 3).combine_chunks(), stored_scores=stored(result.scores))
    assert alone.decisions["kept"].to_pylist() == [False] * 3 and len(server.requests) == 2


def test_what_a_mapper_finds_in_a_row_of_several_is_metadata_of_the_task_that_it_makes(serve: Any) -> None:
    def answer(text: str) -> str:
        event = "### 情节{}：\n- **情节描述**： {}\n- **相关人物**：{}\n"
        events = (
            [("Rain fell.", "hills"), ("Water rose.", "river，hills")] if "Rain" in text else [("It rang.", "bell")]
        )
        return "".join(event.format(number, *one) for number, one in enumerate(events, start=1))

    server = serve(answer)
    params = {"base_url": server.url, "api_key": "none", "max_retries": 0}
    chain = task_chain({"extract_event_mapper": {"api_model": "tiny", "model_params": params}})
    result = chain.run(tasks()[:3])
    assert result.decisions["reason"].to_pylist() == ["extract_event_mapper made 2 tasks of it", None, None]
    assert [task.payload["metadata"] for task in made(result)] == [
        {"topic": "river", "level": 5, "event_description": "Rain fell.", "relevant_characters": ["hills"]},
        {"topic": "river", "level": 5, "event_description": "Water rose.", "relevant_characters": ["river", "hills"]},
    ]
    assert columns_after(chain, tasks()[1:3], "dj_event_description") == [["It rang.", "It rang."]]


NESTED: dict[str, Any] = {"nested_aggregator": {"input_key": "prompt"}}
STORY: dict[str, Any] = {"nested_aggregator": {"input_key": "prompt", "output_key": "story"}}
READS_STORY: dict[str, Any] = {"sql": "SELECT * FROM batch WHERE dj_story <> ''"}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([NESTED], r"stage 1 .*no stage before it groups the rows.*put a grouper with the same prefix before it"),
        ([BY_TOPIC, "naive_reverse_grouper", NESTED], r"stage 3 .*no stage before it groups the rows"),
        (["naive_reverse_grouper"], r"no stage before it groups the rows"),
        ([{"naive_grouper": {"prefix": "my_"}}, NESTED], r"no stage before it groups the rows"),
        ([BY_TOPIC, "nested_aggregator"], r"input_key is neither a column .* nor a tag .*\(got 'event_description'\)"),
        ([BY_TOPIC, NESTED, NESTED], r"has the same output column \(got 'dj_prompt'\); set its output_key"),
        ([BY_TOPIC, {"naive_reverse_grouper": {"batch_meta_export_path": "x"}}], r"it writes no file here"),
        ([BY_TOPIC, {"meta_tags_aggregator": {"meta_tag_key": "attempts"}}], r"meta_tag_key is not a column of tags"),
        (
            [{"key_value_grouper": {"group_by_keys": ["colour"]}}],
            r"a column that the batch does not have \(got 'colour'\)",
        ),
        ([{"key_value_grouper": {"keys": ["prompt"]}}], r"there is no key 'keys'; allowed: group_by_keys"),
        (
            [BY_TOPIC, STORY, READS_STORY],
            r"stage 3 .*\(sql\).*dj_story.*rows end at stage 2 \(nested_aggregator\).*metadata.group, metadata.story",
        ),
        (
            [BY_TOPIC, {"sql": "SELECT * FROM batch WHERE dj_group <> ''"}, STORY],
            r"stage 2 .*\(sql\).*dj_group.*rows end at stage 3 \(nested_aggregator\)",
        ),
        (["ray_repartition_pipeline"], r"works on a whole Ray data set.*leave it out"),
    ],
)
def test_what_cannot_be_grouped_is_refused_when_the_chain_is_built(stages: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task_chain(*stages)


@pytest.mark.parametrize(
    "stages",
    [
        [BY_TOPIC, STORY, "naive_reverse_grouper", READS_STORY],
        [BY_TOPIC, STORY, {"sql": "SELECT * FROM batch WHERE metadata ->> 'story' <> ''"}],
        [BY_TOPIC, STORY, {"meta_tags_aggregator": {"meta_tag_key": "dj_story"}}, {"words_num_filter": {}}],
        [
            {"words_num_filter": {}},
            BY_TOPIC,
            STORY,
            BY_TOPIC,
            NESTED,
            {"sql": "SELECT * FROM batch WHERE dj_num_words > 1"},
        ],
    ],
)
def test_what_the_tasks_of_groups_have_can_be_read_behind_them(stages: list[Any]) -> None:
    assert [stage.index for stage in task_chain(*stages).stages] == list(range(1, len(stages) + 1))


def test_the_task_of_a_group_passes_all_stages_but_those_of_its_grouping() -> None:
    tags = {"meta_tags_aggregator": {"meta_tag_key": "dj_story"}}
    chain = task_chain({"words_num_filter": {}}, BY_TOPIC, {"clean_ip_mapper": {}}, STORY, tags, BY_TOPIC, NESTED)
    behind_story = chain.passed_by(["nested_aggregator"]).stages
    assert [stage.name for stage in behind_story] == [
        "words_num_filter",
        "clean_ip_mapper",
        "key_value_grouper#2",
        "nested_aggregator#2",
    ]
    behind_both = chain.passed_by(["nested_aggregator", "nested_aggregator#2"]).stages
    assert [stage.name for stage in behind_both] == ["words_num_filter", "clean_ip_mapper"]
    assert chain.passed_by([]) is chain


@pytest.mark.parametrize("stage", ["naive_grouper", {"key_value_grouper": {"group_by_keys": ["taskset"]}}])
def test_on_experiences_a_group_that_a_batch_could_cut_is_refused(stage: Any) -> None:
    with pytest.raises(ConfigError, match=r"a group must lie within one rollout group.*add group_id"):
        build_chain([stage])
