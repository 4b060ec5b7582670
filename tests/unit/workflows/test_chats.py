"""Chats to imitate: the tokens that count are those of the assistant's answers with their end tokens, by hand for several templates."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rftcore.engines.base import Decoding
from rftcore.workflows.chats import chat_sequence, written_sequence
from rftcore.workflows.demonstration import check_task, demonstration
from rftcore.workflows.task import Model, Score, Task
from rftdata.errors import ConfigError, ModelError, RftError
from rftdata.experience import TURNS, Group, Rollout, Sequence
from rftdata.experience_checks import validate
from tests.support.models import make_character_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 3's, with a token of its own at the beginning of the text.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|sep|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|sep|>' }}{% endif %}"
)
# The words before an answer may be the answer's own.
CHANNELS = (
    "{% for m in messages %}{{ m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{{ 'final<|sep|>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
# As reasoning models' templates do: what was thought is taken out of all answers but the last.
FORGETFUL = (
    "{% for m in messages %}{{ m['role'] + ':' }}{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('/')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
LEADING = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:think:' }}{% endif %}"
)
# What was thought is taken out of all answers.
SILENT = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'].split('/')[-1] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m['content'] + eos_token }}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "4 of course"},
]


def tokenizer(template: str | None) -> Any:
    found = make_character_tokenizer()
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|sep|>"]})
    found.chat_template = template
    return found


def parts(found: Any, sequence: Sequence) -> list[tuple[bool, str]]:
    """Runs of tokens that count, or do not, decoded."""
    mask = [False] * sequence.num_prompt_tokens
    mask += sequence.loss_mask or [True] * (len(sequence.token_ids) - sequence.num_prompt_tokens)
    runs: list[tuple[bool, list[int]]] = []
    for token, counts in zip(sequence.token_ids, mask, strict=True):
        if not runs or runs[-1][0] != counts:
            runs.append((counts, []))
        runs[-1][1].append(token)
    return [(counts, found.decode(ids)) for counts, ids in runs]


def test_all_answers_count_with_their_end_tokens_and_nothing_else() -> None:
    found = tokenizer(CHATML)
    sequence = chat_sequence(found, CHAT)
    assert parts(found, sequence) == [
        (False, "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"),
        (True, "2<|im_end|>"),
        (False, "\n<|im_start|>user\nand 2+2?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "4 of course<|im_end|>"),
    ]
    assert sequence.prompt == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert sequence.response.startswith("2<|im_end|>\n") and sequence.response.endswith("\n4 of course")
    assert (sequence.messages, sequence.behavior_logprobs, sequence.finish_reason) == (CHAT, None, "stop")


@pytest.mark.parametrize("template", [CHATML, HEADERS, None])
@pytest.mark.parametrize("first", ["2", ""])
def test_each_answer_that_counts_is_a_turn(template: str | None, first: str) -> None:
    found = tokenizer(template)
    chat = [*CHAT, CHAT[0], {"role": "assistant", "content": first}, *CHAT]
    sequence = chat_sequence(found, chat, start=2)
    assert [number for *_, number in sequence.arrays[TURNS]] == [0, 1, 2, 3] and sequence.num_turns == 4
    texts = [found.decode(sequence.token_ids[start:end]) for start, end, _ in sequence.arrays[TURNS]]
    end = "" if template is None else "<|im_end|>"
    assert texts == [
        f"4 of course{end}",
        f"{first}{end}",
        f"2{end}",
        "4 of course<eos>" if not end else f"4 of course{end}",
    ]
    assert sequence.last_answer == "4 of course"
    empty = chat_sequence(found, [CHAT[0], {"role": "assistant", "content": ""}, *CHAT[2:]])
    validate((Group([Rollout(0, sequences=[sequence, empty])], taskset="t", task_key="k", source="import"),))
    assert chat_sequence(found, CHAT, turns="last").num_turns == chat_sequence(found, CHAT, start=2).num_turns == 1


def test_turns_of_a_written_chat_are_numbered_among_those_of_the_rollout_and_rewarded_at_the_last() -> None:
    model = Model(type("Engine", (), {"tokenizer": tokenizer(CHATML)})(), Decoding())
    model.write(CHAT[:1], "2")
    turn = model.write_chat(CHAT)
    model.write(CHAT[:1], "3")
    turn.record(step_reward=0.5)
    with pytest.raises(RftError, match="a written chat with 2 answers has no state for each of them"):
        turn.record(state="s")
    sequences = model.sequences()
    assert [(s.turn_index, s.num_turns) for s in sequences] == [(0, 1), (1, 2), (3, 1)]
    assert [number for *_, number in sequences[1].arrays[TURNS]] == [1, 2]
    assert sequences[1].arrays["step_reward"].tolist() == [0.0, 0.5]
    assert turn.sequence.arrays[TURNS][0, 2] == 0, "what is stored is a copy"
    validate((Group([Rollout(0, sequences=sequences)], taskset="t", task_key="k", source="import"),))


def test_only_the_last_answer_counts_with_turns_last() -> None:
    found = tokenizer(CHATML)
    sequence = chat_sequence(found, CHAT, turns="last")
    before, last = parts(found, sequence)
    assert last == (True, "4 of course<|im_end|>") and "2<|im_end|>" in before[1]
    assert sequence.loss_mask is None and sequence.response == "4 of course"


def test_a_chat_ends_with_its_last_answer_and_examples_do_not_count() -> None:
    found = tokenizer(CHATML)
    sequence = chat_sequence(found, [*CHAT, {"role": "user", "content": "why?"}], start=2)
    assert [text for counts, text in parts(found, sequence) if counts] == ["4 of course<|im_end|>"]
    assert sequence.messages == CHAT


def test_special_tokens_of_the_template_are_not_doubled() -> None:
    found = tokenizer(HEADERS)
    shown = parts(found, chat_sequence(found, CHAT))
    assert shown[0] == (False, "<bos><|im_start|>user<|sep|>1+1<|im_end|><|im_start|>assistant<|sep|>")
    assert [text for counts, text in shown if counts] == ["2<|im_end|>", "4 of course<|im_end|>"]
    whole = found.apply_chat_template(CHAT, tokenize=False)
    assert "".join(text for _, text in shown) == whole


@pytest.mark.parametrize("content", ["final", "n", "a<|im_end|>b", " spaced ", "assistant\n"])
def test_an_answer_is_found_whatever_it_states(content: str) -> None:
    found = tokenizer(CHANNELS)
    chat = [CHAT[0], {"role": "assistant", "content": content}, *CHAT[2:]]
    spans = [text for counts, text in parts(found, chat_sequence(found, chat)) if counts]
    assert spans == [f"final<|sep|>{content}<|im_end|>", "final<|sep|>4 of course<|im_end|>"]


def test_an_answer_that_the_template_trims_is_trained_on_trimmed() -> None:
    found = tokenizer(CHATML)
    chat = [CHAT[0], {"role": "assistant", "content": " 2\n"}]
    assert parts(found, chat_sequence(found, chat))[-1] == (True, "2<|im_end|>")


@pytest.mark.parametrize("template", [None, "tests/support/models.py"])
def test_without_end_tokens_in_the_text_the_last_answer_ends_with_the_tokenizers(template: str | None) -> None:
    found = tokenizer(None if template is None else make_character_tokenizer().chat_template)
    shown = parts(found, chat_sequence(found, CHAT))
    if template is None:
        assert shown == [(False, "1+1"), (True, "2"), (False, "and 2+2?"), (True, "4 of course<eos>")]
    else:
        assert [text for counts, text in shown if counts] == ["2", "4 of course<eos>"]


@pytest.mark.parametrize("template", [None, HEADERS])
def test_one_answer_gives_the_sequence_of_a_written_answer(template: str | None) -> None:
    found = tokenizer(template)
    found.eos_token = "<|im_end|>"
    written, chat = written_sequence(found, CHAT[:1], "2"), chat_sequence(found, CHAT[:2])
    assert written == chat


@pytest.mark.parametrize(
    ("template", "response", "tokens"),
    [
        (CHATML, " 2\n", "2<|im_end|>"),
        (CHANNELS, "2", "final<|sep|>2<|im_end|>"),
        (LEADING, "hm/2", "hm/2<|im_end|>"),  # which the template renders without the end of its generation prompt
        (SILENT, "hm/2", "hm/2<|im_end|>"),
    ],
)
def test_a_written_answer_ends_as_the_template_ends_answers(template: str, response: str, tokens: str) -> None:
    found = tokenizer(template)
    assert found.eos_token == "<eos>"
    sequence = written_sequence(found, CHAT[:1], response)
    asked = found.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert parts(found, sequence) == [(False, asked), (True, tokens)]


def test_a_written_answer_without_any_end_token_is_refused() -> None:
    found = tokenizer(None)
    found.eos_token = None
    with pytest.raises(ModelError, match="no end token"):
        written_sequence(found, CHAT[:1], "2")


def test_a_template_that_changes_earlier_answers_is_refused_for_all_turns_only() -> None:
    found = tokenizer(FORGETFUL)
    chat = [CHAT[0], {"role": "assistant", "content": "hm/2"}, *CHAT[2:]]
    with pytest.raises(ConfigError, match=r"differently when message 4 is generated.*turns: last"):
        chat_sequence(found, chat)
    assert parts(found, chat_sequence(found, chat, turns="last"))[-1] == (True, "4 of course<|im_end|>")


def test_a_generation_prompt_that_no_answer_follows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"before message 2 differently when that answer follows"):
        chat_sequence(tokenizer(LEADING), CHAT)


def test_an_error_of_the_template_itself_is_reported() -> None:
    with pytest.raises(
        ConfigError, match=r"refuses the first 2 messages of the chat.*roles must alternate.*'user', 'user'"
    ):
        chat_sequence(tokenizer(STRICT), [CHAT[0], CHAT[0], CHAT[1]])


class Written:
    """The tokenizer of an engine that samples nothing."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer(CHATML)


def imitated(task: Task, **args: Any) -> tuple[list[tuple[bool, str]], Any]:
    written = Written()
    model = Model(written, None)  # type: ignore[arg-type]

    async def score(turn: Any, task: Task) -> Score:
        return Score(float(turn.response == "4 of course"))

    reward = asyncio.run(demonstration(task, model, score, **args)).reward
    (turn,) = model.turns
    return parts(written.tokenizer, turn.sequence), (turn.messages, reward)


def chat_task(prompt: Any = CHAT, answer: str | None = None, **metadata: Any) -> Task:
    return Task(1, "chats", "one", prompt, answer, metadata)


def test_a_chat_that_ends_with_an_answer_is_imitated_whatever_else_the_row_has() -> None:
    spans, (messages, reward) = imitated(
        chat_task(answer="5"), system="be brief", examples=[{"prompt": "0", "answer": "1"}]
    )
    assert [text for counts, text in spans if counts] == ["2<|im_end|>", "4 of course<|im_end|>"]
    assert spans[0][1].startswith("<|im_start|>system\nbe brief<|im_end|>") and "1<|im_end|>" in spans[0][1]
    assert reward == 1.0 and messages[-1] == CHAT[2]


def test_an_answer_beside_a_chat_that_ends_with_a_question_is_imitated() -> None:
    spans, _ = imitated(chat_task(CHAT[:3], answer="5"))
    assert [text for counts, text in spans if counts] == ["5<|im_end|>"]
    spans, _ = imitated(chat_task(CHAT[:3]))
    assert [text for counts, text in spans if counts] == ["2<|im_end|>"]


@pytest.mark.parametrize(
    ("task", "args", "words"),
    [
        (
            chat_task(CHAT[:1]),
            {},
            r"'one' of 'chats' has a chat without a turn of the assistant; add a message with the role assistant",
        ),
        (chat_task("1+1"), {}, r"neither 'demonstration' nor an answer to imitate; name the column: `answer: …`"),
        (chat_task(), {"turns": "every"}, r"unknown value of turns \(got 'every'\); allowed: all, last"),
        (chat_task(), {"template": "{prompt}"}, "template has no effect"),
    ],
)
def test_what_cannot_be_imitated_is_refused_before_and_during_a_run(
    task: Task, args: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_task(task, **args)
    with pytest.raises(ConfigError, match=words):
        imitated(task, **args)
