"""Unfinished answers are kept in the buffer, and the next worker that claims their group continues them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import rftdata
from rftcore.config.run import parse_config
from rftcore.engines.base import Decoding, Engine, Generation
from rftcore.explorer.drafts import Drafts, RolloutDraft
from rftcore.explorer.role import Explorer
from rftcore.resolved import ResolvedRun
from rftcore.run.join import JoinedRun
from rftcore.workflows.task import Model, Score, Scorer, Task
from rftdata.attempts.attempt import Attempt
from rftdata.planning.claims import ClaimedGroup, claim_groups, release_groups
from rftdata.planning.partial import Part, PartialAnswer, keep, take_up
from rftdata.postgres.database import execute
from rftdata.workers.worker import Worker
from tests.store.pipeline.test_review_locks import wait_for_waiting
from tests.support.models import make_character_tokenizer
from tests.support.store_roles import Roles, own_group
from tests.support.waiting import PATIENCE_S

TEXT = "the answer is 42, as 6 times 7 is."


class Typist(Engine):
    """Writes the same text to every prompt, one character of each whenever `allowed` grows; a prompt that ends with part of it is continued.

    Attributes:
        prompts: of all requests, as text.
        allowed: grows by `allow`; a request may write as many characters as it has grown by since the request began.
    """

    def __init__(self, policy_version_id: int = 0) -> None:
        self.tokenizer = make_character_tokenizer()
        self.policy_version_id = policy_version_id
        self.num_generated_tokens = 0
        self.prompts: list[str] = []
        self.limits: list[int] = []
        self.open: dict[str, Generation] = {}
        self.allowed = 0
        self.paced = True
        self._begun_at: dict[str, int] = {}

    def allow(self) -> None:
        """Allow every request one character more, once all have written what they may, so that none is ahead of the others or of
        the test."""
        written = {name: len(generation.token_ids) for name, generation in list(self.open.items())}
        if all(length == self.allowed - self._begun_at[name] for name, length in written.items()):
            self.allowed += 1

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        return await self.generate_named(f"request {len(self.prompts)}", prompt_token_ids, decoding)

    async def generate_named(self, name: str, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        prompt = self.tokenizer.decode(prompt_token_ids)
        self.prompts.append(prompt)
        self.limits.append(decoding.max_tokens)
        written = next(n for n in range(len(TEXT), -1, -1) if prompt.endswith(TEXT[:n]))
        begun_at = self._begun_at[name] = self.allowed
        rest = self.tokenizer.encode(TEXT[written:], add_special_tokens=False)
        spans: list[tuple[int, int]] = []
        for place in range(len(rest) + 1):
            ids = rest[:place]
            done = Generation(ids, [-0.25] * place, self.tokenizer.decode(ids), "stop", list(spans))
            if place == len(rest) or any(stop in done.text for stop in decoding.stop):
                self.open.pop(name, None)
                return done
            self.open[name] = done
            while self.paced and place >= self.allowed - begun_at:
                await asyncio.sleep(0.01)
            if not spans or spans[-1][1] != self.policy_version_id:
                spans.append((place, self.policy_version_id))
        raise AssertionError

    def unfinished(self, first_tokens: Mapping[str, int]) -> dict[str, Generation]:
        return {
            name: Generation(
                g.token_ids[first_tokens[name] :], g.logprobs[first_tokens[name] :], "", "abort", g.version_spans
            )
            for name, g in list(self.open.items())
            if name in first_tokens
        }

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        self.policy_version_id = policy_version_id
        return 0.0

    def close(self) -> None:
        pass


@pytest.fixture
def roles(buffer: rftdata.Buffer) -> Roles:
    return Roles(buffer, steps=9, batch_groups=1, max_staleness=1)


@pytest.fixture
def attempt(roles: Roles) -> Iterator[Attempt]:
    with roles.attempt() as attempt:
        roles.plan()
        yield attempt


def claimed_by(roles: Roles, worker_id: int, policy_step: int = 0) -> ClaimedGroup:
    (group,) = claim_groups(roles.run, worker_id, policy_step=policy_step, last_step=0, count=1, lease_s=60)
    return group


def another_worker(roles: Roles) -> int:
    rows = roles.database.fetch(
        "insert_worker", run_id=roles.run_id, role="explorer", host="here", pid=1, pid_space="", pid_started=0
    )
    return int(rows[0]["worker_id"])


def num_parts(roles: Roles) -> int:
    return int(roles.buffer.sql("SELECT count(*) AS n FROM rft.partial_tokens")["n"][0].as_py())


async def written(engine: Typist, drafts: Drafts, claimed: ClaimedGroup, length: int, decoding: Decoding) -> None:
    """An explorer that is interrupted when its engine has written so much."""
    prompt = engine.tokenizer.encode("6*7=", add_special_tokens=False)
    request = asyncio.create_task(drafts.rollout(claimed.group_id, 0).generate(prompt, decoding))
    while True:
        engine.allow()
        await asyncio.sleep(0.01)
        assert not request.done(), "it was to be interrupted"
        if any(len(generation.token_ids) >= length for generation in engine.open.values()):
            break
        if engine.allowed % 4 == 0:
            await asyncio.to_thread(drafts.save, all_groups=True)
    await asyncio.to_thread(drafts.save, all_groups=True)
    request.cancel()


def continued(
    roles: Roles, engine: Typist, worker_id: int, decoding: Decoding, policy_step: int = 0
) -> tuple[Generation, ClaimedGroup]:
    group = claimed_by(roles, worker_id, policy_step)
    kept = take_up(roles.run, worker_id, [group], policy_step=policy_step, max_staleness=1)
    draft = RolloutDraft(engine, 0, kept.get(group.group_id, ()))
    engine.paced = False
    prompt = engine.tokenizer.encode("6*7=", add_special_tokens=False)
    return asyncio.run(draft.generate(prompt, decoding)), group


def interrupted(roles: Roles, length: int, decoding: Decoding, engine: Typist | None = None) -> None:
    engine = engine or Typist(roles.version or 0)
    group = claimed_by(roles, roles.worker_id)
    kept = take_up(roles.run, roles.worker_id, [group], policy_step=0, max_staleness=1)
    drafts = Drafts(roles.run, engine, keep_s=60)
    drafts.begin(group, kept.get(group.group_id, ()))
    asyncio.run(written(engine, drafts, group, length, decoding))
    release_groups(roles.run, roles.worker_id)


def test_an_answer_is_continued_by_the_next_explorer_with_its_log_probabilities_and_versions(
    roles: Roles, attempt: Attempt
) -> None:
    decoding = Decoding(max_tokens=99)
    interrupted(roles, 10, decoding)
    assert num_parts(roles) > 2, "stored in parts, while it was written"
    engine = Typist(roles.publish(attempt, 1))
    first = roles.version or 0
    whole, _ = continued(roles, engine, another_worker(roles), decoding)
    assert engine.prompts == ["6*7=" + TEXT[:10]] and engine.limits == [99 - 10]
    assert whole.text == TEXT and whole.finish_reason == "stop"
    assert whole.token_ids == engine.tokenizer.encode(TEXT, add_special_tokens=False)
    assert whole.logprobs == [-0.25] * len(TEXT)
    assert whole.version_spans == [(0, first - 1), (10, first)]


def test_an_answer_that_is_interrupted_again_and_again_is_continued_from_its_last_token(
    roles: Roles, attempt: Attempt
) -> None:
    decoding = Decoding(max_tokens=99)
    for length in (3, 6, 9):
        interrupted(roles, length, decoding)
    engine = Typist(roles.version or 0)
    whole, _ = continued(roles, engine, another_worker(roles), decoding)
    (prompt,) = engine.prompts
    assert prompt.startswith("6*7=" + TEXT[:9]) and whole.text == TEXT


def test_a_finished_answer_is_not_sampled_again(roles: Roles, attempt: Attempt) -> None:
    async def answers(drafts: Drafts, group: ClaimedGroup, engine: Typist) -> None:
        engine.paced = False
        rollout = drafts.rollout(group.group_id, 0)
        for text in ("6*7=", "and 7*6="):
            await rollout.generate(engine.tokenizer.encode(text, add_special_tokens=False), Decoding())
        await asyncio.to_thread(drafts.save, all_groups=True)

    first, group = Typist(roles.version or 0), claimed_by(roles, roles.worker_id)
    drafts = Drafts(roles.run, first, keep_s=60)
    drafts.begin(group)
    asyncio.run(answers(drafts, group, first))
    release_groups(roles.run, roles.worker_id)

    engine, worker_id = Typist(roles.version or 0), another_worker(roles)
    again = claimed_by(roles, worker_id)
    drafts = Drafts(roles.run, engine, keep_s=60)
    drafts.begin(again, take_up(roles.run, worker_id, [again], policy_step=0, max_staleness=1)[again.group_id])
    asyncio.run(answers(drafts, again, engine))
    assert engine.prompts == []


def test_a_text_that_ends_an_answer_is_found_where_it_was_interrupted(roles: Roles, attempt: Attempt) -> None:
    decoding = Decoding(max_tokens=99, stop=("42",))
    interrupted(roles, TEXT.index("2"), decoding)
    engine = Typist(roles.version or 0)
    whole, _ = continued(roles, engine, another_worker(roles), decoding)
    assert whole.text == "the answer is " and whole.finish_reason == "stop"
    assert engine.tokenizer.decode(whole.token_ids) == "the answer is 42"


def test_a_text_that_ends_an_answer_may_take_a_token_for_each_of_its_bytes(roles: Roles, attempt: Attempt) -> None:
    decoding = Decoding(max_tokens=99, stop=("\u2192",))
    interrupted(roles, 10, decoding)
    engine = Typist(roles.version or 0)
    continued(roles, engine, another_worker(roles), decoding)
    assert engine.prompts == ["6*7=" + TEXT[: 10 - 3]]


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"max_tokens": 98}])
def test_other_sampling_parameters_begin_anew(roles: Roles, attempt: Attempt, change: dict[str, Any]) -> None:
    interrupted(roles, 5, Decoding(max_tokens=99))
    engine = Typist(roles.version or 0)
    continued(roles, engine, another_worker(roles), Decoding(**{"max_tokens": 99, **change}))
    assert engine.prompts == ["6*7="]


def test_tokens_that_would_be_too_old_are_not_continued(roles: Roles, attempt: Attempt) -> None:
    interrupted(roles, 5, Decoding())
    for step in (1, 2):
        roles.publish(attempt, step)
    engine = Typist(roles.version or 0)
    continued(roles, engine, another_worker(roles), Decoding(), policy_step=2)
    assert engine.prompts == ["6*7="]


def test_tokens_are_not_continued_that_are_too_old_for_every_step_not_drawn_yet(roles: Roles, attempt: Attempt) -> None:
    interrupted(roles, 5, Decoding())
    # Others take its place in the first two steps.
    roles.buffer.sql("UPDATE rft.rollout_group SET trainable = false")
    roles.insert(*[own_group(task_key=key) for key in ("one", "two")])
    roles.decide()
    attempt.draw(1, 1, timeout_s=5)
    roles.publish(attempt, 1)
    attempt.draw(2, 1, timeout_s=5)  # which is being trained, and the policy is that of step 1
    roles.buffer.sql("UPDATE rft.rollout_group SET trainable = true")
    engine = Typist(roles.version or 0)
    continued(roles, engine, another_worker(roles), Decoding(), policy_step=1)
    assert engine.prompts == ["6*7="]


def test_an_answer_without_tokens_is_kept(roles: Roles, attempt: Attempt) -> None:
    group = claimed_by(roles, roles.worker_id)
    answer = PartialAnswer(
        rollout_index=0,
        generation_index=0,
        input_digest=b"1",
        token_ids=[],
        logprobs=[],
        version_spans=[],
        finish_reason="stop",
    )
    keep(roles.run, [Part(group_id=group.group_id, claim_token=group.claim_token, first_token=0, answer=answer)])
    release_groups(roles.run, roles.worker_id)
    worker_id = another_worker(roles)
    again = claimed_by(roles, worker_id)
    assert take_up(roles.run, worker_id, [again], policy_step=0, max_staleness=1) == {again.group_id: [answer]}


def test_the_oldest_token_counts_as_the_policy_of_the_claim(roles: Roles, attempt: Attempt) -> None:
    interrupted(roles, 5, Decoding())
    roles.publish(attempt, 1)
    _, group = continued(roles, Typist(roles.version or 0), another_worker(roles), Decoding(), policy_step=1)
    rows = roles.buffer.sql("SELECT claimed_policy_step FROM rft.rollout_group WHERE group_id = %s", [group.group_id])
    assert rows.to_pylist() == [{"claimed_policy_step": 0}]


def test_the_seal_deletes_them_and_a_lost_claim_stores_nothing(roles: Roles, attempt: Attempt) -> None:
    interrupted(roles, 5, Decoding())
    engine, worker_id = Typist(roles.version or 0), another_worker(roles)
    group = claimed_by(roles, worker_id)
    roles.insert(roles.result(group, [0.0, 1.0]))
    assert num_parts(roles) == 0
    late = Drafts(roles.run, engine, keep_s=60)
    late.begin(group)
    asyncio.run(written(engine, late, group, 5, Decoding()))
    assert num_parts(roles) == 0


@pytest.mark.parametrize(("keep_rollouts", "num_continued"), [(False, 5), (True, 10)])
def test_a_rewind_keeps_the_tokens_that_the_remaining_policies_sampled(
    roles: Roles, keep_rollouts: bool, num_continued: int
) -> None:
    with roles.attempt() as attempt:
        roles.plan()
        first = roles.version
        interrupted(roles, 5, Decoding())
        roles.publish(attempt, 1)
        attempt.commit_checkpoint(1, "/checkpoints/1")
        roles.publish(attempt, 2)
        interrupted(roles, 5, Decoding())
        undone = roles.version
    roles.buffer.rewind(roles.run, 1, keep_rollouts=keep_rollouts)
    with roles.attempt():
        engine = Typist(roles.version or 0)
        whole, _ = continued(roles, engine, another_worker(roles), Decoding(), policy_step=1)
    assert engine.prompts == ["6*7=" + TEXT[:num_continued]] and whole.text == TEXT
    versions = [(0, first), (5, undone), (10, roles.version)] if keep_rollouts else [(0, first), (5, roles.version)]
    assert whole.version_spans == versions


def test_a_part_without_the_parts_before_it_is_not_continued(roles: Roles, attempt: Attempt) -> None:
    group = claimed_by(roles, roles.worker_id)

    def part(first_token: int, token_ids: list[int]) -> Part:
        answer = PartialAnswer(
            rollout_index=0,
            generation_index=0,
            input_digest=b"1",
            token_ids=token_ids,
            logprobs=[-0.5] * len(token_ids),
            version_spans=[(0, roles.version or 0)],
            finish_reason=None,
        )
        return Part(group_id=group.group_id, claim_token=group.claim_token, first_token=first_token, answer=answer)

    keep(roles.run, [part(0, [5, 6, 7]), part(4, [9, 9]), part(6, [9])])
    release_groups(roles.run, roles.worker_id)
    again = claimed_by(roles, roles.worker_id)
    found = take_up(roles.run, roles.worker_id, [again], policy_step=0, max_staleness=1)
    assert [answer.token_ids for answer in found[again.group_id]] == [[5, 6, 7]]


def saved(roles: Roles, group: ClaimedGroup) -> None:
    """An explorer samples five tokens for a group, and saves them."""
    engine = Typist(roles.version or 0)
    drafts = Drafts(roles.run, engine, keep_s=60)
    drafts.begin(group)
    asyncio.run(written(engine, drafts, group, 5, Decoding()))


def test_a_run_that_finishes_deletes_them_and_one_that_is_interrupted_keeps_them(
    roles: Roles, attempt: Attempt
) -> None:
    interrupted(roles, 5, Decoding())
    roles.run.end("interrupted", "stopped by a person")
    assert num_parts(roles) > 0
    group = claimed_by(roles, roles.worker_id)
    attempt.finish("all steps are done")
    assert num_parts(roles) == 0
    saved(roles, group)
    assert num_parts(roles) == 0, "an explorer that stops after the run has finished keeps nothing"


def test_a_run_does_not_finish_between_a_part_and_its_commit(roles: Roles, attempt: Attempt) -> None:
    group = claimed_by(roles, roles.worker_id)
    finishing = threading.Thread(target=attempt.finish, args=("all steps are done",))
    with roles.database.transaction() as connection:
        execute(
            connection,
            "keep_partial_tokens",
            run_id=roles.run_id,
            group_id=group.group_id,
            claim_token=group.claim_token,
            rollout_index=0,
            generation_index=0,
            first_token=0,
            input_digest=b"1",
            token_ids=[5],
            logprobs=[-0.5],
            version_starts=[0],
            policy_version_ids=[1],
            finish_reason=None,
        )
        finishing.start()
        wait_for_waiting(roles.buffer, 1, behind=connection.info.backend_pid)
    finishing.join(PATIENCE_S)
    assert num_parts(roles) == 0


def test_a_continued_finished_run_samples_its_unfinished_groups_from_the_beginning(
    roles: Roles, attempt: Attempt
) -> None:
    interrupted(roles, 5, Decoding())
    attempt.finish("all steps are done")
    attempt.close()
    roles.run.continue_with({}, steps=19, pipeline_version="p1")
    with roles.attempt():
        engine = Typist(roles.version or 0)
        whole, group = continued(roles, engine, another_worker(roles), Decoding())
        assert engine.prompts == ["6*7="] and whole.text == TEXT
        saved(roles, group)
        assert num_parts(roles) > 0


async def in_two_turns(task: Task, model: Model, score: Scorer) -> Score:
    first = await model.chat([{"role": "user", "content": "6*7="}])
    second = await model.chat(
        [
            {"role": "user", "content": "6*7="},
            {"role": "assistant", "content": first.response},
            {"role": "user", "content": "sure?"},
        ]
    )
    return Score(float("42" in second.response))


def test_an_explorer_that_is_stopped_leaves_its_rollouts_to_the_next(buffer: rftdata.Buffer, tmp_path: Path) -> None:
    run = buffer.create_run(name="drafted", config={}, seed=7, steps=4, pipeline_version="p1")
    buffer.sql(
        'INSERT INTO rft.task (taskset, task_key, payload) VALUES (\'train\', \'one\', \'{"prompt": "6*7=", "answer": "42"}\')'
    )
    section = {"workflow": f"{__name__}:in_two_turns", "reward": "exact_match", "keep_partial_s": 0.2}
    config = parse_config(
        {
            "run": {"name": "drafted"},
            "model": {"path": "nowhere"},
            "tasks": [{"name": "train", "source": "none"}],
            "algorithm": {"name": "grpo", "group_size": 2},
            "trainer": {"batch_groups": 1},
            "steps": 4,
            "explorer": section,
        },
        tmp_path,
        "test",
    )

    def status() -> list[Any]:
        return list(buffer.sql("SELECT status::text AS s FROM rft.rollout_group")["s"].to_pylist())

    async def explore(engine: Typist, worker: Worker, *, until_second_turn: bool) -> None:
        explorer = asyncio.create_task(Explorer(JoinedRun(buffer, run, ResolvedRun(config)), worker, engine).explore())
        engine.paced = until_second_turn
        while not explorer.done():
            if len(engine.open) == 2:  # neither rollout runs ahead
                engine.allow()
            await asyncio.sleep(0.02)
            written = [len(generation.token_ids) for generation in list(engine.open.values())]
            if until_second_turn and len(engine.prompts) == 4 and len(written) == 2 and min(written) > 3:
                break
            if status() == ["sealed"]:
                break
        buffer.sql("UPDATE rft.run SET stop_requested = true")
        await asyncio.wait_for(explorer, PATIENCE_S)
        buffer.sql("UPDATE rft.run SET stop_requested = false")

    (tmp_path / "weights").write_text("weights")
    with buffer.attempt(run) as attempt:
        attempt.publish(0, method="memory", uri=str(tmp_path / "weights"), num_bytes=1, checksum="a")
        first, second = Typist(), Typist()
        with Worker(run, "explorer") as worker:
            asyncio.run(explore(first, worker, until_second_turn=True))
        assert status() == ["planned"]
        with Worker(run, "explorer") as worker:
            asyncio.run(explore(second, worker, until_second_turn=False))
    assert status() == ["sealed"]
    assert all(prompt.endswith(tuple(TEXT[:n] for n in range(3, len(TEXT)))) for prompt in second.prompts), (
        second.prompts
    )
    rows = buffer.sql("SELECT response, num_turns FROM rft.v_experience ORDER BY experience_id").to_pylist()
    assert rows == [{"response": f"{TEXT}\nu:sure?\na:{TEXT}", "num_turns": 2}] * 2
    assert buffer.sql("SELECT count(*) AS n FROM rft.partial_tokens").to_pylist() == [{"n": 0}]
