"""Experiences by condition: what is found, and one reward for all that match."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import httpx
import pytest

import rftdata
from rftdata.labels import set_rewards
from tests.support.studio_site import Site


@pytest.fixture(scope="module")
def client(site: Site, ada: str) -> Iterator[httpx.Client]:
    with site.account(ada) as opened:
        yield opened


def found(client: httpx.Client, where: str, **asked: object) -> list[int]:
    answer = client.get("/experiences", params={"where": where, **asked})
    assert answer.status_code == 200, answer.text
    return [int(key) for key in re.findall(r'href="/experience/(\d+)"', answer.text)]


def ids(buffer: rftdata.Buffer, where: str) -> list[int]:
    rows = buffer.sql(f"SELECT experience_id FROM rft.v_experience WHERE {where} ORDER BY 1 DESC")
    return list(rows["experience_id"].to_pylist()) if rows.num_rows else []


def test_a_condition_finds_the_newest_that_match_a_page_at_a_time(
    client: httpx.Client, studio_buffer: rftdata.Buffer
) -> None:
    assert found(client, "reward = 0.5 -- half") == ids(studio_buffer, "reward = 0.5")
    everything = ids(studio_buffer, "true")
    assert found(client, "", before=everything[3]) == everything[4:]
    assert found(client, "reward = 0.5", run=999) == []


@pytest.mark.parametrize(
    "where",
    [
        "reward <",
        "true) OR (true",
        "true; DELETE FROM rft.label",
        "nothing = 1",
        "true ORDER BY 1",
        "1 / (reward - reward) = 1",
        "pg_read_file('/etc/passwd') = ''",
    ],
)
def test_what_is_no_condition_is_told_beside_its_field_and_kept(client: httpx.Client, where: str) -> None:
    answer = client.get("/experiences", params={"where": where})
    assert (
        answer.status_code == 422
        and 'id="condition-problem"' in answer.text
        and html.escape(where, quote=False)[:8] in answer.text
    )


def test_bars_count_what_they_lead_to(client: httpx.Client, studio_buffer: rftdata.Buffer) -> None:
    text = html.unescape(client.get("/experiences/histograms", params={"where": "finish_reason = 'stop'"}).text)
    bars = re.findall(r'<a href="(/experiences\?[^"]+)"><title>([^<]+): (\d+)<', text)
    assert [(label, int(count)) for _, label, count in bars[:3]] == [
        (f"{value:g}", len(ids(studio_buffer, f"reward = {value}"))) for value in (0.0, 0.5, 1.0)
    ]
    for address, _, count in bars:
        assert len(re.findall(r'href="/experience/\d+"', client.get(address).text)) == int(count)


def test_a_new_reward_for_all_is_previewed_set_as_one_batch_and_undone(
    client: httpx.Client, studio_buffer: rftdata.Buffer
) -> None:
    before = studio_buffer.sql("SELECT experience_id, reward FROM rft.experience ORDER BY 1").to_pylist()
    asked = {"where": "reward = 0.5", "run": "", "reward": "0,75", "reason": "half is <b>too little</b>"}
    preview = client.post("/experiences/relabel/preview", data=asked).text
    num = len(ids(studio_buffer, "reward = 0.5"))
    assert (
        f"{num} experiences in {num} groups match." in preview
        and f"{num} would get the reward 0.75; 0 have it already." in preview
    )
    assert studio_buffer.sql("SELECT experience_id, reward FROM rft.experience ORDER BY 1").to_pylist() == before
    fields = {name: html.unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', preview)}
    done = client.post("/experiences/relabel", data=fields)
    assert done.status_code == 200 and f"{num} rewards set" in done.text
    rows = studio_buffer.sql(
        "SELECT DISTINCT label_batch_id, author, session_user_name, reason FROM rft.label"
    ).to_pylist()
    assert [(row["author"], row["session_user_name"], row["reason"]) for row in rows] == [
        ("studio_ada", "studio_ada", asked["reason"])
    ]
    again = client.post("/experiences/relabel", data=fields)
    assert again.status_code == 409 and "other experiences match now" in again.text
    assert client.post("/experiences/undo", data={"label_batch_id": rows[0]["label_batch_id"]}).status_code == 200
    assert studio_buffer.sql("SELECT experience_id, reward FROM rft.experience ORDER BY 1").to_pylist() == before


def test_what_matches_anew_since_the_preview_is_not_relabelled_unseen(
    client: httpx.Client, studio_buffer: rftdata.Buffer
) -> None:
    preview = client.post("/experiences/relabel/preview", data={"where": "reward = 0.5", "reward": "0.1"}).text
    fields = {name: html.unescape(value) for name, value in re.findall(r'name="(\w+)" value="([^"]*)"', preview)}
    other = ids(studio_buffer, "reward = 0")[0]
    set_rewards(studio_buffer, {other: 0.5}, author="bob")
    assert client.post("/experiences/relabel", data=fields).status_code == 409
    assert ids(studio_buffer, "reward = 0.1") == []
    for reward in ("nan", "inf", "x"):
        refused = client.post("/experiences/relabel/preview", data={"where": "true", "reward": reward})
        told = (
            refused
            if refused.status_code == 422
            else client.post(
                "/experiences/relabel",
                data={
                    "where": "true",
                    "reward": reward,
                    "digest": re.findall(r'digest" value="(\w+)', refused.text)[0],
                },
            )
        )
        assert told.status_code == 422 and "number" in told.text
