"""A judge's answers are suggestions: annotations of the source judge that a person accepts or corrects, and that no column counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from operators.base import StageContext
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from rftcore.pipeline.group_decisions import decide_groups
from rftcore.pipeline.role import register_stages
from rftcore.pipeline.suggestions import Suggestions
from rftdata import Buffer
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds, standing
from rftdata.errors import ConfigError
from rftdata.pipeline.queue import claim_sealed_groups, read_groups
from rftdata.pipeline.verdicts import commit_verdicts
from tests.support.chat_server import ChatServer
from tests.support.store_roles import Roles, two_sealed_groups

CRITERIA: dict[str, Any] = {"clear": {"min": 0, "max": 1}, "true": {"min": 0, "max": 1}}
KINDS = [
    LabelKind("quality", "number", spec={"min": 0, "max": 10}, reopens=True),
    LabelKind("grades", "rubric", spec={"criteria": CRITERIA}),
    LabelKind("whole", "number", "group"),
    LabelKind("small", "number", spec={"max": 3}),
]


def reply(number: int, body: dict[str, Any]) -> str:
    if "Criteria:" in body["messages"][-1]["content"]:
        return '{"1": 1, "2": 0}'
    return '{"reason": "short", "score": 7}'


@pytest.fixture
def judge() -> Iterator[dict[str, Any]]:
    server = ChatServer(reply)
    yield {"url": server.url, "model": "critic"}
    server.close()


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    define_kinds(buffer, KINDS, author="owner")
    return two_sealed_groups(buffer)


def decide(roles: Roles, chain: Chain, *, is_killed: bool = False) -> list[int]:
    """Decide on what waits, as the pipeline role does; or end before the commit."""
    chain.prepare(StageContext())
    register_stages(roles.buffer, chain)
    suggestions = Suggestions(roles.buffer, chain, "tiny")
    roles.buffer.sql("UPDATE rft.run SET pipeline_version = %s", [chain.version])
    batch = claim_sealed_groups(roles.run, roles.worker_id, count=100, lease_s=60, columns=chain.columns)
    if batch is None:
        chain.close()
        return []
    verdicts = decide_groups(chain, batch)
    chain.close()
    verdicts.stages += suggestions.store(verdicts.scores)
    if is_killed:
        roles.buffer.sql("UPDATE rft.worklist SET available = true, claimed_by = NULL WHERE consumer = 'pipeline'")
        return []
    return commit_verdicts(roles.run, roles.worker_id, chain.version, batch, verdicts).decided


def test_scores_are_suggested_once_and_a_person_overrules_them(
    buffer: Buffer, roles: Roles, judge: dict[str, Any]
) -> None:
    chain = build_chain(
        [
            {"llm_judge": {"endpoint": judge, "suggests": "quality"}},
            {"reward_shaping": {"formula": "coalesce(label_quality.mean, judge_score)"}},
        ]
    )
    assert decide(roles, chain, is_killed=True) == []
    assert decide(roles, chain) == [1, 2]
    said = standing(buffer, kind="quality")
    assert len(said) == 4 == len(buffer.sql("SELECT annotation_id FROM rft.annotation"))
    names = ("value", "source", "author", "model", "reason")
    assert {tuple(row[name] for name in names) for row in said} == {(7, "judge", "llm_judge", "critic", "short")}

    accepted = next(row["annotation_id"] for row in said if row["target_id"] == 1)
    annotate(
        buffer,
        [Annotation("quality", 1, 7, shown={"suggestion_id": accepted}), Annotation("quality", 2, 2)],
        author="ada",
    )
    assert decide(roles, chain) == [1]
    rewards = buffer.sql("SELECT reward FROM rft.verdict WHERE is_newest ORDER BY experience_id")["reward"].to_pylist()
    assert rewards == [7, 2, 7, 7]
    table = read_groups(buffer.database, [1, 2], ["experience_id", "group_id", "reward", "label_quality"]).table
    labels = table["label_quality"].to_pylist()
    assert [(label["count"], label["mean"], label["suggestion"]) for label in labels] == [
        (1, 7, "7.0"),
        (1, 2, "7.0"),
        (0, None, "7.0"),
        (0, None, "7.0"),
    ]


def test_a_rubric_suggests_its_grades(buffer: Buffer, roles: Roles, judge: dict[str, Any]) -> None:
    criteria = [{"name": "clear", "description": "Is clear."}, {"name": "true", "description": "Is true."}]
    stage = {"rubric": {"endpoint": judge, "criteria": criteria, "suggests": "grades"}}
    decide(roles, build_chain([stage]))
    assert [row["value"] for row in standing(buffer, kind="grades")] == [{"clear": 1.0, "true": 0.0}] * 4


def test_a_suggestion_that_the_kind_refuses_is_an_error_of_the_stage(
    buffer: Buffer, roles: Roles, judge: dict[str, Any]
) -> None:
    assert decide(roles, build_chain([{"llm_judge": {"endpoint": judge, "suggests": "small"}}])) == [1, 2]
    errors = buffer.sql("SELECT error FROM rft.operator_run WHERE error IS NOT NULL")["error"].to_pylist()
    assert len(errors) == 4 and all("the suggestion is refused" in e and "up to 3" in e for e in errors)
    assert standing(buffer) == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [("wrong", "does not exist.*quality"), ("whole", "cannot suggest"), ("grades", "cannot suggest")],
)
def test_a_kind_that_a_judge_cannot_suggest_is_refused_at_the_start(
    buffer: Buffer, roles: Roles, judge: dict[str, Any], kind: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Suggestions(buffer, build_chain([{"llm_judge": {"endpoint": judge, "suggests": kind}}]), "tiny")


def test_the_version_of_a_chain_without_suggestions_stays(judge: dict[str, Any]) -> None:
    plain, suggesting = (
        build_chain([{"llm_judge": {"endpoint": judge, **more}}]) for more in ({}, {"suggests": "quality"})
    )
    assert "suggests" not in json.dumps(plain.stages[0].operator.spec())
    assert plain.version != suggesting.version and plain.score_keys == suggesting.score_keys
