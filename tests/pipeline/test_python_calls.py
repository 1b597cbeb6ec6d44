"""`svdc.sparsify` from Python: settings under two names, other forms of data and models, and what a call leaves unchanged."""

import random
import shutil
import subprocess
import sys
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import svdcompress as svdc
from svdcompress.errors import DataError, ModelError, RecipeError
from svdcompress.pipeline import verify_run
from svdcompress.pipeline._folder import resume_command
from svdcompress.recipe import changed, load_recipe
from svdcompress.sources import open_data
from svdcompress.sources.given import given

_sparsify = __import__("sys").modules["svdcompress.pipeline._sparsify"]

FEW = {"train.epochs": 1, "recover.epochs": 1, "uncertainty.samples": 5, "report.html": False, "report.latency": False}


class Stopped(Exception):
    pass


@pytest.fixture
def recipe_of(monkeypatch):
    """The recipe that a call would run, which is intercepted."""

    def stop(recipe, *more, **rest):
        raise Stopped(recipe)

    monkeypatch.setattr(_sparsify, "run", stop)

    def work(**asked):
        with pytest.raises(Stopped) as seen:
            svdc.sparsify(nn.Linear(2, 2), (torch.zeros(4, 2), torch.zeros(4)), **asked)
        return seen.value.args[0]

    return work


def own_loss(output, targets):
    return nn.functional.cross_entropy(output, targets)


@pytest.mark.parametrize("base", [None, "recipe"])
def test_a_section_of_settings_leaves_its_other_fields(recipe_of, base):
    base = base and load_recipe(None, ["train.epochs=7", "convert.share={weight: 0.5, input: 0.5}"])
    made = recipe_of(max_drop=1.0, recipe=base, settings={"search": {"trials": 1}, "convert": {"prior": "log-uniform"}})
    assert (made.search.max_drop, made.search.trials) == (1.0, 1) and made.convert.prior == "log-uniform"
    assert made.convert.share == ({"weight": 0.5, "input": 0.5} if base else {"weight": 0.8, "input": 0.2})
    made = recipe_of(loss="binary", recipe=base, settings={"loss": {"class_weights": [2.0]}, "weights": {"strip_prefix": "m."}})
    assert (made.loss.name, made.loss.class_weights) == ("binary", [2.0])
    assert (made.weights.trained, made.weights.strip_prefix) == (True, "m.")
    assert recipe_of(loss=own_loss, recipe=base, settings={"loss": {"task": "classification"}}).loss.name.endswith("given:loss")


def test_the_loss_of_a_recipe_stays_unless_another_one_is_named(recipe_of):
    base = load_recipe(None, ["loss=gaussian-nll"])
    assert recipe_of(recipe=base).loss.name == "gaussian-nll"
    assert recipe_of(recipe=base, loss="mse").loss.name == "mse"
    assert recipe_of().loss.name == "cross-entropy"


def test_a_share_in_words_takes_the_place_of_one_in_numbers(recipe_of):
    base = load_recipe(None, ["convert.share={weight: 0.5, input: 0.5}"])
    assert recipe_of(recipe=base, settings={"convert.share": "input"}).convert.share == "input"


def test_fields_that_are_none_are_named(recipe_of):
    with pytest.raises(RecipeError, match=r"settings: 1 is not a field; write section\.field"):
        changed(load_recipe(None), {1: 2})
    with pytest.raises(RecipeError, match="1 is not a field"):
        svdc.sparsify(nn.Linear(2, 2), (torch.zeros(4, 2), torch.zeros(4)), settings={1: 2})


class Swapped(TensorDataset):
    """Returns other targets than its tensors hold."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, 1 - y


def opened(data, task="classification", **fields):
    with given(data=data) as names:
        section = load_recipe(None).data.model_copy(update={"name": names["data"], **fields})
        return open_data(section, task)


@pytest.mark.parametrize("loader", [False, True])
def test_a_dataset_with_tensors_and_an_own_way_of_giving_them_is_asked(loader):
    x = torch.arange(40.0).view(20, 2)
    y = torch.arange(20) % 2
    for kind, wanted in ((Swapped, 1 - y), (TensorDataset, y)):
        data = kind(x, y)
        train = opened(DataLoader(data) if loader else data, split="tail").train
        got = torch.cat([targets for _, targets in train.batches(4)])
        assert torch.equal(got, wanted[: len(got)])


def test_bytes_that_are_no_images_are_warned_of():
    y = torch.arange(20) % 2
    told = "the data object: byte inputs (uint8) are divided by 255 like images"
    flat = opened((torch.randint(0, 255, (20, 5), dtype=torch.uint8), y))
    assert any(line.startswith(told) for line in flat.warnings)
    for others in (torch.randint(0, 255, (20, 1, 4, 4), dtype=torch.uint8), torch.randint(0, 255, (20, 5))):
        assert not any("uint8" in line for line in opened((others, y)).warnings)


def test_a_split_by_two_names_is_an_error():
    pair = (torch.zeros(6, 2), torch.zeros(6))
    with pytest.raises(
        DataError, match=r"the data object returned train, val, valid: validation, val and valid mean the same split"
    ):
        opened({"train": pair, "val": pair, "valid": pair})


def test_half_and_double_precision_go_in_as_single():
    y = torch.arange(20) % 2
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        train = opened((torch.randn(20, 3).to(kind), y)).train
        assert next(iter(train.batches(2)))[0].dtype == torch.float32


def test_features_with_a_graph_are_data_like_any_other():
    """Such as those that a network made outside of no_grad: a second epoch would go through a graph that is gone."""
    features, y = nn.Linear(4, 3)(torch.randn(40, 4)), torch.arange(40) % 2
    for data in ((features, y), DataLoader(Swapped(features, y), batch_size=8)):
        train = opened(data).train
        assert features.requires_grad and not any(x.requires_grad for x, _ in train.batches(8))


def test_importing_does_not_draw_from_the_callers_generator():
    code = "import random, svdcompress as svdc; random.seed(1); state = random.getstate(); svdc.sparsify; svdc.report"
    code += "; assert random.getstate() == state"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A quiet run of a double-precision model: the call's warnings, random generators before and after, the result."""
    torch.manual_seed(5)
    x = torch.randn(200, 4, dtype=torch.float64)
    data = (x, (x[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    np.random.seed(3)
    random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    out = tmp_path_factory.mktemp("python") / "run"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = svdc.sparsify(model, data, settings=FEW, out=out)
    after = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    return model, data, found, [str(each.message) for each in told], before, after


def test_a_quiet_call_gives_its_warnings_in_python(run):
    _, _, found, told, _, _ = run
    assert found.results["warnings"] and set(found.results["warnings"]) <= set(told)
    assert f"{len(found.results['warnings'])} warnings (.report.warnings))" in repr(found)


def test_the_generators_are_where_they_were(run):
    *_, before, after = run
    assert torch.equal(before[0], after[0]) and np.array_equal(before[1], after[1]) and before[2] == after[2]


def test_a_model_in_double_precision_is_trained_in_single(run):
    model, data, found, *_ = run
    assert model[0].weight.dtype == torch.float64 and found.model(data[0].float()).dtype == torch.float32
    assert "the model object has float64 weights but is trained in float32, like its data" in found.results["notes"]


def test_the_data_are_checked_where_they_are_handed_over_again(run):
    model, data, found, *_ = run
    assert not (checked := verify_run(found.folder, model=model, data=data)).failed and not checked.skipped
    assert verify_run(found.folder, model=model).skipped


@contextmanager
def stopped_once_trained(monkeypatch):
    """Stops a run as by Ctrl-C once its training has ended."""
    stages = sys.modules["svdcompress.pipeline._stages"]
    whole = stages.train_stage

    def stop(*given):
        whole(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stages, "train_stage", stop)
        yield


def test_a_run_goes_on_with_the_weights_that_it_began_with(run, tmp_path, monkeypatch):
    model, data, _, *_ = run
    again = rf"stopped at once\. Continue with: svdcompress\.sparsify\(\.\.\., out='{tmp_path / 'run'}', resume=True\)"
    with stopped_once_trained(monkeypatch), pytest.raises(svdc.errors.Interrupted, match=again):
        svdc.sparsify(model, data, settings=FEW, out=tmp_path / "run")
    kept = (tmp_path / "run" / "dense.safetensors").read_bytes()
    other = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ModelError, match="its weights differ from those with which the run in"):
        svdc.sparsify(other, data, settings=FEW, out=tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "dense.safetensors").read_bytes() == kept
    assert svdc.sparsify(model, data, settings=FEW, out=tmp_path / "run", resume=True).folder == tmp_path / "run"


def test_another_loss_function_is_told_where_a_run_goes_on(run, tmp_path, monkeypatch):
    model, data, _, *_ = run
    own, settings = nn.CrossEntropyLoss(), FEW | {"loss.task": "classification"}
    with stopped_once_trained(monkeypatch), pytest.raises(svdc.errors.Interrupted):
        svdc.sparsify(model, data, loss=own, settings=settings, out=tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    told = svdc.sparsify(model, data, loss=own, settings=settings, out=tmp_path / "run", resume=True).results["warnings"]
    assert not any("the loss of the first examples" in line for line in told)
    twice = lambda output, targets: 2 * own(output, targets)  # noqa: E731
    told = svdc.sparsify(model, data, loss=twice, settings=settings, out=tmp_path / "other", resume=True).results["warnings"]
    assert any("what was trained there followed another loss function, or other data" in line for line in told)


def test_how_to_go_on_is_said_in_the_language_of_the_call(tmp_path):
    recipe = load_recipe(None)
    assert resume_command(tmp_path, recipe).startswith("svdc sparsify --resume")
    recipe.model.name = "svdcompress.sources.given:model"
    command = resume_command(tmp_path, recipe, "--set train.lr=...")
    assert command == f"svdcompress.sparsify(..., settings={{'train.lr': ...}}, out={str(tmp_path)!r}, resume=True)"


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_one_hot_targets_are_told_from_class_numbers(kind, tmp_path):
    y = torch.arange(40) % 3
    model = nn.Linear(4, 3)
    data = (torch.randn(40, 4), nn.functional.one_hot(y).to(kind))
    hint = r"of the model object, of shape \(2, 3\).*look one-hot: pass the number of each class, targets\.argmax\(1\)"
    with pytest.raises(ModelError, match=hint):
        svdc.sparsify(model, data, settings=FEW, out=tmp_path / "run")
