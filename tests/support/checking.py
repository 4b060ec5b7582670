"""Checks of a configuration as tests want them: what is wrong is raised, and what is reported is returned."""

from __future__ import annotations

from rftcore.checks.algorithm import check_algorithm
from rftcore.checks.plugins import check_plugins, check_selectors
from rftcore.checks.run import check_deeply, check_start
from rftcore.checks.tasks import check_new_buffer
from rftcore.findings import Findings
from rftcore.resolved import ResolvedRun


def refuse_names(resolved: ResolvedRun) -> None:
    """Raise what is wrong with the plug-ins and the algorithm that a configuration names."""
    findings = Findings()
    check_plugins(resolved, findings)
    check_algorithm(resolved, findings)
    findings.refuse()


def refuse_selectors(resolved: ResolvedRun) -> None:
    """Raise what is wrong with the selectors of a configuration."""
    findings = Findings()
    check_selectors(resolved, findings)
    findings.refuse()


def refuse_start(resolved: ResolvedRun) -> None:
    """Raise what keeps a run from starting."""
    findings = Findings()
    check_start(resolved, findings)
    findings.refuse()


def refuse_new_buffer(resolved: ResolvedRun) -> None:
    """Raise what is wrong with the tasks of a run whose buffer does not exist yet."""
    findings = Findings()
    check_new_buffer(resolved, findings)
    findings.refuse()


def deep_sentences(resolved: ResolvedRun, read_s: float = 60.0) -> list[str]:
    """Return what `rft check --deep` reports of a configuration; raise what is wrong with it."""
    sentences: list[str] = []
    findings = Findings(sentences.append)
    check_deeply(resolved, findings, read_s)
    findings.refuse()
    return sentences
