"""The studio: pages on a buffer for people who read, label and run (`rft studio`).

A page is a module of `rftcore.studio.pages`, a template beside the others, and queries in sql/queries/studio.sql; nothing else names it:

    # rftcore/studio/pages/checkpoints.py
    PAGE = Page("Checkpoints", "/checkpoints", order=70)  # order: its place in the navigation; None: not in the navigation
    router = APIRouter()

    @router.get("/checkpoints")
    def checkpoints(visit: Visit, run: str | None = None) -> Response:
        return visit.render("checkpoints.html", rows=visit.fetch("studio_checkpoints", run=run))

- Routes are plain functions (`def`), so FastAPI calls them in its thread pool; a blocking call in the event loop would stop all pages.
- `visit.buffer` is the buffer with the connections of the account that has signed in: what the account may not do, the page cannot do.
  `visit.author` is the author of what it writes. `visit.fetch` asks a named query.
- GET never writes. A form that writes uses `hx-post`, which sends the token of the session. `guards` refuses writes without it, or from another site.
- A template extends `page.html` and fills the block `content`. `{{ value }}` escapes markup, and shows control and bidirectional characters as
  escapes. `{{ texts.model(text) }}` (import "texts.html" as texts with context) shows a text of a model; it is the only way to show one.
  Classes, never `style=`, and no script in a template: the content security policy refuses both.
- `_("Checkpoints")` is the text in the reader's language. translations/zh.json has every English text that templates and pages name so; a test
  compares them.
- An element with `data-live="run ready" hx-get="…" hx-trigger="live"` is fetched again when something may have changed (`live`).
- `data-chart="/checkpoints/chart.json"` draws `{"series": [{"label", "x", "y"}]}` with uPlot (static/charts.js).
- An `RftError` becomes a message on the page (`failures`). `data-key="p"` gives a button or link a key, and lists it under `?` (static/keys.js).

Importing this package imports neither torch, ray, vllm nor transformers.
"""
