"""Stages read annotations as columns, and an annotation of a kind that the chain reads reopens its group as a reward does."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from operators.base import Operator, StageOutcome
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from rftcore.pipeline.group_decisions import decide_groups
from rftcore.pipeline.preview import preview, read_sample
from rftcore.pipeline.role import register_stages
from rftdata import Buffer, labels
from rftdata.annotations import Annotation, LabelKind, annotate, define_kinds
from rftdata.errors import ConfigError
from rftdata.pipeline.queue import claim_sealed_groups, read_groups
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.pipeline.versions import groups_to_replay
from tests.store.conftest import Login
from tests.support.store_roles import Roles, two_sealed_groups

KINDS = [
    LabelKind("helpful", "choice", spec={"choices": ["good", "bad"]}, reopens=True),
    LabelKind("note", "text", reopens=True),
    LabelKind("score", "number", "rollout"),
    LabelKind("grades", "rubric", "task", spec={"criteria": {"clear": {"min": 0, "max": 3}, "true": {"min": 0}}}),
    LabelKind("order", "ranking", "group", reopens=True),
    LabelKind("flags", "tags", spec={"tags": ["rude", "wrong"]}),
    LabelKind("thumb", "bool", blind=True),
]


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    """Experiences 1 and 2 of group 1, 3 and 4 of group 2, sealed."""
    define_kinds(buffer, KINDS, author="owner")
    return two_sealed_groups(buffer)


def say(buffer: Buffer, kind: str, target: int, *values: Any, source: Any = "human") -> None:
    """Annotate as one person after the other."""
    for number, value in enumerate(values):
        annotate(buffer, [Annotation(kind, target, value)], author=f"person {number}", source=source)


def decide(roles: Roles, chain: Chain) -> list[int]:
    """Decide on what waits, as the pipeline role does."""
    register_stages(roles.buffer, chain)
    roles.buffer.sql("UPDATE rft.run SET pipeline_version = %s", [chain.version])
    batch = claim_sealed_groups(roles.run, roles.worker_id, count=100, lease_s=60, columns=chain.columns)
    if batch is None:
        return []
    return commit_verdicts(roles.run, roles.worker_id, chain.version, batch, decide_groups(chain, batch)).decided


def kept(buffer: Buffer) -> list[int]:
    return [
        row["experience_id"]
        for row in buffer.sql(
            "SELECT experience_id FROM rft.verdict WHERE kept AND is_newest ORDER BY experience_id"
        ).to_pylist()
    ]


def column(roles: Roles, kind: str) -> list[dict[str, Any]]:
    table = read_groups(roles.database, [1, 2], ["experience_id", "group_id", "reward", f"label_{kind}"]).table
    found: list[dict[str, Any]] = table[f"label_{kind}"].to_pylist()
    return found


def test_a_column_sums_up_what_several_people_said(roles: Roles) -> None:
    buffer = roles.buffer
    say(buffer, "helpful", 1, "good", "bad", "good")
    say(buffer, "helpful", 2, "good", "bad")
    say(buffer, "helpful", 2, "bad", source="judge")
    say(buffer, "score", 2, 1, 2)
    say(buffer, "order", 1, {"order": [[2], [1]]}, {"order": [[1, 2]]})
    say(buffer, "flags", 3, ["rude", "wrong"], ["wrong"])
    say(buffer, "thumb", 3, True, True, False)
    task = buffer.sql("SELECT task_id FROM rft.rollout_group WHERE group_id = 2").to_pylist()[0]["task_id"]
    say(buffer, "grades", task, {"clear": 1, "true": 1}, {"clear": 2, "true": 1})
    say(buffer, "note", 4, "too long")
    first, second, none, _ = column(roles, "helpful")
    assert (first["count"], first["majority"], first["values"]) == (3, "good", ["good", "bad", "good"])
    assert first["agreement"] == pytest.approx(2 / 3) and first["suggestion"] is None
    assert (second["count"], second["majority"], second["agreement"], second["suggestion"]) == (2, None, 0.5, "bad")
    assert none == dict.fromkeys(none) | {"count": 0, "values": []}
    assert [row["mean"] for row in column(roles, "score")] == [None, 1.5, None, None]
    assert [row["mean"] for row in column(roles, "order")] == [0.25, 0.75, None, None]
    assert column(roles, "flags")[2]["majority"] == '["wrong"]'
    assert column(roles, "thumb")[2]["mean"] == pytest.approx(2 / 3)  # a blind kind: the pipeline sees everybody's
    assert [row["means"] for row in column(roles, "grades")] == [None, None] + ['{"clear": 1.5, "true": 1.0}'] * 2
    assert column(roles, "note")[3]["values"] == ["too long"]


def test_an_adjudication_decides_alone_and_an_undone_annotation_does_not_count(roles: Roles) -> None:
    say(roles.buffer, "helpful", 1, "good", "good")
    say(roles.buffer, "helpful", 1, "bad", source="adjudication")
    assert column(roles, "helpful")[0]["values"] == ["bad"]
    batch = annotate(roles.buffer, [Annotation("helpful", 2, "bad")], author="ada")
    labels.undo(roles.buffer, batch.label_batch_id, author="ada")
    assert column(roles, "helpful")[1]["count"] == 0


def test_a_column_counts_an_account_once_whatever_authors_it_gives(roles: Roles, login: Login) -> None:
    ada = login("rft_labeler")
    for author, value in [("ada", "bad"), ("anna", "bad"), ("ann", "good")]:
        ada.execute(
            "INSERT INTO rft.annotation (kind, target_id, value, author) VALUES ('helpful', 1, to_jsonb(%s::text), %s)",
            [value, author],
        )
    say(roles.buffer, "helpful", 1, "bad")
    first = column(roles, "helpful")[0]
    assert (first["count"], first["values"], first["agreement"]) == (2, ["good", "bad"], 0.5)
    say(roles.buffer, "helpful", 1, "bad", "bad", "bad")  # the owner writes for several people
    assert column(roles, "helpful")[0]["count"] == 4


class Praised(Operator):
    """Keeps what most people call good."""

    reads = frozenset({"label_helpful"})
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        good = [label["majority"] == "good" for label in table["label_helpful"].to_pylist()]
        return StageOutcome.keep_where(pa.array(good), "not good")


def is_good(row: dict[str, Any]) -> bool:
    return bool(row["label_helpful"]["majority"] == "good")


is_good.reads = {"label_helpful"}  # type: ignore[attr-defined]

STAGES: list[Any] = [
    {"sql": "SELECT * FROM batch WHERE label_helpful.majority = 'good'"},
    {"sql": "SELECT b.* FROM batch b WHERE list_contains(b.label_helpful.values, 'good') ORDER BY 1"},
    {"sql": 'WITH w AS (SELECT experience_id FROM batch WHERE Label_Helpful."count" > 0) SELECT * FROM w'},
    {"threshold": {"column": "(label_helpful.majority = 'good')::INT", "min": 1}},
    {f"{__name__}:Praised": {}},
    {f"{__name__}:is_good": {}},
]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_of_every_form_reads_a_label(roles: Roles, stage: Any) -> None:
    chain = build_chain([stage])
    assert chain.label_kinds == ["helpful"]
    say(roles.buffer, "helpful", 2, "good")
    assert decide(roles, chain) == [1, 2] and kept(roles.buffer) == [2]
    shown = preview(chain, read_sample(roles.run, chain, 4).table)
    assert [row["experience_id"] for row in shown.decisions if row["kept"]] == [2]


def test_only_a_kind_that_the_chain_reads_reopens_its_group(roles: Roles) -> None:
    buffer = roles.buffer
    chain = build_chain([{"sql": "SELECT * FROM batch WHERE label_helpful.majority = 'good'"}])
    assert decide(roles, chain) == [1, 2] and kept(buffer) == []
    say(buffer, "note", 1, "read by no stage")
    assert decide(roles, chain) == []

    batch = annotate(buffer, [Annotation("helpful", 1, "good")], author="ada")
    assert decide(roles, chain) == [1] and kept(buffer) == [1]
    annotate(buffer, [Annotation("helpful", 1, "bad")], author="ada")  # supersedes
    assert decide(roles, chain) == [1] and kept(buffer) == []
    labels.undo(buffer, batch.label_batch_id, author="ada")  # superseded meanwhile: nothing happens
    assert decide(roles, chain) == []
    newest = buffer.sql("SELECT max(annotation_id) AS n FROM rft.annotation WHERE kind = 'helpful'").to_pylist()
    cuts = buffer.sql("SELECT max(label_cut) AS n FROM rft.verdict WHERE group_id = 1").to_pylist()
    assert cuts == newest


def test_an_annotation_while_a_group_is_decided_on_is_not_lost(roles: Roles) -> None:
    chain = build_chain([{"sql": "SELECT * FROM batch WHERE label_helpful.majority = 'good'"}])
    decide(roles, chain)
    say(roles.buffer, "helpful", 1, "good")
    batch = claim_sealed_groups(roles.run, roles.worker_id, count=9, lease_s=60, columns=chain.columns)
    assert batch is not None
    say(roles.buffer, "helpful", 1, "bad")
    late = commit_verdicts(roles.run, roles.worker_id, chain.version, batch, decide_groups(chain, batch))
    assert late.decided == []
    assert decide(roles, chain) == [1] and kept(roles.buffer) == []


def test_a_drawn_group_is_decided_again_when_its_step_is_undone(buffer: Buffer, roles: Roles) -> None:
    chain = build_chain([{"sql": "SELECT * REPLACE (coalesce(label_helpful.agreement, 0) AS reward) FROM batch"}])
    decide(roles, chain)
    with roles.attempt(publish=False) as attempt:
        assert roles.train(attempt, 1) == [1, 2]
        say(buffer, "helpful", 1, "good")
        assert decide(roles, chain) == []  # it was drawn
    with roles.attempt(publish=False) as attempt:  # there is no checkpoint: the step is drawn again
        assert decide(roles, chain) == [1]
        roles.train(attempt, 1)
    used = buffer.sql("SELECT reward_used FROM rft.draw WHERE experience_id = 1 ORDER BY draw_id").to_pylist()
    assert [row["reward_used"] for row in used][-1] == 1.0


def test_a_replay_decides_again_after_an_annotation_of_any_kind_it_reads(roles: Roles) -> None:
    chain = build_chain([{"sql": 'SELECT * FROM batch WHERE label_thumb."mean" IS NULL'}])
    decide(roles, chain)
    assert groups_to_replay(roles.run, chain.version, 0, 9) == []
    say(roles.buffer, "thumb", 3, True)
    assert decide(roles, chain) == []  # the kind does not reopen
    assert groups_to_replay(roles.run, chain.version, 0, 9) == [2]


def test_what_a_chain_dropped_is_no_longer_left_out_after_a_label_that_it_reads(roles: Roles) -> None:
    chain = build_chain([{"sql": "SELECT * FROM batch WHERE label_helpful.majority = 'good'"}])
    decide(roles, chain)
    left = "SELECT experience_id FROM rft.v_left_out ORDER BY 1"
    assert len(roles.buffer.sql(left)) == 4
    say(roles.buffer, "note", 1, "read by no stage")
    assert len(roles.buffer.sql(left)) == 4
    say(roles.buffer, "helpful", 1, "good")
    assert [row["experience_id"] for row in roles.buffer.sql(left).to_pylist()] == [3, 4]


def test_a_kind_that_was_never_defined_is_refused_with_those_that_were(roles: Roles) -> None:
    chain = build_chain([{"sql": 'SELECT * FROM batch WHERE label_helpfull."count" > 0'}])
    with pytest.raises(ConfigError, match=r"'label_helpfull'.*no such kind.*flags, grades, helpful"):
        register_stages(roles.buffer, chain)
    with pytest.raises(ConfigError, match="no such kind"):
        read_groups(roles.database, [1], chain.columns)


def test_a_column_that_a_stage_adds_is_not_a_label(roles: Roles) -> None:
    chain = build_chain(
        [{"tag": {"columns": {"label_mine": "reward + 1"}}}, {"threshold": {"column": "label_mine", "min": 2}}]
    )
    assert chain.label_kinds == []
    assert decide(roles, chain) == [1, 2] and kept(roles.buffer) == [2, 4]
