"""`/quality`: figures of people, and decisions with one key."""

from __future__ import annotations

import re

import psycopg
import pytest

from rftdata import Buffer
from rftdata.annotations import LabelKind, define_kinds, standing
from tests.store.annotations.test_annotation_rights import add
from tests.store.conftest import Login
from tests.support.store_roles import two_sealed_groups
from tests.support.studio_site import account, open_site


@pytest.fixture
def people(buffer: Buffer, login: Login) -> list[psycopg.Connection]:
    two_sealed_groups(buffer)
    define_kinds(buffer, [LabelKind("good", "choice", spec={"choices": ["<b>yes</b>", "no"]})], author="owner")
    found = [login(role) for role in ("rft_labeler", "rft_other_labeler")]
    for person, value in zip(found, ('"<b>yes</b>"', '"no"'), strict=True):
        add(person, "good", 1, value)
        add(person, "good", 2, '"no"')
    return found


def test_the_owner_sees_agreement_and_decides(buffer: Buffer, people: list[psycopg.Connection]) -> None:
    with open_site(buffer) as site, site.owner() as client:
        page = client.get("/quality").text
        assert "Krippendorff" in page and people[0].info.user in page
        open_one = client.get("/quality/good").text
        assert "&lt;b&gt;yes" in open_one and "<b>yes" not in open_one and 'data-key="2"' in open_one
        fields = {"target_id": "1", "value": '"<b>yes</b>"', "reason": "it is"}
        for _ in range(2):  # an answer may be sent twice
            assert client.post("/quality/good/decide", data=fields).status_code == 200
        decided = [row for row in standing(buffer, kind="good") if row["source"] == "adjudication"]
        assert [(row["value"], row["author"], row["reason"]) for row in decided] == [("<b>yes</b>", "olga", "it is")]
        assert 'name="target_id"' not in client.get("/quality/good").text
        assert "100 %" in client.get("/quality").text
        assert client.get("/quality/missing").status_code == 404


def test_what_people_are_asked_is_claimed_skipped_and_answered(
    buffer: Buffer, people: list[psycopg.Connection]
) -> None:
    with (
        open_site(buffer) as site,
        account(buffer, "studio_quality_eve", "rft_labeler") as name,
        site.account(name) as client,
    ):
        assert "data-claims" not in client.get("/label/good").text
        buffer.sql("INSERT INTO rft.question (kind, target_id) SELECT 'good', i FROM generate_series(3, 4) i")
        assert "data-claims" in client.get("/label/good").text

        def claimed(**fields: str) -> list[str]:
            page = client.post("/label/good/claim", data={"count": "1", **fields}).text
            return re.findall(r'data-item-id="(\d+)" data-cursor="\d+" data-question="\d+"', page)

        held = str(buffer.sql("SELECT question_id AS q FROM rft.question WHERE target_id = 3")["q"][0].as_py())
        assert claimed() == ["3"] and claimed(holding=held) == ["4"]
        assert client.post("/label/good/skip", data={"question": held}).json() == {"kind": "good", "is_moved": True}
        answer = {"item": "4", "value": "no", "key": "k"}
        assert client.post("/label/good/answer", data=answer).status_code == 200
        assert claimed() == ["3"]
        assert people[0].execute("SELECT * FROM rft.claim_questions('good', 5)").fetchall() == []


def test_a_labeller_decides_nothing(buffer: Buffer, people: list[psycopg.Connection]) -> None:
    with (
        open_site(buffer) as site,
        account(buffer, "studio_quality_ada", "rft_labeler") as name,
        site.account(name) as client,
    ):
        assert 'name="target_id"' not in client.get("/quality/good").text
        answer = client.post("/quality/good/decide", data={"target_id": "1", "value": '"no"'})
        assert answer.status_code in (400, 403, 422)
    assert [row for row in standing(buffer, kind="good") if row["source"] == "adjudication"] == []
