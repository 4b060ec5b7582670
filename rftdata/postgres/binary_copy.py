"""Encoding of rows in PostgreSQL's binary COPY format.

The hot tables of a write are encoded here field by field, because a driver that looks up a converter for each of twenty values per row takes
several times as long. Layout (PostgreSQL manual, COPY, "Binary Format"): a signature; for each row the number of fields, and for each
field its length (-1: NULL) and its bytes in network order; a trailer. Enums are encoded as text, jsonb as a version byte and its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from struct import Struct
from typing import NamedTuple

from rftdata.experience import STEP_REWARD, Rollout, Sequence
from rftdata.postgres.database import Connection
from rftdata.postgres.values import jsonb_bytes, storable

NULL = b"\xff\xff\xff\xff"
_SIGNATURE = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
_TRAILER = b"\xff\xff"
_ROWS_AT_ONCE = 32
_LENGTH = Struct(">i")
_INT8 = Struct(">iq")
_FLOAT8 = Struct(">id")


def int8(value: int | None) -> bytes:
    """Encode a bigint field."""
    return NULL if value is None else _INT8.pack(8, value)


def float8(value: float | None) -> bytes:
    """Encode a double precision field."""
    return NULL if value is None else _FLOAT8.pack(8, value)


def text(value: str | None) -> bytes:
    """Encode a text or enum field; characters that text cannot hold are replaced."""
    return NULL if value is None else binary(_utf8(value))


@cache
def word(value: str) -> bytes:
    """Encode a text or enum field that has one of few values."""
    return text(value)


def binary(value: bytes | None) -> bytes:
    """Encode a field from its binary form."""
    return NULL if value is None else _LENGTH.pack(len(value)) + value


def _utf8(value: str) -> bytes:
    try:
        data = value.encode()
    except UnicodeEncodeError:  # half a surrogate
        data = b"\x00"
    return storable(value).encode() if b"\x00" in data else data


def copy_bytes(connection: Connection, table: str, columns: Iterable[str], rows: Iterable[bytes]) -> None:
    """Write encoded rows with a binary COPY.

    Args:
        table: qualified name.
        columns: names, in the order of the fields.
        rows: each the number of its fields (int16) and its fields.
    """
    names = ", ".join(columns)
    rest = iter(rows)
    with connection.cursor() as cursor, cursor.copy(f"COPY {table} ({names}) FROM STDIN (FORMAT BINARY)") as copy:
        copy.write(_SIGNATURE)
        while some := b"".join(islice(rest, _ROWS_AT_ONCE)):  # the server stores these while the next are encoded
            copy.write(some)
        copy.write(_TRAILER)


ROLLOUT_COLUMNS = (
    "rollout_id",
    "group_id",
    "rollout_index",
    "num_turns",
    "seconds",
    "outcome",
    "reward",
    "error",
    "stop_reason",
    "tries",
)
_ROLLOUT_FIXED = Struct(">h iq iq ii ii id")

GROUP_PROMPT_COLUMNS = ("group_id", "prompt_digest", "prompt", "messages")
_GROUP_PROMPT_FIXED = Struct(">h iq")

TURN_REWARD_COLUMNS = ("experience_id", "turn", "reward_sampled", "reward")
_TURN_REWARD = Struct(">h iq ii id id")

EXPERIENCE_COLUMNS = (
    "experience_id",
    "run_id",
    "group_id",
    "rollout_id",
    "segment_id",
    "turn_index",
    "num_prompt_tokens",
    "num_response_tokens",
    "num_trained_tokens",
    "num_turns",
    "segment_row",
    "parent_id",
    "policy_version_min",
    "policy_version_max",
    "reward_sampled",
    "reward",
    "reward_final",
    "source",
    "fork",
    "role",
    "finish_reason",
    "prompt_digest",
    "response",
    "response_messages",
    "reward_parts",
    "metrics",
)
_NO_VERSIONS = NULL + NULL
_FALSE, _TRUE = binary(b"\x00"), binary(b"\x01")
_NO_OBJECT = binary(jsonb_bytes({}))
_EXPERIENCE_FIXED = Struct(">h iq iq iq iq iq ii ii ii ii ii ii")


def rollout_row(rollout_id: int, group_id: int, r: Rollout) -> bytes:
    """Encode a row of rft.rollout with the fields of `ROLLOUT_COLUMNS`."""
    fixed = _ROLLOUT_FIXED.pack(10, 8, rollout_id, 8, group_id, 4, r.index, 4, r.num_turns, 8, r.seconds)
    return (
        fixed
        + word(r.outcome)
        + float8(r.reward)
        + text(r.error)
        + (NULL if r.stop_reason is None else word(r.stop_reason))
        + (binary(jsonb_bytes([vars(tried) for tried in r.tries])) if r.tries else NULL)
    )


def group_prompt_row(group_id: int, prompt_digest: bytes, prompt: bytes, messages: bytes) -> bytes:
    """Encode a row of rft.group_prompt from its key and its other fields, in the order of `GROUP_PROMPT_COLUMNS`."""
    return b"".join((_GROUP_PROMPT_FIXED.pack(4, 8, group_id), prompt_digest, prompt, messages))


def turn_reward_rows(experience_id: int, turn_index: int, s: Sequence) -> Iterator[bytes]:
    """Encode the rows of rft.turn_reward of an experience with the array `step_reward`, with the fields of `TURN_REWARD_COLUMNS`."""
    sampled = s.arrays[STEP_REWARD].tolist()
    now = s.origin.turn_rewards if s.origin is not None and s.origin.turn_rewards is not None else sampled
    for turn, first, reward in zip(s.turn_numbers(turn_index), sampled, now, strict=True):
        yield turn_reward_row(experience_id, turn, first, reward)


def turn_reward_row(experience_id: int, turn: int, reward_sampled: float, reward: float) -> bytes:
    """Encode a row of rft.turn_reward with the fields of `TURN_REWARD_COLUMNS`."""
    return _TURN_REWARD.pack(4, 8, experience_id, 4, turn, 8, reward_sampled, 8, reward)


class ExperienceKeys(NamedTuple):
    """The keys of a row of rft.experience. A named tuple, because a frozen dataclass takes three times as long to make.

    Attributes:
        segment_row: row of the segment with its arrays.
        turn_index: number of the sequence's first turn in its rollout.
    """

    experience_id: int
    run_id: int
    group_id: int
    rollout_id: int
    segment_id: int
    segment_row: int
    turn_index: int


def _fixed_fields(keys: ExperienceKeys, s: Sequence) -> bytes:
    """Encode the number of fields and the first fields of `EXPERIENCE_COLUMNS`, which are never NULL."""
    num_prompt = s.num_prompt_tokens
    return _EXPERIENCE_FIXED.pack(
        26,
        8,
        keys.experience_id,
        8,
        keys.run_id,
        8,
        keys.group_id,
        8,
        keys.rollout_id,
        8,
        keys.segment_id,
        4,
        keys.turn_index,
        4,
        num_prompt,
        4,
        len(s.token_ids) - num_prompt,
        4,
        s.num_trained_tokens,
        4,
        s.num_turns,
        4,
        keys.segment_row,
    )


def experience_row(
    keys: ExperienceKeys, source: str, s: Sequence, parent_id: int | None, texts: tuple[bytes, bytes]
) -> bytes:
    """Encode a row of rft.experience with the fields of `EXPERIENCE_COLUMNS`.

    Args:
        texts: the fields `prompt_digest` and `response_messages`.
    """
    versions = _NO_VERSIONS
    sampled = reward = float8(s.reward)
    final = _FALSE
    if s.origin is not None:
        # Versions of another buffer, or of another run's policy, do not determine staleness here.
        reward, final = float8(s.origin.reward), _TRUE if s.origin.reward_final else _FALSE
    elif s.policy_spans:
        span_versions = [version for _, version in s.policy_spans]
        versions = int8(min(span_versions)) + int8(max(span_versions))
    prompt_digest, response_messages = texts
    return b"".join(
        (
            _fixed_fields(keys, s),
            int8(parent_id),
            versions,
            sampled,
            reward,
            final,
            word(source),
            NULL if s.fork is None else word(s.fork),
            text(s.role),
            text(s.finish_reason),
            prompt_digest,
            text(s.response),
            response_messages,
            binary(jsonb_bytes(s.reward_parts)) if s.reward_parts else _NO_OBJECT,
            binary(jsonb_bytes(s.metrics)),
        )
    )
