"""Checks of a row's values, column by column: what passes can be stored, and is stored as it is.

The types are those of `SCHEMA` (`rftdata.exchange.formats`). These checks refuse what a type allows and the buffer does not: numbers that
are not finite, NUL in texts, JSON of another kind, NULL within lists.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import uuid
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa

from rftdata.errors import RftError
from rftdata.exchange.columns import BASE_ARRAYS, SCHEMA, Row, unpacked
from rftdata.exchange.label_checks import check_annotations, check_comments, check_edit
from rftdata.experience import FORKS, OUTCOMES, SOURCES, STEP_REWARD, STOP_REASONS, TURNS, Baseline
from rftdata.experience_checks import check_reward_parts, check_role
from rftdata.limits import (
    INT4,
    INT8,
    LARGEST_REWARD,
    MAX_JSON_DEPTH,
    MAX_NAME_BYTES,
    check_integer,
    check_json,
    check_task_name,
    check_text,
    is_number,
    may_be_unstorable,
)

LABEL_SOURCES = ("sql", "set", "import", "undo")
# What the rows of a group, and those of a rollout, have in common.
OF_GROUP = (
    "run_id",
    "run",
    "group_size",
    "baseline",
    "explore_step",
    "taskset",
    "task_key",
    "task_payload",
    "task_features",
)
_OF_EXPERIENCE = SCHEMA.names[SCHEMA.names.index("experience_id") + 1 :]
OF_ROLLOUT = ("outcome", "rollout_reward", "seconds", "error", "stop_reason", "tries")
_TEXTS = [column.name for column in SCHEMA if pa.types.is_string(column.type)]
_GROUP_TEXTS = [name for name in _TEXTS if name in OF_GROUP]
_ROW_TEXTS = [name for name in _TEXTS if name not in OF_GROUP and name != "buffer_id"]
_REWARDS = f"finite numbers between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}"
_NUMBERS = ("rollout_reward", "seconds", "reward_sampled", "reward")
# PostgreSQL refuses texts within jsonb of 256 MiB, and values of 1 GiB. A character takes up to four bytes.
_MAX_CHARACTERS = 2**26


def check_group_columns(row: Row, taskset_prefix: str) -> None:
    """Refuse a row whose group cannot be stored; the other rows of the group have the same values in `OF_GROUP`.

    Raises:
        RftError: the column, the value and what is allowed.
    """
    _check_texts(row, _GROUP_TEXTS)
    _check_buffer_id(row["buffer_id"])
    check_task_name(taskset_prefix + row["taskset"], row["task_key"])
    _at_least("group_size", row["group_size"], 1)
    for name in ("task_payload", "task_features"):
        _check_object(name, row[name])
    if row["baseline"] is not None:
        _check_baseline(_parsed("baseline", row["baseline"]))


def check_row(row: Row) -> None:
    """Refuse a row with another value that cannot be stored as it is.

    Raises:
        RftError: the column, the value and what is allowed.
    """
    _check_texts(row, _ROW_TEXTS)
    _one_of("outcome", row["outcome"], OUTCOMES)
    if row["stop_reason"] is not None:
        _one_of("stop_reason", row["stop_reason"], STOP_REASONS)
    _at_least("rollout_index", row["rollout_index"], 0)
    for name in _NUMBERS:
        if row[name] is not None and not is_number(row[name]):
            raise RftError(f"the column {name} is not a finite number", value=row[name], allowed=f"{_REWARDS}, or none")
    _check_seconds("the column seconds", row["seconds"])
    if row["tries"] is not None:
        _check_tries(_parsed("tries", row["tries"]))
    if row["experience_id"] is None:
        _check_alone(row)
    else:
        _check_experience(row)


def _check_alone(row: Row) -> None:
    """Refuse a row that has values of an experience but no experience_id: they would be lost."""
    filled = [name for name in _OF_EXPERIENCE if row[name] is not None]
    if filled:
        raise RftError(
            f"the row has no experience_id, but {', '.join(filled[:5])}",
            allowed="all columns of an experience, or none of them for a rollout without a sequence",
        )


def _check_experience(row: Row) -> None:
    _one_of("source", row["source"], SOURCES)
    _at_least("turn_index", row["turn_index"], 0)
    if row["fork"] is not None:
        _one_of("fork", row["fork"], FORKS)
    if row["role"] is not None:
        check_role(row["role"])
    check_reward_parts(_check_object("reward_parts", row["reward_parts"]))
    _check_object("metrics", row["metrics"])
    if row["messages"] is not None:
        _parsed("messages", row["messages"])
    _check_time("the column created_at", row["created_at"])
    num_tokens = len(row["token_ids"])
    for name, dtype in BASE_ARRAYS.items():
        if not isinstance(row[name], np.ndarray) or row[name].dtype != dtype:
            raise RftError(f"the column {name} has NULL among its values", allowed=f"{np.dtype(dtype).name} values")
        if len(row[name]) != num_tokens:
            raise RftError(
                f"the column {name} must have one value per token of token_ids",
                value=len(row[name]),
                allowed=str(num_tokens),
            )
    if not 0 <= row["num_prompt_tokens"] <= num_tokens:
        raise RftError(
            "the column num_prompt_tokens is a wrong number of prompt tokens",
            value=row["num_prompt_tokens"],
            allowed=f"0 to {num_tokens}, the number of token_ids",
        )
    _check_spans(row["policy_spans"], num_tokens)
    for i, label in enumerate(row["labels"]):
        _check_label(f"the column labels, label {i + 1}", label)
    if row["annotations"] is not None:
        check_annotations(_parsed("annotations", row["annotations"]), row["annotations"])
    if row["comments"] is not None:
        check_comments(_parsed("comments", row["comments"]), row["comments"])
    if row["edit"] is not None:
        check_edit(_parsed("edit", row["edit"]))
    _check_arrays(row["arrays"])
    _check_turns(row)
    _check_earlier(_parsed("earlier", row["earlier"]))


def _check_texts(row: Row, names: list[str]) -> None:
    for name in names:
        value = row[name]
        if value is not None and (not value.isascii() or "\x00" in value or len(value) > _MAX_CHARACTERS):
            if len(value) > _MAX_CHARACTERS:
                raise RftError(
                    f"the column {name} is too long", value=len(value), allowed=f"{_MAX_CHARACTERS:,} characters"
                )
            check_text(f"the column {name}", value)


def _check_object(name: str, text: str) -> dict[str, Any]:
    value = _parsed(name, text)
    if not isinstance(value, dict):
        raise RftError(f"the column {name} is not a JSON object", value=type(value).__name__)
    return value


def _at_least(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise RftError(f"the column {name} is not valid", value=value, allowed=f"whole numbers from {smallest}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RftError(f"the column {name} is an unknown {name}", value=value, allowed=", ".join(allowed))


def _finite(where: str, value: float | None) -> None:
    if value is not None and not math.isfinite(value):
        raise RftError(f"{where} is not a finite number", value=value, allowed="a finite number, or none")


def _check_seconds(where: str, value: float) -> None:
    if value < 0:
        raise RftError(f"{where} has a negative number of seconds", value=value, allowed="0 or more")


def _check_buffer_id(value: str) -> None:
    try:
        is_canonical = str(uuid.UUID(value)) == value
    except ValueError:
        is_canonical = False
    if not is_canonical:
        raise RftError(
            "the column buffer_id is not the id of a buffer", value=value, allowed="a UUID in lower case, with hyphens"
        )


def _check_time(where: str, value: Any) -> None:
    if not isinstance(value, datetime.datetime):
        raise RftError(f"{where} is not a time", value=value, allowed="times of the years 1 to 9999")


def _parsed(name: str, text: str) -> Any:
    """Return the value of a JSON column."""
    where = f"the column {name}"
    if text in ("{}", "[]"):
        return {} if text == "{}" else []
    suspicious = may_be_unstorable(text)
    try:
        if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _depth(text) > MAX_JSON_DEPTH:
            raise RecursionError
        value = json.loads(text)
    except RecursionError:
        raise RftError(f"{where} is nested too deeply", allowed=f"up to {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:
        raise RftError(f"{where} is not JSON: {error}") from error
    if suspicious:
        check_json(where, value)
    return value


def _depth(text: str) -> int:
    """Return how deeply JSON is nested, from its text: a parser would call itself for every level."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _check_baseline(value: Any) -> None:
    if value is None:
        return
    where = "the column baseline"
    if not isinstance(value, dict):
        raise RftError(f"{where} is not a JSON object", value=type(value).__name__)
    allowed = {field.name for field in fields(Baseline)}
    needed = {"outcome", "reward", "response", "num_turns", "num_response_tokens", "finish_reason", "seconds"}
    for problem, names in (("an unknown", value.keys() - allowed), ("no", needed - value.keys())):
        for name in sorted(names):
            raise RftError(f"{where} has {problem} {name[:60]!r}", allowed=", ".join(sorted(allowed)))
    if value["outcome"] not in OUTCOMES:
        raise RftError(f"{where} has an unknown outcome", value=value["outcome"], allowed=", ".join(OUTCOMES))
    for name in ("reward", "seconds"):
        item = value[name]
        if not (item is None and name == "reward") and not _is_finite_number(item):
            raise RftError(
                f"{where}: {name} is not a finite number", value=type(item).__name__, allowed="a finite number"
            )
    _check_seconds(where, value["seconds"])
    for name in ("response", "finish_reason", "error"):
        if not isinstance(value.get(name), str) and not (name == "error" and value.get(name) is None):
            raise RftError(f"{where}: {name} is not a text", value=type(value.get(name)).__name__)
    for name in ("num_turns", "num_response_tokens"):
        check_integer(f"{where}: {name}", value[name], (0, INT4[1]))
    if value.get("policy_version_min") is not None:
        check_integer(f"{where}: policy_version_min", value["policy_version_min"], INT8)
    if not isinstance(value.get("reward_parts", {}), dict):
        raise RftError(f"{where}: reward_parts is not a JSON object", value=type(value["reward_parts"]).__name__)


def _check_tries(value: Any) -> None:
    """Refuse tries that are not of the form in which `rft.rollout.tries` has them."""
    is_valid = isinstance(value, list) and all(
        isinstance(tried, dict)
        and tried.keys() == {"error", "chats"}
        and isinstance(tried["error"], str)
        and isinstance(tried["chats"], list)
        and all(isinstance(chat, dict) and isinstance(chat.get("turns"), list) for chat in tried["chats"])
        for tried in value
    )
    if not is_valid:
        raise RftError(
            "the column tries is not valid",
            allowed="a list of objects with error, a text, and chats, a list of objects with turns",
        )


def _is_finite_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _check_spans(spans: list[Any], num_tokens: int) -> None:
    starts = []
    for span in spans:
        if span is None or span["start"] is None or span["policy_version_id"] is None:
            raise RftError(
                "the column policy_spans has NULL among its values", allowed="start and policy_version_id of each span"
            )
        starts.append(span["start"])
    if starts != sorted(set(starts)) or any(not 0 <= start < num_tokens for start in starts):
        raise RftError(
            "the column policy_spans must begin at ascending tokens of the sequence",
            value=starts[:10],
            allowed=f"0 to {num_tokens - 1}, the places in token_ids",
        )


def _check_label(where: str, label: Any) -> None:
    if label is None:
        raise RftError(f"{where} is NULL")
    for name in ("author", "session_user_name", "source", "label_batch_id", "final", "labelled_at"):
        if label[name] is None:
            raise RftError(f"{where} has no {name}")
    for name in ("author", "session_user_name", "reason"):
        if label[name] is not None:
            check_text(f"{where}: {name}", label[name])
    for name in ("old_value", "new_value"):
        _finite(f"{where}: {name}", label[name])
        if label["turn"] is not None and label[name] is None:
            raise RftError(f"{where} is of a turn and has no {name}", allowed="a finite number")
    if label["source"] not in LABEL_SOURCES:
        raise RftError(f"{where} has an unknown source", value=label["source"], allowed=", ".join(LABEL_SOURCES))
    _check_time(f"{where}: labelled_at", label["labelled_at"])


def _check_turns(row: Row) -> None:
    """Refuse rewards and labels of turns that the arrays do not have."""
    rewards = row["turn_rewards"]
    shapes = {array["name"]: array["shape"] for array in row["arrays"]}
    if rewards is not None:
        for reward in rewards:
            if reward is None or not is_number(reward):
                raise RftError("the column turn_rewards has not only finite numbers", value=reward, allowed=_REWARDS)
        if shapes.get(STEP_REWARD) != [len(rewards)]:
            raise RftError(
                f"the column turn_rewards must have one value for each of the array {STEP_REWARD}",
                value=len(rewards),
                allowed=f"the shape {shapes[STEP_REWARD]}"
                if STEP_REWARD in shapes
                else "no values, because there is no such array",
            )
    labels = [label for label in row["labels"] if label["turn"] is not None]
    if labels and STEP_REWARD not in shapes:
        raise RftError(
            f"the column labels has a label of a turn, and there is no array {STEP_REWARD}", value=labels[0]["turn"]
        )
    if not labels:
        return
    turns = next((unpacked(array) for array in row["arrays"] if array["name"] == TURNS), None)
    # An array of another shape is refused with the group.
    numbers = [row["turn_index"]] if turns is None else turns.reshape(-1)[2::3].tolist()
    for label in labels:
        if label["turn"] not in numbers:
            raise RftError(
                "the column labels has a label of a turn that the row does not have",
                value=label["turn"],
                allowed=str(numbers[:10]),
            )


def _check_arrays(arrays: list[Any]) -> None:
    names: set[str] = set()
    for i, array in enumerate(arrays):
        where = f"the column arrays, array {i + 1}"
        if array is None or None in array.values() or None in array["shape"]:
            raise RftError(f"{where} is not complete", allowed="name, dtype, shape and data of each array")
        check_text(f"{where}: its name", array["name"], MAX_NAME_BYTES)
        if array["name"] in names:
            raise RftError(f"{where} has the name of another one", value=array["name"], allowed="names that differ")
        names.add(array["name"])
        try:
            unpacked(array)
        except RftError as error:
            raise error.about("the column arrays") from error


def _check_earlier(value: Any) -> None:
    hops = value if isinstance(value, list) else [None]
    if not all(isinstance(hop, dict) and {"buffer_id", "run", "experience_id"} <= hop.keys() for hop in hops):
        raise RftError(
            "the column earlier is not valid", allowed="a list of objects with buffer_id, run and experience_id"
        )
