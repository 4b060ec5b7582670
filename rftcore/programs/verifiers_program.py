"""Program that runs episodes of an environment of the package verifiers. It runs with the interpreter of that package, for many rollouts at once.

A script of its own, so that it needs nothing of this package. It speaks with the explorer over the socket whose number is in RFT_CHANNEL, in lines of
JSON: first the settings, which are answered with what is known of the environment; then requests, each answered by its number in any order.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import traceback
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found, unused-ignore]

_LIMIT = 1 << 30


def _config(environment: str, args: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return the configuration of an environment, and the role for which each model's name stands, if there are several.

    Roles whose author chose no place run here, instead of in a remote sandbox, and without a shell, which the model would have as this user. Each role for
    which no model and no client was chosen asks for a model of its own name, by which its requests are told apart.
    """
    data = {**args, "taskset": {**(args.get("taskset") or {}), "id": environment}}
    roles: dict[str, str] = {}
    fields = vf.env_config_type(environment, data.get("id") or "").model_fields
    for name, field in fields.items():
        default = field.default
        if not isinstance(default, vf.AgentConfig):
            continue
        given = data[name] = dict(data.get(name) or {})
        if "runtime" not in default.model_fields_set:
            given.setdefault("runtime", {"type": "subprocess"})
        if default.harness is None and vf.default_harness_id(environment) == "bash":
            given.setdefault("harness", {"id": "null"})
        if not any(given.get(key) or getattr(default, key) for key in ("model", "client")):
            roles[f"policy.{name}"] = name
    if len([each for each in fields.values() if isinstance(each.default, vf.AgentConfig)]) < 2:
        roles = {}
    for model, name in roles.items():
        data[name]["model"] = model
    return vf.resolve_env_config(data), roles


class _Episodes:
    """The episodes of one environment."""

    def __init__(self, env: Any, writer: asyncio.StreamWriter) -> None:
        self._env, self._writer = env, writer
        self._task_class = type(env.taskset).task_type()
        self._running: dict[int, asyncio.Task[None]] = {}

    def request(self, request: dict[str, Any]) -> None:
        """Begin an episode, or end one."""
        number = request["number"]
        if "data" not in request:
            if number in self._running:
                self._running[number].cancel()
            return
        self._running[number] = asyncio.create_task(self._answer(number, request))

    async def _answer(self, number: int, request: dict[str, Any]) -> None:
        try:
            found = await self._run(request)
        except Exception as error:  # noqa: BLE001 - the explorer records it
            found = {"errors": [_error(type(error).__name__, str(error), traceback.format_exc())], "traces": []}
        finally:
            self._running.pop(number, None)
        self._writer.write(json.dumps({"number": number, **found}).encode() + b"\n")
        await self._writer.drain()

    async def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        data = self._task_class.data_type().model_validate(request["data"])
        task = self._task_class(data, self._env.config.taskset.task)
        # The key is in the URL.
        client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var="RFT_NO_KEY")
        episode = await self._env.run_episode(task, vf.ModelContext(model=request["model"], client=client))
        return {
            "errors": [_error(each.type, each.message, each.traceback) for each in episode.errors],
            "traces": [_trace(trace) for trace in episode.traces],
        }


def _trace(trace: Any) -> dict[str, Any]:
    errors = [] if trace.ok else [_error(each.type, each.message, each.traceback) for each in trace.errors]
    return {
        "agent": trace.agent.name,
        "trainable": trace.agent.trainable,
        "ok": trace.ok,
        "stop_condition": trace.stop_condition,
        "reward": trace.reward,
        "rewards": {name: reward.score for name, reward in trace.rewards.items() if reward is not None},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "errors": errors,
    }


def _error(kind: str, message: str, stack: str | None) -> dict[str, str]:
    return {"type": kind, "message": message, "stack": stack or ""}


async def main() -> None:
    """Serve until the explorer closes the connection."""
    channel = socket.socket(fileno=int(os.environ.pop("RFT_CHANNEL")))
    reader, writer = await asyncio.open_connection(sock=channel, limit=_LIMIT)
    settings = json.loads(await reader.readline())
    try:
        config, roles = _config(settings["environment"], settings["args"])
        env = vf.load_environment(config)
    except Exception as error:  # noqa: BLE001 - the explorer reports it
        writer.write(json.dumps(_error(type(error).__name__, str(error), traceback.format_exc())).encode() + b"\n")
        await writer.drain()
        return
    async with env.serving():
        writer.write(json.dumps({"type": "ready", "roles": roles}).encode() + b"\n")
        await writer.drain()
        episodes = _Episodes(env, writer)
        while line := await reader.readline():
            episodes.request(json.loads(line))


if __name__ == "__main__":
    asyncio.run(main())
