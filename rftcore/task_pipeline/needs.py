"""Check that tasks have what the rewards and the workflow of a run need, before a rollout is spent on one that lacks it.

A reward or workflow declares `needs_answer`: tasks without an answer are counted and named, and a set without any answer is refused.
A workflow may also declare `check_task`, which refuses single tasks. Stages of `pipelines.task` may write answers and drop tasks, so
deficiencies of a source are refused only if no stage can change them. The tasks left after the stages are counted in the buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from operators.chain.chain import Chain
from rftcore.resolved import ResolvedRun
from rftcore.workflows import check_workflow_args
from rftcore.workflows.task import Task
from rftdata.buffer import Buffer
from rftdata.config import TasksetConfig
from rftdata.errors import ModelError, RftError, TaskSourceError, TimeLimitError, described
from rftdata.tasks.stored import tasks_without_answer
from rftdata.user_code.time_limits import call

_NAMED_KEYS = 3
# Rendering a chat takes a millisecond, and errors of a template show in the first chats.
_RENDERED_TASKS = 64


class TaskNeeds:
    """Counts the tasks of one set that lack an answer, and refuses tasks that the workflow cannot process.

    Args:
        chain: of `pipelines.task`, for a set that passes through it; None for a set that does not.

    Raises:
        PluginError: a reward or workflow cannot be loaded.
        ConfigError: the workflow does not accept its arguments.
    """

    def __init__(self, resolved: ResolvedRun, taskset: TasksetConfig, chain: Chain | None) -> None:
        resolved = resolved.for_taskset(taskset.name)
        self._resolved, self._taskset = resolved, taskset
        workflow = resolved.workflow
        functions: dict[str, object] = {
            f"the reward {key!r}": reward.function for key, reward in resolved.rewards.items()
        }
        functions[f"the workflow {resolved.config.explorer.workflow!r}"] = workflow
        self._needing = [who for who, function in functions.items() if getattr(function, "needs_answer", False)]
        stages = chain.stages if chain is not None else []
        self._may_answer = any(stage.operator.writes is None or "answer" in stage.operator.writes for stage in stages)
        self._check_task = None if stages else getattr(workflow, "check_task", None)
        if self._check_task is not None:
            explorer = resolved.config.explorer
            check_workflow_args(explorer.workflow, self._check_task, 2, explorer.workflow_args)
        self._num_tasks = self._num_lacking = 0
        self._keys: list[str] = []
        self._columns: set[str] = set()
        self._tokenizer: Any = None

    def see(self, task: Mapping[str, Any]) -> None:
        """Check the next task of `read_tasks`.

        Raises:
            TaskSourceError: the workflow cannot process it.
            ConfigError, ModelError: the model's chat template does not fit it, or the model cannot be opened.
        """
        self._num_tasks += 1
        if _is_blank(task["payload"]["answer"]):
            self._num_lacking += 1
            self._columns.update(task["payload"]["metadata"])
            if len(self._keys) < _NAMED_KEYS:
                self._keys.append(task["task_key"])
        if self._check_task is not None:
            self._check(task)

    def _check(self, task: Mapping[str, Any]) -> None:
        assert self._check_task is not None
        parsed = Task.from_row({"task_id": 0, "taskset": self._taskset.name, **task})
        tokenizer = self._opened_tokenizer() if isinstance(parsed.prompt, list) else None
        explorer = self._resolved.config.explorer
        check = functools.partial(self._check_task, parsed, tokenizer, **explorer.workflow_args)
        what = f"check_task of the workflow {explorer.workflow!r} on row {task['row']} of the taskset {self._taskset.name!r}"
        try:
            call(check, self._taskset.timeout_s, what)
        except TimeLimitError:
            raise
        except RftError as error:
            raise TaskSourceError(
                f"row {task['row']} of the taskset {self._taskset.name!r}: {error.what}",
                value=error.value,
                allowed=error.allowed,
                todo=error.todo,
            ) from error
        except Exception as error:
            raise TaskSourceError(f"{what} raised {described(error)}", todo="correct the workflow") from error

    def _opened_tokenizer(self) -> Any:
        """Return the model's tokenizer for the first tasks, None for later ones."""
        if self._num_tasks > _RENDERED_TASKS:
            return None
        if self._tokenizer is None:
            folder = self._resolved.model_folder
            from transformers import AutoTokenizer

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(folder)
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())[:400]
                raise ModelError(
                    f"the tokenizer in {folder} cannot be opened: {reason}", todo="correct model.path"
                ) from error
        return self._tokenizer

    def sentences(self, *, are_all: bool) -> list[str]:
        """Return sentences for the user about the tasks that were seen.

        Args:
            are_all: whether all tasks of the source were seen.

        Raises:
            TaskSourceError: see `refuse_all`.
        """
        if are_all:
            self.refuse_all()
        return list(self._sentences(self._num_tasks, self._num_lacking, self._keys))

    def refuse_all(self) -> None:
        """Refuse the set if an answer is needed and none of its tasks has one.

        Raises:
            TaskSourceError: an answer is needed, and no task that was seen has one.
        """
        if not self._may_answer:
            self._refuse(self._num_tasks, self._num_lacking)

    def stored(self, buffer: Buffer) -> list[str]:
        """Return the same sentences for the tasks that can be selected now.

        Raises:
            TaskSourceError: an answer is needed, and none of them has one.
        """
        if not self._needing:
            return []
        unanswered = tasks_without_answer(buffer.database, self._taskset.name, _NAMED_KEYS)
        self._refuse(unanswered.num_tasks, unanswered.num_lacking)
        return list(self._sentences(unanswered.num_tasks, unanswered.num_lacking, unanswered.task_keys))

    def _refuse(self, num_tasks: int, num_lacking: int) -> None:
        if not self._needing or not num_tasks or num_lacking < num_tasks:
            return
        column = self._taskset.answer or "answer"
        raise TaskSourceError(
            f"no task of the taskset {self._taskset.name!r} has an answer (column {column!r}), which {_and(self._needing)} needs",
            value=self._taskset.source,
            allowed=f"other columns: {', '.join(sorted(self._columns))}" if self._columns else None,
            todo=f"name the column with the answer: `answer: …` in the taskset {self._taskset.name!r}, or use another reward",
        )

    def _sentences(self, num_tasks: int, num_lacking: int, keys: Sequence[str]) -> Iterator[str]:
        if self._needing and num_lacking:
            more = ", …" if num_lacking > len(keys) else ""
            yield (
                f"{num_lacking:,} of {num_tasks:,} tasks have no answer, which {_and(self._needing)} needs: task keys "
                f"{', '.join(keys)}{more}; add their answers to the source, or exclude these tasks"
            )


def _is_blank(answer: str | None) -> bool:
    return answer is None or not answer.strip()


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)
