"""`/config`: configurations of a folder, edited in a form or as text, and the runs that are started with them.

Only the person who started the studio is let in: a configuration names code that runs under the account of this process.

- The text is the truth. A field of the form changes its key in the text (`yaml_edits`), and the difference to the disk is shown before it is saved.
- What is wrong is what the loader of `rft run` finds (`config_mistakes`), shown at the field of its key. A text with mistakes stays in the tab: it is
  neither saved nor started. What only plug-ins, models and tasks know, *Check* finds, which is `rft check`, and the start itself.
"""

from __future__ import annotations

import difflib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Form, HTTPException, Request
from fastapi.responses import Response

from rftcore.config.run import config_mistakes
from rftcore.studio.config_files import ConfigFile, ConfigFolder
from rftcore.studio.config_form import FormField, is_text, section_fields, section_names
from rftcore.studio.config_runs import ConfigRun, config_runs, mapping_of, run_names
from rftcore.studio.failures import NotFoundError
from rftcore.studio.page import Page
from rftcore.studio.run_processes import RunProcesses, child_environment
from rftcore.studio.visits import Visit, VisitOf
from rftcore.studio.yaml_edits import with_value
from rftdata.errors import ConfigError, ConflictError, QueryError

PAGE = Page("Configurations", "/config", order=110, for_owner=True)
router = APIRouter()
_LONGEST = 2**19
_CHECK_S = 300
_MOST_OUTPUT = 2**16
_ONE_CHECK = threading.Semaphore(1)


def _processes_of(request: Request, visit: Visit) -> RunProcesses:
    """Return what starts runs.

    Raises:
        HTTPException: the person is not the one who started the studio.
        NotFoundError: no folder was named.
    """
    if not visit.session.is_owner:
        raise HTTPException(
            403, visit.text("Only the person who started the studio edits configurations and starts runs.")
        )
    found: RunProcesses | None = request.app.state.run_processes
    if found is None:
        raise NotFoundError(
            visit.text("This studio knows no folder of configurations."),
            todo=visit.text("Start it with one: rft studio --configs FOLDER"),
        )
    return found


Processes = Annotated[RunProcesses, Depends(_processes_of)]
Text = Annotated[str, Form(max_length=_LONGEST)]
Name = Annotated[str, Form(max_length=1000)]


@router.get("/config")
def config_page(visit: Visit, processes: Processes, file: str | None = None) -> Response:
    """Show the files of the folder and the runs at work, or one file."""
    folder = processes.folder
    if file is None:
        runs = _runs(visit, processes, None, "")
        return visit.render("configs.html", folder=str(folder.path), names=folder.names(), file=None, **runs)
    found = folder.read(file)
    return visit.render(
        "config.html",
        **_editor(folder, found.name, found.text, section_names()[0]),
        digest=found.digest,
        **_runs(visit, processes, found.name, found.text),
    )


@router.get("/config/runs")
def runs_part(visit: Visit, processes: Processes, file: str | None = None) -> Response:
    """Return the runs of a file, or all at work."""
    text = "" if file is None else processes.folder.read(file).text
    return visit.render("config_runs.html", file=file, **_runs(visit, processes, file, text))


@router.post("/config/draft")
def draft_part(
    visit: Visit, processes: Processes, file: Name, text: Text, section: Name, chosen: Annotated[str, Form()] = ""
) -> Response:
    """Return the form for a text, in another section if one is chosen. Nothing is saved."""
    return visit.render("config_draft.html", **_editor(processes.folder, file, _lines(text), chosen or section))


@router.post("/config/field")
def field_part(
    visit: Visit,
    processes: Processes,
    file: Name,
    text: Text,
    section: Name,
    key: Name,
    value: Text = "",
    remove: bool = False,
) -> Response:
    """Change a key in a text, and return what changes on the page: the text, and what is wrong. Nothing is saved."""
    _refuse_section(key.partition(".")[0])
    text, refusal = _lines(text), None
    try:
        text = with_value(text, key, None if remove or not value.strip() else _lines(value), is_text=is_text(key))
    except ConfigError as error:
        refusal = str(error)
    editor = _editor(processes.folder, file, text, section)
    if refusal is not None:
        editor["problems"].setdefault(key, []).insert(0, refusal)
    if remove:
        return visit.render("config_draft.html", **editor, is_removed=True)
    return visit.render("config_changes.html", **editor)


@router.post("/config/save")
def save(
    visit: Visit, processes: Processes, file: Name, text: Text, section: Name, digest: Annotated[str, Form()]
) -> Response:
    """Save a text over the file that the person has seen."""
    text = _lines(text)
    _refuse_mistakes(text, file)
    saved = processes.folder.write(file, text, digest)
    return _saved(visit, processes.folder, saved, section)


@router.post("/config/save-as")
def save_as(visit: Visit, processes: Processes, file: Name, text: Text, name: Name) -> Response:
    """Save a text as another file, beside the one from which it comes."""
    text = _lines(text)
    _refuse_mistakes(text, file)
    folder, slash, _ = file.rpartition("/")
    name = name.strip() if name.strip().endswith((".yaml", ".yml")) else f"{name.strip()}.yaml"
    saved = processes.folder.write(f"{folder}{slash}{name}", text, "", source=file)
    return Response(headers={"hx-redirect": f"/config?file={quote(saved.name)}"})


@router.post("/config/check")
def check_part(visit: Visit, processes: Processes, file: Name, text: Text, digest: Annotated[str, Form()]) -> Response:
    """Return what `rft check` says about the saved file."""
    _refuse_unsaved(processes.folder, file, text, digest)
    if not _ONE_CHECK.acquire(blocking=False):
        raise HTTPException(429, visit.text("A check is running already."))
    try:
        command = [sys.executable, "-P", "-m", "rftcore", "check", str(processes.folder.path / file)]
        with tempfile.TemporaryFile() as output:  # a plug-in may print without end
            done = subprocess.run(
                command,
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                timeout=_CHECK_S,
                check=False,
            )
            begin = max(0, output.seek(0, os.SEEK_END) - _MOST_OUTPUT)
            output.seek(begin)
            said = ("…" if begin else "") + output.read(_MOST_OUTPUT).decode(errors="replace").strip()
        is_valid = done.returncode == 0
    except subprocess.TimeoutExpired:
        said, is_valid = visit.text("The check did not end within five minutes."), False
    finally:
        _ONE_CHECK.release()
    return visit.render("config_check.html", said=said, is_valid=is_valid)


@router.post("/config/start")
def start(
    visit: Visit, processes: Processes, file: Name, text: Text, digest: Annotated[str, Form()], key: Name
) -> Response:
    """Start a run with the saved file; the same key starts it once."""
    saved = _refuse_unsaved(processes.folder, file, text, digest)
    _begin(visit, processes, saved, key, None)
    return visit.render("config_runs.html", file=file, **_runs(visit, processes, file, saved.text))


@router.post("/config/resume")
def resume(
    visit: Visit,
    processes: Processes,
    file: Name,
    text: Text,
    digest: Annotated[str, Form()],
    key: Name,
    run: Annotated[int, Form()],
) -> Response:
    """Continue a stopped run with the saved file."""
    saved = _refuse_unsaved(processes.folder, file, text, digest)
    names = run_names(saved.text)
    found = next((each for each in config_runs(visit, processes, file, names) if each.run_id == run), None)
    if found is None or found.name is None:
        raise NotFoundError("no such run of this configuration", value=run)
    if not found.can_resume and not processes.was_started(key):
        raise ConflictError(
            f"the run {found.name!r} cannot be resumed: it is {found.state}", todo="look at the page again"
        )
    # The stages of a file are one sequence, which continues where it stopped.
    _begin(visit, processes, saved, key, found.name if len(names) == 1 else "")
    return visit.render("config_runs.html", file=file, **_runs(visit, processes, file, saved.text))


@router.post("/config/stop")
def stop(visit: Visit, processes: Processes, process: Name, file: Annotated[str | None, Form()] = None) -> Response:
    """Stop a run in good order, as Ctrl-C does."""
    text = "" if file is None else processes.folder.read(file).text
    runs = config_runs(visit, processes, file, run_names(text))
    found = next(
        (each.process for each in runs if each.is_live and each.process and each.process.label == process), None
    )
    if found is None:
        raise ConflictError("this run is not running any more", todo="nothing was stopped")
    processes.stop(found, visit.author, visit.session.account)
    return visit.render("config_runs.html", file=file, **_runs(visit, processes, file, text))


def _begin(visit: VisitOf, processes: RunProcesses, saved: ConfigFile, key: str, resumes: str | None) -> None:
    if not processes.was_started(key):
        _refuse_mistakes(saved.text, saved.name)
        runs = config_runs(visit, processes, saved.name, run_names(saved.text))
        live = next((each for each in runs if each.is_live), None)
        if live is not None:
            raise ConflictError(
                f"a run of this configuration is at work: {live.name or 'it is starting'}",
                todo="stop it first, or give this one another run.name",
            )
    processes.start(key, saved.name, resumes, visit.author, visit.session.account, saved.digest)
    visit.live.hint()


def _runs(visit: VisitOf, processes: RunProcesses, file: str | None, text: str) -> dict[str, Any]:
    runs: list[ConfigRun] = config_runs(visit, processes, file, run_names(text) if file is not None else [])
    is_moving = any(each.state in ("starting", "stops") for each in runs)
    return {"runs": runs, "key": secrets.token_hex(16), "is_moving": is_moving}


def _editor(folder: ConfigFolder, file: str, text: str, section: str) -> dict[str, Any]:
    """Return what the form, the text and the summary show."""
    _refuse_section(section)
    fields = section_fields(section, mapping_of(text))
    problems: dict[str, list[str]] = {}
    of_section = dict.fromkeys(section_names(), 0)
    for key, error in config_mistakes(text, file):
        name = key.partition(".")[0]
        if name in of_section:
            of_section[name] += 1
        place = _place(key, fields) if name == section else name if name in of_section else ""
        problems.setdefault(place, []).append(str(error))
    disk = folder.read(file).text
    return {
        "file": file,
        "text": text,
        "section": section,
        "sections": of_section,
        "fields": fields,
        "problems": problems,
        "num_problems": sum(map(len, problems.values())),
        "changes": []
        if disk == text
        else list(difflib.unified_diff(disk.split("\n"), text.split("\n"), lineterm="", n=2))[2:],
    }


def _refuse_section(name: str) -> None:
    if name not in section_names():
        raise QueryError("there is no such section", value=name, todo="load the page again")


def _place(key: str, fields: list[FormField]) -> str:
    """Return the key of the field at which a mistake is shown; that of its section if it has none of its own."""
    fitting = (each.key for each in fields if key == each.key or key.startswith(f"{each.key}."))
    return next(fitting, key.partition(".")[0])


def _saved(visit: VisitOf, folder: ConfigFolder, saved: ConfigFile, section: str) -> Response:
    return visit.render("config_changes.html", **_editor(folder, saved.name, saved.text, section), digest=saved.digest)


def _refuse_mistakes(text: str, file: str) -> None:
    found = config_mistakes(text, file)
    if found:
        raise ConfigError(
            f"`rft run` would refuse this configuration: {found[0][1]}",
            todo="correct what the page marks; your text is kept in this tab",
        )


def _refuse_unsaved(folder: ConfigFolder, file: str, text: str, digest: str) -> ConfigFile:
    """Return the file, if it is what the page shows."""
    saved = folder.read(file)
    if saved.digest != digest:
        raise ConflictError(f"{file} was changed on disk since you opened it", todo="load the page again")
    if saved.text.rstrip("\n") != _lines(text).rstrip("\n"):
        raise ConflictError("your changes are not saved yet", todo="save them first, or undo them")
    return saved


def _lines(text: str) -> str:
    """Return a text of a form with the line ends of files."""
    return text.replace("\r\n", "\n")
