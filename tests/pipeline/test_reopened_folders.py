"""Runs on folders of images, reopened after the folder has changed."""

import shutil

import numpy as np
import pytest

from svdcompress.errors import DataError
from svdcompress.pipeline import open_run, run
from svdcompress.recipe import load_recipe

Image = pytest.importorskip("PIL.Image")

QUICK = ["dense.epochs=1", "train.epochs=1", "recover.epochs=0", "uncertainty.samples=0", "report.html=false", "device=cpu"]


def test_other_classes_are_refused(tmp_path):
    """Their numbers would name other classes: a new first one shifts all labels."""
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(30):
            pixels = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{index}.png")
    data = [f"data=imagefolder:{tmp_path / 'photos'}", "data.transform=[flatten]", "train.batch_size=5", "dense.batch_size=5"]
    sizes = ["model.args={sizes: [48, 6, 2]}", "export.onnx=false", "report.latency=false"]
    results = run(load_recipe("digits", [*data, *sizes, *QUICK]), tmp_path / "run")
    assert any(line.endswith("2 classes (images): cat (30), dog (30)") for line in results["notes"])
    assert open_run(tmp_path / "run").data.classes == ["cat", "dog"]
    shutil.copytree(tmp_path / "photos" / "dog", tmp_path / "photos" / "ant")
    with pytest.raises(DataError, match=r"the classes cat, dog, but .* now has ant, cat, dog: every figure"):
        open_run(tmp_path / "run").data  # noqa: B018
