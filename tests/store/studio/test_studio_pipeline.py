"""The pages of the pipeline, of tasks and of pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

import rftdata
from tests.support.studio_site import Site


@pytest.fixture(scope="module")
def client(site: Site, studio_buffer: rftdata.Buffer) -> Iterator[httpx.Client]:
    """A client of a buffer in which two versions have decided, a task has outcomes and two answers are a pair."""
    with studio_buffer.database.connection() as connection:
        for version, dropped in (("v0", "reward = 0"), ("v1", "reward < 1")):
            connection.execute(
                "INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept, stage, reason)"
                f" SELECT experience_id, group_id, '{version}', NOT ({dropped}), CASE WHEN {dropped} THEN 'drop_low' END,"
                f" CASE WHEN {dropped} THEN '<b>too low</b>' END FROM rft.experience"
            )
            for rows_in, kept in ((12, 7), (8, 3)):
                connection.execute(
                    "INSERT INTO rft.operator_run (run_id, pipeline_version, stage_index, stage, rows_in, rows_kept, rows_dropped, rows_created, seconds)"
                    " VALUES (1, %s, 1, 'drop_low', %s, %s, %s, 0, 0.5)",
                    [version, rows_in, kept, rows_in - kept],
                )
        connection.execute(
            "INSERT INTO rft.task_observation (run_id, attempt_id, ordinal, task_id, successes, trials)"
            " SELECT run_id, attempt_id, ordinal, task_id, 1, 3 FROM rft.rollout_group WHERE group_id = 1"
        )
        connection.execute(
            "INSERT INTO rft.preference_pair (chosen_id, rejected_id, author) VALUES (1, 2, 'ada'), (3, 2, 'bob')"
        )
    with site.owner() as opened:
        yield opened


def test_a_pipeline_shows_rows_per_stage_and_what_was_dropped(client: httpx.Client) -> None:
    text = client.get("/pipeline", params={"run": 1}).text
    row = re.search(r"<td>drop_low.*?</tr>", text, re.DOTALL)
    assert row is not None and re.findall(r'class="num">(\d+)<', row[0]) == ["20", "10", "10"]
    assert "&lt;b&gt;too low" in text and "<b>too low" not in text
    assert len(re.findall(r'href="/experience/\d+"', text)) == 5


def test_two_versions_are_compared(client: httpx.Client, studio_buffer: rftdata.Buffer) -> None:
    text = client.get("/pipeline/difference", params={"run": 1, "before": "v0", "after": "v1"}).text
    halves = studio_buffer.sql("SELECT count(*) AS n FROM rft.experience WHERE reward = 0.5")["n"][0].as_py()
    assert re.search(rf'<td>kept</td><td>drop_low</td><td class="num">{halves}</td>', text)
    assert client.get("/pipeline/difference", params={"run": 1, "before": "v0", "after": "x"}).status_code >= 400


def test_tasks_are_listed_a_page_at_a_time_with_their_outcomes(
    client: httpx.Client, studio_buffer: rftdata.Buffer
) -> None:
    keys = re.findall(r'href="/task/(\d+)\?run=1"', client.get("/tasks", params={"taskset": "sums", "run": 1}).text)
    assert len(keys) == 7 and keys == sorted(keys, key=int)
    rest = client.get("/tasks", params={"taskset": "sums", "run": 1, "after": keys[2]}).text
    assert re.findall(r'href="/task/(\d+)\?run=1"', rest) == keys[3:]
    assert "There are no tasks here." in client.get("/tasks", params={"taskset": "sums", "status": "excluded"}).text
    key = studio_buffer.sql("SELECT task_id FROM rft.rollout_group WHERE group_id = 1")["task_id"][0].as_py()
    task = client.get(f"/task/{key}", params={"run": 1}).text
    assert "1 / 3" in task and "It has no vector" in task
    assert client.get("/task/999").status_code == 404


def test_hostile_tasks_are_texts(client: httpx.Client) -> None:
    listed = client.get("/tasks", params={"taskset": "<b>set</b>"}).text
    assert "&lt;i&gt;" in listed
    (key,) = set(re.findall(r'href="/task/(\d+)', listed))
    for text in (listed, client.get(f"/task/{key}").text):
        assert "&lt;img" in text and "<img" not in text and "<i>" not in text and "\u202e" not in text


def test_pairs_stand_side_by_side(client: httpx.Client) -> None:
    text = client.get("/pairs", params={"run": 1}).text
    assert re.findall(r'href="/experience/(\d+)"', text) == ["3", "2", "1", "2"] and "by bob" in text
    assert re.findall(r'href="/experience/(\d+)"', client.get("/pairs", params={"before": 2}).text) == ["1", "2"]
    assert "There are no pairs here." in client.get("/pairs", params={"run": 999}).text
