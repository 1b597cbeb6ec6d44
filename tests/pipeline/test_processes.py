"""Launches of several processes: as many as before, with the same data and the same model."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from svdcompress.errors import DataError, ModelError, RecipeError, UsageError
from svdcompress.files import sealed, unsealed
from svdcompress.pipeline import _processes, _run
from svdcompress.pipeline._folder import RunState
from svdcompress.pipeline._processes import check_data, check_number, first_examples, one_model, remember_number
from svdcompress.pipeline._same_data import seen
from svdcompress.recipe import load_recipe
from svdcompress.sources import InMemory
from svdcompress.sources.given import named
from svdcompress.train import Place


def begun(folder, processes, epochs):
    """A run's state after this many epochs of training."""
    (folder / "state").mkdir()
    facts = {} if processes is None else {"processes": processes}
    (folder / "state" / "run.json").write_text(sealed(facts))
    torch.save({"epoch": epochs}, folder / "state" / "train.pt")


@pytest.mark.parametrize(
    ("before", "now", "model", "said"),
    [
        (2, 1, "lenet-5", "with 2 processes, and 1 would .* .torchrun --nproc_per_node 2 -m svdcompress sparsify --resume"),
        (1, 2, "lenet-5", "with 1 process, and 2 would .* with 1 .without torchrun or accelerate launch"),
        (4, 2, named("model"), r"with 4 .torchrun --nproc_per_node 4\), or start another run"),
    ],
)
def test_a_run_goes_on_with_as_many_processes(tmp_path, before, now, model, said):
    begun(tmp_path, before, 1)
    recipe = load_recipe(None, [f"model={model}"])
    with pytest.raises(UsageError, match=said):
        check_number(tmp_path, recipe, now)
    check_number(tmp_path, recipe, before)


@pytest.mark.parametrize(("before", "epochs", "kept"), [(2, 0, 1), (None, 0, 1), (None, 3, None)])
def test_a_run_that_has_not_trained_takes_any_number_and_an_older_one_too(tmp_path, before, epochs, kept):
    begun(tmp_path, before, epochs)
    check_number(tmp_path, load_recipe(None), 1)
    remember_number(RunState(tmp_path, writer=True), 1)
    assert unsealed((tmp_path / "state" / "run.json").read_text()).get("processes") == kept


def test_a_search_in_several_processes_ends_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(_run, "find_place", lambda device: Place(torch.device("cpu"), 0, 2))
    with pytest.raises(RecipeError, match="search: works in one process only"):
        _run.run(load_recipe(None, ["search.max_drop=1"]), tmp_path / "run")
    assert not list(tmp_path.iterdir())


X = torch.arange(40.0).reshape(20, 2)


def data(x, y):
    return SimpleNamespace(train=InMemory(x, y), validation=InMemory(x[:4], y[:4]), test=InMemory(x[:2], y[:2]))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ((X[1::2], torch.zeros(10)), "process 1 has others than process 0 .train: other values"),
        ((X[::2], torch.ones(10)), "train: other values"),
        ((X[:8], torch.zeros(8)), "train: 8 examples, not 10"),
    ],
)
def test_each_process_has_all_of_the_data(monkeypatch, other, said):
    first = seen(data(X[::2], torch.zeros(10)))
    monkeypatch.setattr(_processes, "gathered", lambda value: [first, value])
    check_data(first)
    with pytest.raises(DataError, match=said):
        check_data(seen(data(*other)))


class Read:
    """Examples that are read as needed."""

    def __len__(self):
        return len(X)

    def batches(self, size):
        yield X[:size] + torch.rand(()), None


@pytest.mark.parametrize("same", [True, False])
def test_first_examples_that_differ_are_told_unless_seeds_explain_it(monkeypatch, same):
    said = []
    context = SimpleNamespace(recipe=load_recipe(None), place=SimpleNamespace(world=2), warn=said.append)
    sums = []
    monkeypatch.setattr(_processes, "gathered", lambda value: sums.append(value) or (sums if same else [value, value + 1]))
    for seed in (0, 1):
        torch.manual_seed(seed)
        assert len(first_examples(context, SimpleNamespace(train=Read()), 2)) == 2
    assert bool(said) != same


def test_models_of_another_architecture_are_refused(monkeypatch):
    context = SimpleNamespace(place=Place(torch.device("cpu"), 0, 2))
    other = ({"weight": [3, 2], "bias": [3]}, "digest")
    monkeypatch.setattr(_processes, "gathered", lambda value: [value, other])
    with pytest.raises(ModelError, match=r"process 1 has another one than process 0 \(weight: \[3, 2\], not \[5, 2\]\)"):
        one_model(context, nn.Linear(2, 5))
    with pytest.raises(ModelError, match=r"\(scale: missing, not \[2\]\)"):
        one_model(context, nn.ParameterDict({"scale": torch.ones(2)}))
