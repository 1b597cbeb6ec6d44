"""The report in a headless Chromium: no errors or requests, names and contrast, tooltips, a legend that filters, phones."""

from __future__ import annotations

import copy

import pytest

from svdcompress import report

PICTURE = {"shape": [2, 2], "base64": "AP8JAA=="}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(sample, tmp_path_factory):
    """Addresses of a run's page and of a comparison's."""
    folder = tmp_path_factory.mktemp("pages")
    results = sample()
    results["doubts"] = [
        {"example": k, "truth": "3", "guess": "35"[k % 2], "confidence": 0.5, "entropy": 0.7, "picture": PICTURE}
        for k in range(4)
    ]
    other = copy.deepcopy(results) | {"name": "other"}
    other["compression"]["nonzero"] = 40.0
    (folder / "report.html").write_text(report.render(results), encoding="utf-8")
    (folder / "compare.html").write_text(report.render_comparison([("a", results), ("b", other)]), encoding="utf-8")
    return {path.stem: path.as_uri() for path in folder.glob("*.html")}


@pytest.fixture
def opened(browser, pages):
    """Opens a page; console messages and errors are collected in `wrong`, network requests in `asked`."""
    contexts = []

    def open_page(name, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.wrong, page.asked = [], []
        page.on("console", lambda message: page.wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(pages[name])
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", ["report", "compare"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_names_in_light_and_dark(opened, name, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = opened(name, color_scheme=scheme)
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.wrong == []
    assert [url for url in page.asked if not url.startswith("data:")] == [page.url]


@pytest.mark.parametrize("name", ["report", "compare"])
def test_phones_scroll_tables_and_not_the_page(opened, name):
    page = opened(name, viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    wide = page.evaluate("[...document.querySelectorAll('.wide')].filter(e => e.scrollWidth > e.clientWidth + 1).length")
    assert wide > 0, "nothing on this page is wide: the test shows nothing"


def test_points_have_tooltips_by_pointer_and_by_keyboard(opened):
    page = opened("report")
    tip = page.locator(".tip")
    assert not tip.is_visible()
    svg = page.locator("#curves svg[aria-label^='NLL']")
    svg.scroll_into_view_if_needed()
    place = svg.evaluate(
        "s => { const [x, y] = JSON.parse(s.dataset.points)[40];"
        " const p = new DOMPoint(x, y).matrixTransform(s.getScreenCTM()); return [p.x, p.y]; }"
    )
    page.mouse.move(*place)
    assert tip.is_visible() and "NLL" in tip.inner_text() and "epoch" in tip.inner_text()
    page.mouse.move(2, 2)
    assert not tip.is_visible()
    svg.focus()
    page.keyboard.press("ArrowRight")
    first = tip.inner_text()
    assert first.startswith("dense, epoch 1: NLL 0.41")
    page.keyboard.press("ArrowRight")
    assert tip.inner_text() != first


def test_points_are_where_the_curve_is(opened):
    """The oracle: the path drawn by the browser passes through each point that has a tooltip."""
    page = opened("report")
    svg = page.locator("#curves svg[aria-label^='beta']")
    far = svg.evaluate(
        """s => { const points = JSON.parse(s.dataset.points);
        const paths = [...s.querySelectorAll('[data-series] path')].filter(p => !p.closest('defs'));
        const corners = paths.flatMap(p => [...p.getAttribute('d').matchAll(/[ML] ([-\\d.]+) ([-\\d.]+)/g)]
            .map(m => [+m[1], +m[2]]));
        return Math.max(...points.map(([x, y]) => Math.min(...corners.map(c => Math.hypot(c[0] - x, c[1] - y)))));
        }"""
    )
    assert far < 3  # straight stretches have fewer corners than there are epochs, so only approximately


def test_a_legend_hides_its_series(opened):
    page = opened("report")
    lines = page.locator("#curves svg [data-series='0']")
    assert lines.count() >= 2 and lines.first.is_visible()
    button = page.locator("#curves .legend button", has_text="dense")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert not lines.first.is_visible() and page.locator("#curves svg [data-series='1']").first.is_visible()
    assert page.locator("#calibration svg [data-series='0']").first.is_visible()  # belongs to another legend
    button.click()
    assert lines.first.is_visible()


def test_a_script_in_a_name_would_not_run(browser, results, tmp_path):
    """Names are escaped; if one were not, the page's policy would stop it from running."""
    text = report.render(results).replace("<main>", "<main><script>document.title = 'run'</script>")
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    assert page.title() != "run"
    assert page.locator("svg[tabindex='0']").count() > 3  # although the page's own script ran
    page.close()
