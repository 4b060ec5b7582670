"""`rft bench NAME`, or `python -m benchmarks NAME`: runs a benchmark, or lists all of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from rftdata.errors import ConfigError

BENCHMARKS = {
    "algorithms": ("runs.algorithms", "Held-out scores of algorithm presets with one budget of rollouts."),
    "annotations": (
        "buffer.annotations",
        "Labels of every kind: batches, histories, pages and undo, with few and with many.",
    ),
    "archive": ("buffer.archive", "Archiving and restoring finished runs, beside a plain copy of the same bytes."),
    "buffer": ("buffer.throughput", "Durable writes and draws, beside other stores and the limits of this machine."),
    "draw_ahead": ("trainer.draw_ahead", "How long a trainer waits for a batch that is drawn ahead, or at its step."),
    "endurance": ("runs.endurance", "What grows in a run of many steps: memory, files, bytes and seconds."),
    "environments": ("runs.environments", "A step through the process of an environment, beside a bare pipe; starts."),
    "exchange": ("buffer.exchange", "Import, export and scan of a buffer, beside COPY and a plain read."),
    "failures": ("runs.failures", "Share of the time in which a run trains although its processes are killed."),
    "gateway": ("runs.gateway", "Requests of many programs at once to the endpoint, beside calls without HTTP."),
    "history": ("buffer.history", "Questions to a long history in PostgreSQL, beside DuckDB over Parquet."),
    "mismatch": ("runs.mismatch", "Tokens that a clip removes because engine and trainer compute differently."),
    "modes": ("runs.modes", "Time to one held-out score: synchronous, one step off and asynchronous."),
    "pages": ("studio.pages", "Pages of the studio and commands on a large buffer with labels, at two sizes."),
    "pipeline": ("pipeline.stages", "Pipeline stages and the chain, beside datasets, Trinity-RFT and Data-Juicer."),
    "pipeline_data_juicer": ("pipeline.data_juicer", "Data-Juicer's operators in the chain, beside a call by hand."),
    "pipeline_workers": ("pipeline.workers", "Pipeline workers from the queue to committed verdicts, by their number."),
    "replay": ("runs.replay", "Rollouts to a held-out score when stored experiences are used again."),
    "rollouts": ("runs.rollouts", "Answers a second of an explorer, beside `LLM.generate` of vLLM alone."),
    "run": ("whole_runs.comparison", "Time of a whole run to a held-out score, beside TRL on the same device."),
    "sampling": ("buffer.sampling", "Cost of a draw by sampling policy and size of the buffer."),
    "sandbox": ("runs.sandbox", "A program in a sandbox of each tier, beside a bare subprocess."),
    "selection": (
        "selection.comparison",
        "Rollouts to a held-out score with each task selector, beside uniform choice.",
    ),
    "selection_cost": ("selection.cost", "Cost of a choice of tasks by selector and number of tasks."),
    "slow_environments": (
        "runs.slow_environments",
        "Rollouts a second with slow environments: adaptive, beside a fixed number at a time.",
    ),
    "soak": ("buffer.soak", "Speed, size and correctness of a buffer that is written and read without a pause."),
    "startup": ("runs.startup", "Time from `rft run` to the first answer, beside vLLM alone."),
    "studio": ("studio.queue", "Time from a key to the next item of a labeller, with many questions waiting."),
    "trainer": ("trainer.speed", "One optimisation step of the trainer, beside TRL on the same tensors."),
    "turn_rewards": ("buffer.turn_rewards", "Operations on rollouts of several turns with rewards, and their growth."),
    "turns": ("buffer.turns", "Bytes and trainer tokens of rollouts of many turns, beside a row per turn."),
    "weights": ("weights.speed", "Weights from trainer ranks into live engines, beside a copy and a broadcast."),
}
"""Name → module with `main(arguments)` that returns the exit code, and what is measured."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names with the other arguments; return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, BENCHMARKS))
        print("\n".join(f"{name:{width}}  {sentence}" for name, (_, sentence) in BENCHMARKS.items()))
        return 0
    name, *rest = arguments
    if name not in BENCHMARKS:
        print(ConfigError("unknown benchmark", value=name, allowed=", ".join(BENCHMARKS)), file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.{BENCHMARKS[name][0]}")
    code: int = module.main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
