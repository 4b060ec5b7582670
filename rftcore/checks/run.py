"""The checks of a run in their order, at three depths.

check_named    what the configuration names; opens no model that is not on this machine    `rft check`
check_start    also what a run needs of this machine, fetching its models                  `rft run`, roles started by hand
check_deeply   also the inputs, opened, and a trial of rollouts and stages                 `rft check --deep`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import rftdata
from rftcore.checks.algorithm import check_algorithm
from rftcore.checks.devices import check_devices, check_gpus, describe_engine_device, describe_stored
from rftcore.checks.models import check_models, check_workflow_models, describe_adapters, describe_models, open_model
from rftcore.checks.plugins import check_plugins
from rftcore.checks.scheduling import check_device, check_drafts
from rftcore.checks.selections import describe_selection
from rftcore.checks.tasks import TasksetSample, check_new_buffer, read_tasksets
from rftcore.checks.trials import describe_rollouts, describe_stages
from rftcore.config.run import RunConfig
from rftcore.findings import Findings
from rftcore.installation.packages import check_environment
from rftcore.model_folder import names_folder
from rftcore.pipeline.rehearsal_trial import RehearsedBatch
from rftcore.resolved import ResolvedRun
from rftcore.vocabulary import refuse_damaged_tokenizer
from rftdata.attempts.sampling import checked_formula
from rftdata.buffer import Buffer
from rftdata.connection import check_new_folder, check_segments, exists
from rftdata.reports.inspection import schema_version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_named(resolved: ResolvedRun, findings: Findings) -> None:
    """Check what a configuration names, and describe its memory and adapters; fetch nothing."""
    _check_names(resolved, findings)
    if names_folder(resolved.config.model.path):
        folder = findings.value(lambda: resolved.model_folder)
        if folder is not None and findings.passes(refuse_damaged_tokenizer, folder, "model.path"):
            check_workflow_models(resolved, findings)
    findings.describe(describe_stored(resolved))
    findings.describe(describe_adapters(resolved))


def check_start(resolved: ResolvedRun, findings: Findings, *, has_all_roles: bool = True) -> None:
    """Check everything that a run needs except its buffer; check its tasks too if the buffer does not exist yet.

    Models are fetched last, because a run whose model does not exist must not be stored, and a fetch may take long.

    Args:
        has_all_roles: whether this machine runs all roles, so that it needs their GPUs.
    """
    if not findings.passes(check_environment, resolved.config.explorer.engine):
        return
    _check_names(resolved, findings)
    check_new_buffer(resolved, findings)
    if resolved.config.sampling.source is not None and not exists(resolved.config.buffer):
        findings.passes(rftdata.open, resolved.config.buffer, create=False)
    if has_all_roles:
        findings.passes(check_gpus, resolved)
        findings.passes(check_device, resolved)
    if not findings.errors:
        check_models(resolved, findings)


def check_deeply(resolved: ResolvedRun, findings: Findings, read_s: float = 60.0) -> None:
    """Check a configuration with all its inputs opened; report a sentence about each.

    Args:
        read_s: maximum seconds for reading a task source.
    """
    config = resolved.config
    if not findings.passes(check_environment, config.explorer.engine):
        return
    _check_names(resolved, findings)
    with ExitStack() as stack:
        # Without the buffer that there is, nothing can be said of features that were set in it.
        buffer = findings.value(stack.enter_context, _stored(config, findings))
        samples = read_tasksets(
            resolved, buffer, findings, read_s, checks_features=not exists(config.buffer) or buffer is not None
        )
        can_open = not findings.errors or names_folder(config.model.path)
        if not can_open:
            findings.note("the model is fetched when nothing else is wrong")
        opened = findings.value(open_model, resolved) if can_open else None
        if opened is not None:
            findings.note(opened.sentence)
            findings.describe(check_devices(resolved, opened.config, opened.tokenizer))
            findings.describe(describe_engine_device(resolved))
            check_models(resolved, findings)
            findings.describe(describe_models(resolved, opened.tokenizer))
            _try_out(resolved, findings, buffer, samples, opened.tokenizer, read_s)
        if config.sampling.source is not None:
            findings.describe(describe_selection(resolved))
    findings.describe(describe_adapters(resolved))


def _try_out(
    resolved: ResolvedRun,
    findings: Findings,
    buffer: Buffer | None,
    samples: Sequence[TasksetSample],
    tokenizer: PreTrainedTokenizerBase,
    read_s: float,
) -> None:
    """Try rollouts and stages on the tasks that were read, once nothing else is wrong."""
    if findings.errors:
        findings.note("rollouts and stages are tried when nothing else is wrong")
        return
    config = resolved.config
    if config.has_explorer:
        for sample in samples:
            findings.describe(describe_rollouts(resolved, sample, tokenizer))
    rehearsed = [one for sample in samples if sample.is_trained for one in sample.rehearsed]
    findings.describe(describe_stages(resolved, "task", buffer, RehearsedBatch([], 1), read_s))
    batch = RehearsedBatch(rehearsed, config.algorithm.group_size)
    findings.describe(describe_stages(resolved, "experience", buffer, batch, read_s))


def _check_names(resolved: ResolvedRun, findings: Findings) -> None:
    findings.passes(check_segments, resolved.config.buffer)
    check_plugins(resolved, findings)
    check_algorithm(resolved, findings)
    findings.passes(check_drafts, resolved)
    findings.passes(resolved.check_model_folder)


@contextmanager
def _stored(config: RunConfig, findings: Findings) -> Iterator[Buffer | None]:
    """Open the configuration's buffer, and describe it; None if it does not exist yet.

    Raises:
        BufferUnavailableError, SchemaVersionError: it cannot be opened, or created later.
    """
    buffer, formula = config.buffer, config.sampling.priority.formula
    if not exists(buffer):
        later = "; sampling.priority.formula is checked there when the run starts" if formula else ""
        findings.note(f"buffer: {check_new_folder(buffer)} will be created{later}")
        yield None
        return
    with rftdata.open(buffer, create=False, schema="check", application="rft check") as opened:
        findings.note(f"buffer: {opened.location} answers, schema {schema_version(opened.database)}")
        findings.passes(checked_formula, opened.database, formula)
        yield opened
