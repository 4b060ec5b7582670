"""Edited responses as trainable experiences: children of the experiences that people edited.

A child has its parent's tokens up to the last answer, and behind them the edited answer as the chat template of the parent's model writes it, with
its end token. So the two answer the same prompt, token for token: the child can be learned from (SFT), and preferred to its parent (DPO). In a
rollout of several turns the person left the earlier answers as they are; they count in the loss as they do in the parent. The edited answer has
no log-probabilities, because no policy sampled it: algorithms with ratios refuse the child.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rftcore.workflows.chats import written_sequence
from rftdata.annotations.edits import Edit, blind_edits, edits_to_render, rendering, run_of_edits
from rftdata.buffer import Buffer
from rftdata.errors import (
    BufferUnavailableError,
    DiskFullError,
    ModelError,
    QueryError,
    RftError,
)
from rftdata.experience import TURNS, Array, Group, Rollout, Sequence
from rftdata.run import Run


@dataclass
class RenderedEdits:
    """Attributes:
    run: the run that has the children; None if there was nothing to render.
    num_rendered: edits that have a child now and had none before.
    num_blind: edits of blind kinds that were left out.
    refused: edits that cannot be rendered, by annotation_id, with the reason.
    """

    run: str | None = None
    num_rendered: int = 0
    num_blind: int = 0
    refused: dict[int, str] = field(default_factory=dict)


def render_edits(
    buffer: Buffer, run: Run, tokenizer: Any, *, into: str | None = None, include_blind: bool = False
) -> RenderedEdits:
    """Render the standing edits of a run's experiences that have no child yet, each once.

    Args:
        into: name of the run that takes the children; `RUN-edits` by default.
        include_blind: render edits of blind kinds, too. Every account that may read sees the children.

    Raises:
        ArchivedError: a run is archived.
        ConflictError: another process renders edits of the run.
        QueryError: `into` names a run of another kind.
    """
    result = RenderedEdits()
    with rendering(run):
        blind = {} if include_blind else blind_edits(run)
        result.num_blind = sum(blind.values())
        edits = list(edits_to_render(run, without_kinds=blind))
        if not edits:
            return result
        target = run_of_edits(buffer, run, into)
        result.run = target.name
        with buffer.writer(target) as writer:
            for edit in edits:
                try:
                    group = _group(edit, rendered(buffer, tokenizer, edit))
                    written = writer.insert(group, receipt=edit.receipt)
                except (BufferUnavailableError, DiskFullError, ModelError):
                    raise
                except (RftError, TypeError, ValueError) as error:
                    result.refused[edit.annotation_id] = f"experience {edit.parent_id}: {error}"
                    continue
                result.num_rendered += len(written)
    return result


def _group(edit: Edit, sequence: Sequence) -> Group:
    rollout = Rollout(0, "ok", None, [sequence])
    return Group([rollout], source="human", taskset=edit.taskset, task_key=edit.task_key)


def rendered(buffer: Buffer, tokenizer: Any, edit: Edit) -> Sequence:
    """Return the trainable sequence of an edit.

    Raises:
        QueryError: the parent's prompt has images, or its arrays are gone.
        ModelError: the tokenizer has no end token.
    """
    tokens, mask, turns = (buffer.arrays([edit.parent_id], name)[0] for name in ("token_ids", "loss_mask", TURNS))
    if tokens is None or mask is None:
        raise QueryError("the experience has no arrays any more", value=edit.parent_id, todo="retract the edit")
    before = edit.messages[:-1] if edit.messages else [{"role": "user", "content": edit.prompt}]
    if any(part.get("type", "text") != "text" for message in before for part in _parts(message)):
        raise QueryError("an answer to images cannot be rendered", value=edit.parent_id, allowed="texts")
    start = edit.num_prompt_tokens if turns is None else int(turns[-1, 0])
    answer = written_sequence(tokenizer, before, edit.response)
    answer_ids = list(answer.token_ids[answer.num_prompt_tokens :])
    kept: Array = mask[edit.num_prompt_tokens : start].astype(bool)  # stored for the prompt, too
    loss_mask = [*kept.tolist(), *[True] * len(answer_ids)]
    earlier = tokenizer.decode(tokens[edit.num_prompt_tokens : start].tolist()) if len(kept) else ""
    arrays: dict[str, Array] = {}
    if turns is not None:
        arrays[TURNS] = turns.copy()
        arrays[TURNS][-1, 1] = start + len(answer_ids)
        arrays[TURNS][:, 2] = np.arange(len(turns))  # the child is a rollout without branches
    return Sequence(
        prompt=edit.prompt,
        response=earlier + edit.response,
        token_ids=np.concatenate([tokens[:start], np.array(answer_ids, tokens.dtype)]),
        num_prompt_tokens=edit.num_prompt_tokens,
        finish_reason="stop",
        loss_mask=None if all(loss_mask) else loss_mask,
        messages=None if edit.messages is None else [*before, {"role": "assistant", "content": edit.response}],
        parent_id=edit.parent_id,
        edit_id=edit.annotation_id,
        role=edit.role,
        arrays=arrays,
    )


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
