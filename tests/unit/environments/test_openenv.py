"""The client of OpenEnv's protocol, with a server that answers as `openenv.core.env_server.http_server` does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from rftcore.environments import EnvironmentFailedError, InfrastructureError, Step, open_environment
from rftdata.errors import ConfigError


async def echo(connection: ServerConnection) -> None:
    """Serve a session: the observation has the message, and its length is the reward; three steps are an episode."""
    count = 0
    async for raw in connection:
        request = json.loads(raw)
        kind, data = request["type"], request.get("data", {})
        message = str(data.get("message", f"seed {data.get('seed')}"))
        if kind == "close":
            return
        if message == "leave":
            await connection.close()
            return
        if kind == "state":
            answer: dict[str, Any] = {"type": "state", "data": {"episode_id": str(id(connection)), "step_count": count}}
        elif message in ("crash", "busy"):
            code = {"crash": "EXECUTION_ERROR", "busy": "CAPACITY_REACHED"}[message]
            answer = {"type": "error", "data": {"message": f"{message}!", "code": code}}
        elif kind == "step" and set(data) != {"message"}:
            errors = [{"loc": ["colour"], "msg": "Extra inputs are not permitted"}]
            answer = {
                "type": "error",
                "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors},
            }
        else:
            count += kind == "step"
            seen = {"echoed": message, "length": len(message)}
            reward = float(len(message)) if kind == "step" else None
            answer = {"type": "observation", "data": {"observation": seen, "reward": reward, "done": count == 3}}
        await connection.send(json.dumps(answer))


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    async with serve(echo, "127.0.0.1", 0) as running:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}/"


async def played(*actions: str, **args: Any) -> list[Step]:
    async with server() as url, open_environment("openenv", {"url": url, **args}) as environment:
        first = await environment.reset("task", 7)
        return [Step(first), *[await environment.step(action) for action in actions]]


def test_a_session_is_an_episode() -> None:
    first, one, two, three = asyncio.run(played("a", "bb", "ccc", with_state=True))
    assert (first.observation.text, first.observation.state) == ("seed 7", '{"step_count": 0}')
    assert [(s.observation.text, s.reward, s.terminated) for s in (one, two, three)] == [
        ("a", 1.0, False), ("bb", 2.0, False), ("ccc", 3.0, True),
    ]  # fmt: skip
    assert three.state == '{"step_count": 3}'


def test_actions_as_json_and_other_fields_of_the_observation() -> None:
    answers = ['{"message": "x"}', '{"message": "x", "colour": 1}', "no json", "[1]"]
    texts = [s.observation.text for s in asyncio.run(played(*answers, action_field=None, observation_field="length"))]
    assert texts[:3] == ["6", "1", "Invalid action: colour: Extra inputs are not permitted"]
    assert texts[3].startswith("Invalid action: not JSON") and texts[4] == "Invalid action: not a JSON object"


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        ("crash", EnvironmentFailedError, "reports EXECUTION_ERROR: crash!"),
        ("busy", InfrastructureError, "reports CAPACITY_REACHED: busy!"),
        ("leave", InfrastructureError, "the connection to the OpenEnv server .* is lost"),
    ],
)
def test_what_a_server_does_wrong_is_its_own_kind_of_error(action: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        asyncio.run(played(action))


def test_a_server_that_is_not_there_is_a_failure_of_the_infrastructure() -> None:
    async def test() -> None:
        async with server() as url:
            pass
        async with open_environment("openenv", {"url": url}) as environment:
            await environment.reset("task", 7)

    with pytest.raises(InfrastructureError, match=r"no connection to the OpenEnv server ws://127\.0\.0\.1"):
        asyncio.run(test())


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="url of openenv"):
        asyncio.run(played(url="127.0.0.1:80"))
    with pytest.raises(ConfigError, match=r"no field 'text'; allowed: echoed, length"):
        asyncio.run(played(observation_field="text"))
