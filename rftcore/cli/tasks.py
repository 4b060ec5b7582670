"""`rft tasks load|list`: what there is to try."""

from __future__ import annotations

import typer

from rftcore.cli.roles import ConfigArgument
from rftcore.cli.run import SetOption, configuration
from rftcore.cli.session import BufferOption, JsonOption, opened

app = typer.Typer(help="Tasks in the buffer.", no_args_is_help=True)


@app.command("load")
def load(config: ConfigArgument, overrides: SetOption = None, buffer: BufferOption = None) -> None:
    """Load every taskset of a configuration; loading again finds the same rows."""
    import rftdata
    from rftdata.tasks import load_taskset

    resolved = configuration(config, None, overrides, buffer)
    with rftdata.open(resolved.buffer, application="rft tasks") as found:
        for taskset in (*resolved.tasks, *resolved.eval.tasks, *resolved.eval.test):
            load_taskset(found, taskset, resolved.base_dir)
            print(f"{taskset.name}: {found.database.fetch('count_tasks', taskset=taskset.name)[0]['n']} tasks")


@app.command("list")
def list_tasksets(buffer: BufferOption = None, as_json: JsonOption = False) -> None:
    """List the tasksets of the buffer."""
    from rftcore.cli.output import print_rows

    with opened(buffer, "rft tasks") as found:
        rows = found.database.fetch("list_tasksets")
    print_rows(rows, ("taskset", "source", "args", "num_tasks", "loaded_at"), as_json=as_json)
