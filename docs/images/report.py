"""The README's pictures of a report: python docs/images/report.py RUN (of `svdc sparsify digits`). Needs `.[browser]`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from svdcompress import report

HERE = Path(__file__).resolve().parent
SECTIONS = ("relevance", "filters")
WIDTH = 1100


def picture(run: Path) -> None:
    """Both schemes of colour, as report-light.png and report-dark.png."""
    text = report.render(report.load(run), run)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(color_scheme=scheme, viewport={"width": WIDTH, "height": 1000})
            page.set_content(text)
            boxes = [page.locator(f"#{name}").bounding_box() for name in SECTIONS]
            top = boxes[0]["y"] + 12
            clip = {"x": 0, "y": top, "width": WIDTH, "height": boxes[-1]["y"] + boxes[-1]["height"] + 12 - top}
            page.screenshot(path=HERE / f"report-{scheme}.png", full_page=True, clip=clip)
        browser.close()


if __name__ == "__main__":
    picture(Path(sys.argv[1]))
