"""Answers completions of one token as vLLM does, with `prompt_logprobs` from a real model, for `ChatServer`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.chat_server import Body, Says


def answer_with(folder: Path) -> Callable[[int, Body], Says]:
    """The answers of the model in a folder, to prompts given as texts or as tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()

    def answer(_: int, body: Body) -> Says:
        assert body["max_tokens"] == 1 and body["prompt_logprobs"] == 0
        prompt = body["prompt"]
        ids = (
            tokenizer.encode(prompt, add_special_tokens=body["add_special_tokens"])
            if isinstance(prompt, str)
            else prompt
        )
        rows: list[Any] = [None]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        for place, token in enumerate(ids[1:]):
            rows.append({str(token): {"logprob": logprobs[place, token].item(), "rank": 1, "decoded_token": "?"}})
        return Says(json.dumps({"choices": [{"index": 0, "text": "?", "prompt_logprobs": rows}]}), raw=True)

    return answer
