"""Take the pictures of the studio in docs/studio, in the system's Chromium (`make screenshots`)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import rftdata  # noqa: E402
from rftcore.studio.server import StudioServer  # noqa: E402
from rftcore.studio.settings import StudioSettings  # noqa: E402
from rftdata.annotations import define_kinds  # noqa: E402
from rftdata.config import BufferConfig  # noqa: E402
from tests.support import studio_run  # noqa: E402
from tests.support.browsers import open_browser  # noqa: E402

FOLDER = ROOT / "docs" / "studio"
PICTURES: dict[str, tuple[str, int, int, str]] = {
    # name: path, width, height, keys pressed before
    "sign-in": ("/sign-in", 900, 620, ""),
    "review": ("/review", 1200, 640, ""),
    "review-phone": ("/review", 390, 780, ""),
    "rank": ("/label/best", 1200, 640, "b a"),
    "label": ("/label", 1200, 760, ""),
    "experience": ("/experience/19", 1200, 900, ""),
    "group": ("/group/1?base=1", 1200, 620, ""),
    "config": ("/config?file=grpo.yaml", 1200, 860, ""),
}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rft-pictures-") as folder:
        config = BufferConfig(uri=f"{folder}/buffer", min_free_bytes=0)
        with rftdata.open(config) as buffer, open_browser() as browser:
            studio_run.ask(buffer, studio_run.store(buffer))
            define_kinds(buffer, studio_run.KINDS, author="olga")
            with StudioServer(
                buffer, StudioSettings(author="olga", configs=ROOT / "examples" / "sort_from_scratch")
            ).in_thread() as server:
                origin = server.address().partition("/?")[0]
                context = browser.new_context(locale="en", color_scheme="light", device_scale_factor=1)
                page = context.new_page()
                page.goto(server.address())
                page.wait_for_url(f"{origin}/review")
                for name, (path, width, height, keys) in PICTURES.items():
                    page.set_viewport_size({"width": width, "height": height})
                    page.goto(origin + path)
                    if path in ("/review", "/label/best"):
                        page.wait_for_selector("article.item")
                        page.wait_for_selector("#progress b")
                    for key in keys.split():
                        page.keyboard.press(key)
                    page.evaluate("document.activeElement.blur()")
                    page.wait_for_timeout(300)
                    page.screenshot(path=FOLDER / f"{name}.png")
                    print(f"wrote {(FOLDER / name).relative_to(ROOT)}.png")
            if buffer.server is not None:
                buffer.server.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
