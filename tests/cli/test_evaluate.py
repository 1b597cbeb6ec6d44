"""`svdc evaluate` and `svdc predict` on a run, as a user sees them."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from svdcompress.cli import app
from svdcompress.errors import DataError, UsageError

pytestmark = pytest.mark.slow

NAMES = ["dense", "dense, temperature", "dense, MC dropout", "sparse, mean", "sparse, samples"]


def svdc(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "160"})
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def photos(tmp_path):
    """Other data: color images of a different size."""
    x = np.random.default_rng(0).integers(0, 256, (40, 3, 12, 12), dtype=np.uint8)
    np.savez(tmp_path / "photos.npz", x=x, y=np.arange(40) % 2)
    return tmp_path / "photos.npz"


def test_what_tells_inputs_from_elsewhere(tiny_run, photos, tmp_path):
    folder, _ = tiny_run
    run = [
        "evaluate",
        folder,
        "--samples",
        3,
        "--no-magnitude",
        "--no-laplace",
        "--outside",
        f"npz:{photos}",
        "--out",
        tmp_path / "e",
    ]
    text = svdc(*run).stdout
    rows = [re.split(" *│|  ", line)[0] for line in text.splitlines() if line.startswith(("dense", "sparse"))]
    assert rows == [*NAMES, *(name for name in NAMES if name != "dense, temperature"), *NAMES]  # metrics, differences, AUROC
    assert all(word in text for word in ("shuffled", "uniform", "npz", "mutual information", "entropy", "1 - confidence"))
    found = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    for row in found["contenders"]:
        assert set(row["ood"]) == {"shuffled", "uniform", "npz"}
        for scores in row["ood"].values():
            assert {"softmax", "entropy"} <= set(scores) and all(0 <= value <= 1 for value in scores.values())
            assert ("mutual_information" in scores) == (row["name"] in (NAMES[2], NAMES[4]))
    assert (tmp_path / "e" / "out_of_distribution.png").is_file()


def test_other_data_that_are_no_images(tiny_run, tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.zeros((40, 5), np.float32), y=np.arange(40) % 2)
    for name, words in (
        (f"npz:{tmp_path}/rows.npz", "are not images"),
        (f"npz:{tmp_path}/none.npz", "none.npz"),
        ("what", "what"),
    ):
        text = svdc("evaluate", tiny_run[0], "--outside", name, code=DataError.exit_code).stderr
        assert "--outside" in text and words in text


def test_images_of_any_size_and_colour_can_be_predicted(tiny_run, tmp_path):
    folder, _ = tiny_run
    (tmp_path / "scans").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 20, 20, 3), dtype=np.uint8)
    for k, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "scans" / f"{k}.png")
    for onnx in ([], ["--onnx"]):
        out = tmp_path / f"p{len(onnx)}.csv"
        svdc("predict", folder, "--input", tmp_path / "scans", "--out", out, "--samples", 4, *onnx)
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["name"] for row in rows] == ["0.png", "1.png"] and all(float(row["entropy"]) >= 0 for row in rows)


def test_baselines_shift_and_a_section_of_the_report(tiny_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(tiny_run[0], folder)
    done = svdc("evaluate", folder, "--samples", 3, "--members", 2, "--shift")
    for words in ("deep ensemble of 2", "magnitude, as many weights", "difference from dense, temp", "Under shift", "energy"):
        assert words in done.stdout
    assert "training member 2 of 2" in done.stderr and "laplace-torch" in done.stderr
    names = {path.name for path in (folder / "evaluation").iterdir()}
    assert names == {"evaluation.json", "reliability.png", "answered.png", "out_of_distribution.png", "shift.png"}
    page = (folder / "report.html").read_text()
    assert "Compared with other methods" in page and "deep ensemble of 2" in page and "Under shift" in page
    svdc("verify", folder)
    again = svdc("evaluate", folder, "--samples", 3, "--members", 2, "--json")
    assert "training" not in again.stderr and json.loads(again.stdout)["contenders"][3]["name"] == "deep ensemble of 2"
    (folder / "evaluation" / "evaluation.json").write_text('{"contenders": 3}')
    svdc("report", folder)
    assert "evaluation.json cannot be shown" in (folder / "report.html").read_text()


def test_an_ensemble_has_two_members_or_more(tiny_run):
    assert "members: 1" in svdc("evaluate", tiny_run[0], "--members", 1, code=UsageError.exit_code).stderr
