"""`rft tasks load|list`: what there is to try."""

from __future__ import annotations

import typer

from rftcore.cli.roles import ConfigArgument
from rftcore.cli.run import SetOption, configuration
from rftcore.cli.session import BufferOption, ConfigBufferOption, JsonOption, opened

app = typer.Typer(help="Tasks in the buffer.", no_args_is_help=True)


@app.command("load")
def load(config: ConfigArgument, overrides: SetOption = None, buffer: ConfigBufferOption = None) -> None:
    """Load every taskset of a configuration; loading again finds the same rows."""
    import rftdata
    from rftdata.tasks import load_taskset

    resolved = configuration(config, overrides, buffer)
    with rftdata.open(resolved.buffer, application="rft tasks") as found:
        for taskset in (*resolved.tasks, *resolved.eval.tasks, *resolved.eval.test):
            num_tasks = load_taskset(found.database, taskset, resolved.base_dir)
            print(f"{taskset.name}: {num_tasks} tasks")


@app.command("list")
def list_tasksets(buffer: BufferOption = None, as_json: JsonOption = False) -> None:
    """List the tasksets of the buffer."""
    from rftcore.cli.output import print_rows
    from rftdata import tasks

    with opened(buffer, "rft tasks") as found:
        rows = tasks.list_tasksets(found.database)
    print_rows(rows, ("taskset", "source", "args", "num_tasks", "loaded_at"), as_json=as_json)
