"""One tiny run from start to end without a network, shared by the tests that look at it."""

import functools
import socket

import pytest

from svdcompress.recipe import load_recipe

TINY = [
    "model.args={sizes: [64, 24, 10]}",
    "data.limit=300",
    "dense.epochs=3",
    "dense.lr=0.01",
    "train.epochs=4",
    "train.lr=0.01",
    "train.beta={start: 0, stop: 2, final: 0.02}",
    "recover.epochs=2",
    "recover.beta=0.02",
    "uncertainty.samples=5",
    "device=cpu",
]


@pytest.fixture(scope="session", autouse=True)
def operators_read_once():
    """torch.onnx reads the source of its 500 operators again for each export: more than half of the time for a small model."""
    try:
        from torch.onnx._internal._lazy_import import onnxscript_apis as apis
    except ImportError:  # private, so another version may not have it
        yield
        return
    apis.get_torchlib_ops = functools.cache(lambda: apis.__getattr__("get_torchlib_ops")())
    yield
    del apis.get_torchlib_ops


@pytest.fixture(scope="session")
def tiny_recipe():
    return load_recipe("digits", TINY)


def without_network(patch):
    """Refuse connections and look-ups through a monkeypatch; returns the list of requested addresses."""
    asked = []

    def connect(self, address):
        asked.append(address)
        raise OSError("no network in this test")

    def look_up(host, *args, **kwargs):
        asked.append(host)
        raise OSError("no network in this test")

    patch.setattr(socket.socket, "connect", connect)
    patch.setattr(socket.socket, "connect_ex", connect)
    patch.setattr(socket, "getaddrinfo", look_up)
    return asked


@pytest.fixture
def asked(monkeypatch):
    """The addresses that a test requests; none of them answers."""
    return without_network(monkeypatch)


@pytest.fixture(scope="session")
def tiny_run(tiny_recipe, tmp_path_factory):
    """(folder, results) of a whole run, which requests nothing from a network."""
    from svdcompress.pipeline import run

    folder = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        asked = without_network(patch)
        results = run(tiny_recipe, folder)
    assert asked == []
    return folder, results


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium driven by playwright; skips with the reason if there is none."""
    import os
    import shutil
    from pathlib import Path

    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'")
    names = (os.environ.get("SVDC_BROWSER", ""), "chromium", "chromium-browser", "google-chrome", "chrome")
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = next((path for name in names if name and (path := shutil.which(name))), own if Path(own).is_file() else None)
        if found is None:
            pytest.skip("no Chromium was found: install one, or name it in SVDC_BROWSER")
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()
