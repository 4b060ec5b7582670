"""The pages; one module each, with `PAGE` and `router`. Every module of this package is a page."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from fastapi import APIRouter

from rftcore.studio.page import Page


def all_pages() -> list[tuple[Page, APIRouter]]:
    """Return all pages with their routes, in the order of the navigation."""
    modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    found = [(module.PAGE, module.router) for module in modules]
    return sorted(found, key=lambda pair: (pair[0].order is None, pair[0].order, pair[0].path))
