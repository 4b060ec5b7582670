"""Calls to a model are retried, limited, counted and cached; a failed call is data."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pyarrow as pa
import pytest

from operators.base import Messages, StageContext
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.chain.resolve import resolve_stage
from operators.llm.client import Asker
from operators.llm.endpoint import PolicyEndpoint
from rftdata.errors import ConfigError
from rftdata.pipeline.budget import Limits, MemoryUsage, Usage
from tests.support.batches import batch_of_groups, replaced
from tests.support.chat_server import Body, ChatServer, Says
from tests.support.ports import closed_port
from tests.support.waiting import PATIENCE_S, wait_until

GOOD = '{"reason": "fine", "score": 7}'
Serve = Callable[[Callable[[int, Body], Says | str]], ChatServer]
MakeJudge = Callable[..., Chain]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that end with the test."""
    servers: list[ChatServer] = []

    def start(answer: Callable[[int, Body], Says | str]) -> ChatServer:
        servers.append(ChatServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def silent(serve: Serve) -> Iterator[ChatServer]:
    """A server that does not answer before the end of the test."""
    ended = threading.Event()

    def answer(*_: object) -> str:
        ended.wait(PATIENCE_S)
        return GOOD

    yield serve(answer)
    ended.set()


@pytest.fixture
def judge() -> Iterator[MakeJudge]:
    """Makes prepared chains of one llm_judge, closed with the test."""
    chains: list[Chain] = []

    def make(
        url: str, endpoint: Mapping[str, Any] | None = None, *, usage: MemoryUsage | None = None, **arguments: Any
    ) -> Chain:
        where = {"url": url, "model": "judge", "backoff_s": 0.01, "timeout_s": PATIENCE_S, **(endpoint or {})}
        chain = build_chain([{"llm_judge": {"endpoint": where, **arguments}}])
        chain.prepare(StageContext(usage=usage or MemoryUsage()))
        chains.append(chain)
        return chain

    yield make
    for chain in chains:
        chain.close()


def batch(num_rows: int, **columns: Any) -> pa.Table:
    return batch_of_groups([1] * num_rows, messages=[None] * num_rows, **columns)


def scored(chain: Chain, table: pa.Table) -> tuple[list[float | None], list[str | None]]:
    """Scores and errors of a batch."""
    result = chain.run(table)
    assert all(result.decisions["kept"].to_pylist()), "it scores and drops nothing"
    scores = result.scores[0].table
    return scores["judge_score"].to_pylist(), scores["judge_error"].to_pylist()


def threads_within(*functions: Callable[..., object]) -> int:
    """The number of threads that are within all of these functions."""
    stacks = [{frame.f_code for frame, _ in traceback.walk_stack(top)} for top in sys._current_frames().values()]
    return sum({function.__code__ for function in functions} <= stack for stack in stacks)


def test_every_row_is_asked_about_and_gets_the_answer_to_its_own_question(serve: Serve, judge: MakeJudge) -> None:
    answered = threading.Semaphore(0)

    def grade(_: int, body: Body) -> str:
        text = body["messages"][-1]["content"]
        place = next(n for n in range(8) if f"rollout {n}" in text)
        if place > 0:
            answered.release()
        for _ in range(7 if place == 0 else 0):  # the first to be asked is the last to be answered
            answered.acquire(timeout=PATIENCE_S)
        return f'{{"reason": "", "score": {place}}}'

    server = serve(grade)
    assert scored(judge(server.url), batch(8)) == ([0, 1, 2, 3, 4, 5, 6, 7], [None] * 8)
    body = server.requests[0]
    assert (body["model"], body["temperature"], body["seed"]) == ("judge", 0, 0)
    assert body["response_format"]["json_schema"]["schema"]["properties"]["score"]["maximum"] == 10


def test_requests_fly_together_up_to_the_limit(serve: Serve, judge: MakeJudge) -> None:
    meet = threading.Barrier(4)  # broken, and the request a 500, unless four come at once

    def together(_: int, __: Body) -> Says | str:
        meet.wait(PATIENCE_S)
        return GOOD

    server = serve(together)
    assert scored(judge(server.url, {"concurrency": 4, "retries": 0}), batch(12))[1] == [None] * 12
    assert server.busiest == 4


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_failure_that_may_pass_is_tried_again(serve: Serve, judge: MakeJudge, status: int) -> None:
    server = serve(lambda number, _: Says("later", status) if number < 2 else GOOD)
    assert scored(judge(server.url), batch(1)) == ([7], [None])
    assert len(server.requests) == 3


def test_a_failure_that_stays_is_an_error_of_the_row_alone(serve: Serve, judge: MakeJudge) -> None:
    server = serve(lambda _, body: Says("out of memory", 500) if "rollout 1" in str(body) else GOOD)
    scores, errors = scored(judge(server.url, {"retries": 2}), batch(3))
    assert scores == [7, None, 7]
    assert errors == [None, "HTTP 500: out of memory (3 tries)", None]
    assert len(server.requests) == 5


def test_a_refusal_is_not_tried_again(serve: Serve, judge: MakeJudge) -> None:
    server = serve(lambda *_: Says("no such model", 404))
    assert scored(judge(server.url), batch(1)) == ([None], ["HTTP 404: no such model"])
    assert len(server.requests) == 1


@pytest.mark.parametrize("as_date", [False, True])
def test_a_server_that_asks_to_wait_is_left_alone_so_long_by_all(serve: Serve, judge: MakeJudge, as_date: bool) -> None:
    arrivals: list[float] = []

    def busy_at_first(number: int, _: Body) -> Says | str:
        arrivals.append(time.monotonic())
        later = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        return Says("", 429, {"retry-after": later if as_date else "0.5"}) if number == 0 else GOOD

    server = serve(busy_at_first)
    assert scored(judge(server.url, {"concurrency": 1}), batch(3))[1] == [None] * 3
    assert min(arrivals[1:]) - arrivals[0] > 0.45


def test_a_server_that_asks_to_wait_too_long_is_given_up(serve: Serve, judge: MakeJudge) -> None:
    server = serve(lambda *_: Says("come tomorrow", 429, {"retry-after": "86400"}))
    assert scored(judge(server.url, {"max_wait_s": 5}), batch(1)) == ([None], ["HTTP 429: come tomorrow"])


def test_no_answer_in_time_and_no_server_at_all_are_errors(silent: ChatServer, judge: MakeJudge) -> None:
    chain = judge(silent.url, {"timeout_s": 0.1, "retries": 1})
    assert scored(chain, batch(1)) == ([None], ["no answer within 0.1 s (2 tries)"])
    with closed_port() as port:
        scores, (error,) = scored(judge(f"http://127.0.0.1:{port}/v1", {"retries": 0}), batch(1))
    assert scores == [None]
    assert error is not None and error.startswith("ConnectError")


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"choices": []}', '{"choices": [{"message": {"content": 3}}]}'])
def test_a_response_that_is_no_completion_is_an_error(serve: Serve, judge: MakeJudge, body: str) -> None:
    server = serve(lambda *_: Says(body, raw=True))
    scores, (error,) = scored(judge(server.url, {"retries": 1}), batch(1))
    assert scores == [None]
    assert error is not None and "not a chat completion" in error
    assert len(server.requests) == 2


@pytest.mark.parametrize("usage", [None, [], "many", {"prompt_tokens": "20", "completion_tokens": -3}])
def test_without_a_count_of_tokens_they_are_estimated(serve: Serve, judge: MakeJudge, usage: object) -> None:
    body = json.dumps({"choices": [{"message": {"content": GOOD}}], "usage": usage})
    ledger = MemoryUsage()
    chain = judge(serve(lambda *_: Says(body, raw=True)).url, usage=ledger, budget={"name": "estimated"})
    assert scored(chain, batch(1)) == ([7], [None])
    assert 100 < ledger.spent("estimated").tokens < 1000


def test_a_text_that_cannot_be_sent_is_an_error_of_its_row(serve: Serve, judge: MakeJudge) -> None:
    broken = json.dumps([{"role": "user", "content": "half a character: \ud83d"}, {"role": "assistant", "content": ""}])
    scores, errors = scored(judge(serve(lambda *_: GOOD).url), batch_of_groups([1, 1], messages=[broken, None]))
    assert scores == [None, 7]
    assert str(errors[0]).startswith("UnicodeEncodeError")


def test_a_malformed_answer_is_asked_for_once_more_with_what_was_wrong(serve: Serve, judge: MakeJudge) -> None:
    server = serve(lambda number, _: "I would rather not." if number == 0 else GOOD)
    assert scored(judge(server.url), batch(1)) == ([7], [None])
    first, second = (request["messages"] for request in server.requests)
    assert second[:2] == [*first, {"role": "assistant", "content": "I would rather not."}]
    assert "it contains no score" in second[2]["content"]


def test_an_answer_malformed_twice_is_an_error_that_shows_it(serve: Serve, judge: MakeJudge) -> None:
    server = serve(lambda *_: '{"reason": "superb", "score": 11}')
    _, (error,) = scored(judge(server.url), batch(1))
    assert error == ('malformed answer: the score 11 is not between 0 and 10: \'{"reason": "superb", "score": 11}\'')
    assert len(server.requests) == 2


def test_a_server_without_structured_output_is_asked_without(serve: Serve, judge: MakeJudge) -> None:
    def refuses(_: int, body: Body) -> Says | str:
        return Says("response_format is not supported", 400) if "response_format" in body else GOOD

    server = serve(refuses)
    chain = judge(server.url, {"concurrency": 4})
    assert scored(chain, batch(8)) == ([7] * 8, [None] * 8)
    before = len(server.requests)
    assert scored(chain, batch(1, response=["another"])) == ([7], [None])
    assert len(server.requests) == before + 1, "it is not offered again"
    _, (error,) = scored(judge(server.url, {"structured": "always"}), batch(1))
    assert error == "HTTP 400: response_format is not supported"


def test_the_same_question_is_asked_once(serve: Serve, judge: MakeJudge) -> None:
    server = serve(lambda *_: GOOD)
    chain = judge(server.url)
    table = batch(6, response=["same"] * 5 + ["other"])
    assert scored(chain, table) == ([7] * 6, [None] * 6)
    assert scored(chain, table)[0] == [7] * 6
    assert len(server.requests) == 2


def test_the_same_question_of_two_threads_is_asked_once(serve: Serve, judge: MakeJudge) -> None:
    def slow(*_: object) -> str:
        wait_until(lambda: threads_within(Asker.ask) == 4, "the question of every thread")
        return GOOD

    server = serve(slow)
    chain = judge(server.url, run={"concurrency": 4})
    assert scored(chain, batch(8, response=["same"] * 8)) == ([7] * 8, [None] * 8)
    assert len(server.requests) == 1


def test_an_error_is_not_remembered(serve: Serve, judge: MakeJudge) -> None:
    server = serve(lambda number, _: Says("", 404) if number == 0 else GOOD)
    chain = judge(server.url)
    assert scored(chain, batch(1))[0] == [None]
    assert scored(chain, batch(1)) == ([7], [None])


def test_stored_scores_are_used_and_only_the_others_asked_for(serve: Serve, judge: MakeJudge) -> None:
    server = serve(lambda *_: GOOD)
    chain = judge(server.url)
    assert chain.stages[0].operator.error_column == "judge_error"
    known = replaced(chain, batch(1), {100: {"judge_score": 2.0, "judge_reason": "stored", "judge_error": None}})
    chain = judge(server.url)  # without what it remembers
    before = len(server.requests)
    (scores,) = chain.run(batch(3), stored_scores=known).scores
    assert scores.table["experience_id"].to_pylist() == [101, 102]
    assert len(server.requests) == before + 2


def test_calls_beyond_the_budget_are_errors_and_a_ledger_that_lives_on_keeps_count(
    serve: Serve, judge: MakeJudge
) -> None:
    server = serve(lambda *_: GOOD)
    ledger = MemoryUsage()
    scores, errors = scored(judge(server.url, usage=ledger, budget={"max_calls": 3}), batch(5))
    assert sorted(score is None for score in scores) == [False, False, False, True, True]
    assert {error for error in errors if error} == {
        "the budget 'llm_judge/judge' allows no further call: 3 of 3 calls are spent"
    }
    again = judge(server.url, usage=ledger, budget={"max_calls": 4})  # as after a restart, with a little more money
    assert sum(score is not None for score in scored(again, batch(5))[0]) == 1
    assert len(server.requests) == 4
    assert ledger.spent("llm_judge/judge") == Usage(4, 4 * 30, 0.0)


def test_tokens_and_cost_are_counted_as_the_server_reports_them(serve: Serve, judge: MakeJudge) -> None:
    server = serve(lambda *_: GOOD)
    ledger = MemoryUsage()
    budget = {"max_cost": 1.0, "prompt_price": 1000.0, "response_price": 4000.0, "name": "judges"}
    scores, errors = scored(judge(server.url, usage=ledger, budget=budget, max_tokens=64), batch(40))
    # One answer costs 20 * 0.001 + 10 * 0.004 = 0.06; a call reserves more than that, so the last of the budget stays unspent.
    num_scored = sum(score is not None for score in scores)
    assert 0 < num_scored < 17
    assert ledger.spent("judges").cost == pytest.approx(0.06 * num_scored)
    assert all(
        error is not None and "of 1 cost are spent" in error for score, error in zip(scores, errors) if score is None
    )


def test_what_calls_in_flight_give_back_is_spent_again(serve: Serve, judge: MakeJudge) -> None:
    # A call reserves about 700 tokens and uses 30: with room for two reservations all forty rows are answered.
    server = serve(lambda *_: GOOD)
    scores, _ = scored(judge(server.url, budget={"max_tokens": 2600}, max_tokens=512), batch(40))
    assert scores == [7] * 40
    assert server.busiest <= 3


def test_a_refused_request_costs_a_call_and_no_tokens_and_a_lost_one_what_it_may_have_cost(
    serve: Serve, silent: ChatServer, judge: MakeJudge
) -> None:
    ledger = MemoryUsage()
    scored(judge(serve(lambda *_: Says("", 404)).url, usage=ledger, budget={"name": "refused"}), batch(1))
    assert ledger.spent("refused") == Usage(1, 0, 0.0)

    lost = judge(silent.url, {"timeout_s": 0.1, "retries": 0}, usage=ledger, budget={"name": "lost"}, max_tokens=64)
    scored(lost, batch(1))
    assert ledger.spent("lost").tokens > 64


def test_stages_share_a_budget_by_name_and_only_by_name(serve: Serve) -> None:
    """Also where there is no run, as for tasks."""
    server = serve(lambda *_: GOOD)
    endpoint = {"url": server.url, "model": "judge"}

    def spent(usage: MemoryUsage | None = None, **budget: Any) -> int:
        before = len(server.requests)
        stages = [
            {
                "llm_judge": {
                    "endpoint": endpoint,
                    "template": f"{word} {{response}}",
                    "budget": {"max_calls": 3, **budget},
                }
            }
            for word in ("first", "second")
        ]
        chain = build_chain(stages)
        chain.prepare(None if usage is None else StageContext(usage=usage))
        chain.run(batch(5))
        chain.close()
        return len(server.requests) - before

    assert spent(name="all") == 3
    usage = MemoryUsage()
    assert spent(usage) == 6
    assert [usage.spent(name).calls for name in ("llm_judge/judge", "llm_judge#2/judge")] == [3, 3]


def test_parts_that_ask_the_policy_wait_for_what_others_in_flight_give_back() -> None:
    flying: list[int] = []
    together: list[int] = []

    def waits_or_flies() -> bool:
        return len(flying) > 1 or threads_within(PolicyEndpoint.ask, threading.Condition.wait) == 1

    def generate(chats: Sequence[Messages], *_: object) -> list[str]:
        flying.append(threading.get_ident())
        if not together:  # the other part flies beside the first, if the budget has room for both, or waits for it
            wait_until(waits_or_flies, "the other part")
        together.append(len(flying))
        flying.remove(threading.get_ident())
        return [GOOD] * len(chats)

    budget = {"max_tokens": 700}  # a call reserves about 560 and uses about 60
    judge = {"endpoint": "policy", "template": "{response}", "budget": budget}
    chain = build_chain([{"llm_judge": {**judge, "run": {"concurrency": 2, "batch_rows": 1}}}])
    chain.prepare(StageContext(generate=generate))
    assert scored(chain, batch(2)) == ([7, 7], [None, None])
    assert together == [1, 1]


@pytest.mark.parametrize(
    ("stage", "arguments"),
    [
        ("llm_judge", {"budget": {"max_tokens": 500}}),
        ("llm_judge", {"budget": {"max_tokens": 550}}),  # room for the answer, and none for the template
        ("ruler", {"budget": {"max_tokens": 2000}}),
        ("synthesize", {"kind": "rephrase", "budget": {"max_cost": 0.5, "response_price": 1000}}),
    ],
)
def test_a_budget_below_a_single_call_is_refused_with_what_one_reserves(stage: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"budget.max_\w+ allows no call: each reserves the most it may use, [\d.]+ even"
    ):
        build_chain([{stage: {"endpoint": "policy", **arguments}}])
    assert build_chain([{stage: {"endpoint": "policy", **arguments, "max_tokens": 64}}])


def test_a_call_that_the_budget_never_allows_states_what_it_would_take() -> None:
    chain = build_chain(
        [{"llm_judge": {"endpoint": "policy", "template": "{response}", "budget": {"max_tokens": 600}}}]
    )
    chain.prepare(StageContext(generate=lambda chats, *_: [GOOD] * len(chats)))
    _, (error,) = scored(chain, batch(1, response=["long " * 100]))
    assert str(error).endswith("0 of 600 tokens are spent, and such a call may use 695 tokens")


def test_limits_are_kept_by_threads_that_spend_together() -> None:
    ledger = MemoryUsage()
    taken: list[bool] = []

    def spend() -> None:
        for _ in range(200):
            taken.append(ledger.reserve("shared", Usage(1, 10), Limits(max_calls=500)))

    threads = [threading.Thread(target=spend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 500
    assert ledger.spent("shared") == Usage(500, 5000)


SECRET = "sk-very-secret-7f3a"


def test_a_key_travels_in_the_header_and_stands_nowhere_else(
    serve: Serve, judge: MakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    server = serve(lambda *_: Says(f"Incorrect API key provided: {SECRET}", 401))
    chain = judge(server.url, {"api_key_env": "JUDGE_KEY"})
    _, (error,) = scored(chain, batch(1))
    assert server.keys == [f"Bearer {SECRET}"]
    assert error == "HTTP 401: Incorrect API key provided: ***"
    operator = chain.stages[0].operator
    assert SECRET not in str(operator.spec()) + str(operator.config)


@pytest.mark.parametrize(
    "endpoint",
    [
        {"url": "http://here/v1", "model": "m", "api_key": SECRET},
        {"url": "http://here/v1", "model": "m", "api_key_env": SECRET},
        {"url": f"http://user:{SECRET}@here/v1", "model": "m"},
        {"url": f"http://here/v1?key={SECRET}", "model": "m"},
    ],
)
def test_a_key_in_the_configuration_is_refused_without_repeating_it(endpoint: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="name") as caught:
        resolve_stage("llm_judge", {"endpoint": endpoint})
    assert SECRET not in str(caught.value)


def test_a_variable_that_is_not_set_is_found_before_the_first_batch() -> None:
    assert "NO_SUCH_KEY" not in os.environ
    endpoint = {"url": "http://here/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}
    chain = build_chain([{"llm_judge": {"endpoint": endpoint}}])
    with pytest.raises(ConfigError, match=r"stage 1 .* NO_SUCH_KEY, which endpoint.api_key_env names, is not set"):
        chain.prepare()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "the key 'endpoint' is missing"),
        ({"endpoint": "polizy"}, "endpoint is not a model to ask .got 'polizy'.; allowed: policy, or a mapping"),
        ({"endpoint": {"url": "http://here/v1", "modl": "m"}}, "did you mean 'model'"),
        ({"endpoint": {"url": "here", "model": "m"}}, "not an http"),
        ({"endpoint": {"url": "http://here", "model": "m", "extra": {"stream": True}}}, "'stream' is set by the stage"),
        ({"endpoint": {"url": "http://here", "model": "m", "extra": {"max_tokens": 9}}}, "'max_tokens' is set by the"),
        ({"endpoint": "policy", "budget": {"max_cost": 1}}, "max_cost needs prompt_price"),
        ({"endpoint": "policy", "budget": {"max_call": 1}}, "did you mean 'max_calls'"),
        ({"endpoint": "policy", "scale": [5, 5]}, "not .lowest, highest."),
        ({"endpoint": "policy", "pattern": "score"}, "no group"),
        ({"endpoint": "policy", "template": "Grade {reply}"}, "unknown placeholder {reply}"),
        ({"endpoint": "policy", "template": "Grade it"}, "shows the judge nothing"),
    ],
)
def test_wrong_arguments_are_refused_with_what_is_allowed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_stage("llm_judge", arguments)


def test_how_calls_are_made_is_no_part_of_what_is_scored() -> None:
    def version(endpoint: Mapping[str, Any], **arguments: Any) -> str:
        where = {"url": "http://here/v1", "model": "m", **endpoint}
        return build_chain([{"llm_judge": {"endpoint": where, **arguments}}]).stages[0].score_key

    usual = version({})
    assert version({"concurrency": 2, "timeout_s": 5, "retries": 1}, budget={"max_calls": 9}) == usual
    assert version({"model": "other"}) != usual
    assert version({}, scale=[0, 1]) != usual
    assert version({"name": "judge"}) == version({"name": "judge", "url": "http://there/v1"})
