"""`Findings`: what checks of a configuration find, collected so that a user reads all mistakes at once instead of the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from rftdata.errors import RftError, SeveralErrors, refuse

P = ParamSpec("P")
T = TypeVar("T")


class Findings:
    """The errors of the checks that were made, in their order, each once.

    Several checks may fail for one reason, such as an algorithm that cannot be built; its error is kept once.

    Args:
        report: receives each sentence for the user as soon as it is known.
    """

    def __init__(self, report: Callable[[str], object] = lambda sentence: None) -> None:
        self._report = report
        self._errors: dict[str, RftError] = {}

    @property
    def errors(self) -> list[RftError]:
        return list(self._errors.values())

    def note(self, sentence: str) -> None:
        """Report a sentence that is no error."""
        self._report(sentence)

    def add(self, error: RftError) -> None:
        """Collect an error, or each of several."""
        for each in error.errors if isinstance(error, SeveralErrors) else [error]:
            self._errors.setdefault(str(each), each)

    def describe(self, sentences: Iterable[str]) -> None:
        """Report sentences as they are made; collect the error that ends them."""
        try:
            for sentence in sentences:
                self._report(sentence)
        except RftError as error:
            self.add(error)

    def passes(self, check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run a check; return whether it raised no error, which is collected."""
        try:
            check(*args, **kwargs)
        except RftError as error:
            self.add(error)
            return False
        return True

    def passes_of(self, whose: str, check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run a check as `passes` does, with its subject before an error; an empty one is that of the whole run."""
        try:
            check(*args, **kwargs)
        except RftError as error:
            self.add(error.about(whose) if whose else error)
            return False
        return True

    def value(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what a function makes; None if it raised an error, which is collected."""
        try:
            return make(*args, **kwargs)
        except RftError as error:
            self.add(error)
            return None

    def refuse(self) -> None:
        """Raise what was collected.

        Raises:
            RftError: the only error.
            SeveralErrors: all of them.
        """
        refuse(self.errors)
