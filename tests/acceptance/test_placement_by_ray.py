"""Ray gives roles their planned GPUs, and reports when they end. Its GPUs here are only declared."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest
import ray

from rftcore.config.run import RunConfig
from rftcore.launch.ray_cluster.cluster import ActorOptions, ProcessIdentity, identity, machines, reserve, stop_cluster
from rftcore.launch.ray_cluster.launcher import RayLauncher, RoleActorProcess
from rftcore.launch.restarts import Restarts
from rftcore.launch.roles import Roles
from rftcore.launch.signals import StopSignals
from rftcore.launch.terminal.views import LineView
from rftcore.run.placement import place
from rftdata import Buffer
from rftdata.errors import ConfigError
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Probe:
    """An actor in place of a role; returns what its process sees."""

    def devices(self) -> list[int]:
        return [int(number) for number in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if number]


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # these GPUs are only numbers
        yield from _four_gpus()


def _four_gpus() -> Iterator[None]:
    ray.init(
        address="local",
        num_gpus=4,
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=128 * 2**20,
        log_to_driver=False,
    )
    yield
    stop_cluster()


def config(explorers: int, parts: int, ranks: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "m"},
            "algorithm": {"name": "grpo"},
            "steps": 1,
            "tasks": [{"name": "t", "source": "t.jsonl"}],
            "explorer": {"num_explorers": explorers, "tensor_parallel_size": parts},
            "trainer": {"num_gpus": ranks},
        }
    )


def test_each_role_sees_its_own_gpus_also_after_a_restart_and_further_gpus_are_refused(four_gpus: None) -> None:
    (machine,) = machines()
    assert machine.num_gpus == 4
    placement = place(config(1, 2, 2), [machine])
    reserved = reserve(placement)
    actor_options = ActorOptions(placement, reserved)

    def probe(role: str) -> ray.actor.ActorHandle:
        return ray.remote(Probe).options(**actor_options.of_role(role)).remote()

    explorer, trainer, pipeline = probe("explorer"), probe("trainer"), probe("pipeline")
    sampling, training = ray.get([explorer.devices.remote(), trainer.devices.remote()])
    assert len(sampling) == len(training) == 2
    assert sorted(sampling + training) == [0, 1, 2, 3]
    assert ray.get(pipeline.__ray_call__.remote(lambda _: ray.get_gpu_ids())) == []

    with pytest.raises(ConfigError, match=r"the GPUs of the cluster are in use.*\(got '0 free'\); allowed: 2 or more"):
        reserve(place(config(1, 1, 1), [machine]), timeout_s=0.5)

    ray.kill(explorer)
    again = probe("explorer")
    assert ray.get(again.devices.remote()) == sampling
    for actor in (again, trainer, pipeline):
        ray.kill(actor)
    ray.util.remove_placement_group(reserved)


def test_roles_that_share_a_gpu_see_the_same_gpu(four_gpus: None) -> None:
    placement = place(config(4, 1, 2), machines(), engine_share=0.3)
    reserved = reserve(placement)
    actor_options = ActorOptions(placement, reserved)
    names = [f"explorer {index}" for index in range(4)]
    actors = [ray.remote(Probe).options(**actor_options.of_role(name)).remote() for name in (*names, "trainer")]
    *sampling, training = ray.get([actor.devices.remote() for actor in actors])
    assert sampling[0::2] == [sampling[0]] * 2 and sampling[1::2] == [sampling[1]] * 2
    assert sorted(sampling[0] + sampling[1] + training) == [0, 1, 2, 3]
    for actor in actors:
        ray.kill(actor)
    ray.util.remove_placement_group(reserved)


class Role:
    """An actor in place of a role, whose process works or exits at once."""

    def identity(self) -> ProcessIdentity:
        return identity()

    def run(self, seconds: float) -> int:
        time.sleep(seconds)
        if seconds < 60:
            os.kill(os.getpid(), signal.SIGKILL)
        return 0


def started(name: str, seconds: float) -> RoleActorProcess:
    actor = ray.remote(Role).options(num_cpus=0).remote()
    return RoleActorProcess(
        name=name,
        role=name.split()[0],
        start=lambda: started(name, seconds),
        actor=actor,
        identity=actor.identity.remote(),
        done=actor.run.remote(seconds),
    )


class Lines(LineView):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


def test_an_explorer_that_keeps_exiting_is_not_restarted_any_more_while_another_works(
    four_gpus: None, buffer: Buffer
) -> None:
    run = buffer.create_run(name="r", config={}, seed=1, steps=9, pipeline_version="none")
    view = Lines()
    roles = Roles(
        [started("explorer 0", 1.5), started("explorer 1", 600), started("trainer", 600)],
        Restarts(run),
        view,
        StopSignals(),
        RayLauncher(),
    )

    def is_given_up() -> bool:
        roles.watch(0.2)
        assert not roles.failed, (view.said, roles.failed)
        return any("not started again" in text for text in view.said)

    wait_until(is_given_up, "the end of its restarts", pause_s=0)
    *again, given_up = view.said
    assert [re.sub(r"process \d+", "process", text) for text in again] == [
        f"the explorer 0 was killed by signal 9, possibly for lack of memory (process); it is started again in {pause} s ({number})"
        for number, pause in ((1, 1), (2, 2), (3, 4))
    ]
    assert given_up.startswith("warning: the explorer 0 was killed by signal 9")
    assert given_up.endswith(
        "; 4 processes in a row ended before they had finished anything; it is not started again, and the run continues with explorer 1"
    )
    assert sorted(process.name for process in roles.running) == ["explorer 1", "trainer"]
    roles.kill("end")
