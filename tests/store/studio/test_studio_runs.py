"""The pages of runs and checkpoints: what they show is what the buffer has."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import rftdata
from rftcore.reporting.waiting_roles import what_waits
from rftdata.labels import set_rewards
from rftdata.reports.progress import Progress
from tests.support.browsers import violations
from tests.support.stored_run import StoredRun
from tests.support.studio_run import HOSTILE
from tests.support.studio_site import Site

STEPS = 30


@pytest.fixture(scope="module")
def run(studio_buffer: rftdata.Buffer) -> StoredRun:
    """A run of 30 steps: rewards that rise, an evaluation every 10 steps, two checkpoints, and a person's correction."""
    stored = StoredRun(studio_buffer, "curves", steps=40)
    stored.attempt()
    for step in range(1, STEPS + 1):
        stored.group(step - 1, [step / 100, step / 100])
        stored.train_step(step, loss=1.0 / step)
    for step in (0, 10, 20):
        stored.evaluation(step, {1: 0.0, 2: step / 20})
    for step in (10, 20):
        stored.checkpoint(step)
    ids = stored.experiences()
    with studio_buffer.database.connection() as connection:
        for step, key in ((5, ids[8]), (12, ids[22]), (13, ids[8])):
            connection.execute(
                "INSERT INTO rft.draw (attempt_id, trainer_step, slot, item_id, experience_id, reward_used, staleness)"
                " SELECT %s, %s, 0, group_id, experience_id, reward, 2 FROM rft.experience WHERE experience_id = %s",
                [stored.attempt_id, step, key],
            )
    set_rewards(studio_buffer, {ids[8]: 1.0}, author="ada", reason=HOSTILE[0])
    stored.worker("trainer", state="training", progress={"policy_step": 30})
    stored.worker(
        "explorer", state="waiting", waiting_for="the policy after trainer step 31", progress={"tokens_per_s": 120.0}
    )
    return stored


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[httpx.Client]:
    with site.owner() as opened:
        yield opened


def curve(client: httpx.Client, **asked: Any) -> list[dict[str, Any]]:
    answer = client.get("/runs/curve.json", params=asked)
    assert answer.status_code == 200, answer.text
    series: list[dict[str, Any]] = answer.json()["series"]
    return series


def test_all_runs_are_listed_newest_first_and_found_by_name(client: httpx.Client, run: StoredRun) -> None:
    names = re.findall(r'href="/run/\d+">([^<]+)<', client.get("/runs").text)
    assert names[:2] == ["curves", "sums"]
    assert "sums" not in re.findall(r'href="/run/\d+">([^<]+)<', client.get("/runs", params={"name": "CURV"}).text)
    assert "There are no runs here." in client.get("/runs", params={"before": 1}).text


def test_a_run_shows_what_its_processes_do_in_the_words_of_rft_status(client: httpx.Client, run: StoredRun) -> None:
    text = html.unescape(client.get(f"/run/{run.run_id}").text)
    waits = what_waits(Progress(run.run).snapshot(), run.run.config)
    assert waits is not None and waits in text and "waits for the policy after trainer step 31" in text
    assert "120 tokens/s" in text and ">30</b> of 40" in text


def test_curves_have_the_numbers_of_the_buffer(client: httpx.Client, run: StoredRun) -> None:
    (reward,) = curve(client, id=run.run_id, of="reward")
    assert reward["x"] == list(range(1, STEPS + 1)) and reward["y"] == pytest.approx([n / 100 for n in reward["x"]])
    faint, smooth = curve(client, id=run.run_id, of="metric:loss", smooth=10)
    assert faint["faint"] and faint["y"] == pytest.approx([1 / n for n in faint["x"]])
    assert smooth["y"][0] == 1 and smooth["y"][-1] == pytest.approx(sum(1 / n for n in range(21, 31)) / 10)
    (evaluations,) = curve(client, id=run.run_id, of="evaluations")
    assert evaluations["label"] == "validation val, greedy" and evaluations["x"] == [0, 10, 20]
    assert (evaluations["low"][2], evaluations["y"][2], evaluations["high"][2]) == pytest.approx((0, 0.5, 1))
    assert curve(client, id=run.run_id, of="staleness")[0]["y"] == [2, 2, 2]
    assert curve(client, id=run.run_id, of="tokens_per_s")[0]["y"][0] == 25
    assert curve(client, id=run.run_id, of="metric:nothing") == []


def test_a_long_curve_is_thinned_out_to_means(
    client: httpx.Client, run: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rftcore.studio import curves

    monkeypatch.setattr(curves, "_MOST_POINTS", 10)
    (reward,) = curve(client, id=run.run_id, of="reward")
    assert reward["x"] == list(range(3, 31, 3)) and reward["y"][0] == pytest.approx(0.02)


def test_runs_side_by_side_show_what_differs(client: httpx.Client, run: StoredRun) -> None:
    other = run.buffer.find_run("sums").run_id
    text = client.get("/runs/compare", params={"id": [run.run_id, other]}).text
    assert "algorithm.name" in text and "model.path" not in text.partition("<tbody>")[2]
    assert len(curve(client, id=[run.run_id, other], of="reward")) == 2
    assert client.get("/runs/compare", params={"id": [1, 2, 3, 4, 5]}).status_code == 422
    assert client.get("/runs/compare", params={"id": [999]}).status_code == 404
    assert client.get("/runs/compare").status_code == 422
    assert client.get("/runs/curve.json", params={"id": run.run_id, "of": "pg_sleep"}).status_code == 422


def test_a_step_shows_the_rollouts_that_were_sampled_for_it_and_those_it_trained_on(
    client: httpx.Client, run: StoredRun
) -> None:
    (group,) = re.findall(r'href="/group/(\d+)"', client.get(f"/run/{run.run_id}/step/5").text)
    trained = client.get(f"/run/{run.run_id}/step/13", params={"trained": True}).text
    assert re.findall(r'href="/group/(\d+)"', trained) == [group] and "staleness 2" in trained
    assert "There are no rollouts here." in client.get(f"/run/{run.run_id}/step/31").text


def test_checkpoints_count_what_was_corrected_since(client: httpx.Client, run: StoredRun) -> None:
    text = client.get("/checkpoints", params={"run": run.run_id}).text
    assert re.findall(r'step=(\d+)">(\d+) experiences', text) == [("20", "1"), ("10", "1")]
    corrected = client.get("/checkpoints/corrected", params={"run": run.run_id, "step": 20}).text
    assert (
        f"/experience/{run.experiences()[8]}" in corrected
        and "&lt;img src=x onerror" in corrected
        and "<img" not in corrected
    )
    assert re.findall(r"/step/(\d+)", client.get("/checkpoints", params={"run": run.run_id, "before": 20}).text) == [
        "10"
    ]


def test_a_click_on_a_step_of_a_curve_opens_its_rollouts(tab: Any, site: Site, run: StoredRun) -> None:
    tab.goto(f"{site.origin}/run/{run.run_id}")
    picture = tab.locator(".chart[data-step] .u-over").first
    picture.wait_for()
    assert violations(tab) == []
    box = picture.bounding_box()
    picture.click(position={"x": box["width"] - 1, "y": 20})
    tab.wait_for_url(f"**/run/{run.run_id}/step/{STEPS}")
    tab.set_viewport_size({"width": 360, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
