"""Opening of the teacher that a run's configuration names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rftcore.resolved import ResolvedRun
from rftcore.teachers.base import Teacher
from rftcore.teachers.endpoint import EndpointTeacher
from rftcore.teachers.local import LocalTeacher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def open_teacher(resolved: ResolvedRun, tokenizer: PreTrainedTokenizerBase) -> Teacher:
    """Open the teacher of `explorer.teacher`, in the event loop that will use it.

    Args:
        tokenizer: the policy's.

    Raises:
        ModelError: the model cannot be opened.
        PluginError, ConfigError: the server cannot be asked, has another tokenizer, or returns no log-probabilities.
    """
    explorer, folder = resolved.config.explorer, resolved.scoring_teacher_folder
    assert explorer.teacher is not None
    if explorer.teacher.endpoint is not None:
        teacher: Teacher = EndpointTeacher(explorer.teacher.endpoint)
    else:
        assert folder is not None
        num_threads = resolved.engine(worker_index=0).resolve_num_threads()
        # At temperature 0 nothing is sampled, and log-probabilities are the model's own.
        teacher = await asyncio.to_thread(
            LocalTeacher, folder, explorer.teacher, explorer.temperature or 1.0, num_threads
        )
    try:
        await teacher.open(tokenizer)
    except BaseException:
        await teacher.close()
        raise
    return teacher
