"""Operators that look at texts: copies, near copies, repetition, languages, contamination."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.chain.build import build_chain
from operators.text.ngrams import distinct, ngrams, tokens
from rftdata.errors import ConfigError
from tests.support.batches import batch_of_groups
from tests.unit.operators.test_operators_experience import outcome, reasons

WORDS = [
    "the",
    "a",
    "one",
    "two",
    "three",
    "four",
    "sum",
    "of",
    "number",
    "then",
    "carry",
    "left",
    "right",
    "add",
    "check",
    "result",
]


def words(seed: int, num: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=num)


# N-grams


def test_words_are_runs_of_letters_and_digits_in_lower_case() -> None:
    hashes, counts = tokens(pa.array(["Two + two, TWO", "", None, "über zwei", "a"]))
    assert counts.tolist() == [3, 0, 0, 2, 1]
    assert len(set(hashes[:3].tolist())) == 1
    assert len(set(hashes.tolist())) == 4


@settings(max_examples=100, deadline=None)
@given(
    texts=st.lists(st.one_of(st.none(), st.text(alphabet="ab é_1-. \n", max_size=40)), max_size=6),
    n=st.integers(1, 4),
    unit=st.sampled_from(["word", "character"]),
)
def test_ngrams_of_a_batch_are_those_of_each_text(texts: list[str | None], n: int, unit: str) -> None:
    import re

    hashes, rows = ngrams(pa.array(texts, pa.string()), n, unit)  # type: ignore[arg-type]
    expected: list[tuple[int, tuple[str, ...]]] = []
    for row, text in enumerate(texts):
        parts = re.findall(r"[a-z0-9_é]+", (text or "").lower()) if unit == "word" else list((text or "").lower())
        expected += [(row, tuple(parts[at : at + n])) for at in range(len(parts) - n + 1)]
    assert rows.tolist() == [row for row, _ in expected]
    # The same n-gram has the same hash, and no other has it.
    names = dict(zip((gram for _, gram in expected), hashes.tolist()))
    assert [names[gram] for _, gram in expected] == hashes.tolist()
    assert len(set(names.values())) == len(names)
    assert len(distinct(hashes, rows)[0]) == len(set(expected))


def test_ngrams_do_not_depend_on_the_batch_they_are_in() -> None:
    texts = pa.array(["one two three", "x", "internationalisation of one two", None, "one two"] * 60)
    alone = [ngrams(texts.slice(row, 1), 2)[0].tolist() for row in range(5)] * 60
    together, rows = ngrams(texts, 2)
    assert [together[rows == row].tolist() for row in range(300)] == alone
    assert ngrams(texts.slice(7, 200), 2)[0].tolist() == together[(rows >= 7) & (rows < 207)].tolist()


# Copies


def test_of_equal_rows_of_a_group_the_best_stays_else_the_first() -> None:
    table = batch_of_groups([0, 1, 0, None], [1], response=["a", "a", "b", "b", "a"])
    same = "the same prompt and response as experience {}"
    assert reasons("dedup_exact", {}, table) == [same.format(101), None, None, same.format(102), None]


def test_copies_over_the_batch_and_differences_that_do_not_count() -> None:
    table = batch_of_groups([1, 0], [1, 0], response=["It is  four", "it is four ", "IT IS FOUR", None])
    found = reasons("dedup_exact", {"scope": "batch", "columns": ["response"], "ignore": ["case", "whitespace"]}, table)
    same = "the same response as experience 100"
    assert found == [None, same, same, None]
    assert reasons("dedup_exact", {"scope": "batch"}, table) == [None] * 4


def test_rows_without_a_text_are_copies_of_none() -> None:
    assert reasons("dedup_exact", {}, batch_of_groups([0, 0], response=[None, None])) == [None, None]


# Near copies


def test_a_text_that_differs_in_a_word_is_near_and_the_reason_states_how_near() -> None:
    # Of 20 words 16 five-grams; another last word leaves 15 of them equal: 15 / 17.
    text = [f"word{number}" for number in range(20)]
    table = batch_of_groups(
        [0, 1, 0], response=[" ".join(text), " ".join([*text[:19], "end"]), "something else altogether"]
    )
    near = "response is 0.88 similar to that of experience 101"
    assert reasons("dedup_near", {"threshold": 15 / 17}, table) == [near, None, None]
    assert reasons("dedup_near", {"threshold": 0.89}, table) == [None] * 3


def test_near_copies_in_other_groups_count_only_over_the_batch() -> None:
    text = " ".join(words(1, 60))
    table = batch_of_groups([0], [0], response=[text, text + " indeed"])
    assert reasons("dedup_near", {}, table) == [None, None]
    assert reasons("dedup_near", {"scope": "batch"}, table)[1] == "response is 0.98 similar to that of experience 100"


def test_short_texts_are_compared_as_wholes_and_blank_ones_not_at_all() -> None:
    table = batch_of_groups([0] * 6, response=["four", "Four!", "five", "", None, ""])
    assert reasons("dedup_near", {}, table) == [
        None,
        "response is 1.00 similar to that of experience 100",
        None,
        None,
        None,
        None,
    ]


def test_no_two_texts_that_stay_are_near_each_other_and_each_that_goes_is_near_one() -> None:
    texts = []
    for seed in range(120):
        text = words(seed % 30, 80)
        for at in random.Random(seed).sample(range(80), seed % 5):
            text[at] = "changed"
        texts.append(text)
    table = batch_of_groups(*[[0.0, 1.0]] * 60, response=[" ".join(text) for text in texts])
    found = reasons("dedup_near", {"threshold": 0.6, "n": 3, "scope": "batch"}, table)

    def similarity(a: int, b: int) -> float:
        one, other = ({tuple(texts[row][at : at + 3]) for at in range(78)} for row in (a, b))
        return len(one & other) / len(one | other)

    kept = [row for row, reason in enumerate(found) if reason is None]
    assert 30 <= len(kept) < 60
    assert max(similarity(a, b) for a in kept for b in kept if a < b) < 0.6
    for row, reason in enumerate(found):
        if reason is not None:
            other = int(reason.split()[-1]) - 100
            assert other in kept
            assert similarity(row, other) >= 0.6
            assert other % 2 >= row % 2  # odd rows have the higher reward


# Repetition


def test_repetition_is_the_share_of_ngrams_that_came_before() -> None:
    # Two-grams: "a b", "b a", "a b", "b a" and, of the second, four different ones.
    table = batch_of_groups([0] * 5, response=["a b a b a", "a b c d e", "one", "", None])
    found = outcome("repetition_score", {"n": 2}, table).columns["repetition"].to_pylist()
    assert found == [0.5, 0.0, 0.0, 0.0, None]
    found = outcome("repetition_score", {"n": 1, "unit": "character", "name": "c"}, table).columns["c"].to_pylist()
    assert found == pytest.approx([1 - 3 / 9, 1 - 6 / 9, 0.0, 0.0, None])


def test_a_loop_is_found_by_score_and_threshold() -> None:
    chain = build_chain([{"repetition_score": {}}, {"threshold": {"column": "repetition", "max": 0.5}}])
    table = batch_of_groups([0, 1], response=["so we add and carry " * 50, " ".join(WORDS)])
    result = chain.run(table)
    assert result.decisions["kept"].to_pylist() == [False, True]
    # 247 four-grams of which 5 differ.
    assert result.scores[0].table["repetition"].to_pylist() == pytest.approx([1 - 5 / 247, 0.0])


# Languages

LANGUAGES = {
    "en": "The answer is four because two and two make four.",
    "de": "Die Antwort lautet vier, weil zwei und zwei vier ergeben.",
    "fr": "La réponse est quatre parce que deux et deux font quatre.",
}


def test_languages_are_distinguished_and_filtered() -> None:
    texts = [*LANGUAGES.values(), "", None]
    table = batch_of_groups([0] * 5, response=texts)
    stages: list[dict[str, object]] = [{"language_score": {}}, {"language_filter": {"keep": ["en", "fr"]}}]
    result = build_chain(stages).run(table)
    assert result.scores[0].table["language"].to_pylist() == ["en", "de", "fr", None, None]
    assert result.decisions["reason"].to_pylist() == [
        None,
        "language is de",
        None,
        "the text has no language",
        "the text has no language",
    ]
    stages[1] = {"language_filter": {"keep": ["de"], "null": "keep", "min_probability": 1}}
    found = build_chain(stages).run(table).decisions["reason"].to_pylist()
    assert found[0] == "language is en"
    assert found[1].startswith("language is de with probability 0.9") or found[1] == "language is de with probability 1"
    assert found[3:] == [None, None]


def test_languages_can_be_narrowed_down() -> None:
    table = batch_of_groups([0], response=[LANGUAGES["fr"]])
    found = outcome("language_score", {"among": ["en", "de"]}, table).columns
    assert found["language"][0].as_py() in ("en", "de")
    assert (
        build_chain([{"language_score": {}}]).score_keys
        != build_chain([{"language_score": {"among": ["en", "de"]}}]).score_keys
    )
    with pytest.raises(ConfigError, match=r"unknown language 'klingon'; allowed: ace, af, "):
        build_chain([{"language_score": {"among": ["en", "klingon"]}}]).prepare()


def test_without_its_package_the_stage_states_what_to_install() -> None:
    script = """
import sys
sys.modules["py3langid.langid"] = None
from operators.chain.build import build_chain
build_chain([{"language_score": {}}]).prepare()
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (
        "stage 1 of the pipeline (language_score): it needs the package py3langid; pip install 'rftdata[language]'"
        in run.stderr
    )


# Evaluation sets


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    long = "If a train leaves the station at noon and travels sixty miles an hour how far is it by three"
    rows = [{"question": long}, {"question": "What is 2 + 2?"}, {"question": None}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pa.parquet.write_table(
        pa.table({"question": ["Name the capital of the country north of Spain."]}), tmp_path / "more.parquet"
    )
    return tmp_path


def decontaminated(folder: Path, table: pa.Table, **args: object) -> list[str | None]:
    stage = {"decontaminate": {"against": ["test.jsonl", "more.parquet"], "against_column": "question", **args}}
    found: list[str | None] = build_chain([stage], folder).run(table).decisions["reason"].to_pylist()
    return found


def test_prompts_that_share_an_ngram_with_the_evaluation_set_are_dropped_by_name(evaluation: Path) -> None:
    prompts = [
        "Hello! if a train leaves the station at noon, and travels sixty miles an hour: where is it?",
        "If a train leaves the station at noon and travels fifty miles an hour",
        "what is 2+2",
        "What is 2 + 2 + 2?",
        None,
    ]
    found = decontaminated(evaluation, batch_of_groups([0] * 5, prompt=prompts))
    # Fourteen words of the first are in the set: two of its 13-grams; it has 18 words, so six.
    assert found[0] == (
        "2 of 6 13-grams of prompt are in test.jsonl row 1: If a train leaves the station at noon and travels sixty mil…"
    )
    assert found[1:] == [None, "all of prompt is in test.jsonl row 2: What is 2 + 2?", None, None]


def test_the_share_and_the_length_of_ngrams_decide(evaluation: Path) -> None:
    table = batch_of_groups([0, 0], response=["capital of the country north of Spain", "the country south of it"])
    assert decontaminated(evaluation, table, columns=["response"], n=4) == [
        "4 of 4 4-grams of response are in more.parquet row 1: Name the capital of the country north of Spain.",
        None,
    ]
    assert decontaminated(evaluation, table, columns=["response"], n=2)[1].startswith("1 of 4 2-grams")  # type: ignore[union-attr]
    assert decontaminated(evaluation, table, columns=["response"], n=2, max_share=0.25)[1] is None


def test_an_evaluation_set_without_texts_is_refused_before_the_first_batch(evaluation: Path) -> None:
    (evaluation / "test.jsonl").write_text('{"question": ["a", "b"]}\n')
    stage = {"decontaminate": {"against": ["test.jsonl"], "against_column": "question"}}
    message = (
        r"the column 'question' of test.jsonl does not contain texts \(got 'list.*; name another in against_column"
    )
    with pytest.raises(ConfigError, match=message):
        build_chain([stage], evaluation).prepare()


def test_another_evaluation_set_is_another_version(evaluation: Path) -> None:
    stage = {"decontaminate": {"against": ["test.jsonl"], "against_column": "question"}}
    before = build_chain([stage], evaluation).version
    (evaluation / "test.jsonl").write_text('{"question": "What is 3 + 3?"}\n')
    assert build_chain([stage], evaluation).version != before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"against": []}, r"the key 'against' is wrong"),
        ({"against": ["taskset:eval"]}, r"no buffer here to read a taskset from \(got 'taskset:eval'\)"),
        ({"against": ["nowhere.csv"]}, r"the file does not exist \(got .*nowhere.csv"),
        (
            {"against": ["test.txt"]},
            r"this file format is not supported \(got 'test.txt'\); allowed: .parquet, .csv, .jsonl",
        ),
        ({"against": ["test.jsonl"], "n": 0}, r"the key 'n' is wrong"),
        ({"against": ["test.jsonl"], "columns": ["prompts"]}, r"reads the column 'prompts'"),
        (
            {"against": ["test.jsonl"]},
            r"test.jsonl has no column 'prompt'; allowed: question; name it in against_column",
        ),
        ({"against": ["broken.jsonl"]}, r"the file cannot be read"),
    ],
)
def test_an_evaluation_set_that_cannot_be_used_is_refused(evaluation: Path, args: object, message: str) -> None:
    (evaluation / "broken.jsonl").write_text('{"prompt": ')
    with pytest.raises(ConfigError, match=message):
        build_chain([{"decontaminate": args}], evaluation).prepare()


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"dedup_near": {"threshold": 0}}, r"the key 'threshold' is wrong"),
        ({"dedup_near": {"column": "text"}}, r"reads the column 'text'"),
        ({"dedup_exact": {"columns": []}}, r"the key 'columns' is wrong"),
        ({"dedup_exact": {"scope": "history"}}, r"the key 'scope' is wrong: .*'group' or 'batch'"),
        ({"repetition_score": {"name": "reward"}}, r"'reward' is a column of every batch"),
        ({"repetition_score": {"n": 0}}, r"the key 'n' is wrong"),
        ({"language_filter": {"keep": ["en"]}}, r"no stage before it detects .*put `- language_score: \{\}` before it"),
        ({"language_filter": {}}, r"the key 'keep' is missing"),
    ],
)
def test_wrong_arguments_are_refused(stage: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([stage])


@pytest.mark.parametrize("name", ["repetition_score", "language_score", "dedup_near", "dedup_exact"])
def test_an_empty_batch_and_one_without_texts_are_decided(name: str) -> None:
    chain = build_chain([{name: {}}])
    assert chain.run(batch_of_groups()).decisions.num_rows == 0
    assert chain.run(batch_of_groups([0, 0], response=[None, None])).decisions["kept"].to_pylist() == [True, True]
