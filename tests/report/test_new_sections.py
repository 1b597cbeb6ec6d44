"""Sections on the least certain examples and on using the model, tiles, axes; the page of a comparison."""

from __future__ import annotations

import base64
import copy
import io
import json
import re

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import svdcompress as svdc
from svdcompress import report
from svdcompress.report import _draw, _plots, _sections, _summary
from svdcompress.report._doubts import doubts
from svdcompress.report._small import small_files
from svdcompress.report._use import use

PIXELS = [[0, 255, 7], [3, 4, 5]]


def stored(pixels):
    values = np.asarray(pixels, dtype=np.uint8)
    return {"shape": list(values.shape), "base64": base64.b64encode(values.tobytes()).decode()}


def row(**more):
    return {"example": 3, "truth": "cat", "guess": "dog", "confidence": 0.51, "entropy": 0.69, **more}


def test_pictures_of_doubtful_examples_are_what_was_given():
    from PIL import Image

    text = doubts({"doubts": [row(picture=stored(PIXELS), mutual_information=0.1)]}, None)
    data = re.search(r'src="data:image/png;base64,([^"]+)"', text).group(1)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), PIXELS)
    assert 'alt="Test example 3: predicted dog (51 %), true cat"' in text and "it is cat" in text


def test_what_is_no_picture_is_a_table():
    for wrong in (None, {}, [[1]], stored([[[1, 2]]]), {"shape": [9, 9], "base64": "AAAA"}, {"shape": [1, 1], "base64": "?"}):
        text = doubts({"doubts": [row(picture=wrong, truth="<b>")]}, None)
        assert "<img" not in text and "&lt;b&gt;" in text and "<b>" not in text and "51.0 %" in text
    assert doubts({}, None) == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two small ONNX files."""
    place = tmp_path_factory.mktemp("use") / "mine"
    place.mkdir()
    model = svdc.convert(torch.nn.Sequential(torch.nn.Linear(6, 3)), log_sigma2=-4.0).eval()
    metadata = {"classes": ["a", "b", "c"], "preprocessing": {"transform": [{"pad": 2}]}}
    svdc.export_onnx(model, place / "model.onnx", torch.randn(2, 6), metadata=metadata)
    svdc.export_onnx(model, place / "model_mc.onnx", torch.randn(2, 6), monte_carlo=True)
    return place


def test_the_snippet_runs(folder, monkeypatch, capsys):
    from html import unescape

    text = use({}, folder)
    assert "float32 (batch, 6)" in text and "pad: 2" in text and f"svdc predict {folder} --input FILE" in text
    snippet = unescape(re.search(r"<pre[^>]*>(.*?)</pre>", text, re.DOTALL).group(1))
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(snippet, names)
    assert capsys.readouterr().out.strip() in ("['a']", "['b']", "['c']")
    assert names["result"]["mean"].shape == (1, 3) and names["result"]["mutual_information"].shape == (1,)


def test_no_file_no_use_and_a_damaged_one_is_told_of(tmp_path):
    assert use({}, None) == use({}, tmp_path) == ""
    (tmp_path / "model.onnx").write_bytes(b"\x00 no model")
    assert "cannot be read" in use({}, tmp_path)


def test_tiles_say_error_with_its_interval_and_ece(results):
    text = _summary.summary(results, None)
    assert "<b>1.83 %</b>error<small>+0.19 points (+0.05 to +0.33)</small>" in text
    assert "<b>0.0052</b>ECE (100 samples)<small>dense: 0.0091</small>" in text


def test_tiles_say_what_is_larger_and_whose_ece_has_a_temperature(results):
    results["compression"]["bytes"] = 0.8
    results["calibrate"] = {"samples": {"value": 1.4, "before": 0.5, "after": 0.4, "taken": True}}
    results["calibrate"]["likelihood"] = {"temperature": 1.4}
    text = _summary.summary(results, None)
    assert "<b>1.25x</b>larger ONNX file" in text and "smaller ONNX file" not in text
    assert "ECE (100 samples)<small>dense, without a temperature: 0.0091</small>" in text


def test_two_counts_of_nonzeros_are_explained(results):
    assert "Two counts" not in _summary.summary(results, None)  # the sample curve has fewer there
    results["threshold_curve"] = [{"threshold": 3.0, "error": 1.8, "nll": 0.06, "nonzero": 3_600}]
    text = _summary.summary(results, None)
    assert "3,600 with the masks alone" in text and "3,312 after pruning" in text
    results["sparse"]["nonzero"] = 3_600
    assert "Two counts" not in _summary.summary(results, None)


def test_rows_without_draws_have_a_dash_for_mutual_information(results):
    results["uncertainty"]["sparse, 100 samples"]["mutual_information"] = 0.0123
    text = _sections.uncertainty(results, None)
    cells = {name: re.findall(r"<td[^>]*>(.*?)</td>", line)[-1] for name, line in _lines(text).items()}
    assert cells == {"dense": "–", "dense, temperature": "–", "sparse, 100 samples": "0.0123"}


def _lines(text):
    found = [line for line in re.findall(r"<tr>(.*?)</tr>", text) if 'class="name"' in line]
    return {re.search(r'class="name">(.*?)</td>', line).group(1): line for line in found}


def test_layers_have_types_and_costs(results):
    plain = _sections.layers(results, None)
    assert "MACs" not in plain and "type" not in plain
    results["layers"][0] |= {"type": "Linear", "parameters_before": 235_500, "parameters": 900, "macs_before": 5, "macs": 4}
    text = _sections.layers(results, None)
    assert "<td>Linear</td>" in text and "235,500 → 900" in text and "5 → 4" in text


def test_axes_do_not_blow_up_chance(monkeypatch):
    """Changes that are a hundredth of the noise take no more than that share of an axis."""
    kept = []
    monkeypatch.setattr(_draw, "_to_svg", lambda figure: kept.append(figure) or "<svg >")
    history = [{"stage": "train", "epoch": k, "val_error": 2.0 + 0.01 * (k % 2)} for k in range(9)]
    _plots.training_curve(history, "val_error", 1000)
    low, high = kept[-1].axes[0].get_ylim()
    assert high - low == pytest.approx(4 * 100 * (0.02 * 0.98 / 1000) ** 0.5, rel=0.02) and low < 2 < high
    wide = [{"stage": "train", "epoch": k, "val_error": 50.0 - k} for k in range(40)]
    _plots.training_curve(wide, "val_error", 1000)
    low, high = kept[-1].axes[0].get_ylim()
    assert high - low < 45  # what exceeds the noise fills its axis
    _plots.threshold_curve([{"threshold": t, "error": 2.0, "nonzero": 9} for t in (0.0, 1.0)], None, 100)
    low, high = kept[-1].axes[0].get_ylim()
    assert low == 0 and high > 5


def test_steady_axes_stay_above_zero_where_values_are():
    ax = Figure().subplots()
    ax.set_ylim(0.1, 0.2)
    _draw.steady(ax, 1.0)
    assert ax.get_ylim() == (0.0, 1.0)
    _draw.steady(ax, 0.5)
    assert ax.get_ylim() == (0.0, 1.0)


# A comparison


def test_runs_on_one_page(results):
    other = copy.deepcopy(results)
    other["recipe"] = results["recipe"].replace("epochs: 60", "epochs: 90")
    other["sparse"]["metrics"]["error"] = 9.87
    text = report.render_comparison([("a", results), ("<b>", other)])
    assert "<b>" not in re.sub(r"<b>[\d.]+", "", text) and "&lt;b&gt;" in text
    assert "9.87 %" in text and "25,912 (10.3x)" in text and "+0.05 to +0.33 points" in text
    settings = text[text.index('id="settings"') :]
    assert "train.<wbr>epochs" in settings and ">60<" in settings and ">90<" in settings and "data" not in settings[:300]
    points = json.loads(re.search(r'data-points="([^"]*)"', text).group(1).replace("&quot;", '"'))
    assert len(points) == 2 and "dense 1.64" in points[0][2]


def test_runs_without_figures_still_give_a_page(results):
    text = report.render_comparison([("a", {}), ("b", {"task": "regression"})])
    assert "<section" in text and "<svg" not in text
    del results["changes"]
    results["recipe"] = "- {not a mapping"
    assert "–" in report.render_comparison([("a", results)])


def test_a_compact_file_that_saves_nothing_is_called_so(results):
    results["sparse"]["bytes_compact"] = 26_000
    assert "Without its zeros (model_compact.onnx): 26.0 kB, 41.1x smaller than the dense file." in report.render(results)
    results["sparse"]["bytes_compact"] = results["sparse"]["bytes"]
    text = report.render(results)
    assert "model_compact.onnx saves nothing (106.2 kB)" in text and "Without its zeros" not in text


def test_a_compact_file_of_a_model_without_zeros_is_not_said_to_leave_them_out(results, tmp_path, capsys):
    sparse = results["sparse"]
    sparse["bytes_compact"], sparse["parameters"] = 26_000, sparse["nonzero"]
    (tmp_path / "model_compact.onnx").touch()
    report.table(results, out_dir=tmp_path)
    text = " ".join(capsys.readouterr().out.split())
    assert "With shorter names, as there are no zeros to leave out (model_compact.onnx): 26.0 kB, 41.1x smaller than" in text
    assert "the same with shorter names" in text and "without its zeros" not in text.lower()
    sparse["nonzero"] -= 1
    report.table(results, out_dir=tmp_path)
    assert "the same without its zeros" in " ".join(capsys.readouterr().out.split())


def test_a_small_file_that_is_larger_is_called_so(results):
    for size, told in (
        (1.05, "1.05x larger than"),
        (2.5, "2.5x larger than"),
        (1.004, "as large as"),
        (0.5, "2.0x smaller than"),
    ):
        results["float16"] = {"file": "model_float16.onnx", "bytes": results["dense"]["bytes"] * size}
        assert f"B, {told} the dense file." in small_files(results)[-1]


def test_a_file_in_which_no_layer_has_four_bits_is_not_called_one_of_four(results):
    for kinds, words in (
        (("int8", "int8"), "No layer could be stored in"),
        (("int8", "float32"), "No layer could be stored in"),
        (("int8", "int4"), "In"),
    ):
        results["int4"] = {"file": "model_int4.onnx", "layers": dict(zip(("fc1", "fc2"), kinds, strict=True))}
        assert small_files(results)[-1].startswith(f"{words} four bits (model_int4.onnx): {kinds.count('int8')} of 2 layers")


def test_columns_that_are_no_longer_read_are_named(results):
    results["pruning"] |= {"inputs_kept": [0, 2], "columns_dropped": ["R&D", "age"]}
    assert "reads 2 of the inputs, and nothing of the columns R&amp;D, age." in _sections.pruning(results, None)
    results["pruning"]["columns_dropped"] = []
    assert "reads 2 of the inputs." in _sections.pruning(results, None)


def test_the_coverage_of_a_table_says_of_what(results):
    results["uncertainty"]["sparse, 100 samples"]["coverage"] = 0.93
    assert "coverage of the central 95%" in _sections.uncertainty(results, None)


def test_a_file_in_integers_tells_the_nll_where_the_error_says_nothing_of_deviations():
    sparse = {"metrics": {"rmse": 2.0, "nll": 1.5}}
    (line,) = small_files({"sparse": sparse, "int8": {"file": "model_int8.onnx", "metrics": {"rmse": 2.1, "nll": 9.25}}})
    assert "rmse 2.1000 (2.0000 in float32); nll 9.2500 (1.5000 in float32)" in line
    metrics = {"error": 2.0, "nll": 1.5}
    (line,) = small_files({"sparse": {"metrics": metrics}, "int8": {"file": "model_int8.onnx", "metrics": metrics}})
    assert "nll" not in line
