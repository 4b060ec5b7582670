"""Data-Juicer operators run as stages under their own names, and never install anything."""

from __future__ import annotations

import random
import subprocess

import pytest

from operators.build import build_chain
from operators.data_juicer_index import index
from operators.stage import StageError
from rftdata.errors import ConfigError, PluginError
from tests.batches import batch_of_groups

RESPONSES = ["short", "a response of a good length", "see https://example.com/page for more", None]


def reasons(stage: object, **columns: list[object]) -> list[str | None]:
    table = batch_of_groups([1] * 4, **{"response": RESPONSES, **columns})
    found: list[str | None] = build_chain([stage]).run(table).decisions["reason"].to_pylist()  # type: ignore[list-item]
    return found


def test_the_index_of_names_is_data_juicers_own_registry() -> None:
    from data_juicer.ops import OPERATORS

    fused = {"fused_sequential_batch_op", "general_fused_op"}  # built by its optimiser, not written by people
    assert set(index()) == set(OPERATORS.modules) - fused


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


def test_a_filter_on_other_columns_sees_them() -> None:
    stage = {"specified_numeric_field_filter": {"field_key": "num_response_tokens", "min_value": 4}}
    found = reasons(stage, response=["a"] * 4, num_response_tokens=[1, 4, 9, 5])
    assert found == ["num_response_tokens 1 < min_value 4", None, None, None]


def test_a_reversed_range_says_what_the_statistic_is() -> None:
    stage = {"text_length_filter": {"min_len": 1, "max_len": 10, "reversed_range": True}}
    assert reasons(stage)[0] == "text_length_filter: text_len is 5 (min_len 1, max_len 10, reversed_range True)"


def test_a_mapper_changes_the_text_for_later_stages_only() -> None:
    chain = build_chain(
        [{"clean_links_mapper": {}}, {"sql": "FROM batch WHERE response LIKE '%https%' OR response IS NULL"}]
    )
    table = batch_of_groups([1] * 4, response=RESPONSES)
    assert chain.run(table).decisions["kept"].to_pylist() == [False, False, False, True]
    assert table["response"].to_pylist() == RESPONSES


def test_a_mapper_that_makes_new_rows_is_refused() -> None:
    with pytest.raises(StageError, match=r"text_chunk_mapper made \d+ rows of 3; allowed: mappers that give one row"):
        reasons({"text_chunk_mapper": {"max_len": 5}})


def test_a_deduplicator_keeps_the_first_of_equal_rows() -> None:
    same = "duplicate of an earlier row of the batch (document_deduplicator)"
    assert reasons({"document_deduplicator": {"lowercase": True}}, response=["a", "b", "A", "b"]) == [
        None,
        None,
        same,
        same,
    ]


def test_a_selector_chooses_the_same_rows_every_time_and_leaves_the_generator_alone() -> None:
    random.seed(5)
    before = random.getstate()
    first = reasons({"random_selector": {"select_num": 2}}, response=["a", "b", "c", "d"])
    assert first == reasons({"random_selector": {"select_num": 2}}, response=["a", "b", "c", "d"])
    assert first.count(None) == 2
    assert random.getstate() == before


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


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            {"text_length_filter": {"min_length": 3}},
            r"no key 'min_length'; allowed: min_len, max_len, text_key; did you mean",
        ),
        ({"text_length_filter": {"text_key": "reply"}}, r"text_key is not a column of the batch \(got 'reply'\)"),
        ({"text_length_filter": {"text_key": "reward"}}, r"text_key is not a column of text"),
        ({"text_length_filter": [1]}, r"arguments are not a mapping"),
        ({"naive_grouper": {}}, r"'naive_grouper' is a grouper that cannot be a stage"),
        ({"ray_document_deduplicator": {}}, r"cannot be a stage here"),
    ],
)
def test_wrong_arguments_are_refused_when_the_chain_is_built(stage: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([stage])  # type: ignore[list-item]


def test_arguments_that_data_juicer_refuses_are_a_configuration_error() -> None:
    chain = build_chain([{"fix_unicode_mapper": {"normalization": "XYZ"}}])
    with pytest.raises(ConfigError, match=r"stage 1 .*Data-Juicer refuses the arguments of fix_unicode_mapper"):
        chain.prepare()
