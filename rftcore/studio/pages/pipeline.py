"""`/pipeline`: what each stage did with the rows of a run, examples of what it dropped, and the differences between two versions."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from rftcore.studio.page import Page
from rftcore.studio.visits import Visit
from rftdata.pipeline.versions import compare_versions

PAGE = Page("Pipeline", "/pipeline", order=70)
router = APIRouter()
_EXAMPLES = 5
_DIFFERENT = 50


@router.get("/pipeline")
def pipeline_page(visit: Visit, run: int | None = None, version: str | None = None) -> Response:
    """Show the stages of a version on a run; by default the version that the newest run trains on."""
    runs = visit.fetch("studio_run_page", before=None, name=None, limit=50)
    run_id = run if run is not None else runs[0]["run_id"] if runs else None
    if run_id is None:
        return visit.render("pipeline.html", run=None, runs=[], versions=[], version=None, stages=[], examples={})
    versions = visit.fetch("studio_versions", run_id=run_id)
    chosen = version or (versions[0]["pipeline_version"] if versions else None)
    examples: dict[str, list[dict[str, object]]] = {}
    for row in visit.fetch("studio_dropped_examples", run_id=run_id, version=chosen, limit=_EXAMPLES):
        examples.setdefault(row["stage"], []).append(row)
    return visit.render(
        "pipeline.html",
        run=visit.buffer.find_run(run_id),
        runs=runs,
        versions=versions,
        version=chosen,
        stages=visit.fetch("studio_stages", run_id=run_id, version=chosen),
        examples=examples,
    )


@router.get("/pipeline/difference")
def difference_part(visit: Visit, run: int, before: str, after: str) -> Response:
    """Return how two versions treat the experiences of a run."""
    found = compare_versions(visit.buffer.find_run(run), before, after, _DIFFERENT)
    return visit.render("pipeline_difference.html", found=found, before=before, after=after)
