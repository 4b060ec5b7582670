"""Write docs/reference/stages.md from the stages' own texts and argument classes, so that the two cannot differ.

`--check` writes nothing and exits 1 when the file is not what would be written.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from operators import OPERATORS
from operators.base import IDENTITY_COLUMNS, Operator
from operators.chain.stage import RunOptions
from operators.data_juicer import recipe as data_juicer_recipe
from operators.sql import expression
from rftcore.config_reference import arguments
from scripts import reference_page

PAGE = reference_page.FOLDER / "stages.md"

HEADER = """\
# Stages of a pipeline

Generated from the stages themselves by `make docs`; do not edit. A stage can be used in
`pipelines.experience` or `pipelines.task` if the columns it reads exist there: stages that read rewards, rollouts or reviews belong to experiences,
`difficulty_score`, `quality_score`, `diversity_score`, `usage_frequency` and `task_priority` to tasks, and those that read texts fit both. So does
[any Data-Juicer operator](#data-juicer-operators) and [your own operator](../how-to/write-an-operator.md). How to try and change a pipeline:
[pipelines](../how-to/pipelines.md).

The columns after *reads* and *writes* are those with the arguments of the first example. A stage that *scores* stores its results in `rft.score`;
later stages read them as columns. [Labels of every kind](../how-to/train-on-labels.md) are columns, too: `label_KIND`.
An argument that is an [expression](#expressions) is a DuckDB expression on the columns: `reward + 0.1 * metrics.quality`.
Every stage also accepts the key [`run`](#the-key-run-of-every-stage).

"""

DATA_JUICER = """\
## Data-Juicer operators

Every operator of the installed Data-Juicer is a stage under its own name, with its own arguments. [The table](data-juicer.md) lists them with their
requirements, and [this page](../how-to/use-data-juicer.md) describes how their statistics become columns. `data_juicer` takes a whole recipe.

```yaml
- text_length_filter: {min_len: 10, max_len: 2000}
- clean_links_mapper: {}
- document_deduplicator: {lowercase: true, text_key: prompt}
- image_aspect_ratio_filter: {image_key: metadata.images}
```

| argument in addition to the operator's own | type | default | meaning |
| --- | --- | --- | --- |
| `text_key` | text | `response`, of a task `prompt` | The column with the text; a path leads into a column of JSON text: `metadata.title`. |
| `query_key`, `response_key` | text | `prompt`, `response` | The columns with both sides of a dialogue. |
| `image_key`, `audio_key`, `video_key` | text | `metadata.images`, … | The columns with lists of files. |
| `prefix` | text | `dj_` | Prefix of the columns with its statistics: `dj_text_len`. |
| `mode` | `default` or `ray` | `default` | `ray` distributes the stage over a Ray cluster. |
"""


def render() -> str:
    """Return the page."""
    entries = {name: (summary(operator_class(name)), section(name)) for name in OPERATORS.builtins}
    entries[data_juicer_recipe.NAME] = (_first_sentence(data_juicer_recipe.__doc__ or ""), _recipe())
    lines = [f"- [`{name}`](#{name}): {entries[name][0]}\n" for name in sorted(entries)]
    lines.append("- [any Data-Juicer operator](#data-juicer-operators) by its own name.\n")
    sections = [entries[name][1] for name in sorted(entries)]
    return HEADER + "".join(lines) + "\n" + "\n".join([*sections, DATA_JUICER, _expressions(), _run_options()])


def operator_class(name: str) -> type[Operator]:
    operator = OPERATORS.load(name)
    assert isinstance(operator, type) and issubclass(operator, Operator)
    return operator


def summary(operator: type[Operator]) -> str:
    """Return the first sentence of its module."""
    return _first_sentence(_module_text(operator))


def _first_sentence(text: str) -> str:
    text = " ".join(text.strip().split("\n\n")[0].split())
    return text if text.endswith((".", "!", "?")) else text + "."


def section(name: str) -> str:
    operator = operator_class(name)
    # The module header is directly above on this page.
    text = re.sub(r"; see the module header( for [^.]*)?", "", inspect.cleandoc(operator.__doc__ or ""))
    parts = [f"## {name}\n", body(_module_text(operator)), f"{text}\n", facts(name, operator)]
    rows = arguments(operator.Config)
    if rows:
        parts += [table(rows), *_long_defaults(operator)]
    return "\n".join(parts)


def table(rows: list[list[str]]) -> str:
    """Format rows of `arguments`."""
    table = [["argument", "type", "default", "meaning"], ["---"] * 4, *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in row)} |\n" for row in table)


def _long_defaults(operator: type[Operator]) -> Iterator[str]:
    """Yield defaults of several lines, which do not fit into the table: templates."""
    for name, field in operator.Config.model_fields.items():
        if isinstance(field.default, str) and "\n" in field.default:
            yield f"The default of `{name}`:\n\n```text\n{field.default.strip()}\n```\n"
    for kind, template in getattr(sys.modules[operator.__module__], "TEMPLATES", {}).items():
        yield f"The default of `template` for `{kind}`:\n\n```text\n{template.strip()}\n```\n"


def _recipe() -> str:
    text = body((data_juicer_recipe.__doc__ or "").strip())
    return "\n".join([f"## {data_juicer_recipe.NAME}\n", text, table(arguments(data_juicer_recipe.RecipeConfig))])


def _expressions() -> str:
    """Describe the language of expressions by its module's header."""
    paragraphs = (expression.__doc__ or "").strip().split("\n\n")[1:]
    text = "\n\n".join(paragraphs).replace("the sandbox of\n`operators.sql.sandbox`", "a sandbox")
    return f"## Expressions\n\n{text}\n"


def body(module_text: str) -> str:
    """Format a module header, with its examples and formulas as code."""
    out = []
    for block in re.split(r"\n{2,}", module_text):
        if block.startswith("    "):
            kind = "yaml" if block.lstrip().startswith("- ") else "text"
            out.append(f"```{kind}\n{textwrap.dedent(block)}\n```\n")
        else:
            out.append(block + "\n")
    return "\n".join(out)


def examples(name: str) -> list[Any]:
    """Return the stage's arguments in the examples of its header."""
    blocks = re.split(r"\n{2,}", _module_text(operator_class(name)))
    entries = [
        entry for block in blocks if block.startswith("    - ") for entry in yaml.safe_load(textwrap.dedent(block))
    ]
    return [entry[name] for entry in entries if isinstance(entry, dict) and name in entry]


def facts(name: str, operator: type[Operator]) -> str:
    """Return what it reads, writes and scores, with the arguments of its first example."""
    made = operator.from_args(examples(name)[0])
    columns = {
        "reads": None if made.reads is None else made.reads - IDENTITY_COLUMNS,
        "writes": None if made.writes is None else made.writes,
        "scores": frozenset(made.scores),
    }
    shown = [
        f"{what} {_columns(names)}" for what, names in columns.items() if names is None or names or what == "reads"
    ]
    rows = "Decides each row independently." if made.rowwise else "Sees whole groups."
    return f"*{'; '.join(shown)}*. {rows}\n"


def _columns(names: frozenset[str] | None) -> str:
    if names is None:
        return "any column"
    return ", ".join(f"`{name}`" for name in sorted(names)) or "only ids"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _module_text(operator: type[Operator]) -> str:
    # Not `cleandoc`, which would take an example at the end for the text's own indentation.
    return (sys.modules[operator.__module__].__doc__ or "").strip()


def _run_options() -> str:
    rows = [["`run." + row[0].strip("`") + "`", *row[1:]] for row in arguments(RunOptions)]
    text = "## The key `run` of every stage\n\nHow a stage is run. It does not affect decisions, so it is not part of the pipeline's version.\n\n"
    return text + table(rows)


if __name__ == "__main__":
    sys.exit(reference_page.main({PAGE: render}, __doc__))
