"""The catalogue of Data-Juicer's operators: its contents, that it is up to date, and what happens with another version."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from operators.chain.build import build_chain
from operators.data_juicer.arguments import adapter, check_types, mismatch
from operators.data_juicer.catalogue import FILE, facts, operator_names
from rftdata.errors import PluginError
from scripts.data_juicer_catalogue import DECIDING, render


def test_the_catalogue_is_what_the_installed_data_juicer_states() -> None:
    assert FILE.read_text(encoding="utf-8") == render(), "run scripts/data_juicer_catalogue.py and read the difference"
    assert FILE.stat().st_size < 1_000_000


@pytest.mark.parametrize("entry", ["clean_links_mapper", {"data_juicer": {"process": ["clean_links_mapper"]}}])
def test_another_version_of_data_juicer_is_refused(
    entry: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "py_data_juicer-1.7.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: py-data-juicer\nVersion: 1.7.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused = (
        r"stage 1 .*\(clean_links_mapper\): the installed Data-Juicer is not the version .*got 'py-data-juicer 1.7.0'"
        r".*allowed: py-data-juicer 1.6.1; pip install 'py-data-juicer==1.6.1'.*scripts/data_juicer_catalogue.py"
    )
    with pytest.raises(PluginError, match=refused):
        build_chain([entry])  # type: ignore[list-item]


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
    filters = [name for name in operator_names() if facts(name).kind == "filter"]
    assert len(filters) > 50
    assert {name for name in filters if not facts(name).splits} == {
        "specified_field_filter",
        "specified_numeric_field_filter",
        "suffix_filter",
        "video_tagging_from_frames_filter",
    }


def test_statistics_of_parents_are_not_those_of_the_child() -> None:
    stats = tuple(facts("llm_quality_score_filter").stats)
    assert stats == ("llm_quality_score", "llm_quality_record", "llm_quality_tags")


def test_types_of_statistics() -> None:
    of_operators = [
        facts(f"{name}_filter").stats
        for name in ("text_length", "language_id_score", "llm_quality_score", "image_aspect_ratio")
    ]
    types = {name: kind for stats in of_operators for name, kind in stats.items()}
    wanted = {
        "text_len": pa.float64(),
        "lang": pa.string(),
        "llm_quality_record": pa.string(),
        "aspect_ratios": pa.list_(pa.float64()),
    }
    assert types.items() >= wanted.items()


def test_every_operator_can_be_read() -> None:
    found = {name: facts(name) for name in operator_names()}
    assert found["clean_links_mapper"].plain and not found["python_lambda_mapper"].plain
    assert {name for name, one in found.items() if one.asks} > {"llm_quality_score_filter", "extract_keyword_mapper"}
    assert found["extract_keyword_mapper"].metas == (("keyword_key", "keyword", pa.string()),)
    assert found["nlpaug_en_mapper"].draws and not found["text_length_filter"].draws


def test_arguments_that_fit_their_types_pass() -> None:
    check_types(facts("text_length_filter"), {"min_len": 10, "max_len": None, "text_key": "prompt", "batch_size": 4})
    check_types(facts("text_length_filter"), {"min_len": 10.0})
    check_types(facts("special_characters_filter"), {"max_ratio": 1})
    check_types(facts("remove_words_with_incorrect_substrings_mapper"), {"substrings": ["http"]})


def test_nearly_all_arguments_can_be_checked_and_no_default_is_refused() -> None:
    checked, unknown = 0, []
    for name in operator_names():
        known = facts(name)
        for key in known.arguments or ():
            kind = adapter(known.types[key]) if key in known.types else None
            default = known.defaults.get(key)
            if kind is None or (default is not None and mismatch(kind, default)):
                unknown.append(f"{name}.{key}")
            else:
                checked += 1
        check_types(known, known.defaults)
    assert checked > 1200 and len(unknown) < checked / 15, unknown


def test_mappers_that_make_rows() -> None:
    assert {name for name in operator_names() if facts(name).makes_rows} == {
        "extract_event_mapper",
        "generate_qa_from_text_mapper",
        "image_captioning_mapper",
        "image_diffusion_mapper",
        "latex_figure_context_extractor_mapper",
        "nlpaug_en_mapper",
        "nlpcda_zh_mapper",
        "optimize_prompt_mapper",
        "text_chunk_mapper",
        "video_captioning_from_audio_mapper",
        "video_captioning_from_frames_mapper",
        "video_captioning_from_summarizer_mapper",
        "video_captioning_from_video_mapper",
        "video_captioning_from_vlm_mapper",
        "video_split_by_duration_mapper",
        "video_split_by_key_frame_mapper",
    }
