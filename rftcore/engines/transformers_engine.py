"""Engine for machines on which vLLM does not install: `transformers` generate, batch by batch.

Waiting requests with the same `Decoding` are generated as one left-padded batch. A weight update waits for the running batch,
so every response has one policy version.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rftcore.engines.answer_text import AnswerText
from rftcore.engines.base import Decoding, Generation
from rftcore.engines.commands import Request
from rftcore.engines.driver import DrivenEngine
from rftcore.sync.device_names import device_id
from rftcore.sync.files.adapters_file import adapters_config
from rftcore.sync.files.weights_file import iterate_weights
from rftcore.sync.tensors import AdaptersConfig
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.reception import Reception
from rftdata.errors import RftError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers._typing import GenerativePreTrainedModel

    from rftcore.sync.checkpoint_layout import CheckpointLayout
    from rftcore.sync.transfer.receiver import TransferReceiver


class TransformersEngine(DrivenEngine):
    """See the module header; `kv_cache_gib`, `gpu_memory_utilization`, `enforce_eager` have no effect here."""

    def _open_model(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        from rftcore.engines.transformers_adapters import AdaptersBeside
        from rftcore.whole_models import open_whole

        self._waiting: dict[str, Request] = {}
        self._receiver: TransferReceiver | None = None
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        if self._device == "cpu":
            torch.set_num_threads(self.config.resolve_num_threads())
        torch.manual_seed(self.config.seed)
        self._model = open_whole(AutoModelForCausalLM, self.model_path, dtype=self.config.dtype)
        self._model.to(self._device)
        self._model.eval()
        self._adapters = AdaptersBeside(self._model)
        # The tokenizers library forbids use by two threads at once; callers use the other copy.
        self._detokenizer = copy.deepcopy(self.tokenizer)
        self._text = AnswerText(self._detokenizer)
        limit = self._model.config.max_position_embeddings
        self._context_length = min(self.config.context_length or limit, limit)
        end_token = self._model.generation_config.eos_token_id
        if end_token is None:
            end_token = self.tokenizer.eos_token_id
        self._end_token_ids = [end_token] if isinstance(end_token, int) else list(end_token or [])
        # `generate` takes parameters that a request omits from here. A model's own repetition_penalty and the like would change
        # the distribution that is sampled from, but the trainer computes the one without them.
        self._model.generation_config = GenerationConfig(
            eos_token_id=self._end_token_ids or None, pad_token_id=self._model.generation_config.pad_token_id
        )

    def unfinished(self, first_tokens: Mapping[str, int]) -> dict[str, Generation]:
        # Nothing is known of a batch before it has finished, so callers do not wait for the driving thread.
        return {}

    def _add(self, request: Request) -> None:
        if request.decoding.structure is not None:
            raise RftError(
                "explorer.engine transformers samples no structured answers",
                value=request.decoding.structure.kind,
                todo="set explorer.engine: vllm, or call model.chat without response_format",
            )
        self._waiting[request.request_id] = request

    def _abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def _works_on(self) -> list[str]:
        return []  # a step computes a batch from its beginning to its end

    def _step(self) -> list[tuple[str, Generation]]:
        decoding = next(iter(self._waiting.values())).decoding
        alike = [request for request in self._waiting.values() if request.decoding == decoding]
        # A seed belongs to one request; two rows of a batch would share one random stream.
        batch = alike[: 1 if decoding.seed is not None else self.config.max_num_seqs]
        for request in batch:
            del self._waiting[request.request_id]
        self._report_work([request.request_id for request in batch])
        generations = self._generate([request.prompt_token_ids for request in batch], decoding)
        return [(request.request_id, generation) for request, generation in zip(batch, generations, strict=True)]

    def _generate(self, prompts: list[list[int]], decoding: Decoding) -> list[Generation]:
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        width = max(map(len, prompts))
        pad = self._end_token_ids[0] if self._end_token_ids else 0
        token_ids_BT = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self._device)
        mask_BT = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        recorder = _SamplingRecorder(decoding)
        settings = GenerationConfig(
            do_sample=decoding.temperature > 0,
            max_new_tokens=min(decoding.max_tokens, self._context_length - width),
            eos_token_id=self._end_token_ids or None,
            pad_token_id=pad,
            stop_strings=list(decoding.stop) or None,
            # The recorder applies these; transformers warns about them if nothing is sampled.
            **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if decoding.temperature > 0 else {}),
        )
        if decoding.seed is not None:
            torch.manual_seed(decoding.seed)
        with torch.inference_mode():
            sequences_BT = cast("GenerativePreTrainedModel", self._model).generate(
                token_ids_BT,
                attention_mask=mask_BT,
                generation_config=settings,
                logits_processor=LogitsProcessorList([recorder]),
                tokenizer=self._detokenizer if decoding.stop else None,
            )
        assert isinstance(sequences_BT, torch.Tensor)  # no other output was requested
        recorder.record_last(sequences_BT)
        logprobs_BR = torch.stack(recorder.logprobs_RB, dim=1).tolist()
        responses = sequences_BT[:, width:].tolist()
        return [self._trim(ids, logprobs, decoding) for ids, logprobs in zip(responses, logprobs_BR, strict=True)]

    def _trim(self, token_ids: list[int], logprobs: list[float], decoding: Decoding) -> Generation:
        """Remove everything after the end token or the stop text, which longer rows of the batch added."""
        length, reason = len(token_ids), "length"
        for index, token_id in enumerate(token_ids):
            ends_text = decoding.stop and self._has_stop(token_ids[: index + 1], decoding.stop)
            if token_id in self._end_token_ids or ends_text:
                length, reason = index + 1, "stop"
                break
        token_ids = token_ids[:length]
        text = self._text(token_ids, ended=reason == "stop", stop=decoding.stop)
        spans = [(0, self.policy_version_id)] if token_ids else []
        return Generation(token_ids, logprobs[:length], text, reason, spans)

    def _has_stop(self, token_ids: list[int], stop: tuple[str, ...]) -> bool:
        text = self._text(token_ids, ended=False)
        return any(each in text for each in stop)

    def _replace_weights(self, path: Path) -> None:
        self._put_weights(iterate_weights(path), adapters_config(path))

    def _put_weights(self, tensors: Iterator[tuple[str, Tensor]], adapters: AdaptersConfig | None) -> None:
        if adapters is not None:
            self._adapters.replace(dict(tensors), adapters)
            return
        # In place; a tied head is the embedding's own tensor and is written twice with the same values.
        state = self._checkpoint_views()
        for name, tensor in tensors:
            state[name].copy_(tensor)

    def _checkpoint_views(self) -> dict[str, Tensor]:
        """Return the model's weights under the names that they have in files and on the wire."""
        return self._layout.of_state(self._model.state_dict(keep_vars=False).items())

    @cached_property
    def _layout(self) -> CheckpointLayout:
        from rftcore.sync.checkpoint_layout import CheckpointLayout

        return CheckpointLayout(self._model)

    @property
    def reception(self) -> Reception:
        dtype = str(self._model.dtype).removeprefix("torch.")
        # Adapters alone leave the model's own weights as they are.
        is_plain = dtype == "float32" or self.config.adapter_rank is not None
        views = {} if is_plain else self._checkpoint_views()
        wide = tuple(name for name, tensor in views.items() if str(tensor.dtype) == "torch.float32")
        return Reception(dtype=dtype, device=device_id(self._device), num_ranks=1, in_float32=wide)

    def _receive_weights(self, plan: TransferPlan) -> str:
        from rftcore.sync.transfer.receiver import TransferReceiver

        if self._receiver is None:
            self._receiver = TransferReceiver()
        return self._receiver.receive(plan, 0, lambda tensors: self._put_weights(tensors, plan.adapters))

    def _wake_up(self, weights_only: bool) -> None:
        """Do nothing: this engine never sleeps."""

    def _name_version(self, policy_version_id: int) -> None:
        """Do nothing: a batch takes its version from `policy_version_id` when it has ended."""

    def _differing_weights(self, path: Path) -> list[str]:
        state = self._checkpoint_views()
        if adapters_config(path) is None:
            return [name for name, tensor in iterate_weights(path) if not state[name].equal(tensor.to(state[name]))]
        own, published = self._adapters.tensors, dict(iterate_weights(path))
        files = sorted(Path(self.model_path).glob("*.safetensors"))
        weights = (named for file in files for named in iterate_weights(file))
        differing = [name for name, tensor in weights if not state[name].equal(tensor.to(state[name]))]
        return differing + sorted(
            name
            for name in {*own, *published}
            if name not in own or name not in published or not own[name].equal(published[name].to(own[name]))
        )

    def _close_model(self) -> None:
        if self._receiver is not None:
            self._receiver.leave()
        del self._model


class _SamplingRecorder:
    """A logits processor that applies temperature, top-k and top-p itself and records the log-probability of each token.

    The token drawn from the scores of one call is known at the next call (its last column) or from the finished sequences.
    Only one step of scores is kept, so memory is B·V instead of B·R·V.
    """

    def __init__(self, decoding: Decoding) -> None:
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        self.logprobs_RB: list[Tensor] = []
        self._previous_logprobs_BV: Tensor | None = None
        self._prompt_width = 0
        self._warpers: list[Any] = []
        if decoding.temperature > 0:
            if decoding.temperature != 1.0:
                self._warpers.append(TemperatureLogitsWarper(float(decoding.temperature)))
            if decoding.top_k > 0:
                self._warpers.append(TopKLogitsWarper(decoding.top_k))
            if decoding.top_p < 1.0:
                self._warpers.append(TopPLogitsWarper(decoding.top_p))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Tensor:
        if self._previous_logprobs_BV is None:
            self._prompt_width = input_ids.shape[1]
        else:
            self._record(input_ids)
        warped = scores.float()
        for warper in self._warpers:
            warped = warper(input_ids, warped)
        self._previous_logprobs_BV = warped.log_softmax(-1)
        return warped

    def record_last(self, sequences_BT: Tensor) -> None:
        """Record the last drawn token, which no further call shows."""
        if sequences_BT.shape[1] - self._prompt_width > len(self.logprobs_RB):
            self._record(sequences_BT)

    def _record(self, token_ids_BT: Tensor) -> None:
        assert self._previous_logprobs_BV is not None
        self.logprobs_RB.append(self._previous_logprobs_BV.gather(1, token_ids_BT[:, -1:])[:, 0])
