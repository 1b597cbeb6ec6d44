"""Commands on a finished run: their device, what their files say, and output paths checked for writing before the work."""

import json
import os
import shutil
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from svdcompress import cost
from svdcompress.cli import app
from svdcompress.cli._bench import _median
from svdcompress.export import read_metadata


def svdc(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def test_a_place_that_cannot_be_written_is_seen_before_the_work(tiny_run, tmp_path, monkeypatch):
    from svdcompress import predict, uncertainty

    def work(*args, **kwargs):
        raise AssertionError("worked for nothing")

    monkeypatch.setattr(uncertainty, "compare", work)
    monkeypatch.setattr(predict, "predict_run", work)
    folder = tiny_run[0]
    (tmp_path / "file").write_text("mine")
    assert "file is a file; name a folder" in svdc("evaluate", folder, "--out", tmp_path / "file", code=7).stderr
    assert "cannot be written" in svdc("evaluate", folder, "--out", tmp_path / "file" / "below", code=7).stderr
    out = ["--input", tmp_path / "x.npy", "--out"]
    assert "there is no folder" in svdc("predict", folder, *out, tmp_path / "absent" / "p.csv", code=7).stderr
    assert "is a folder; name a file" in svdc("predict", folder, *out, tmp_path, code=7).stderr
    assert "there is no folder" in svdc("export", folder, "--out", tmp_path / "absent" / "a.onnx", code=7).stderr
    assert (tmp_path / "file").read_text() == "mine" and not (tmp_path / "absent").exists()


def test_devices_of_the_commands(tiny_run, tmp_path, monkeypatch):
    from svdcompress import predict

    folder, seen = tiny_run[0], []
    monkeypatch.setattr(predict, "predict_run", lambda *args, device, **more: (seen.append(device), (tmp_path, 0))[1])
    for command in (("evaluate", folder), ("predict", folder, "--input", "x.npy"), ("bench", folder)):
        assert "device: unknown 'gpu'" in svdc(*command, "--device", "gpu", code=2).stderr
    svdc("predict", folder, "--input", "x.npy", "--device", "cpu")
    svdc("predict", folder, "--input", "x.npy", "--onnx")
    assert seen == ["cpu", None]
    # The recipe's device describes the machine that trained the run; it is not used here.
    svdc("predict", folder, "--input", "x.npy")
    assert torch.device(seen[-1]).type in ("cpu", "cuda", "mps")


def test_bench_measures_onnxruntime_and_pytorch(tiny_run):
    folder, results = tiny_run
    run = ("bench", folder, "--seconds", 0.02, "--batch", 2, "--samples", 3, "--device", "cpu")
    threads = torch.get_num_threads()
    found = json.loads(svdc(*run, "--json").stdout)
    assert torch.get_num_threads() == threads
    assert set(found["dense"]["latency_ms"]) == {"batch_2"} and found["sparse"]["nonzero"] == results["sparse"]["nonzero"]
    assert (found["torch"]["device"], found["torch"]["samples"]) == ("cpu", 3)
    latency = found["torch"]["latency_ms"]
    assert list(latency) == ["dense", "sparse", "sampled"] and all(0 < times["batch_2"] < 1e4 for times in latency.values())
    text = svdc(*run).stdout
    assert "onnxruntime on the CPU, 1 thread" in text and "PyTorch on cpu, 1 thread" in text and "sparse, 3 samples" in text
    assert found["threads"] == 1 and found["clock"] == cost.clock_name(1)
    # Layers this small have no sparse products, and the output says so.
    assert [one["used"] for one in found["torch"]["sparse_execution"]["batch_2"]] == [False, False]
    assert "batch 2: no layer is sparse: " in text and "not timed" in text and "CSR" not in text


def test_bench_measures_sparse_products_where_a_layer_has_them(tiny_run, monkeypatch):
    from svdcompress.execution import _eligible, _to_sparse

    def pretend(dense, sparse, seconds, device):
        return (2.0, 1.0) if len(sparse()) == 3 else (1.0, 2.0)

    monkeypatch.setattr(_to_sparse, "in_turns", pretend)
    monkeypatch.setattr(_to_sparse, "LEAST_WORK", 0)
    monkeypatch.setattr(_eligible, "DENSEST", 1.0)
    run = ("bench", tiny_run[0], "--seconds", 0.02, "--batch", 2, "--batch", 3, "--samples", 3, "--device", "cpu")
    found = json.loads(svdc(*run, "--json").stdout)["torch"]
    assert list(found["latency_ms"]) == ["dense", "sparse", "csr", "sampled"]
    assert list(found["latency_ms"]["csr"]) == ["batch_3"] and 0 < found["latency_ms"]["csr"]["batch_3"] < 1e4
    used = {size: [one["used"] for one in entries] for size, entries in found["sparse_execution"].items()}
    assert used == {"batch_2": [False, False], "batch_3": [True, True]}
    assert found["sparse_execution"]["batch_3"][0]["rows"] == 3
    text = " ".join(svdc(*run).stdout.split())
    assert "sparse, CSR products" in text and "batch 3: sparse products in " in text and "0.50 times as fast" in text


def test_a_median_is_made_of_several_calls():
    calls = []
    assert _median(lambda: calls.append(None), torch.device("cpu"), 0.0) < 100
    assert len(calls) == 2 + 5  # warm-up, then measured calls


@pytest.mark.skipif(sys.platform != "linux", reason="the wall clock is used")
def test_models_are_timed_like_files(monkeypatch):
    for threads, counts in ((1, False), (2, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert (_median(lambda: time.sleep(0.01), torch.device("cpu"), 0.0) >= 10) == counts


@pytest.mark.slow
def test_an_exported_file_says_what_the_runs_own_says(tiny_run, tmp_path):
    folder, _ = tiny_run
    for name, more in (("model.onnx", ()), ("model_mc.onnx", ("--monte-carlo",))):
        svdc("export", folder, "--out", tmp_path / name, *more)
        own, again = read_metadata(folder / name), read_metadata(tmp_path / name)
        assert set(again) == set(own)
        assert {key: again[key] for key in own if key != "compression"} == {k: v for k, v in own.items() if k != "compression"}
        assert again["compression"]["nonzero"] == own["compression"]["nonzero"] and again["classes"] == own["classes"]
        assert again["preprocessing"] == own["preprocessing"] != {}


def test_noise_is_of_a_file_that_draws(tiny_run, tmp_path):
    for noise in ("input", "seed"):
        text = svdc("export", tiny_run[0], "--out", tmp_path / "n.onnx", "--noise", noise, code=2).stderr
        assert "--noise needs --monte-carlo" in text


def test_a_run_without_its_report_can_be_exported_still(tiny_run, tmp_path):
    shutil.copytree(tiny_run[0], tmp_path / "run")
    (tmp_path / "run" / "report.json").unlink()
    svdc("export", tmp_path / "run", "--out", tmp_path / "a.onnx")
    assert {"preprocessing", "classes", "task"} <= set(read_metadata(tmp_path / "a.onnx"))


def test_a_folder_that_may_only_be_read_has_its_table(tiny_run, monkeypatch):
    def refused(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refused)  # permissions do not stop root
    result = svdc("report", tiny_run[0])
    assert "Parameters" in result.stdout and "report.html" in result.stdout
    assert f"warning: {tiny_run[0]}/report.json: cannot be written: Permission denied" in result.stderr


@pytest.mark.parametrize("words, wanted", [("dig", "digits"), ("mn", "mnist-lenet5"), ("mi", "mine.yaml"), ("su", "sub/")])
def test_the_shell_completes_shipped_recipes_and_own_files(tmp_path, monkeypatch, words, wanted):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "mist.txt").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "own.yml").write_text("")
    for line in (f"svdc sparsify {words}", f"svdc inspect {words}"):
        assert wanted in completed(line) and "mist.txt" not in completed(line)
    assert completed("svdc sparsify sub/o") == ["sub/own.yml"]
    assert completed("svdc sparsify absent/o") == []
    assert "sparsify" in completed("svdc spars")


def completed(line):
    """The completions a shell gets after `svdc --install-completion`."""
    words = line.split()
    env = {"_SVDC_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return CliRunner().invoke(app, [], env=env, prog_name="svdc").stdout.split()


def test_the_help_tells_of_completion():
    text = svdc("--help").stdout
    assert text.count("--install-completion") > 1  # in the text and among the options


def test_bench_says_where_sparse_products_cannot_be_measured(tiny_run, monkeypatch):
    from svdcompress.errors import ModelError

    def broken(model, inputs):
        raise ModelError("it cannot be copied")

    monkeypatch.setattr("svdcompress.execution.to_sparse", broken)
    result = CliRunner().invoke(app, ["bench", str(tiny_run[0]), "--batch", "1", "--seconds", "0.1", "--samples", "2"])
    assert result.exit_code == 0, result.output
    assert "batch 1: sparse products were not measured: it cannot be copied" in result.output
    assert "no Linear layer" not in result.output
