"""Intervals of the changes in a run's report, against predictions of the models one by one."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from svdcompress.pipeline import open_run
from svdcompress.pipeline._changes import changes as between
from svdcompress.pipeline._passes import Passes
from svdcompress.sources import InMemory
from svdcompress.train import evaluate, losses


def examples(task, n=300):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=g)
    if task == "regression":
        return InMemory(x, x[:, :2] + 0.3 * torch.randn(n, 2, generator=g))
    if task == "pixels":
        return InMemory(x[:, None].expand(n, 3, 4).contiguous(), torch.randint(3, (n, 4), generator=g))
    return InMemory(x, torch.randint(3, (n,), generator=g))


def data(task, scale=None):
    kind = "classification" if task == "pixels" else task
    return SimpleNamespace(task=kind, test=examples(task), validation=examples(task), target_scale=scale, dim=1)


def changes(dense, sparse, source):
    return between(Passes(dense, source), Passes(sparse, source), source)


def two(outputs):
    torch.manual_seed(0)
    return nn.Linear(4, outputs).eval(), nn.Linear(4, outputs).eval()


def test_classification_is_judged_by_the_examples_on_which_the_two_differ():
    dense, sparse = two(3)
    found = changes(dense, sparse, data("classification"))
    x, y = data("classification").test.inputs, data("classification").test.targets
    wrong = [model(x).argmax(1) != y for model in (dense, sparse)]
    gained, lost = int((wrong[1] & ~wrong[0]).sum()), int((wrong[0] & ~wrong[1]).sum())
    middle, half = (gained - lost) / 300, 1.96 * math.sqrt(gained + lost - (gained - lost) ** 2 / 300) / 300  # for large counts
    assert found["error"]["low"] == pytest.approx(100 * (middle - half), abs=0.3)
    assert found["error"]["high"] == pytest.approx(100 * (middle + half), abs=0.3)
    nll = [nn.functional.cross_entropy(model(x), y, reduction="none").double() for model in (dense, sparse)]
    step = nll[1] - nll[0]
    assert found["nll"]["low"] == pytest.approx((step.mean() - 1.96 * step.std() / math.sqrt(300)).item(), abs=1e-4)


def test_the_same_model_twice_has_not_changed():
    model = two(3)[0]
    span = changes(model, model, data("classification"))
    assert span["error"]["low"] < 0 < span["error"]["high"] and span["nll"] == {"low": 0.0, "high": 0.0}


def test_labels_of_each_position_are_judged_by_example():
    """Four labels of an input are wrong together, so the interval is that of 300 inputs, not of 1,200 labels."""
    torch.manual_seed(0)
    dense, sparse = nn.Conv1d(3, 3, 1).eval(), nn.Conv1d(3, 3, 1).eval()
    source = data("pixels")
    found = changes(dense, sparse, source)
    x, y = source.test.inputs, source.test.targets
    share = [(model(x).argmax(1) != y).double().mean(1) for model in (dense, sparse)]
    step = share[1] - share[0]
    # random weights of the inputs, and of one more that got better throughout
    weights = torch.distributions.Dirichlet(torch.ones(301, dtype=torch.float64)).sample((20_000,))
    lowest = (weights @ torch.cat([step, -torch.ones(1)]).double()).quantile(0.025)
    assert found["error"]["low"] == pytest.approx(100 * lowest.item(), abs=0.15)
    assert found["error"]["low"] < 100 * (step.mean() - 1.96 * step.std() / 300**0.5).item()


def test_regressions_are_in_the_targets_own_units():
    dense, sparse = two(2)
    found = changes(dense, sparse, data("regression", scale=(0.0, 5.0)))
    plain = changes(dense, sparse, data("regression"))
    assert found["rmse"]["low"] == pytest.approx(5 * plain["rmse"]["low"])
    test = data("regression").test
    rmse = [evaluate(model, test, "regression")["rmse"] for model in (dense, sparse)]
    assert plain["rmse"]["low"] < rmse[1] - rmse[0] < plain["rmse"]["high"]
    nll = [evaluate(model, test, "regression")["nll"] for model in (dense, sparse)]
    middle = (plain["nll"]["low"] + plain["nll"]["high"]) / 2
    assert middle == pytest.approx(nll[1] - nll[0], abs=1e-6)


def test_losses_of_the_examples_add_up_to_the_metrics():
    model = two(3)[0]
    wrong, nll, count = losses(model, examples("classification"), "classification", batch_size=7)
    metrics = evaluate(model, examples("classification"), "classification")
    assert metrics["error"] == pytest.approx(100 * float(wrong.sum() / count.sum()))
    assert metrics["nll"] == pytest.approx(float(nll.sum() / count.sum()), rel=1e-6)


def test_a_runs_report_has_them_as_its_files_say(tiny_run):
    """From onnxruntime's answers on the test data with the dense and the sparse file."""
    onnxruntime = pytest.importorskip("onnxruntime")
    folder, results = tiny_run
    x, y = next(open_run(folder).data.test.batches(10**6))
    wrong = []
    for name in ("dense.onnx", "model.onnx"):
        answers = onnxruntime.InferenceSession(str(folder / name)).run(None, {"input": x.numpy()})[0].argmax(1)
        wrong.append(torch.from_numpy(answers) != y)
    low, high = (results["changes"]["error"][bound] for bound in ("low", "high"))
    change = results["sparse"]["metrics"]["error"] - results["dense"]["metrics"]["error"]
    assert low < change < high
    gained, lost = int((wrong[1] & ~wrong[0]).sum()), int((wrong[0] & ~wrong[1]).sum())
    assert (high - low) / 2 == pytest.approx(100 * 1.96 * math.sqrt(gained + lost) / len(y), rel=0.25)
    span = results["changes"]["nll"]
    assert span["low"] < results["sparse"]["metrics"]["nll"] - results["dense"]["metrics"]["nll"] < span["high"]
