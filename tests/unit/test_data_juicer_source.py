"""What is read from the source of Data-Juicer's operators."""

from __future__ import annotations

import pyarrow as pa
import pytest

from operators.data_juicer.arguments import _adapter, _wrong, check_types
from operators.data_juicer.index import index
from operators.data_juicer.source import DECIDING, facts, stat_type


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("text_length_filter", {"min_len", "max_len"}),
        ("word_repetition_filter", {"min_ratio", "max_ratio"}),  # not rep_len, which is what is counted
        ("language_id_score_filter", {"min_score"}),  # its lang is stored in more than one way
        ("llm_quality_score_filter", {"min_score", "max_score"}),  # those of its parent
        ("image_shape_filter", {"min_width", "max_width", "min_height", "max_height", "any_or_all"}),
        ("general_field_filter", set()),
    ],
)
def test_a_bound_is_what_only_the_decision_looks_at(name: str, bounds: set[str]) -> None:
    assert facts(name).bounds - DECIDING == bounds


def test_every_filter_but_four_decides_on_its_statistics_alone() -> None:
    filters = [name for name, one in index().items() if one.kind == "filter"]
    assert len(filters) > 50
    assert {name for name in filters if not facts(name).splits} == {
        "specified_field_filter",
        "specified_numeric_field_filter",
        "suffix_filter",
        "video_tagging_from_frames_filter",
    }


def test_statistics_of_parents_are_not_those_of_the_child() -> None:
    assert facts("llm_quality_score_filter").stats == ("llm_quality_score", "llm_quality_record", "llm_quality_tags")


def test_types_of_statistics() -> None:
    types = {name: stat_type(name) for name in ("text_len", "lang", "llm_quality_record", "aspect_ratios")}
    assert types == {
        "text_len": pa.float64(),
        "lang": pa.string(),
        "llm_quality_record": pa.string(),
        "aspect_ratios": pa.list_(pa.float64()),
    }


def test_every_operator_can_be_read() -> None:
    found = {name: facts(name) for name in index()}
    assert found["clean_links_mapper"].plain and not found["python_lambda_mapper"].plain
    assert {name for name, one in found.items() if one.asks} > {"llm_quality_score_filter", "extract_keyword_mapper"}
    assert found["extract_keyword_mapper"].metas == (("keyword_key", "keyword"),)
    assert found["nlpaug_en_mapper"].draws and not found["text_length_filter"].draws


def test_arguments_that_fit_their_types_pass() -> None:
    check_types(facts("text_length_filter"), {"min_len": 10, "max_len": None, "text_key": "prompt", "batch_size": 4})
    check_types(facts("text_length_filter"), {"min_len": 10.0})
    check_types(facts("special_characters_filter"), {"max_ratio": 1})
    check_types(facts("remove_words_with_incorrect_substrings_mapper"), {"substrings": ["http"]})


def test_nearly_all_arguments_can_be_checked_and_no_default_is_refused() -> None:
    checked, unknown = 0, []
    for name in index():
        known = facts(name)
        for key in known.arguments or ():
            adapter = _adapter(known.annotations[key]) if known.annotations[key] else None
            default = known.defaults.get(key)
            if adapter is None or (default is not None and _wrong(adapter, default)):
                unknown.append(f"{name}.{key}")
            else:
                checked += 1
        check_types(known, known.defaults)
    assert checked > 1200 and len(unknown) < checked / 15, unknown


def test_mappers_that_make_rows() -> None:
    assert {name for name in index() if facts(name).makes_rows} == {
        "extract_event_mapper", "generate_qa_from_text_mapper", "image_captioning_mapper", "image_diffusion_mapper",
        "latex_figure_context_extractor_mapper", "nlpaug_en_mapper", "nlpcda_zh_mapper", "optimize_prompt_mapper", "text_chunk_mapper",
        "video_captioning_from_audio_mapper", "video_captioning_from_frames_mapper", "video_captioning_from_summarizer_mapper",
        "video_captioning_from_video_mapper", "video_captioning_from_vlm_mapper", "video_split_by_duration_mapper",
        "video_split_by_key_frame_mapper",
    }  # fmt: skip
