"""Schedulers of vLLM that report the log-probability of each sampled token as a plain number.

vLLM slices three arrays for every sampled token, packs them, and unpacks them in its client. With a thousand sequences of a small model that takes
longer than the model. Training needs one number: the log-probability of the token that was sampled.

The numbers travel in `EngineCoreOutput.kv_transfer_params`, a field of free type that serves engines which exchange their KV cache. vLLM imports this
module in the process of its engine core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

_KEY = "logprobs"


def take_logprobs(output: EngineCoreOutput) -> list[float]:
    """Return the log-probabilities (nats) of an output's tokens, and leave the output without them."""
    found: list[float] = (output.kv_transfer_params or {}).get(_KEY, [])
    output.kv_transfer_params = None
    return found


class _NumbersForTokens(Scheduler):  # type: ignore[misc]  # without type hints
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        if logprobs is not None:
            # The first column is the sampled token's. Rows are those of requests, or begin where `first` says if a request may have several.
            values: list[float] = logprobs.logprobs[:, 0].tolist()
            rows: dict[str, int] = model_runner_output.req_id_to_index
            first = logprobs.cu_num_generated_tokens
            for of_client in outputs.values():
                for output in of_client.outputs:
                    num = len(output.new_token_ids)
                    if num:
                        row = rows[output.request_id]
                        start = row if first is None else first[row]
                        output.kv_transfer_params = {_KEY: values[start : start + num]}
        return outputs


class StepScheduler(_NumbersForTokens):
    """Schedules a step when the last one has ended."""


class AheadScheduler(_NumbersForTokens, AsyncScheduler):  # type: ignore[misc]
    """Schedules a step while the last one runs."""
