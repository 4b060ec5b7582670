"""How often a reward model agrees with people on pairs that it was not trained on.

    python accuracy.py FOLDER [--buffer ./buffer]

FOLDER is the checkpoint that `rft run reward.yaml` printed. The pairs are the human ones of every fifth group, which reward.yaml leaves out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rftdata
from rftcore.rewards.reward_model import RewardModel

HELD_OUT = "select chosen_id, rejected_id from rft.v_preferred_pair where run = 'sort-collect' and source = 'human' and group_id % 5 = 0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint of the run that trained the reward model")
    parser.add_argument("--buffer", default="./buffer", help="the buffer; ./buffer by default")
    options = parser.parse_args()
    with rftdata.open(options.buffer) as buffer:
        pairs = buffer.sql(HELD_OUT)
        chosen, rejected = pairs["chosen_id"].to_pylist(), pairs["rejected_id"].to_pylist()
        answers = sorted({*chosen, *rejected})
        tokens = buffer.read_arrays(answers, ["token_ids"])["token_ids"].to_pylist()
    model = RewardModel(options.folder)
    scores = {answer: model.score(ids) for answer, ids in zip(answers, tokens, strict=True)}
    agreed = [scores[one] > scores[other] for one, other in zip(chosen, rejected, strict=True)]
    accuracy = sum(agreed) / len(agreed)
    error = (accuracy * (1 - accuracy) / len(agreed)) ** 0.5
    print(f"{len(agreed)} held-out pairs: the higher score is the chosen answer's in {accuracy:.3f} ± {error:.3f}")


if __name__ == "__main__":
    main()
