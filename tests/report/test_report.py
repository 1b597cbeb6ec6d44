"""The report: complete for a full run and for a partial one, self-contained, and never half written."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from rich.console import Console

import svdcompress as svdc
from svdcompress import report
from svdcompress.errors import OutputError
from svdcompress.report import _page, _sections
from svdcompress.report._rows import chance

SECTIONS = {
    "summary": "dense",
    "uncertainty": "uncertainty",
    "calibration": "calibration",
    "layers": "layers",
    "pruning": "pruning",
    "curves": "history",
    "relevance": "log_alpha",
    "filters": "filters",
    "recipe": "recipe",
}


class Page(HTMLParser):
    """Collects ids, references, and tags that are not closed in order."""

    VOID = frozenset({"meta", "img", "wbr", "br", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


def test_a_picture_for_the_dark_page_is_taken_there(results, tmp_path):
    for name in ("plot.png", "night.png"):
        (tmp_path / name).write_bytes(b"\x89PNG " + name.encode())
    results["pictures"] = [{"title": "Bands", "file": "plot.png", "dark": dark} for dark in ("night.png", "gone.png")]
    text = report.write(tmp_path, results)[1].read_text()
    light, dark = (base64.b64encode(b"\x89PNG " + name).decode() for name in (b"plot.png", b"night.png"))
    assert text.count(light) == 2
    source = f'<picture><source srcset="data:image/png;base64,{dark}" media="(prefers-color-scheme: dark)"><img src='
    assert text.count(source) == text.count("<picture>") == 1


def test_a_full_run_has_every_section_and_is_self_contained(results, tmp_path):
    (tmp_path / "plot.png").write_bytes(b"\x89PNG not really")
    results["pictures"] = [{"title": "Bands", "file": "plot.png", "caption": "widening"}, {"title": "gone", "file": "none.png"}]
    json_path, html_path = report.write(tmp_path, results)
    assert json.loads(json_path.read_text())["sparse"]["nonzero"] == results["sparse"]["nonzero"]

    text = html_path.read_text()
    page = Page(text)
    assert page.open in ([], ["html"]) and not page.wrong, (page.open, page.wrong)
    sections = [value for tag, name, value in page.attributes if tag == "section" and name == "id"]
    assert sections == ["summary", "pictures", "uncertainty", "calibration", "layers", "pruning", "curves", "relevance",
                        "filters", "latency", "run", "recipe"]  # fmt: skip
    references = page.values("href") + page.values("src") + page.values("xlink:href")
    assert all(reference.startswith(("#", "data:")) for reference in references)
    assert not re.search(r"url\((?!#)|@import|<script[^>]|<link(?! rel=\"icon\" href=\"data:,\")", text)
    script = text[text.index("<script>") : text.index("</script>")]
    assert text.count("<script>") == 1 and not re.search(r"fetch\(|XMLHttp|import|https?://(?!www\.w3\.org/2000/svg)", script)
    assert "default-src 'none'" in text
    assert all(value for tag, name, value in page.attributes if tag == "svg" and name == "aria-label")
    assert text.count("<svg ") == text.count("<svg aria-label=")
    assert text.count("<img") == 1  # the picture that exists


@pytest.fixture(scope="module")
def full_page(sample):
    return report.render(sample())


def test_pages_svgs_share_no_names(full_page):
    page = Page(full_page)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    used = {value.removeprefix("#") for value in page.values("xlink:href") if value.startswith("#")}
    used |= set(re.findall(r"url\(#([^)]*)\)", " ".join(page.values("clip-path") + page.values("style"))))
    assert used and used <= set(ids)


def test_colours_of_plots_follow_the_page(full_page):
    text = full_page
    assert "var(--c1)" in text and "var(--ink)" in text
    assert not re.search(r"#0[1-5]0[1-5]0[1-6]", text), "a marker colour that no variable replaced"
    style = text[text.index("<style>") : text.index("</style>")]
    dark = style[style.index("prefers-color-scheme: dark") :]
    for name in set(re.findall(r"var\((--\w+)\)", text)):
        assert f"{name}:" in style and f"{name}:" in dark, f"{name} is not defined for light and dark"


def test_layer_names_and_recipes_are_escaped(results):
    results["layers"][0]["name"] = "<script>alert(1)</script>"
    results["name"] = "a & b <c>"
    del results["history"]
    results["log_alpha"] = {"<b>$x$": results["log_alpha"]["fc1"]}
    text = report.render(results)
    assert text.count("<script") == 1 and "alert(1)</script" not in text and "<c>" not in text and "<b>$x$" not in text
    assert "# &lt;not&gt; a tag" in text


@pytest.mark.parametrize(("anchor", "key"), SECTIONS.items())
def test_a_section_without_data_is_left_out(results, anchor, key):
    kept = {name: value for name, value in results.items() if name not in (key, "sparse", "threshold_curve")}
    assert _page.SECTIONS[anchor][1](kept, None) == ""


def test_an_empty_run_still_gives_a_page(tmp_path):
    report.write(tmp_path, {})
    text = (tmp_path / "report.html").read_text()
    assert "<section" not in text and not Page(text).wrong
    assert report.rows({}) == []


def broken(results, folder):
    raise ValueError("no <bins>\nand more")


def test_a_section_that_fails_is_named_and_costs_no_other(results, monkeypatch):
    monkeypatch.setitem(_page.SECTIONS, "calibration", ("Calibration", broken))
    results["seconds"] = {"data": "long"}  # in the head of the page
    with pytest.warns(report.SectionWarning) as told:
        text = report.render(results)
    page = Page(text)
    ids = {value for _, name, value in page.attributes if name == "id"}
    assert page.wrong == [] and ids >= {"summary", "calibration", "layers", "recipe"}
    assert "Calibration could not be drawn (ValueError: no &lt;bins&gt;)." in text and "The head could not be drawn" in text
    assert [each.message.section for each in told] == ["Calibration", "This run", "The head"]
    assert isinstance(told[0].message.__cause__, ValueError)


def test_a_section_that_fails_fails_the_tests(results, monkeypatch):
    """`filterwarnings` in pyproject.toml makes our warnings errors, wherever they are not asked for."""
    monkeypatch.setitem(_page.SECTIONS, "calibration", ("Calibration", broken))
    with pytest.raises(report.SectionWarning, match="Calibration could not be drawn"):
        report.render(results)


def test_none_in_any_figure_is_shown_as_a_dash(results):
    results["sparse"] = {"metrics": {"error": None, "nll": float("nan")}, "latency_ms": {}}
    results["parity"]["model.onnx"] = None
    results["calibration"]["dense"]["ece"] = None
    results["layers"][0] = {"name": "fc1", "shape_before": [3, 2], "shape_after": None, "sparsity": None}
    for drawn in ("history", "log_alpha", "threshold_curve", "filters"):
        del results[drawn]
    text = report.render(report.plain(results))
    assert "–" in text and ">None<" not in text and "nan" not in text.replace("<nan", "")


def test_many_layers_share_one_map(results):
    histogram = results["log_alpha"]["fc1"]
    few = {"fc1": histogram, "fc2": histogram}
    assert _sections.relevance({"log_alpha": few}, None).count("<svg") == 2
    many = {
        **{f"layer{k}": histogram for k in range(_sections.SINGLE_HISTOGRAMS)},
        "one more": {**histogram, "edges": [-10.0, 0.0, 10.0], "counts": [3, 4]},
    }
    assert _sections.relevance({"log_alpha": many, "threshold": 3.0}, None).count("<svg") == 1


def test_relevance_says_what_the_threshold_decided(results):
    shown = {"log_alpha": results["log_alpha"], "threshold": 3.0}
    for search in (None, {"objective": "nonzero"}):
        assert "and it is dropped" in _sections.relevance({**shown, "search": search}, None)
    text = _sections.relevance({**shown, "search": {"objective": "latency"}}, None)
    assert "it is dropped" not in text and "whole units by their rank" in text


# Rows and the terminal


def test_rows_say_what_changed_and_whether_it_is_better(results):
    found = {row.label: row for row in report.rows(results)}
    assert found["Error"].change == "+0.19 points (+0.05 to +0.33)" and found["Error"].better is False
    assert found["NLL"].change == "-0.0021 (-0.0049 to +0.0007)" and found["NLL"].better is None  # it may be chance
    assert found["ECE"].change == "-0.0039" and found["ECE"].better is None  # unknown
    assert found["Non-zeros"].change == "80.5x fewer" and found["ONNX file"].change == "10.1x smaller"
    assert found["Latency, batch 128"].change == "7.0x faster"
    results["sparse"]["latency_ms"]["batch_1"] = 0.0664
    results["sparse"]["macs"] = results["dense"]["macs"]
    found = {row.label: row for row in report.rows(results)}
    assert found["Latency, batch 1"].change == "2.0x slower" and found["Latency, batch 1"].better is False
    assert found["MACs"].change == "the same" and found["MACs"].better is None


def test_only_what_is_more_than_chance_has_a_colour(results):
    results["changes"] = {"error": {"low": -0.4, "high": -0.1}, "nll": {"low": -0.1, "high": 0.1}}
    results["sparse"]["metrics"]["error"] = 1.40
    stream = io.StringIO()
    report.table(results, Console(file=stream, width=200, color_system="standard", force_terminal=True))
    lines = {line.split()[0]: line for line in stream.getvalue().splitlines() if line.split()}
    green, yellow = "\x1b[32m", "\x1b[33m"
    assert green in lines["Error"] and green not in lines["NLL"] and yellow not in lines["NLL"]
    assert "changes without color may be chance" in stream.getvalue()
    cells = dict(
        re.findall(r"<td>(Error|NLL)</td>.*?(<td[^>]*>[^<]*points[^<]*|<td[^>]*>[-+][^<]*)</td></tr>", report.render(results))
    )
    assert 'class="good"' in cells["Error"] and "class" not in cells["NLL"]
    del results["changes"]  # an older report: nothing is claimed about its metrics
    assert all(row.better is None for row in report.rows(results) if row.label in ("Error", "NLL", "ECE"))
    assert "In parentheses" not in report.render(results)


def test_regression_has_rmse_and_no_error(results):
    for side, rmse in (("dense", 0.5), ("sparse", 0.25)):
        results[side]["metrics"] = {"rmse": rmse, "r2": 1 - rmse, "nll": 1.0}
    rows = {row.label: row for row in report.rows(results)}
    assert "RMSE" in rows and "Error" not in rows
    assert (rows["R2"].dense, rows["R2"].sparse, rows["R2"].change) == ("0.5000", "0.7500", "+0.2500")
    assert "<td>R2</td>" in report.render(results)
    for side in ("dense", "sparse"):
        results[side]["metrics"]["r2"] = None  # for a constant target
    assert "R2" not in [row.label for row in report.rows(results)]


def test_rounding_is_told_beside_what_it_would_have_been_without(results, tmp_path):
    results["pruning"].update(round_to=8, parameters_after=12_345, parameters_unrounded=11_000, notes=["seen <once>"])
    for group, kept in zip(results["pruning"]["groups"], (27, 18), strict=True):
        group["kept_unrounded"] = kept
    told = "multiples of 8: 51 stay (45 without rounding); 12,345 parameters (11,000 without rounding)."
    stream = io.StringIO()
    report.table(results, Console(file=stream, width=200))
    assert told in stream.getvalue()
    html = _sections.pruning(results, tmp_path)
    assert told in html and "kept without rounding" in html and ">27<" in html and "Seen &lt;once&gt;." in html
    forms = {"rounded": {"kept": 51, "parameters": 12_345}, "unrounded": {"kept": 45, "parameters": 11_000}}
    results["pruning"].update(rounded=True, rounding=forms)
    assert f"{told[:-1]}; this measured faster." in _sections.pruning(results, tmp_path)
    results["pruning"].update(rounded=False)
    told = "multiples of 8 measured no faster: without rounding 45 channels, 11,000 parameters; with it 51 channels, 12,345"
    assert told in _sections.pruning(results, tmp_path)
    results["pruning"]["round_to"] = 1
    stream = io.StringIO()
    report.table(results, Console(file=stream, width=200))
    assert "rounding" not in stream.getvalue() and "rounding" not in _sections.pruning(results, tmp_path)


def test_the_terminal_table_names_the_files_that_exist(results, tmp_path):
    report.write_json(tmp_path / "report.json", results)
    (tmp_path / "model.onnx").write_bytes(b"x" * 2048)
    stream = io.StringIO()
    report.table(results, Console(file=stream, width=100), tmp_path)
    text = stream.getvalue()
    for expected in ("dense", "sparse", "Non-zeros", "80.5x fewer", "model.onnx", "2.0 kB", "report.json", "5 min 6 s"):
        assert expected in text
    assert "model_mc.onnx" not in text
    assert all(len(line) <= 100 for line in text.splitlines())


# Files


def test_plain_turns_everything_into_json():
    @dataclasses.dataclass
    class Point:
        x: torch.Tensor
        y: float

    value = {1: np.float32(2), "t": Point(torch.ones(2), math.inf), "s": (True, None, np.int64(3), "x"), "p": torch.float32}
    assert report.plain(value) == {"1": 2.0, "t": {"x": [1.0, 1.0], "y": None}, "s": [True, None, 3, "x"], "p": "torch.float32"}


def test_writing_replaces_in_one_step_and_leaves_the_old_file_on_failure(tmp_path, monkeypatch):
    path = report.write_text(tmp_path / "a.json", "old")
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match=r"a\.json.*No space left"):
        report.write_text(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_writing_into_a_missing_folder_is_an_output_error(tmp_path):
    with pytest.raises(OutputError, match=r"report\.json"):
        report.write(tmp_path / "none", {})


def test_load_gives_back_what_was_written(results, tmp_path):
    report.write_json(tmp_path / "report.json", results)
    assert report.load(tmp_path) == report.plain(results)


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), ("{", "not readable"), ("[1]", "not a report")])
def test_load_refuses_what_is_no_report(tmp_path, content, message):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(OutputError, match=message):
        report.load(tmp_path)


# What is collected from models


def test_histograms_count_every_weight_and_split_at_the_threshold():
    torch.manual_seed(0)
    model = svdc.convert(torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 3)), share=["weight", "input"])
    with torch.no_grad():
        model[0].log_sigma2.copy_(torch.randn(20, 30) * 20 - 4)
    found = report.log_alpha_histograms(model, threshold={"weight": 2.0})
    assert [sum(h["counts"]) for h in found.values()] == [600, 60]
    first = found["0"]
    kept = sum(n for left, n in zip(first["edges"], first["counts"], strict=False) if left < first["threshold"])
    assert first["threshold"] == 2.0 and kept == int((model[0].log_alpha() < 2).sum())


def test_group_priors_are_counted_by_group():
    model = svdc.convert(torch.nn.Sequential(torch.nn.Linear(30, 20)), share="input")
    found = report.log_alpha_histograms(model)["0"]
    assert sum(found["counts"]) == 30 and found["share"] == "input"


def test_first_filters_are_those_of_the_first_layer_with_pictures():
    torch.manual_seed(0)
    dense = torch.nn.Sequential(torch.nn.Conv2d(1, 40, 5), torch.nn.Flatten(), torch.nn.Linear(40, 10))
    sparse = svdc.convert(torch.nn.Sequential(torch.nn.Conv2d(1, 40, 5), torch.nn.Flatten(), torch.nn.Linear(40, 10)))
    with torch.no_grad():
        sparse[0].log_sigma2[:39] = 20.0  # only the last filter remains
    (name, pair), *others = report.first_filters(dense, sparse, limit=8).items()
    assert name == "0" and not others
    before, after = np.asarray(pair["before"]), np.asarray(pair["after"])
    assert before.shape == after.shape == (8, 1, 5, 5)
    np.testing.assert_allclose(before[0], dense[0].weight[39].detach().numpy(), atol=1e-3)
    np.testing.assert_allclose(after[0], sparse[0].weight[39].detach().numpy(), atol=1e-3)
    assert not after[1:].any()


def test_layers_without_pictures_give_no_filters():
    def tabular():
        return torch.nn.Sequential(torch.nn.Linear(13, 5))

    assert report.first_filters(tabular(), svdc.convert(tabular())) == {}

    def patches():  # the second layer has 64 inputs, which are not an 8x8 picture
        return torch.nn.Sequential(torch.nn.Conv2d(1, 64, 2), torch.nn.Flatten(), torch.nn.Linear(64, 10))

    assert report.first_filters(patches(), svdc.convert(patches())) == {}


def test_an_nll_with_a_temperature_beside_one_without_is_told():
    found = {"changes": {"nll": {"low": 0.0, "high": 1.0}}, "calibrate": {"likelihood": {"temperature": 0.5}}}
    assert "temperature" not in chance(found)
    found["calibrate"]["mean"] = {"value": 0.7048, "taken": True}
    assert "uses its temperature (0.705, from validation data)" in chance(found)
    found["calibrate"]["likelihood"] = {"tau": 3.0}  # in regressions, both have their own
    assert "temperature" not in chance(found)
