"""The command line: `rft VERB …`, one file per verb.

It owns what all verbs share: exit codes and error messages. An `RftError` is printed as one paragraph
on stderr and has its own exit code; a defect of rftdata is one paragraph and exits with 70; Ctrl-C exits with 130. Stack traces appear only
with `--debug` (anywhere on the line) or RFT_DEBUG=1. Verbs import their engines inside their functions, so that `rft sql`,
`rft status` and `rft label` load neither torch, ray, vllm nor transformers.

Typer reads the options of a verb from the parameters of its function, so a verb with nine options has nine parameters. Its first statements group
them in a record, which the functions that do the work take.
"""

from __future__ import annotations

import copy
import functools
import os
import select
import sys
import traceback

import typer
from typer.core import TyperGroup
from typer.main import get_group

from rftcore import stuck_threads
from rftcore.cli import (
    archive,
    bench,
    check,
    config,
    db,
    docs,
    doctor,
    eval_,
    export,
    import_,
    init,
    label,
    lineage,
    pairs,
    pipeline,
    purge,
    query,
    report,
    retention,
    roles,
    run,
    setup,
    show,
    sql,
    status,
    studio,
    tasks,
    try_,
)
from rftcore.reporting.visible_text import visible
from rftdata.errors import RftError, is_disk_full, time_limit_behind
from rftdata.user_code.frames import has_users_frame

EXIT_DEFECT = 70
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="rft",
    help="Reinforcement fine-tuning around a persistent experience buffer.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(init.init)
app.command("run")(run.run)
app.command("explore")(roles.explore)
app.command("process")(roles.process)
app.command("train")(roles.train)
app.command("eval")(eval_.eval_)
app.command("status")(status.status)
app.command("studio")(studio.studio)
app.command("report")(report.report)
app.command("sql")(sql.sql)
app.command("query")(query.query)
app.command("show")(show.show)
app.command("lineage")(lineage.lineage)
app.command("export")(export.export)
app.command("import")(import_.import_)
app.command("purge")(purge.purge)
app.command("retention")(retention.retention)
app.command("archive")(archive.archive)
app.command("restore-run")(archive.restore_run)
app.command("check")(check.check)
app.command("try")(try_.try_)
app.command("config")(config.config)
app.command("schema")(config.schema)
app.command("setup")(setup.setup)
app.command("doctor")(doctor.doctor)
app.command("docs")(docs.docs)
app.command(
    "bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)(bench.bench)
app.add_typer(label.app, name="label")
app.add_typer(pairs.app, name="pairs")
app.add_typer(tasks.app, name="tasks")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(db.app, name="db")


def _print_version(wanted: bool) -> None:
    if wanted:
        from rftcore.installation.requirements import installed_version

        print(installed_version("rftdata") or "unknown: a checkout that is not installed")
        raise typer.Exit


@app.callback()
def _root(
    debug: bool = typer.Option(
        False, "--debug", envvar="RFT_DEBUG", help="Show stack traces; allowed anywhere on the line."
    ),
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Reinforcement fine-tuning around a persistent experience buffer.

    Commands that read a buffer find it with --buffer, else the environment variable RFT_BUFFER, else ./buffer.
    """


def main() -> None:
    """Run the console script."""
    code = run_command(sys.argv[1:])
    stuck_threads.set_exit_code(code)
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run one command line, with errors as a paragraph on stderr; return the exit code."""
    # Removed here, so that it also works after the verb; arguments after `--` are not changed.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end] or os.environ.get("RFT_DEBUG", "") not in ("", "0")
    arguments = [a for i, a in enumerate(arguments) if a != "--debug" or i > end]
    code = 0
    try:
        code = _run_verb(arguments)
        sys.stdout.flush()
        return code
    except typer.TyperException as error:
        return _usage_error(error, arguments)
    except (KeyboardInterrupt, typer.Abort):
        print("rft: interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the edge of the process
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            # The reader (`| head`) has what it wants. The interpreter must not flush what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return code
        if debug:
            traceback.print_exc()
        paragraph, code = explain(error)
        limit = time_limit_behind(error)
        stack = getattr(error, "stack", "") or getattr(limit, "stack", "")
        if stack and (limit is None or has_users_frame(stack)):
            print(visible(stack.rstrip()), file=sys.stderr)
        print(visible(f"rft: {paragraph}"), file=sys.stderr)
        return code


def _run_verb(arguments: list[str]) -> int:
    """Run the verb and return its exit code; errors are raised."""
    try:
        code = _command_line(_verb(arguments)).main(args=arguments, prog_name="rft", standalone_mode=False)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # which Typer turns into the exit code 1, without a message
            raise end.__context__ from None
        raise
    return code if isinstance(code, int) else 0


def _verb(arguments: list[str]) -> str | None:
    """Return the verb that a command line begins with; None if it begins with an option or an unknown name."""
    names = [command.name for command in app.registered_commands] + [group.name for group in app.registered_groups]
    return arguments[0] if arguments and arguments[0] in names else None


@functools.cache
def _command_line(verb: str | None) -> TyperGroup:
    """Return the command line with this verb alone, or with all of them, which takes longer to build than most verbs need."""
    shown = copy.copy(app)
    if verb is not None:
        shown.registered_commands = [each for each in app.registered_commands if each.name == verb]
        shown.registered_groups = [each for each in app.registered_groups if each.name == verb]
    return get_group(shown)


def _output_is_closed() -> bool:
    """Return whether the standard output is a pipe that no process reads."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def explain(error: Exception) -> tuple[str, int]:
    """Return one paragraph and the exit code for an error that reached the command line."""
    from rftcore.installation.packages import missing_packages, missing_training_module

    if (missing := missing_training_module(error)) is not None:
        error = missing_packages([missing])
    if isinstance(error, RftError):
        return str(error), error.exit_code
    text = " ".join(str(error).split())
    if is_disk_full(error):
        return (
            f"the disk is full ({text}); free some space and run the command again; acknowledged data is safe.",
            1,
        )
    if isinstance(error, PermissionError):
        return f"a file cannot be used ({text}); correct its owner or mode, or run as the user who created it.", 1
    return (
        f"this is a defect of rftdata: {type(error).__name__}: {text}; run again with --debug and report what it prints.",
        EXIT_DEFECT,
    )


def _usage_error(error: Exception, arguments: list[str]) -> int:
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if not message.strip():
        return int(getattr(error, "exit_code", 2))  # help was printed
    context = getattr(error, "ctx", None)
    if context is not None and message == context.get_help():  # there were no arguments
        print(message, file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    command = context.command_path if context is not None else "rft"
    print(f"rft: {' '.join(message.split()).rstrip('.')}; `{command} --help` shows what is allowed.", file=sys.stderr)
    return int(getattr(error, "exit_code", 2))
