"""How many targets of each class both models find, and the warning about a rare class that the small one has lost."""

import json
from collections import defaultdict
from math import comb

import numpy as np
import pytest
import torch
from torch import nn

from svdcompress import report
from svdcompress.pipeline import _finish, _found, _recall, open_run, run
from svdcompress.pipeline._passes import Passes
from svdcompress.pipeline._recall import lost_classes, recall
from svdcompress.pipeline._results import RunResults, Side
from svdcompress.recipe import load_recipe
from svdcompress.report._recall import recall as section
from svdcompress.sources import Data, InMemory
from svdcompress.train import _metrics


class Says(nn.Module):
    """Returns one half of its inputs: the first as the dense model, the second as the small one."""

    def __init__(self, half):
        super().__init__()
        self.half, self.nothing = half, nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x[:, self.half] + self.nothing


def compared(task, dense, small, targets, dim=1, classes=None):
    """The data and `recall` of two models with these outputs, (N, ...) each."""
    examples = InMemory(torch.stack([dense, small], 1), targets)
    data = Data(examples, examples, examples, task, dense.shape[1] if dense.dim() > 1 else 1, classes=classes, dim=dim)
    passes = [Passes(Says(half), data) for half in (0, 1)]
    return data, recall(*passes, data), passes


def by_hand(task, dense, small, targets):
    """`recall` by a loop over all targets, and McNemar's test by counting coin tosses; outputs have classes at dimension 1."""
    several = task == "binary" and dense.ndim > 1 and dense.shape[1] > 1
    answers = [one.argmax(1) if task == "classification" else one > 0 for one in (dense, small)]
    seen = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))  # class: example: targets, found by each
    for place in np.ndindex(targets.shape):
        if targets[place] == -100 or (several and targets[place] == 0):
            continue
        counts = seen[place[1] if several else int(targets[place])][place[0]]
        counts[0] += 1
        for who in (0, 1):
            counts[1 + who] += int(answers[who][place] == targets[place])
    found, tosses = {}, {}
    for label in sorted(seen):
        rows = np.array(list(seen[label].values()))
        total, had, has = rows.sum(0).tolist()
        found[str(label)] = {"examples": total, "dense": had / total, "sparse": has / total}
        tosses[str(label)] = int((rows[:, 2] > rows[:, 1]).sum()), int((rows[:, 2] != rows[:, 1]).sum())
    for label, one in found.items():
        heads, n = tosses[label]
        chance = sum(comb(n, k) for k in range(heads + 1)) / 2**n
        level = 0.05 / sum(each["dense"] > 0 for each in found.values())
        if one["dense"] and 3 * one["sparse"] <= 2 * one["dense"] and chance <= level:
            one["lost"] = True
    return found


CASES = {
    "classes": ("classification", (300,), 4),
    "pixels": ("classification", (40, 6, 5), 3),
    "many classes": ("classification", (60,), 40),
    "one question": ("binary", (300,), 1),
    "a column": ("binary", (300, 1), 1),
    "questions": ("binary", (200, 5), 5),
    "masks of questions": ("binary", (30, 3, 4, 4), 3),
    "masks": ("binary", (30, 1, 4, 4), 1),
}


def made(task, shape, classes):
    """Random outputs and targets; the small model never gives the last class but one, or answers yes to its question."""
    g, worse = torch.Generator().manual_seed(0), max(classes - 2, 0)
    if task == "classification":
        weights = torch.tensor([9.0] + [1.0] * (classes - 1))
        targets = torch.multinomial(weights, int(np.prod(shape)), True, generator=g).reshape(shape)
        dense = 3 * nn.functional.one_hot(targets, classes).movedim(-1, 1) + torch.randn(
            shape[0], classes, *shape[1:], generator=g
        )
    else:
        targets = (torch.rand(shape, generator=g) < 0.2).float()
        dense = 4 * targets - 2 + torch.randn(shape, generator=g)
    small = dense + 0.5 * torch.randn(dense.shape, generator=g)
    if len(shape) > 1 or task == "classification":
        small[:, worse] -= 99
    return dense, small, targets


@pytest.mark.parametrize("batch", [1000, 7])
@pytest.mark.parametrize("case", CASES)
def test_as_counted_by_hand(case, batch, monkeypatch):
    monkeypatch.setattr(_metrics, "EVALUATION_BATCH", batch)
    dense, small, targets = made(*CASES[case])
    if case == "pixels":
        targets[:, 2] = targets[3] = -100  # a row of each, and a whole example, do not count
    wanted = by_hand(CASES[case][0], *(one.numpy() for one in (dense, small, targets)))
    _, found, _ = compared(CASES[case][0], dense, small, targets)
    assert found == wanted and len(found) > 1
    assert any(one.get("lost") for one in found.values()) is (case not in ("many classes", "one question"))


def test_classes_in_the_last_dimension_and_models_in_other_batches(monkeypatch):
    """As for tokens; memory may allow the small model larger batches."""
    dense, small, targets = made("classification", (40, 6), 3)
    wanted = by_hand("classification", *(one.numpy() for one in (dense, small, targets)))
    data, found, _ = compared("classification", dense.movedim(1, -1), small.movedim(1, -1), targets, dim=-1)
    assert found == wanted
    again = [Passes(Says(half), data) for half in (0, 1)]
    for size, each in zip((7, 11), again, strict=True):
        monkeypatch.setattr(_metrics, "EVALUATION_BATCH", size)
        each.test_metrics()
    assert recall(*again, data) == wanted


def test_only_the_first_examples_are_compared_if_more_would_take_too_much_memory(monkeypatch):
    monkeypatch.setattr(_metrics, "EVALUATION_BATCH", 10)
    dense, small, targets = made("classification", (300,), 4)
    wanted = compared("classification", dense, small, targets)[1]
    monkeypatch.setattr(_found, "MOST_KEPT", 15)
    _, found, passes = compared("classification", dense, small, targets)
    counts = sum(map(sum, passes[1].test.found.differences(passes[0].test.found)))
    assert 0 < counts <= 30  # of the first three batches at most
    assert {name: {**one, "lost": None} for name, one in found.items()} == (
        {name: {**one, "lost": None} for name, one in wanted.items()}
    )


def test_no_classes_no_recall():
    values = torch.randn(20, 2)
    assert compared("regression", values, values, values)[1] is None
    padded = torch.zeros(4, 2), torch.zeros(4, 3)  # yes or no for each position, in batches of different lengths
    counts = _found.Found(classes=False)
    for wrong in padded:
        counts(torch.ones_like(wrong), (wrong.bool(), wrong, torch.ones_like(wrong)))
    assert not counts.known
    nothing = _found.Found(classes=True)
    nothing(torch.full((3, 2), -100), (torch.zeros(3, 2, dtype=torch.bool), torch.zeros(3, 2), torch.zeros(3, 2)))
    assert not nothing.known


def test_names_and_the_most_classes(monkeypatch):
    dense, small, targets = made("classification", (300,), 4)
    assert list(compared("classification", dense, small, targets, classes=["a", "b", "c", "d"])[1]) == ["a", "b", "c", "d"]
    assert list(compared("classification", dense, small, targets, classes=["a", "b", "a", "d"])[1]) == ["0", "1", "2", "3"]
    monkeypatch.setattr(_recall, "MOST", 1)
    assert list(compared("classification", dense, small, targets)[1]) == ["2"]  # the one that lost most
    dense, small, targets = made("binary", (200, 5), 5)
    assert list(compared("binary", dense, small, targets, classes=["no", "yes"])[1]) == ["3"]


def results_of(found, before, after):
    return RunResults(dense=Side(metrics={"error": before}), sparse=Side(metrics={"error": after}), recall=found)


def rare(lost):
    """20 of 500 examples are of class 1, of which the dense model finds 15, the small one `lost` fewer."""
    targets = (torch.arange(500) % 25 == 0).long()
    right = targets.clone()
    right[right.nonzero()[:5]] = 0
    fewer = right.clone()
    fewer[fewer.nonzero()[:lost]] = 0
    return [nn.functional.one_hot(each, 2).float() for each in (right, fewer)], targets


@pytest.mark.parametrize("lost", [0, 4, 12])
def test_a_rare_class_that_is_lost_is_told_of(lost):
    (dense, small), targets = rare(lost)
    data, found, passes = compared("classification", dense, small, targets, classes=["good", "bad"])
    assert [each.test_metrics()["error"] for each in passes] == pytest.approx([1.0, 1.0 + lost / 5])
    said = lost_classes(results_of(found, 1.0, 1.0 + lost / 5), load_recipe(None, ["search.max_drop=3"]), data)
    if lost < 12:  # none, or fewer than a third
        assert said is None and section({"recall": found}, None) == ""
        return
    assert "class 'bad', 15% of 20 examples (dense: 75%). The error of all together (1.00%, now 3.40%) does not" in said
    assert (
        "because such examples are rare. Allow less (--max-drop)" in said
        and "--set recover.epochs=10" in said
        and "--set loss.class_weights=balanced" in said
    )
    assert ">bad<" in (page := section({"recall": found}, None)) and "75.0 %" in page and ">good<" not in page
    balanced = load_recipe(None, ["loss.class_weights=balanced"])
    said = lost_classes(results_of(found, 1.0, 3.4), balanced, data)
    assert "class_weights" not in said and "--threshold" in said
    assert lost_classes(results_of(found, 1.0, 45.0), balanced, data) is None  # the error shows it


def test_a_rare_question_that_is_lost_behind_the_others_is_told_of():
    (dense, small), targets = rare(12)
    common = torch.arange(500) % 2
    outputs = [torch.stack([common, one[:, 1], common], 1) - 0.5 for one in (dense, small)]
    data, found, _ = compared("binary", *outputs, torch.stack([common, targets, common], 1).float())
    assert found["0"] == {"examples": 250, "dense": 1.0, "sparse": 1.0} and found["1"]["lost"]
    said = lost_classes(results_of(found, 1 / 3, 1.13), load_recipe(None, ["loss=binary"]), data)
    assert "question '1', 15% of 20 examples (dense: 75%). The" in said and "because such examples are rare" in said
    assert "answers of yes more weight" in said


def test_the_page_shows_those_that_lost_most():
    found = {f"c{k}": {"examples": 50, "dense": 0.9, "sparse": 0.5 - k / 100, "lost": True} for k in range(25)}
    page = section({"recall": report.Results.model_validate({"recall": found}).model_dump()["recall"]}, None)
    assert page.count("<tr>") == 11 and page.index(">c24<") < page.index(">c15<") and ">c14<" not in page
    assert "15 more such classes are in report.json" in page


def test_a_whole_run_reports_what_its_files_answer(tiny_run):
    ort = pytest.importorskip("onnxruntime")
    folder, results = tiny_run
    test = open_run(folder).data.test
    answers = []
    for name in ("dense.onnx", "model.onnx"):
        session = ort.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])
        answers.append(session.run(None, {session.get_inputs()[0].name: test.inputs.numpy()})[0])
    assert by_hand("classification", *answers, test.targets.numpy()) == results["recall"]
    assert json.loads((folder / "report.json").read_text())["recall"] == results["recall"] and len(results["recall"]) == 10


CODE = """
import torch
from torch import nn

def data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 3, generator=g)
    common, rare = x[:, 0] > 0, x[:, 1] + x[:, 2] > 2.3
    y = torch.stack([common, rare], 1).float() if {several} else torch.where(rare, 2, common.long())
    return (x[:1000], y[:1000]), (x[1000:], y[1000:])

def make():
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3 - {several}))
    for each in net.parameters():
        nn.init.zeros_(each)
    with torch.no_grad():
        net[0].weight[0, 0], net[0].weight[1:, 1:], net[0].bias[1:] = 3.0, 1.0, -2.0
        net[2].weight[-2, 0], net[2].weight[-1, 1:] = 2.0, 2.0
        net[2].bias[-2:] = torch.tensor([-0.4, -3.0])
    return net
"""


@pytest.mark.parametrize("said", [None, "as one answer"])
@pytest.mark.parametrize("several", [False, True])
def test_a_run_that_gives_up_a_rare_class_tells_it_once(tmp_path, monkeypatch, several, said):
    """One unit tells two common classes apart; fifteen are for the rare one, with weights below the threshold."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_finish, "lost_skill", lambda *given: said)
    (tmp_path / "mine.py").write_text(CODE.format(several=several))
    quick = ["model=./mine.py:make", "data=./mine.py:data", "data.standardize=false", "weights.trained=true", "device=cpu"]
    quick += ["convert.prior=log-uniform", "convert.share=weight", "relevance.threshold=-10.5", "train.epochs=1"]
    quick += ["train.lr=1e-9", "recover.epochs=0", "uncertainty.samples=0", "calibrate.temperature=false", "export.onnx=false"]
    results = run(load_recipe(None, [*quick, f"loss={'binary' if several else 'cross-entropy'}"]), tmp_path / "run")
    rare = results["recall"]["1" if several else "2"]
    assert rare["lost"] and rare["dense"] > 0.8 and rare["sparse"] < 0.3 and 30 < rare["examples"] < 80
    assert sum("lost" in one for one in results["recall"].values()) == 1
    told = [line for line in results["warnings"] if "misses much of what the dense one finds" in line]
    assert len(told) == (said is None) and (said is None or said in results["warnings"])
    assert 'id="recall"' in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
