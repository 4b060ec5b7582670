"""`Turn`: one answer of the model, as workflows and rewards see it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rftcore.tools.calls import ToolCall, tool_calls_of
from rftcore.workflows import inputs
from rftcore.workflows.chat_encoding import Message, copied
from rftdata.errors import RftError
from rftdata.experience import Array, Sequence

TokenValues = list[float] | Array


@dataclass(frozen=True)
class Turn:
    """One answer of the model.

    Attributes:
        messages: the chat before the answer.
        response: text without the special tokens that begin, end or fill a text; those that mark the calls of tools are in it.
        finish_reason: stop, length or abort.
        sequence: its prompt and its answer. What is stored joins the turns of a chat, see `rftcore.workflows.session`.
        parsed: the answer as a message whose calls of tools are apart from its content; None if it was not parsed.
    """

    messages: list[Message]
    response: str
    finish_reason: str
    sequence: Sequence
    parsed: Message | None = None

    @property
    def message(self) -> Message:
        """The answer as a message, with which a workflow continues the chat."""
        return {"role": "assistant", "content": self.response} if self.parsed is None else copied([self.parsed])[0]

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of tools in the answer, if it was parsed; empty if one of them is malformed."""
        return [] if self.parsed is None else list(tool_calls_of(self.parsed))

    @property
    def response_token_ids(self) -> list[int]:
        """The tokens of the answer, with the end token if there is one."""
        return [int(token) for token in self.sequence.token_ids[self.sequence.num_prompt_tokens :]]

    def record(
        self,
        *,
        state: str | bytes | int | None = None,
        step_reward: float | None = None,
        token_rewards: TokenValues | None = None,
        teacher_logprobs: TokenValues | None = None,
    ) -> None:
        """Store inputs of algorithms with the turn, see `rftcore.workflows.inputs`; a repeated input replaces the earlier value.

        Args:
            state: state of the environment before the turn. Equal states are recognised by their hash, which is stored.
            step_reward: reward of the turn alone. The rollout's reward is not changed.
            token_rewards: one value per token of the response, in addition to the rollout's reward.
            teacher_logprobs: one value per token of the response, nats.

        Of a written chat with several answers, this turn is the last one; the rewards of the others are 0.

        Raises:
            RftError: a value of another type, or not one value per token; a state of a written chat with several answers.
        """
        num_prompt = self.sequence.num_prompt_tokens
        num_response = len(self.sequence.token_ids) - num_prompt
        arrays: dict[str, Array] = {}
        num_before = self.sequence.num_turns - 1
        if state is not None:
            if num_before:
                raise RftError(
                    f"a written chat with {num_before + 1} answers has no state for each of them",
                    todo="write the answers one by one with model.write(…), and record the state of each",
                )
            arrays["state_hash"] = inputs.state_hash(state)
        if step_reward is not None:
            own = inputs.step_reward(step_reward)
            arrays["step_reward"] = np.concatenate([np.zeros(num_before, own.dtype), own])
        for name, values in (("token_rewards", token_rewards), ("teacher_logprobs", teacher_logprobs)):
            if values is not None:
                arrays[name] = inputs.token_array(name, values, num_prompt, num_response)
        self.sequence.arrays = {**self.sequence.arrays, **arrays}
