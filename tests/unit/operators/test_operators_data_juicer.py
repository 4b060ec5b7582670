"""Data-Juicer operators run as stages under their own names, and never install anything."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from operators.chain.build import build_chain
from operators.chain.stage import StageError
from operators.data_juicer.catalogue import operator_names
from operators.data_juicer.runtime import missing_package_named
from rftdata.errors import ConfigError, PluginError
from tests.support.batches import batch_of_groups, replaced

RESPONSES = ["short", "a response of a good length", "see https://example.com/page for more", None]

FOX = "The quick brown fox jumps over the lazy dog near the river bank."
TEXTS = [
    FOX,
    "<p>Mail me: someone@example.com or see https://example.com/page</p>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "$$$ *** ### @@@ !!! 123",
    "one line\nanother much longer line of this text\n\n",
    "to be or not to be to be or not to be to be or not to be",
    "server at 192.168.0.1 answers:   all   is   well",
    FOX,
]


def reasons(stage: Any, **columns: list[Any]) -> list[str | None]:
    table = batch_of_groups([1] * 4, **{"response": RESPONSES, **columns})
    found: list[str | None] = build_chain([stage]).run(table).decisions["reason"].to_pylist()
    return found


def kept(stages: list[Any], **columns: list[Any]) -> list[bool]:
    table = batch_of_groups([1] * len(next(iter(columns.values()))), **columns)
    found: list[bool] = build_chain(stages).run(table).decisions["kept"].to_pylist()
    return found


def after(stage: Any, column: str, **columns: list[Any]) -> list[Any]:
    """The values of a column once the stage has run."""
    seen: list[list[Any]] = []
    columns = columns or {"response": TEXTS}
    table = batch_of_groups([1] * len(next(iter(columns.values()))), **columns)
    build_chain([stage]).run(table, watch=lambda _, before, changed, outcome: seen.append(changed[column].to_pylist()))
    return seen[-1]


def test_the_index_of_names_is_data_juicers_own_registry() -> None:
    from data_juicer.ops import OPERATORS

    fused = {"fused_sequential_batch_op", "general_fused_op"}  # built by its optimiser, not written by people
    assert set(operator_names()) == set(OPERATORS.modules) - fused


def test_a_batched_filter_keeps_and_drops_with_its_statistic_as_reason() -> None:
    null = "response is null, which text_length_filter cannot read"
    assert reasons({"text_length_filter": {"min_len": 10, "max_len": 30}}) == [
        "text_len 5 < min_len 10",
        None,
        "text_len 37 > max_len 30",
        null,
    ]


def test_text_key_names_another_column() -> None:
    stage = {"text_length_filter": {"min_len": 3, "text_key": "answer"}}
    assert reasons(stage, answer=["1", "12", "123", "1234"]) == [
        "text_len 1 < min_len 3",
        "text_len 2 < min_len 3",
        None,
        None,
    ]


def test_a_path_leads_into_the_metadata_of_the_task() -> None:
    stage = {"text_length_filter": {"min_len": 3, "text_key": "metadata.title"}}
    metadata = [json.dumps({"title": title}) for title in ("a", "ab", "abc", "abcd")]
    assert kept([stage], metadata=metadata) == [False, False, True, True]


def test_a_row_that_a_path_leads_nowhere_in_is_treated_like_a_null() -> None:
    metadata = ['{"note": "abc"}', "{}", None, '{"note": null}']
    stage = {"text_length_filter": {"text_key": "metadata.note", "min_len": 4}}
    null = "metadata.note is null, which text_length_filter cannot read"
    assert reasons(stage, metadata=metadata) == ["text_len 3 < min_len 4", null, null, null]


def test_a_mapper_leaves_a_row_alone_that_its_path_leads_nowhere_in() -> None:
    metadata = ['{"note": "see http://a.b/c"}', "{}", None, "null"]
    stage = {"clean_links_mapper": {"text_key": "metadata.note"}}
    assert after(stage, "metadata", metadata=metadata) == ['{"note": "see "}', "{}", None, "null"]


def test_a_filter_on_other_columns_sees_them() -> None:
    stage = {"specified_numeric_field_filter": {"field_key": "num_response_tokens", "min_value": 4}}
    found = reasons(stage, response=["a"] * 4, num_response_tokens=[1, 4, 9, 5])
    assert found == ["num_response_tokens 1 < min_value 4", None, None, None]


def test_a_condition_reads_the_columns_that_it_names() -> None:
    stage = {"general_field_filter": {"filter_condition": "num_response_tokens > 3 and reward == 1"}}
    assert kept([stage], num_response_tokens=[1, 4, 9, 5]) == [False, True, True, True]
    assert build_chain([stage]).stages[0].operator.reads == {"num_response_tokens", "reward"}


def test_a_reversed_range_states_what_the_statistic_is() -> None:
    stage = {"text_length_filter": {"min_len": 1, "max_len": 10, "reversed_range": True}}
    assert reasons(stage)[0] == "text_length_filter: text_len is 5 (min_len 1, max_len 10, reversed_range True)"


def test_a_mapper_changes_the_text_for_later_stages_only() -> None:
    chain = build_chain(
        [{"clean_links_mapper": {}}, {"sql": "FROM batch WHERE response LIKE '%https%' OR response IS NULL"}]
    )
    table = batch_of_groups([1] * 4, response=RESPONSES)
    assert chain.run(table).decisions["kept"].to_pylist() == [False, False, False, True]
    assert table["response"].to_pylist() == RESPONSES


@pytest.mark.parametrize(
    "stage",
    [
        {"alphanumeric_filter": {"min_ratio": 0.6}},
        {"average_line_length_filter": {"min_len": 20, "max_len": 60}},
        {"character_repetition_filter": {"rep_len": 5, "max_ratio": 0.5}},
        {"maximum_line_length_filter": {"max_len": 50}},
        {"special_characters_filter": {"max_ratio": 0.3}},
        {"word_repetition_filter": {"rep_len": 2, "max_ratio": 0.5}},
        {"words_num_filter": {"min_num": 9}},
        {"text_length_filter": {"max_len": 50}},
    ],
)
def test_a_filter_keeps_the_rows_that_the_operator_keeps_by_hand(stage: dict[str, Any]) -> None:
    from data_juicer.ops import OPERATORS

    ((name, args),) = stage.items()
    op = OPERATORS.modules[name](**args)
    samples: dict[str, Any] = {"text": list(TEXTS), "__dj__stats__": [{} for _ in TEXTS]}
    by_hand = [bool(keep) for keep in op.process_batched(op.compute_stats_batched(samples))]
    assert kept([stage], response=TEXTS) == by_hand
    assert len(set(by_hand)) == 2


@pytest.mark.parametrize(
    ("stage", "row", "text"),
    [
        ({"clean_email_mapper": {}}, 1, "<p>Mail me:  or see https://example.com/page</p>"),
        ({"clean_ip_mapper": {}}, 6, "server at  answers:   all   is   well"),
        ({"whitespace_normalization_mapper": {}}, 4, "one line\nanother much longer line of this text"),
        ({"remove_long_words_mapper": {"max_len": 20}}, 2, ""),
        ({"remove_specific_chars_mapper": {"chars_to_remove": "$*#@!"}}, 3, "     123"),
        ({"replace_content_mapper": {"pattern": "fox", "repl": "cat"}}, 0, FOX.replace("fox", "cat")),
        ({"python_lambda_mapper": {"lambda_str": "lambda row: {**row, 'response': 'x'}"}}, 0, "x"),
        ({"remove_repeat_sentences_mapper": {}}, 0, FOX),
        ({"python_lambda_mapper": {"lambda_str": "lambda row: {**row, 'text': row['text'][:3]}"}}, 0, "The"),
    ],
)
def test_a_mapper_changes_the_text(stage: dict[str, Any], row: int, text: str) -> None:
    assert after(stage, "response")[row] == text


def test_what_a_mapper_adds_under_its_own_name_is_a_column() -> None:
    stage = {"python_lambda_mapper": {"lambda_str": "lambda row: {**row, 'shouts': row['response'].count('!')}"}}
    assert after(stage, "shouts") == [0, 0, 0, 3, 0, 0, 0, 0]


def test_tags_are_columns_and_scores() -> None:
    html = ["<table><tr><td>a</td><td>b</td></tr></table>", "none"]
    stage = {"extract_tables_from_html_mapper": {}}
    assert after(stage, "dj_html_tables", response=html) == ['[[["a", "b"]]]', "[]"]
    chain = build_chain([stage, {"sql": "FROM batch WHERE dj_html_tables <> '[]' "}])
    result = chain.run(batch_of_groups([1] * 2, response=html))
    assert result.decisions["kept"].to_pylist() == [True, False]
    assert result.scores[0].table.column_names == ["experience_id", "dj_html_tables"]


def test_statistics_are_columns_for_later_stages() -> None:
    stages = [
        {"text_length_filter": {"min_len": 1}},
        {"words_num_filter": {"min_num": 1, "prefix": "my_"}},
        {"text_length_filter": {"min_len": 1, "text_key": "prompt", "prefix": "prompt_"}},
        {"sql": "FROM batch WHERE dj_text_len / my_num_words < 6 AND prompt_text_len = 14"},
    ]
    assert kept(stages, response=TEXTS) == [True, False, False, False, True, True, False, True]


def test_a_selector_reads_the_statistic_of_an_earlier_stage() -> None:
    stages = [
        {"text_length_filter": {"min_len": 1}},
        {"topk_specified_field_selector": {"field_key": "__dj__stats__.text_len", "topk": 2}},
    ]
    assert kept(stages, response=["a", "bbbb", "cc", "ddd"]) == [False, True, False, True]


def test_statistics_are_scores_which_other_bounds_do_not_compute_again() -> None:
    table = batch_of_groups([1] * 4, response=["a", "bbbb", "cc", "ddd"])
    loose = build_chain([{"text_length_filter": {"min_len": 2}}])
    strict = build_chain([{"text_length_filter": {"min_len": 4}}])
    (scores,) = loose.run(table).scores
    assert scores.table.to_pydict() == {"experience_id": [100, 101, 102, 103], "dj_text_len": [1, 4, 2, 3]}
    assert loose.version != strict.version
    assert loose.score_keys == strict.score_keys == [scores.score_key]
    # Stored values that the operator would not compute show that it was not asked again.
    known = replaced(loose, table, {key: {"dj_text_len": 7.0} for key in (100, 101, 102)})
    again = strict.run(table, stored_scores=known)
    assert again.decisions["reason"].to_pylist() == [None, None, None, "text_len 3 < min_len 4"]
    assert again.scores[0].table["experience_id"].to_pylist() == [103]
    # With all of them stored, nothing is computed.
    known = replaced(loose, table, {key: {"dj_text_len": 3.0} for key in (100, 101, 102, 103)})
    assert strict.run(table, stored_scores=known).scores == []


def test_an_argument_that_changes_the_statistic_changes_its_key() -> None:
    arguments: list[dict[str, Any]] = [
        {"rep_len": 5},
        {"rep_len": 5, "max_ratio": 0.1},
        {"rep_len": 6},
        {"rep_len": 5, "text_key": "prompt"},
    ]
    keys = [build_chain([{"character_repetition_filter": args}]).score_keys[0] for args in arguments]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_the_same_filter_twice_reports_its_scores_once() -> None:
    stages = [{"text_length_filter": {"min_len": 2}}, {"text_length_filter": {"min_len": 1, "max_len": 3}}]
    result = build_chain(stages).run(batch_of_groups([1] * 4, response=["a", "bbbb", "cc", "ddd"]))
    assert result.decisions["kept"].to_pylist() == [False, False, True, True]
    assert len(result.scores) == 1


def test_a_mapper_that_makes_new_rows_is_refused_on_experiences() -> None:
    with pytest.raises(
        ConfigError, match=r"text_chunk_mapper\): it makes several rows from one; allowed: on experiences, "
    ):
        build_chain([{"text_chunk_mapper": {"max_len": 5}}])
    # Code of one's own is known when it has run.
    twice = {
        "python_lambda_mapper": {"lambda_str": "lambda batch: {k: v * 2 for k, v in batch.items()}", "batched": True}
    }
    with pytest.raises(StageError, match=r"python_lambda_mapper made 8 rows of 4; allowed: on experiences, mappers"):
        reasons(twice)


def test_on_tasks_every_new_row_is_a_task_and_the_old_one_is_dropped() -> None:
    table = batch_of_groups([1], [1], prompt=["abcdefgh", "abc"]).drop_columns(["response"])
    table = table.append_column("task_key", pa.array(["t/1", "t/2"]))
    result = build_chain([{"text_chunk_mapper": {"max_len": 4}}], schema=table.schema).run(table)
    assert result.decisions["reason"].to_pylist() == ["text_chunk_mapper made 2 tasks of it", None]
    assert result.stages[0].rows_created == 2
    made = [(task.task_key, task.payload["prompt"], task.parent_id) for task in result.created]  # type: ignore[union-attr]
    assert made == [("t/1/text_chunk_mapper/0", "abcd", 100), ("t/1/text_chunk_mapper/1", "efgh", 100)]


def test_a_deduplicator_keeps_the_first_of_equal_rows() -> None:
    same = "duplicate of an earlier row of the batch (document_deduplicator)"
    assert reasons({"document_deduplicator": {"lowercase": True}}, response=["a", "b", "A", "b"]) == [
        None,
        None,
        same,
        same,
    ]


def test_the_logging_of_the_process_stays_as_it_is() -> None:
    program = """
import logging
from operators.chain.build import build_chain

build_chain([{"text_length_filter": {}}]).prepare()
print(logging.getLogger().level == logging.WARNING, logging.getLogger().handlers)
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout == "True []\n"


def test_a_selector_chooses_the_same_rows_every_time_and_leaves_the_generators_alone() -> None:
    random.seed(5)
    np.random.seed(5)
    before, before_numpy = random.getstate(), np.random.get_state()[1].copy()  # type: ignore[union-attr]
    first = reasons({"random_selector": {"select_num": 2}}, response=["a", "b", "c", "d"])
    assert first == reasons({"random_selector": {"select_num": 2}}, response=["a", "b", "c", "d"])
    assert first.count(None) == 2
    assert random.getstate() == before
    assert (np.random.get_state()[1] == before_numpy).all()  # type: ignore[index]


def test_a_long_chain_decides_the_same_twice_and_in_parts() -> None:
    stages: list[dict[str, Any]] = [
        {"clean_links_mapper": {}},
        {"whitespace_normalization_mapper": {}},
        {"text_length_filter": {"min_len": 10}},
        {"words_num_filter": {"min_num": 2}},
        {"character_repetition_filter": {"max_ratio": 0.8}},
        {"random_selector": {"select_ratio": 0.7}},
    ]
    texts = [" ".join(random.Random(row).choices(TEXTS[row % 8].split(), k=row % 11 + 1)) for row in range(200)]
    table = batch_of_groups([1] * 200, response=texts)
    first = build_chain(stages).run(table)
    parts = [
        {name: {**args, "run": {"batch_rows": 7, "concurrency": 2}}}
        for stage in stages[:5]
        for name, args in stage.items()
    ]
    second = build_chain([*parts, stages[5]]).run(table)
    assert first.decisions.equals(second.decisions)
    assert [one.table for one in first.scores] == [one.table for one in second.scores]
    assert 0 < sum(first.decisions["kept"].to_pylist()) < 200


def test_images_are_read_from_the_paths_in_the_metadata(tmp_path: Path) -> None:
    from PIL import Image

    for name, size in (("wide", (90, 10)), ("square", (20, 20))):
        Image.new("RGB", size, "white").save(tmp_path / f"{name}.png")
    paths = [[str(tmp_path / f"{name}.png")] for name in ("wide", "square", "square")] + [[]]
    metadata = [json.dumps({"images": images}) for images in paths]
    assert reasons({"image_aspect_ratio_filter": {"min_ratio": 0.5, "max_ratio": 2}}, metadata=metadata) == [
        "image_aspect_ratio_filter: aspect_ratios is [9] (min_ratio 0.5, max_ratio 2)",
        None,
        None,
        None,
    ]
    shape = {"image_shape_filter": {"image_key": "metadata.images"}}
    assert after(shape, "dj_image_width", metadata=metadata) == [[90], [20], [20], []]
    assert kept([{"image_size_filter": {"min_size": "1kb"}}], metadata=metadata) == [False, False, False, True]


def test_a_recipe_file_becomes_stages_in_its_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "project_name: demo\ndataset_path: somewhere.jsonl\nnp: 4\ntext_keys: text\nprocess:\n"
        "  - clean_links_mapper:\n  - text_length_filter:\n      min_len: 10\n      max_len: 60\n  - document_deduplicator:\n"
    )
    chain = build_chain(
        [{"data_juicer": {"recipe": "recipe.yaml"}}, {"sql": "FROM batch WHERE dj_text_len > 20"}], tmp_path
    )
    assert [(stage.index, stage.name) for stage in chain.stages] == [
        (1, "clean_links_mapper"),
        (2, "text_length_filter"),
        (3, "document_deduplicator"),
        (4, "sql"),
    ]
    assert "dataset_path, np, project_name" in caplog.text
    texts = ["tiny", "a text of a good length", "a text of a good length", "x" * 99]
    stages = chain.run(batch_of_groups([1] * 4, response=texts)).decisions["stage"].to_pylist()
    assert stages == ["text_length_filter", None, "document_deduplicator", "text_length_filter"]


def test_a_recipe_finds_its_columns_under_other_names() -> None:
    process = [
        {"text_length_filter": {"min_len": 3, "text_key": "content"}},
        {"specified_field_filter": {"field_key": "origin", "target_value": ["explorer"]}},
    ]
    stages = [{"data_juicer": {"process": process, "keys": {"content": "answer", "origin": "source"}}}]
    sources = ["explorer", "explorer", "explorer", "human"]
    assert kept(stages, answer=["1", "12", "123", "1234"], source=sources) == [False, False, True, False]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, r"stage 1 .*\(data_juicer\): it takes a recipe file or a list of operators"),
        ({"recipe": "nowhere.yaml"}, r"the recipe cannot be read .*nowhere.yaml"),
        ({"process": [{"sql": "FROM batch"}]}, r"entry 1 of process is not an operator of Data-Juicer \(got 'sql'\)"),
        ({"process": [{"text_length_filter": {"min_length": 3}}]}, r"\(text_length_filter\): there is no key"),
        ({"process": []}, r"process is not a list of operators"),
        ({"process": [{"text_length_filter": {}}], "mode": "cluster"}, r"the key 'mode' is wrong"),
    ],
)
def test_a_wrong_recipe_is_refused_when_the_chain_is_built(args: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([{"data_juicer": args}])


@pytest.fixture
def own_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster that the test starts, which ends with it."""
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("own_cluster")
def test_over_ray_the_outcome_is_the_same() -> None:
    process = [
        {"clean_links_mapper": {}},
        {"text_length_filter": {"min_len": 30}},
        {"words_num_filter": {"min_num": 2}},
    ]
    table = batch_of_groups([1] * 8, [1] * 8, response=[*TEXTS, *RESPONSES, *RESPONSES])
    here = build_chain([{"data_juicer": {"process": process}}]).run(table)
    there = build_chain([{"data_juicer": {"process": process, "mode": "ray"}}]).run(table)
    assert there.decisions.equals(here.decisions)
    assert [one.table for one in there.scores] == [one.table for one in here.scores]
    unique = build_chain([{"ray_document_deduplicator": {}}])
    first = unique.run(batch_of_groups([1] * 4, response=["a", "b", "a", "b"]))
    assert first.decisions["kept"].to_pylist() == [True, True, False, False]
    # Nothing is remembered from one batch to the next.
    second = unique.run(batch_of_groups([1] * 4, response=["a", "b", "a", "c"]))
    assert second.decisions["kept"].to_pylist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("operator", "package"),
    [
        ("fix_unicode_mapper", "ftfy"),  # imported when first used
        ("text_action_filter", "spacy"),  # looked for by its constructor
        ("document_simhash_deduplicator", "simhash-pybind"),
    ],
)
def test_a_missing_package_is_named_before_the_first_batch_and_not_installed(
    operator: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess, "check_call", started.append)
    chain = build_chain([{"drop_truncated": None}, {operator: None}])
    with pytest.raises(PluginError, match=rf"stage 2 .*needs the package {package}.*pip install '{package}'"):
        chain.prepare()
    assert started == []


def test_an_operator_that_starts_pip_itself_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # if it were not stopped, pip would at least find nothing
    chain = build_chain([{"image_mmpose_mapper": {"image_key": "metadata.images"}}])
    with pytest.raises(PluginError, match=r"needs the package openmim, .*pip install 'openmim'"):
        chain.prepare()


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "pip", "install", "-q", "demo"],
        "uv pip install demo",
        ["git", "clone", "demo"],
        ["mim", "install", "demo"],
    ],
)
def test_commands_that_install_are_refused_while_an_operator_works(command: Any) -> None:
    build_chain([{"text_length_filter": {}}]).prepare()
    with pytest.raises(PluginError, match="needs the package demo"), missing_package_named():
        subprocess.run(command, check=False, shell=isinstance(command, str))
    with missing_package_named():
        assert subprocess.run(["echo", "pip"], check=True, capture_output=True).stdout == b"pip\n"


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            {"text_length_filter": {"min_length": 3}},
            r"no key 'min_length'; allowed: min_len, max_len, text_key, prefix, mode; did you mean",
        ),
        ({"text_length_filter": {"text_key": "reply"}}, r"text_key is not a column of the batch \(got 'reply'\)"),
        ({"text_length_filter": {"text_key": "reward"}}, r"text_key is not a column of text"),
        ({"text_length_filter": {"prefix": "1-"}}, r"prefix is not a valid beginning of a column name"),
        ({"text_length_filter": {"mode": "spark"}}, r"unknown mode \(got 'spark'\)"),
        (
            {"text_length_filter": {"min_len": "ten"}},
            r"stage 1 .*\(text_length_filter\): the argument 'min_len' is of the wrong type: .* valid integer \(got 'ten'\); allowed: int",
        ),
        ({"text_length_filter": {"min_len": [1, 2]}}, r"'min_len' is of the wrong type"),
        (
            {"text_length_filter": {"text_key": 3}},
            r"'text_key' is of the wrong type: .* string \(got 3\); allowed: str",
        ),
        (
            {"text_length_filter": {"reversed_range": "no"}},
            r"'reversed_range' .* valid boolean \(got 'no'\); allowed: bool",
        ),
        # What is only compared with may be infinite, what is counted with may not; nor may a share of more than one.
        ({"word_repetition_filter": {"rep_len": math.inf}}, r"'rep_len' is of the wrong type"),
        ({"text_length_filter": {"reversed_range": math.inf}}, r"'reversed_range' .* valid boolean"),
        ({"text_length_filter": {"max_len": math.nan}}, r"'max_len' is of the wrong type"),
        ({"word_repetition_filter": {"rep_len": 0}}, r"'rep_len' .* greater than 0 \(got 0\); allowed: PositiveInt"),
        ({"image_aspect_ratio_filter": {"min_ratio": "1:2"}}, r"'min_ratio' .* \(got '1:2'\); allowed: float"),
        ({"replace_content_mapper": {"pattern": {"a": 1}}}, r"'pattern' .*; allowed: Union\[str, List\[str\], None\]"),
        (
            {"llm_quality_score_filter": {"sampling_params": "hot"}},
            r"'sampling_params' .* object \(got 'hot'\); allowed: Dict",
        ),
        ({"data_juicer": {"process": [{"text_length_filter": {"max_len": "x"}}]}}, r"'max_len' is of the wrong type"),
        ({"text_length_filter": [1]}, r"arguments are not a mapping"),
        ({"naive_grouper": {}}, r"on experiences a group must lie within one rollout group"),
        (
            {"specified_field_filter": {"field_key": "colour"}},
            r"a column that the batch does not have \(got 'colour'\)",
        ),
        ({"topk_specified_field_selector": {"field_key": "__dj__stats__.text_len"}}, r"no earlier stage computes"),
        ({"random_selector": {"select_num": 2, "run": {"batch_rows": 4}}}, r"its batches cannot be cut"),
    ],
)
def test_wrong_arguments_are_refused_when_the_chain_is_built(stage: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([stage])


def test_a_bound_that_is_a_whole_number_may_be_infinite() -> None:
    table = batch_of_groups([1.0] * 2, response=["", "four"])
    for args, kept in (
        ({"min_len": 2, "max_len": math.inf}, [False, True]),
        ({"min_len": -math.inf}, [True, True]),
        ({"min_len": math.inf}, [False, False]),
    ):
        found = build_chain([{"text_length_filter": {"text_key": "response", **args}}]).run(table)
        assert found.decisions["kept"].to_pylist() == kept
    assert found.decisions["reason"].to_pylist() == ["text_len 0 < min_len inf", "text_len 4 < min_len inf"]


def test_arguments_that_data_juicer_refuses_are_a_configuration_error() -> None:
    chain = build_chain([{"fix_unicode_mapper": {"normalization": "XYZ"}}])
    with pytest.raises(ConfigError, match=r"stage 1 .*Data-Juicer refuses the arguments of fix_unicode_mapper"):
        chain.prepare()
