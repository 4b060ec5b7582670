"""The placement of a run's roles on GPUs: one function from the configuration and the machines of a cluster to bundles.

A bundle is a number of GPUs of one machine and the roles that have it. If there are enough GPUs, every explorer has a bundle of its own, with one
GPU for each part of a tensor-parallel engine, and so has the trainer, with one for each of its ranks. Otherwise roles that need one GPU share it.
On a cluster, Ray reserves all bundles of a run at once (`rftcore.launch.ray_cluster`). A restarted role gets its bundle again. Pipeline workers
need no GPU and go round the machines. Without GPUs there are no bundles, and roles run on CPUs. Judges and teachers with an endpoint are servers of
their own; a teacher with a path is computed by the explorer, or by the trainer, on their GPUs.

Nothing here asks a machine: the caller passes what exists. Importing this module does not import Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftcore.config.run import RunConfig
from rftcore.resolved import ResolvedRun
from rftdata.errors import ConfigError


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster.

    Attributes:
        name: for messages.
        num_gpus: GPUs that roles may have.
    """

    name: str
    num_gpus: int


@dataclass(frozen=True)
class Bundle:
    """GPUs of one machine, and the roles that have them.

    Attributes:
        roles: their names; several share one GPU.
        machine: its index in `Placement.machines`. Ray may choose another one that has room.
    """

    num_gpus: int
    roles: tuple[str, ...]
    machine: int

    @property
    def gpus_of_role(self) -> float:
        """The GPUs of each role, or its share of one."""
        return self.num_gpus / len(self.roles)


@dataclass(frozen=True)
class Placement:
    """Where the roles of a run are.

    Attributes:
        machines: of the cluster; the first is that of `rft run`.
        bundles: those with GPUs; empty if there are none.
        is_together: whether all explorers and the trainer must be on one machine.
        without_gpu: machine of each role without GPUs, by name; None for any machine.
    """

    machines: tuple[Machine, ...]
    bundles: tuple[Bundle, ...]
    is_together: bool
    without_gpu: dict[str, int | None]

    def bundle_of(self, role: str) -> int | None:
        """Return the number of a role's bundle; None if it has no GPU."""
        return next((number for number, bundle in enumerate(self.bundles) if role in bundle.roles), None)


def role_names(config: RunConfig) -> dict[str, list[str]]:
    """Return the names of the processes of a run, by role: a number follows where there are several."""
    numbers = {
        "explorer": config.explorer.num_explorers if config.has_explorer else 0,
        "pipeline": config.pipelines.workers if config.has_pipeline else 0,
        "trainer": 1,
    }
    return {role: [role] if num == 1 else [f"{role} {index}" for index in range(num)] for role, num in numbers.items()}


def asked_gpus(config: RunConfig) -> int:
    """Return how many GPUs the roles need if none are shared; 0 if the configuration asks for none and also runs on a CPU."""
    explorer, trainer = config.explorer, config.trainer
    if trainer.num_gpus is None and explorer.tensor_parallel_size == 1:
        return 0
    explorers = explorer.num_explorers if config.has_explorer else 0
    return explorers * explorer.tensor_parallel_size + _trainer_gpus(config)


def _trainer_gpus(config: RunConfig) -> int:
    """Return the GPUs of the trainer. A run that only evaluates has a process in its place that computes nothing."""
    return 0 if config.only_evaluates else config.trainer.num_gpus or 1


def place_run(resolved: ResolvedRun, machines: Sequence[Machine]) -> Placement:
    """Place the roles of a run.

    Raises:
        ConfigError: see `place`.
    """
    takes_share = resolved.config.explorer.engine == "vllm"
    return place(
        resolved.config, machines, resolved.engine(worker_index=0).gpu_memory_utilization if takes_share else 0.0
    )


def place(config: RunConfig, machines: Sequence[Machine], engine_share: float = 0.0) -> Placement:
    """Place the roles of a configuration on machines.

    Args:
        engine_share: share of a GPU's memory that an engine takes in advance.

    Raises:
        ConfigError: there are too few GPUs, or engines that share one take more than all of its memory.
    """
    names, is_together = role_names(config), _needs_one_machine(config)
    counts = [machine.num_gpus for machine in machines]
    total = max(counts) if is_together else sum(counts)
    groups = _divided(config, names["explorer"], total, _where(machines, is_together)) if total else []
    for num_gpus, roles in groups:
        _refuse_crowd(num_gpus, roles, engine_share)
        if config.explorer.sleep and "trainer" in roles:
            _refuse_several_sleepers(roles)
    if config.explorer.sleep and not groups:
        _refuse_several_sleepers((*names["explorer"], *names["trainer"]))
    bundles = _assigned(groups, machines, is_together)
    without_gpu: dict[str, int | None] = {}
    if not bundles:
        without_gpu = dict.fromkeys((*names["explorer"], *names["trainer"]), 0 if is_together else None)
    elif config.only_evaluates:
        without_gpu = dict.fromkeys(names["trainer"])
    without_gpu |= {name: index % len(machines) for index, name in enumerate(names["pipeline"])}
    return Placement(tuple(machines), bundles, is_together, without_gpu)


def _needs_one_machine(config: RunConfig) -> bool:
    """Return whether weights travel through the memory of one machine."""
    sync = config.sync
    return (sync.method if sync.method in ("memory", "checkpoint") else sync.file_method) == "memory"


def _divided(config: RunConfig, explorers: list[str], total: int, where: str) -> list[tuple[int, tuple[str, ...]]]:
    """Divide GPUs among the roles; return the size and the roles of each bundle.

    Args:
        where: the GPUs that count, for messages.

    Raises:
        ConfigError: there are too few.
    """
    parts, ranks = config.explorer.tensor_parallel_size, _trainer_gpus(config)
    needed = ranks + parts * len(explorers)
    trainer = [(ranks, ("trainer",))] if ranks else []
    if needed <= total:
        return [*((parts, (name,)) for name in explorers), *trainer]
    if parts > 1:
        raise ConfigError(
            f"the explorers need {len(explorers)} × {parts} GPUs (explorer.num_explorers × explorer.tensor_parallel_size) and the trainer {ranks}, "
            "and parts of an engine share no GPU",
            value=needed,
            allowed=f"up to {total}, which is {where}",
            todo="lower explorer.num_explorers, explorer.tensor_parallel_size or trainer.num_gpus, or use machines with more GPUs",
        )
    most = total - 1 if explorers and ranks > 1 else total
    if ranks > most:
        raise ConfigError(
            "trainer.num_gpus leaves no GPU to the explorers"
            if ranks == total
            else "trainer.num_gpus is more than there are GPUs",
            value=ranks,
            allowed=f"1 to {max(most, 1)} of {where}",
            todo="lower it, or start the run on a machine or cluster with more",
        )
    shared = [*explorers, "trainer"] if ranks == 1 else explorers
    num_shared = total if ranks == 1 else total - ranks
    groups = [(1, tuple(shared[first::num_shared])) for first in range(min(num_shared, len(shared)))]
    return groups if ranks == 1 else [*groups, *trainer]


def _refuse_crowd(num_gpus: int, roles: tuple[str, ...], engine_share: float) -> None:
    """Raise a ConfigError if the engines of one GPU take more than all of its memory."""
    engines = [role for role in roles if role != "trainer"]
    if num_gpus == 1 and len(engines) > 1 and len(engines) * engine_share > 1:
        raise ConfigError(
            f"{len(engines)} explorers share a GPU, and each takes explorer.engine_args.gpu_memory_utilization of its memory",
            value=engine_share,
            allowed=f"up to {1 / len(engines):.2f}"
            + (", less what the trainer needs there" if "trainer" in roles else ""),
            todo="lower it, lower explorer.num_explorers, or use more GPUs",
        )


def _refuse_several_sleepers(roles: tuple[str, ...]) -> None:
    """Raise a ConfigError if several engines would share one device with the trainer."""
    num_engines = len(roles) - 1
    if num_engines > 1:
        raise ConfigError(
            "explorer.sleep is for one explorer on the trainer's device, on which one process computes at a time",
            value=num_engines,
            allowed="1",
            todo="lower explorer.num_explorers to the number of GPUs, or set explorer.sleep: false",
        )


def _assigned(
    groups: list[tuple[int, tuple[str, ...]]], machines: Sequence[Machine], is_together: bool
) -> tuple[Bundle, ...]:
    """Give each bundle a machine: the largest first, each on the first machine with room, as Ray does.

    Raises:
        ConfigError: a bundle fits on no machine.
    """
    free = [machine.num_gpus for machine in machines]
    if is_together:
        home = max(range(len(machines)), key=lambda index: free[index])
        return tuple(Bundle(num_gpus, roles, home) for num_gpus, roles in groups)
    machine_of: dict[tuple[str, ...], int] = {}
    for num_gpus, roles in sorted(groups, key=lambda group: -group[0]):
        fitting = [index for index, left in enumerate(free) if left >= num_gpus]
        if not fitting:
            raise ConfigError(
                f"no machine has room for the {roles[0]}, whose GPUs must be on one machine",
                value=num_gpus,
                allowed=f"the machines have {_counts(machines)}",
                todo="lower trainer.num_gpus or explorer.tensor_parallel_size so that the machines' GPUs can be divided",
            )
        free[fitting[0]] -= num_gpus
        machine_of[roles] = fitting[0]
    return tuple(Bundle(num_gpus, roles, machine_of[roles]) for num_gpus, roles in groups)


def _where(machines: Sequence[Machine], is_together: bool) -> str:
    """Describe the GPUs that count, for messages."""
    if len(machines) == 1:
        return f"what {machines[0].name} has"
    if is_together:
        return (
            f"what one of the machines has ({_counts(machines)}): weights in memory reach the engines of one machine only "
            "(sync.method or sync.file_method: checkpoint allows several)"
        )
    return f"what the machines have ({_counts(machines)})"


def _counts(machines: Sequence[Machine]) -> str:
    return ", ".join(f"{machine.name} {machine.num_gpus}" for machine in machines)
