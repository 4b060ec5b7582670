"""Stored rollouts as `rft show` prints them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcore.model_folder import stored_model
from rftcore.reporting.rollout_text import RolloutPrinter, ShownSequence, ShownTurn, finite, named, number
from rftdata.reports.stored_rollouts import (
    StoredAnnotation,
    StoredAnswer,
    StoredExperience,
    StoredGroup,
    StoredRollout,
    StoredTry,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def print_rollout(printer: RolloutPrinter, rollout: StoredRollout) -> None:
    """Print a rollout with its experiences."""
    shown = len(rollout.experiences)
    stored = len(rollout.experience_ids)
    printer.line(
        f"rollout {rollout.rollout_id} ({rollout.rollout_index + 1} of {rollout.group_size} of group {rollout.group_id}) · "
        f"task {rollout.taskset}/{rollout.task_key} · run {rollout.run}, explorer step {rollout.explore_step}",
        "bold",
    )
    for fact in _facts_of_rollout(rollout):
        printer.line(f"  {fact}")
    if not stored:
        printer.line("  nothing is stored of its chat: it ended before its first answer")
    elif shown < stored:
        others = ", ".join(str(key) for key in rollout.experience_ids)
        printer.line(f"  its {stored} experiences: {others}; `rft show --rollout {rollout.rollout_id}` shows all")
    for experience in rollout.experiences:
        printer.line("")
        printer.sequence(shown_experience(experience))
    for place, tried in enumerate(rollout.tries):
        for chat in tried.chats:
            printer.line("")
            printer.sequence(_shown_try(f"try {place + 1}, given up and never trained on", chat))


def _shown_try(heading: str, chat: Mapping[str, Any]) -> ShownSequence:
    return ShownSequence(
        heading=heading,
        facts=[],
        messages=chat.get("messages") or [],
        prompt="",
        response="",
        token_ids=None,
        num_prompt_tokens=0,
        loss_mask=None,
        logprobs=None,
        turns=(),
    )


def _sampled(tried: StoredTry) -> str:
    """Return how much a try had sampled; nothing if it had not."""
    turns = [turn for chat in tried.chats for turn in chat["turns"]]
    num_tokens = sum(turn.get("num_tokens", 0) for turn in turns)
    return f" after {len(turns)} turn{'' if len(turns) == 1 else 's'} of {num_tokens} tokens" if turns else ""


def _facts_of_rollout(rollout: StoredRollout) -> list[str]:
    turns = f"{rollout.num_turns} turn{'' if rollout.num_turns == 1 else 's'}"
    stopped = f", stopped by {rollout.stop_reason}" if rollout.stop_reason else ""
    facts = [
        f"{rollout.outcome}{stopped} · reward {number(rollout.reward)} as sampled · {turns} · {rollout.seconds:.1f} s"
    ]
    if rollout.answer is not None:
        facts.append(f"right answer: {rollout.answer}")
    if rollout.error is not None:
        facts.append(f"error: {rollout.error}")
    facts += [f"an earlier try was given up{_sampled(tried)}: {tried.error}" for tried in rollout.tries]
    return facts + annotation_lines(rollout.annotations)


def print_group(printer: RolloutPrinter, group: StoredGroup) -> None:
    """Print a group with a line for each rollout."""
    closed = f": {group.closed_reason}" if group.closed_reason else ""
    printer.line(
        f"group {group.group_id} · task {group.taskset}/{group.task_key} · run {group.run}, explorer step {group.explore_step}",
        "bold",
    )
    baseline = "" if group.baseline_reward is None else f" · greedy baseline {number(group.baseline_reward)}"
    printer.line(f"  {group.state}{closed}")
    printer.line(
        f"  {group.num_ok} of {group.group_size} rollouts ok · mean reward {number(group.mean_reward)}, "
        f"standard deviation {number(group.std_reward)}{baseline}"
    )
    if group.answer is not None:
        printer.line(f"  right answer: {group.answer}")
    for line in annotation_lines(group.annotations):
        printer.line(f"  {line}")
    for rollout in group.rollouts:
        printer.line("")
        printer.line(f"rollout {rollout.rollout_id} ({rollout.rollout_index + 1} of {group.group_size})", "bold")
        for fact in _facts_of_rollout(dataclasses.replace(rollout, answer=None)):
            printer.line(f"  {fact}")
        if rollout.experience_ids:
            printer.line(f"  experiences {', '.join(map(str, rollout.experience_ids))}")
    if group.rollouts:
        printer.line("")
        printer.line(f"`rft show --rollout {group.rollouts[0].rollout_id}` shows the chat of one")


def print_answers(printer: RolloutPrinter, answers: Sequence[StoredAnswer]) -> None:
    """Print the answers to a question of an evaluation."""
    first = answers[0]
    printer.line(
        f"evaluation {first.evaluation_id} · task {first.taskset}/{first.task_key} · run {first.run}, trainer step {first.trainer_step} · {first.decoding}",
        "bold",
    )
    if first.answer is not None:
        printer.line(f"  right answer: {first.answer}")
    for one in answers:
        printer.line("")
        stopped = f", stopped by {one.stop_reason}" if one.stop_reason else ""
        turns = f"{one.num_turns} turn{'' if one.num_turns == 1 else 's'}, {one.num_response_tokens} tokens"
        facts = [f"{one.outcome}{stopped} · reward {number(one.reward)} · {turns} · finish {one.finish_reason}"]
        facts += [f"parts: {named(one.reward_parts)}"] if one.reward_parts else []
        facts += [f"metrics: {named(one.metrics)}"] if one.metrics else []
        facts += [f"error: {one.error}"] if one.error is not None else []
        chats = one.chats or [{"messages": [{"role": "assistant", "content": one.response}], "turns": []}]
        for place, chat in enumerate(chats):
            heading = f"answer {one.answer_index + 1} of {one.num_answers}"
            heading += f", chat {place + 1} of {len(chats)}" if len(chats) > 1 else ""
            printer.sequence(_shown_chat(heading, facts if place == 0 else (), one, chat))


def _shown_chat(heading: str, facts: Sequence[str], answer: StoredAnswer, chat: Mapping[str, Any]) -> ShownSequence:
    fork = [f"forked: {chat['fork']}"] if chat.get("fork") else []
    turns = [
        ShownTurn(number=turn["turn"], start=0, end=turn["num_tokens"], step_reward=turn.get("step_reward"))
        for turn in chat.get("turns", ())
    ]
    return ShownSequence(
        heading=heading,
        facts=[*facts, *fork],
        messages=chat.get("messages"),
        prompt="",
        response=answer.response,
        token_ids=None,
        num_prompt_tokens=0,
        loss_mask=None,
        logprobs=None,
        turns=turns,
    )


def shown_experience(experience: StoredExperience) -> ShownSequence:
    """Return what is shown of an experience."""
    purged = experience.purge is not None
    return ShownSequence(
        heading=f"experience {experience.experience_id}" + (f" · role {experience.role}" if experience.role else ""),
        facts=_facts(experience),
        messages=None if purged or not isinstance(experience.messages, list) else experience.messages,
        prompt=experience.prompt,
        response=experience.response,
        token_ids=experience.token_ids,
        num_prompt_tokens=experience.num_prompt_tokens,
        loss_mask=_of_response(experience.loss_mask, experience),
        logprobs=_of_response(experience.behavior_logprobs, experience),
        turns=shown_turns(experience),
    )


def _of_response(values: list[float] | None, experience: StoredExperience) -> list[float] | None:
    """Return the values of the response tokens of an array with one for each token."""
    return None if values is None else values[experience.num_prompt_tokens :]


def shown_turns(experience: StoredExperience) -> list[ShownTurn]:
    """Return the turns of an experience."""
    length = experience.num_prompt_tokens + experience.num_response_tokens
    bounds = experience.turns or [experience.num_prompt_tokens, length, experience.turn_index]
    rewards = {one.turn: one for one in experience.turn_rewards}
    return [
        ShownTurn(
            number=bounds[at + 2],
            start=bounds[at],
            end=bounds[at + 1],
            step_reward=rewards[bounds[at + 2]].reward if bounds[at + 2] in rewards else None,
        )
        for at in range(0, len(bounds), 3)
    ]


def _facts(experience: StoredExperience) -> list[str]:
    facts = [_reward(experience)]
    if experience.reward_parts:
        facts.append(f"parts: {named(experience.reward_parts)}")
    if experience.metrics:
        facts.append(f"metrics: {named(experience.metrics)}")
    fork = f" · forked: {experience.fork}" if experience.fork else ""
    facts.append(
        f"{experience.num_prompt_tokens} prompt and {experience.num_response_tokens} response tokens, {experience.num_trained_tokens} "
        f"trained on · finish {experience.finish_reason}{fork} · {_policy(experience)}"
    )
    for label in experience.labels:
        reason = f": {label.reason}" if label.reason else ""
        final = ", final" if label.final else ""
        turn = "" if label.turn is None else f"of turn {label.turn} "
        facts.append(
            f"label {turn}of {label.labelled_at:%Y-%m-%d %H:%M} by {label.author} ({label.source}{final}): "
            f"{number(label.old_value)} → {number(label.new_value)}{reason}"
        )
    facts += annotation_lines(experience.annotations)
    facts.append(_lineage(experience))
    if experience.purge is not None:
        when = f"{experience.purge.purged_at:%Y-%m-%d %H:%M}"
        facts.append(
            f"its text and arrays were purged by {experience.purge.author} on {when} (purge {experience.purge.purge_id}): {experience.purge.reason}"
        )
    return facts


def annotation_lines(annotations: Sequence[StoredAnnotation]) -> list[str]:
    """Return a line for each annotation."""
    lines = []
    for a in annotations:
        reason = f": {a.reason}" if a.reason else ""
        value = a.value if isinstance(a.value, str) else json.dumps(a.value, ensure_ascii=False)
        lines.append(f"{a.kind} of {a.made_at:%Y-%m-%d %H:%M} by {a.author} ({a.source}): {value}{reason}")
    return lines


def _reward(experience: StoredExperience) -> str:
    text = f"reward {number(experience.reward)}"
    if experience.reward != experience.reward_sampled:
        text += f" (sampled {number(experience.reward_sampled)})"
    if experience.reward_shaped is not None:
        text += f", {number(experience.reward_shaped)} after the pipeline"
    if experience.token_rewards:
        text += f", rewards of tokens {number(math.fsum(experience.token_rewards))}"
    return text


def _policy(experience: StoredExperience) -> str:
    low, high = experience.policy_version_min, experience.policy_version_max
    if low is None:
        return f"not sampled here ({experience.source})"
    versions = f"policy version {low}" if low == high else f"policy versions {low} to {high}"
    return versions if experience.policy_step is None else f"{versions} (trainer step {experience.policy_step})"


def _lineage(experience: StoredExperience) -> str:
    because = f" by {experience.dropped_by}: {experience.dropped_because}" if experience.dropped_by else ""
    parent = "" if experience.parent_id is None else f" · created from experience {experience.parent_id}"
    if not experience.uses:
        return f"{experience.state}{because} · no step has trained on it{parent}"
    steps = ", ".join(f"{use.trainer_step} of {use.run}" for use in experience.uses)
    checkpoints = sorted({use.checkpoint_step for use in experience.uses if use.checkpoint_step is not None})
    held = f", in the checkpoint of step {', '.join(map(str, checkpoints))}" if checkpoints else ""
    changed = " · corrected since" if any(use.corrected_since for use in experience.uses) else ""
    return f"{experience.state} · trained on in step {steps}{held}{changed}{parent}"


def json_of(found: StoredRollout | StoredGroup | StoredAnswer) -> dict[str, Any]:
    """Return what is stored as JSON, in which what is not a number is null."""
    return {name: finite(value) for name, value in dataclasses.asdict(found).items()}


def tokenizer_of(config: Mapping[str, Any]) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer of a stored configuration's model; None with the reason if it is not on this machine."""
    model = config.get("model")
    path = model.get("path") if isinstance(model, Mapping) else None
    if not isinstance(path, str):
        return None, "the run's configuration names no model"
    folder = stored_model(str(Path(config.get("base_dir", ".")) / path) if path.startswith((".", "/")) else path)
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return None, f"the tokenizer of the run's model {path} is not on this machine"
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file)), ""
