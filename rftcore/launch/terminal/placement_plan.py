"""The plan of a run as text: which role has which GPUs, and how much of their memory it takes.

`rft run` prints the placement, and `rft check` also the memory. Its numbers are estimates (`rftcore.trainer.estimates.memory`) and the share that
vLLM takes in advance.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rftcore.checks.devices import estimated_models
from rftcore.config.run import RunConfig
from rftcore.resolved import ResolvedRun
from rftcore.run.gpus import local_gpus, this_machine
from rftcore.run.placement import Bundle, Machine, Placement, asked_gpus, place_run
from rftcore.trainer.estimates.memory import ASLEEP_BYTES, GIB, Trained, engine_memory, kept_memory, training_memory
from rftdata.errors import ConfigError, ModelError


def placed(placement: Placement) -> str | None:
    """Return which roles have which GPUs, in one line; None without GPUs."""
    if not placement.bundles:
        return None
    return "; ".join(f"{_roles(bundle)}: {_gpus(placement, bundle)}" for bundle in placement.bundles)


def plan(resolved: ResolvedRun, placement: Placement, gpu_bytes: int | None) -> Iterator[str]:
    """Yield one line for the machines and one for each role: its GPUs, and what it takes of the memory of each.

    Args:
        gpu_bytes: memory of the smallest GPU; None if unknown.
    """
    size = "" if gpu_bytes is None else f" of {gpu_bytes / GIB:.1f} GiB"
    num_gpus = sum(machine.num_gpus for machine in placement.machines)
    machines = ", ".join(machine.name for machine in placement.machines)
    yield f"plan for {machines}" + (
        f", {num_gpus} GPU{'s' if num_gpus > 1 else ''}{size}:" if num_gpus else ", CPU only:"
    )
    models = _models(resolved) if placement.bundles else None
    for bundle in placement.bundles:
        needs = [(role, *_need(resolved, models, role, gpu_bytes)) for role in bundle.roles]
        for role, need, why in needs:
            taken = (
                ""
                if need is None
                else f", {need / GIB:.1f} GiB of each"
                if bundle.num_gpus > 1
                else f", {need / GIB:.1f} GiB"
            )
            yield f"  {role:12} {_gpus(placement, bundle)}{taken}{f' ({why})' if why else ''}"
        sizes = [need for _, need, _ in needs if need is not None]
        if len(needs) > 1 and len(sizes) == len(needs):
            if shares_device(resolved.config, bundle):
                num_gib = _shared_bytes(resolved, models, sizes) / GIB
                yield f"  {'alternately':12} {num_gib:.1f} GiB{size}, the larger of the two with what the other keeps there"
            else:
                yield f"  {'together':12} {sum(sizes) / GIB:.1f} GiB{size}"
    if (reason := without_sharing(resolved.config, placement)) is not None:
        yield f"  warning: {reason}"
    for role, machine in placement.without_gpu.items():
        where = "any machine" if machine is None else placement.machines[machine].name
        yield f"  {role:12} CPU of {where}"


def shares_device(config: RunConfig, bundle: Bundle) -> bool:
    """Return whether the roles of a bundle use its GPU alternately."""
    return config.explorer.sleep and bundle.num_gpus == 1 and "trainer" in bundle.roles and len(bundle.roles) > 1


def without_sharing(config: RunConfig, placement: Placement) -> str | None:
    """Return why explorer.sleep is of no use in a placement; None if it is, or is not set."""
    if not config.explorer.sleep or any(shares_device(config, bundle) for bundle in placement.bundles):
        return None
    why = "explorer and trainer have GPUs of their own" if placement.bundles else "an engine on a CPU frees nothing"
    return f"explorer.sleep has no effect: {why}"


def _shared_bytes(resolved: ResolvedRun, models: Trained | None, needs: list[float]) -> float:
    """Return the bytes of a GPU that engine and trainer use alternately.

    Args:
        needs: of the engine and of the trainer, in this order.
    """
    assert models is not None
    engine, trainer = needs
    return max(engine + kept_memory(resolved.config.trainer, models), trainer + ASLEEP_BYTES)


def _need(resolved: ResolvedRun, models: Trained | None, role: str, gpu_bytes: int | None) -> tuple[float | None, str]:
    """Return the bytes that a role takes of each of its GPUs, None if unknown, and a reason."""
    config = resolved.config
    if role == "trainer":
        return (None, "") if models is None else (training_memory(config.trainer, models).size_bytes, "estimated")
    if config.explorer.engine == "none":
        return 0, "nothing is sampled"
    settings, parts = resolved.engine(worker_index=0), config.explorer.tensor_parallel_size
    engine = None if models is None else engine_memory(models.policy, settings.dtype)
    weights = None if engine is None else engine.weights_bytes / parts
    teacher = " beside the teacher" if config.explorer.teacher is not None and config.explorer.teacher.path else ""
    if config.explorer.engine != "vllm":
        return weights, f"its weights; the cache of running rollouts comes on top{teacher}"
    share = settings.gpu_memory_utilization
    why = f"gpu_memory_utilization {share:g}{teacher}"
    if gpu_bytes is None:
        return None, why + ("" if weights is None else f", weights {weights / GIB:.1f} GiB")
    if engine is not None:
        tokens = engine.cached_tokens(share * gpu_bytes * parts)
        why += f": weights {(weights or 0) / GIB:.1f} GiB, and the cache of {tokens:,} tokens"
    return share * gpu_bytes, why


def _models(resolved: ResolvedRun) -> Trained | None:
    """Return the sizes of the models; None if they are unknown, which the estimate of the memory reports."""
    try:
        return estimated_models(resolved)
    except ModelError:
        return None


def _roles(bundle: Bundle) -> str:
    return " and ".join(bundle.roles)


def _gpus(placement: Placement, bundle: Bundle) -> str:
    machine = placement.machines[bundle.machine].name
    if len(bundle.roles) > 1:
        return f"share a GPU of {machine}" if len(placement.machines) > 1 else "share a GPU"
    gpus = f"{bundle.num_gpus} GPU{'s' if bundle.num_gpus > 1 else ''}"
    return f"{gpus} of {machine}" if len(placement.machines) > 1 else gpus


def describe_plan(resolved: ResolvedRun, *, deep: bool) -> Iterator[str]:
    """Yield which role of the run has which GPUs.

    Raises:
        ConfigError: with `deep`, there are too few here or in the cluster, or the cluster cannot be joined.
    """
    if deep and os.environ.get("RAY_ADDRESS"):
        from rftcore.launch.ray_cluster import cluster

        cluster.start_cluster()
        machines = cluster.machines()
        cluster.stop_cluster()
        yield from plan(resolved, place_run(resolved, machines), None)
        return
    sizes, asked = local_gpus(), asked_gpus(resolved.config)
    try:
        if sizes or not asked:
            yield from plan(resolved, place_run(resolved, [this_machine(len(sizes))]), min(sizes, default=None))
            return
    except ConfigError as error:
        if deep:
            raise
        yield f"this machine cannot run it: {error}"
    if asked:
        elsewhere = Machine("a machine with as many GPUs as asked for", asked)
        yield from plan(resolved, place_run(resolved, [elsewhere]), None)
