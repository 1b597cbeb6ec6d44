"""The demo page in a headless Chromium: a drawn stroke gets an answer, names and contrast are right, no errors."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import threading
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "docs" / "demo"


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("demo_build", DEMO / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def about():
    return json.loads((DEMO / "models" / "models.json").read_text(encoding="utf-8"))


def test_the_models_are_what_the_page_says(about):
    import onnx

    for model in about["models"]:
        file = DEMO / "models" / model["file"]
        assert file.stat().st_size == model["bytes"]
        graph = onnx.load(str(file)).graph
        inputs = [value.name for value in graph.input]
        assert inputs == [about["input"], *(["samples", "seed"] if model.get("samples") else [])]
        assert model["output"] == graph.output[0].name
    dense, sparse, sampled = about["models"]
    assert sparse["bytes"] < dense["bytes"] and sparse["nonzero"] < dense["nonzero"] / 5
    assert abs(sampled["error"] - sparse["error"]) < 1
    assert about["side"] ** 2 == np.prod(about["shape"]) and len(about["classes"]) == 10 and 0.5 < about["answer_above"] < 1


def test_what_is_fetched_is_pinned_and_not_committed(build):
    assert build.INTEGRITY.startswith("sha512-") and len(build.INTEGRITY) > 90
    assert "docs/demo/ort/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert build.VERSION in json.loads((DEMO / "models" / "models.json").read_text(encoding="utf-8"))["note"]


def test_a_run_becomes_models(build, tiny_run, tmp_path):
    folder, results = tiny_run
    build.take(folder, tmp_path)
    found = json.loads((tmp_path / "models.json").read_text(encoding="utf-8"))
    assert found["side"] == 8 and found["shape"] == [1, 1, 8, 8]
    assert found["models"][1]["nonzero"] == results["sparse"]["nonzero"]
    assert sorted(path.name for path in tmp_path.glob("*.onnx")) == ["dense.onnx", "model.onnx", "model_mc.onnx"]


@pytest.fixture(scope="module")
def address(build):
    """The address of the served folder; skips if onnxruntime-web was not fetched."""
    missing = [name for name in build.FILES if not (DEMO / "ort" / name).is_file()]
    if missing:
        pytest.skip("onnxruntime-web is not there: python docs/demo/build.py")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(DEMO)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture
def page(browser, address):
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    page = context.new_page()
    page.wrong, page.asked = [], []
    page.on("console", lambda message: page.wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(address)
    page.wait_for_selector("html[data-ready=yes]", timeout=120_000)
    yield page
    context.close()


def draw(page, points):
    box = page.locator("#canvas").bounding_box()
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=8)
    page.mouse.up()
    page.wait_for_selector(".card:nth-child(3)")


ONE = [(0.52, 0.2), (0.5, 0.5), (0.48, 0.8)]
SEVEN = [(0.3, 0.25), (0.7, 0.25), (0.55, 0.5), (0.45, 0.8)]


@pytest.mark.slow
def test_a_drawn_stroke_has_an_answer(page, about, address):
    assert page.locator("#status").inner_text() == "Draw something."
    draw(page, SEVEN)
    answers = page.locator(".card .answer").all_inner_texts()
    assert answers == ["7", "7", "7"], answers
    assert page.locator("#status").inner_text().startswith("sparse, 100 samples: 7")
    assert "mutual information" in page.locator(".card:nth-child(3)").inner_text()
    first = page.locator("#cards").inner_text()
    page.get_by_role("button", name="Clear").click()
    page.wait_for_function("document.querySelectorAll('.card').length === 0")
    draw(page, SEVEN)
    assert page.locator("#cards").inner_text() == first  # it has its own seed: the same drawing gives the same answer
    cells = page.locator("#table tbody tr").last.locator("td").all_inner_texts()
    assert len(cells) == 3 and all(float(cell.removesuffix(" ms")) > 0 for cell in cells)
    assert page.wrong == [] and all(url.startswith((address, "data:", "blob:")) for url in page.asked)


@pytest.mark.slow
def test_what_the_page_computes_is_what_onnxruntime_computes(page, about):
    import onnxruntime

    draw(page, ONE)
    shown = page.locator("#small").evaluate(
        "c => Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).filter((_, k) => k % 4 === 0)"
    )
    pixels = np.array(shown, dtype=np.float32).reshape(about["shape"]) / 255
    session = onnxruntime.InferenceSession(str(DEMO / "models" / "dense.onnx"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {about["input"]: pixels})
    chances = np.exp(logits[0] - logits[0].max())
    widths = page.locator(".card:first-child .bars i").evaluate_all("all => all.map(e => parseFloat(e.style.width))")
    np.testing.assert_allclose(widths, 100 * chances / chances.sum(), atol=1.5)  # pixels are shown as integers
    assert pixels.reshape(about["side"], -1).sum(0).argmax() in range(about["side"] // 2 - 2, about["side"] // 2 + 2)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_and_contrast(page, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page.emulate_media(color_scheme=scheme)
    page.get_by_role("button", name="Draw one for me").click()
    page.wait_for_selector(".card:nth-child(3)")
    page.wait_for_timeout(300)
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.slow
def test_it_fits_a_phone(page):
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
