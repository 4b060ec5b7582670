"""The text of an answer keeps the special tokens that mark something within it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rftcore.engines.answer_text import AnswerText
from rftcore.engines.base import Decoding, EngineConfig
from rftcore.engines.transformers_engine import TransformersEngine
from tests.support.models import CHARACTERS, make_character_tokenizer, make_tiny_model

CALL, END_OF_TURN = "<|call|>", "<end_of_turn>"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with two special tokens: for calls of tools, and for the end of a turn."""
    made = make_character_tokenizer()
    made.add_special_tokens({"additional_special_tokens": [CALL, END_OF_TURN]})
    return made


@pytest.mark.parametrize(
    ("answer", "ended", "text"),
    [
        (f"{CALL}add:1+2{CALL}=3<eos>", True, f"{CALL}add:1+2{CALL}=3"),
        (f"{CALL}add:1+2{END_OF_TURN}", True, f"{CALL}add:1+2"),
        (f"1{END_OF_TURN}{CALL}", False, f"1{END_OF_TURN}{CALL}"),
        (f"1+2{CALL}", True, "1+2"),
        ("<bos>1<pad>2<pad>", False, "12"),
        ("12", True, "12"),
        ("", True, ""),
    ],
)
def test_special_tokens_within_an_answer_are_in_its_text(
    tokenizer: PreTrainedTokenizerFast, answer: str, ended: bool, text: str
) -> None:
    assert AnswerText(tokenizer)(tokenizer.encode(answer, add_special_tokens=False), ended=ended) == text


def test_a_text_that_ends_an_answer_may_end_with_a_special_token(tokenizer: PreTrainedTokenizerFast) -> None:
    answer = tokenizer.encode(f"1+2=3{CALL}", add_special_tokens=False)
    assert AnswerText(tokenizer)(answer, ended=True, stop=(f"=3{CALL}",)) == "1+2"
    assert AnswerText(tokenizer)(answer, ended=False, stop=("=",)) == f"1+2=3{CALL}"


def test_an_engine_returns_the_text_of_what_it_sampled(tmp_path: Path) -> None:
    """All characters are special tokens here."""
    model = make_tiny_model(tmp_path / "model")
    tokenizer = make_character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*CHARACTERS]})
    tokenizer.save_pretrained(model)
    engine = TransformersEngine(model, EngineConfig(dtype="float32", num_threads=1))
    try:
        prompt = tokenizer.encode("u:1+2=\na:", add_special_tokens=False)
        found = asyncio.run(engine.generate(prompt, Decoding(max_tokens=60, seed=3)))
    finally:
        engine.close()
    ended = found.finish_reason == "stop"
    expected = "".join(tokenizer.convert_ids_to_tokens(found.token_ids[:-1] if ended else found.token_ids))
    for named in ("<pad>", "<bos>", "<eos>", "<unk>"):
        expected = expected.replace(named, "")
    assert found.text == expected != ""
