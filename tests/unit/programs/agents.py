"""Agents that tests run: functions that the workflow `agent` calls in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from openai import AsyncOpenAI, OpenAI


def ask(task: dict[str, Any]) -> float:
    """Ask twice, and compare the last answer."""
    client, chat = OpenAI(), [{"role": "user", "content": task["prompt"]}]
    for _ in range(2):
        answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=chat).choices[0].message
        chat += [answer.model_dump(), {"role": "user", "content": "sure?"}]
    return float(task["answer"] in answer.content)


async def ask_async(task: dict[str, Any]) -> dict[str, Any]:
    async with AsyncOpenAI() as client:
        chat = [{"role": "user", "content": task["prompt"]}]
        await client.chat.completions.create(model="policy", messages=chat)
    return {"reward": 0.5, "parts": {"seed": task["seed"], "same": float(os.environ["RFT_SEED"] == str(task["seed"]))}}


def fail(task: dict[str, Any]) -> float:
    ask(task)
    raise KeyError("lost")


def loop_for_ever(task: dict[str, Any]) -> None:
    """Ask again and again, whatever the answer."""
    client = OpenAI()
    while True:
        try:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
        except Exception:  # noqa: BLE001 - as careless programs do
            time.sleep(0.05)


def keep_a_reward(task: dict[str, Any]) -> None:
    """Write a reward after each answer, until the endpoint refuses."""
    client, reward = OpenAI(), 0.0
    while True:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
        reward += 0.5
        with open(os.environ["RFT_RESULT"], "w") as file:
            json.dump({"reward": reward}, file)
        if reward == float(task["metadata"]["end"]):
            os._exit(3)


def leave_processes(task: dict[str, Any]) -> float:
    """Start a process in a session of its own, and end."""
    OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
    command = [sys.executable, "-c", "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"]
    with open(task["metadata"]["file"], "w") as file:
        left = subprocess.Popen(command, start_new_session=True, stdout=file)
    while not os.path.getsize(task["metadata"]["file"]):
        time.sleep(0.05)
    left.returncode = 0
    return 1.0


def print_much(task: dict[str, Any]) -> float:
    OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
    for _ in range(200):
        print("x" * 100_000)
    return 1.0


def wait(task: dict[str, Any]) -> float:
    OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
    time.sleep(600)
    return 1.0
