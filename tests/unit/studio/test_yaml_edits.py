"""An edit of one key leaves the rest of a configuration's text as it was."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rftcore.studio.yaml_edits import with_value
from rftdata.errors import ConfigError
from rftdata.yaml_text import read_yaml

TEXT = """# head
run: {name: sort-sft, seed: 1}  # the run
trainer:
  # how fast
  learning_rate: 2.0e-3  # peak
  optimizer: {weight_decay: 0.01}
tasks:
  - {name: a}   # first
  - name: b
empty:
# end of tasks
steps: 300
"""


def changed(text: str, new: str) -> list[str]:
    return [line for line in difflib.ndiff(text.splitlines(), new.splitlines()) if line[0] in "+-"]


@pytest.mark.parametrize(
    ("key", "value", "difference"),
    [
        (
            "run.seed",
            "7",
            ["- run: {name: sort-sft, seed: 1}  # the run", "+ run: {name: sort-sft, seed: 7}  # the run"],
        ),
        ("run.seed", None, ["- run: {name: sort-sft, seed: 1}  # the run", "+ run: {name: sort-sft}  # the run"]),
        ("run.name", "12", ["- run: {name: sort-sft, seed: 1}  # the run", "+ run: {name: '12', seed: 1}  # the run"]),
        ("trainer.learning_rate", "1e-4", ["-   learning_rate: 2.0e-3  # peak", "+   learning_rate: 1e-4  # peak"]),
        ("trainer.learning_rate", None, ["-   learning_rate: 2.0e-3  # peak"]),
        ("trainer.epochs", "4", ["+   epochs: 4"]),
        ("trainer.optimizer.weight_decay", None, ["-   optimizer: {weight_decay: 0.01}"]),
        ("sync.offset", "3", ["+ sync:", "+   offset: 3"]),
        ("monitor", "- a\n- b", ["+ monitor: [a, b]"]),
        ("empty.key", "[1, 2]", ["- empty:", "+ empty: {key: [1, 2]}"]),
    ],
)
def test_only_the_key_changes(key: str, value: str | None, difference: list[str]) -> None:
    new = with_value(TEXT, key, value, is_text=key == "run.name")
    assert sorted(changed(TEXT, new)) == sorted(difference)


def test_an_empty_text_gets_sections() -> None:
    assert with_value("", "run.name", "x") == "run:\n  name: x\n"
    assert with_value("# only a comment", "steps", "3") == "# only a comment\nsteps: 3\n"


@pytest.mark.parametrize("key", ["tasks", "steps"])
def test_comments_within_a_value_and_aliases_are_left_to_the_text(key: str) -> None:
    text = TEXT.replace("seed: 1", "seed: &n 1").replace("steps: 300", "steps: *n") if key == "steps" else TEXT
    with pytest.raises(ConfigError, match="change it in the text"):
        with_value(text, key, "7")


@given(
    st.text(
        st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\ufeff\ufffe\uffff\u2028\u2029\x85"),
        min_size=1,
    )
)
def test_any_line_of_text_arrives_as_it_was_typed(value: str) -> None:
    new = with_value(TEXT, "run.name", value, is_text=True)
    assert read_yaml(new, "it")["run"] == {"name": value, "seed": 1}
    assert changed(TEXT, new)[1:] == [line for line in changed(TEXT, new) if line.startswith("+ run")]
