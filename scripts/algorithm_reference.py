"""Write docs/reference/algorithms.md from the presets and the parts, so that the two cannot differ.

`--check` writes nothing and exits 1 when the file is not what would be written.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import yaml

from rftcore.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSSES,
    MASKS,
    build_algorithm,
)
from rftcore.algorithms.base import Advantage, Part, Term
from rftcore.algorithms.config import AlgorithmConfig
from rftcore.algorithms.presets import Preset, presets
from rftcore.config_reference import arguments
from rftdata.plugins import Registry
from scripts import reference_page
from scripts.stages_reference import body, table

PAGE = reference_page.FOLDER / "algorithms.md"

HEADER = """\
# Algorithms: presets and parts

Generated from the presets and parts themselves by `make docs`; do not edit. An algorithm is a [preset](#presets) by name, and every key of
it can be changed alone. Naming another part replaces the preset's part with all of its keys:

```yaml
algorithm:
  name: grpo
  advantage: {scale: none}
  loss: {name: cispo, clip: [1.0, 0.28]}
  kl: {type: k3, coef: 0.001}
```

A [part](#advantages) can be your own: `loss: {name: ./my_loss.py:MyLoss}`. A preset can be, too: `name: ./mine.yaml` with the keys of
the section, which may name another preset as its `name`. `rft check CONFIG` refuses parts that do not fit each other.

In formulas, ρ is the ratio of the policy to its anchor at one token: the policy that sampled it, or the policy before the step
(`old_logprobs`). A is the advantage, r a reward, π a probability, sg a stopped gradient.

"""
KINDS: tuple[tuple[str, Registry[Any]], ...] = (("Advantages", ADVANTAGES), ("Losses", LOSSES), ("Masks", MASKS))
SHARED: tuple[tuple[str, Registry[Any]], ...] = (
    ("aggregation", AGGREGATIONS),
    ("correction", CORRECTIONS),
    ("kl", KL_ESTIMATORS),
)
"""Modules whose text explains a key of the section and all of its parts."""


def render() -> str:
    """Return the text of the page."""
    every_preset = presets()
    rows = [
        [f"[`{name}`](#{name})", preset.title, _cells(preset.compared_with)] for name, preset in every_preset.items()
    ]
    parts = [HEADER + "## Presets\n", _listed(["preset", "algorithm", "compared with"], rows)]
    parts += [preset_section(name, preset) for name, preset in every_preset.items()]
    parts += ["## Keys of the section\n", table(_keys())]
    for module, kinds in SHARED:
        parts += [f"### How `{module}` works\n", body(_text(f"rftcore.algorithms.{module}"))]
        for name in sorted(kinds.builtins):
            rows = arguments(kinds.load(name).Config)
            parts += [f"Keys of the {module} `{name}`:\n", table(rows)] if rows else []
    for title, kinds in KINDS:
        parts.append(f"## {title}\n")
        parts += [part_section(name, kinds.kind, kinds.load(name)) for name in sorted(kinds.builtins)]
    return "\n".join(parts)


def preset_section(name: str, preset: Preset) -> str:
    """Return its formula, paper, comparison, needs and keys."""
    facts = [f"- Paper: {preset.source}", f"- Compared with: {preset.compared_with}"]
    if preset.differs:
        facts.append(f"- Differs: {preset.differs}")
    facts.append(f"- Needs: {_needs(name)}")
    keys = yaml.safe_dump(preset.parts, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    listed = "\n".join(facts)
    return f"### {name}\n\n{preset.title}.\n\n```text\n{preset.formula}\n```\n\n{listed}\n\n```yaml\n{keys}```\n"


def _needs(name: str) -> str:
    algorithm = build_algorithm(name)
    words = {
        "behavior": "log-probabilities of the policy that sampled",
        "old": "a forward pass before the step",
        "entropy": "entropies before the step",
        "discriminator": "entropies before the step",
        "collision": "a forward pass before the step",
        "reference": "the reference model",
        "teacher": "a teacher",
        "teacher_logits": "a teacher",
        "values": "a critic",
        "mismatched": "the reference model",
    }
    needs = [words[signal] for signal in sorted(algorithm.signals)]
    needs += [f"{column.replace('_', ' ')} of sequences" for column in sorted(algorithm.columns)]
    needs += ["rewards"] if algorithm.uses_rewards else []
    needs += ["preference pairs"] if algorithm.draws_pairs else []
    needs += [f"groups of {algorithm.min_group_size} or more"] if algorithm.group_relative else []
    return ", ".join(dict.fromkeys(needs)) or "tokens alone"


def _keys() -> list[list[str]]:
    return [["`name`", "text", "needed", "The preset: one of this page, or ./file.yaml."], *arguments(AlgorithmConfig)]


def part_section(name: str, kind: str, part: type[Part]) -> str:
    """Return the text of its module, what it reads, and its keys."""
    own = inspect.cleandoc(part.__dict__.get("__doc__") or "")
    parts = [f"### {name} ({kind})\n", body(_text(part.__module__))]
    parts += [f"{own}\n"] if own else []
    parts.append(f"*{_what(part)}*\n")
    rows = arguments(part.Config)
    return "\n".join([*parts, table(rows)] if rows else parts)


def _what(part: type[Part]) -> str:
    facts = [f"One loss per {part.unit}."] if issubclass(part, Term) else []
    if issubclass(part, Term) and part.of_critic:
        facts = ["One loss per token, of the critic."]
    if isinstance(part.uses_rewards, bool) and part.uses_rewards and not issubclass(part, Advantage):
        facts.append("Reads rewards.")
    needs = sorted(part.needs) + sorted(part.columns)
    facts.append(f"Reads {', '.join(f'`{need}`' for need in needs)}." if needs else "Reads nothing besides the batch.")
    return " ".join(facts)


def _text(module: str) -> str:
    return (sys.modules[module].__doc__ or "").strip()


def _cells(text: str) -> str:
    return text.replace("|", "\\|")


def _listed(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    sys.exit(reference_page.main({PAGE: render}, __doc__))
