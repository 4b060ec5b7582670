"""`LLM.generate` of vLLM alone, for `rft bench rollouts`: `python -m benchmarks.runs.rollouts_alone FOLDER OUTPUT`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import append_line
from benchmarks.runs.rollouts import GROUP_SIZE


def main(folder: Path, output: Path) -> None:
    """Run the cases of `folder`/work.json; append a line for each."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    work: dict[str, Any] = json.loads((folder / "work.json").read_text())
    prompts: list[list[int]] = json.loads((folder / "prompts.json").read_text())["token_ids"]
    llm = LLM(
        model=str(folder / "model"),
        dtype="bfloat16",
        max_model_len=max(map(len, prompts)) + work["max_tokens"],
        max_num_seqs=work["max_num_seqs"],
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        **_memory(work["gpu_memory"]),
        **({"cudagraph_capture_sizes": work["graph_sizes"]} if work["graph_sizes"] is not None else {}),
    )

    def sample(num: int, max_tokens: int, detokenize: bool) -> tuple[int, float]:
        chosen = [TokensPrompt(prompt_token_ids=prompts[number // GROUP_SIZE]) for number in range(num)]
        params = SamplingParams(
            temperature=1.0, max_tokens=max_tokens, logprobs=0, flat_logprobs=True, detokenize=detokenize
        )
        started = time.perf_counter()
        outputs = llm.generate(chosen, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return sum(len(found.outputs[0].token_ids) for found in outputs), seconds

    sample(work["max_num_seqs"], 16, detokenize=True)
    for case in work["cases"]:
        for detokenize in (False, True) if case["work_ms"] == 0 else ():
            tokens, seconds = sample(case["answers"], case["tokens"], detokenize)
            row = {**case, "detokenize": detokenize, "seconds": round(seconds, 3)}
            append_line(output, {**row, "tokens_per_s": round(tokens / seconds)})


def _memory(share: float) -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        return {"gpu_memory_utilization": share}
    return {"kv_cache_memory_bytes": 2**30, "enforce_eager": True}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
