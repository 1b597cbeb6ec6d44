"""Arguments that `svdc.sparsify` used to misinterpret silently."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

import svdcompress as svdc
from svdcompress.errors import ModelError, UsageError
from svdcompress.evaluation import Wanted, evaluate_run
from svdcompress.pipeline._convert import final_beta
from svdcompress.pipeline._dense import check_model
from svdcompress.recipe import load_recipe
from svdcompress.sources import example_inputs, open_data
from svdcompress.sources.given import given

QUICK = {"train.epochs": 1, "recover.epochs": 0, "dense.epochs": 1, "uncertainty.samples": 0, "export.monte_carlo": False}
QUICK |= {"report.html": False, "report.latency": False, "data.workers": 0}


def small(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def rows(n=120):
    x = torch.rand(n, 8, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0.5).long()


def looked_at(model, data):
    """The data as a run opens it, after the model was checked on it."""
    with given(model=model, data=data) as names:
        recipe = load_recipe(None, fields={"model.name": names["model"], "data.name": names["data"]})
        opened = open_data(recipe.data, recipe.task, strict=False)
        check_model(copy.deepcopy(model), recipe, opened, example_inputs(opened.train, 2))
    return opened


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(reduction="sum"), lambda o, t: nn.functional.cross_entropy(o, t, reduction="sum")]
)
def test_a_loss_that_sums_is_refused(loss, tmp_path):
    settings = QUICK | {"loss.task": "classification"}
    with pytest.raises(ModelError, match=r"the loss object: it sums over the batch .* it must average"):
        svdc.sparsify(small(), rows(), loss=loss, settings=settings, out=tmp_path / "run")


class Tagger(nn.Module):
    def __init__(self, fixed=False, second=False):
        super().__init__()
        self.embed, self.head, self.fixed, self.second = nn.Embedding(9, 4), nn.Linear(4, 5), fixed, second

    def forward(self, ids):
        if self.fixed and ids.shape[1] != 5:
            raise ValueError("five tokens, please")
        logits = self.head(self.embed(ids))
        return logits.transpose(1, 2) if self.second else logits


@pytest.mark.parametrize(("second", "dim"), [(False, -1), (True, 1)])
def test_classes_are_told_from_as_many_positions_by_fewer_of_these(second, dim):
    ids = torch.randint(9, (60, 5), generator=torch.Generator().manual_seed(0))
    opened = looked_at(Tagger(second=second), (ids, ids % 5))
    assert opened.dim == dim and not any("positions" in line for line in opened.warnings)


def test_as_many_positions_as_classes_are_warned_of_where_the_model_cannot_tell():
    ids = torch.randint(9, (60, 5), generator=torch.Generator().manual_seed(0))
    opened = looked_at(Tagger(fixed=True), (ids, ids % 5))
    assert opened.dim == 1
    assert any("has as many positions as classes, and is taken as (N, classes, ...)" in line for line in opened.warnings)


def test_targets_that_are_the_inputs_are_warned_of():
    ids = torch.randint(5, (60, 7), generator=torch.Generator().manual_seed(0))
    assert any("the targets are the inputs themselves" in line for line in looked_at(Tagger(), (ids, ids.clone())).warnings)
    shifted = torch.cat([ids[:, 1:], torch.full((60, 1), -100)], 1)
    assert not any("the targets are the inputs" in line for line in looked_at(Tagger(), (ids, shifted)).warnings)


def test_splits_by_samplers_of_one_dataset_are_those_splits():
    x, y = rows()
    dataset = TensorDataset(x, y)
    split = {"train": (0, 80), "validation": (80, 100), "test": (100, 120)}
    loaders = {key: DataLoader(dataset, batch_size=8, sampler=SubsetRandomSampler(range(*ends))) for key, ends in split.items()}
    opened = looked_at(small(), loaders)
    assert [len(part) for part in (opened.train, opened.validation, opened.test)] == [80, 20, 20]
    seen = torch.cat([inputs for inputs, _ in opened.test.batches(50)])
    assert torch.equal(seen.sort(0).values, x[100:].sort(0).values)
    assert not any("is not used" in line for line in opened.warnings)


def test_a_model_that_is_variational_already_has_the_same_pressure_and_a_note():
    x, y = rows(400)
    recipe = load_recipe(None, fields={"model.name": "mlp", "data.name": "digits"})
    wide = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 2))
    plain = final_beta(recipe, wide, 200)
    converted = svdc.convert(copy.deepcopy(wide))
    assert final_beta(recipe, converted, 200) == plain < 1
    assert any("2 layers are variational already" in line for line in looked_at(converted, (x, y)).notes)


def test_a_run_of_objects_is_evaluated_with_members_and_a_loss_of_its_own(tmp_path):
    model, data = small(), rows()
    svdc.sparsify(model, data, trained=False, settings=QUICK, out=tmp_path / "plain")
    found = evaluate_run(
        svdc.load_run(tmp_path / "plain", model=model, data=data),
        Wanted(samples=3, members=2, magnitude=False, laplace=False),
    )
    assert any("ensemble" in name for name in str(found).lower().split())
    settings = QUICK | {"loss.task": "classification"}
    svdc.sparsify(model, data, loss=nn.CrossEntropyLoss(), settings=settings, out=tmp_path / "own")
    run = svdc.load_run(tmp_path / "own", model=model, data=data)
    told = []
    evaluate_run(run, Wanted(samples=3, laplace=False), say=told.append)
    assert any("left out: magnitude pruning" in line for line in told), told


def test_what_goes_on_has_to_be_named():
    with pytest.raises(UsageError, match="Name its folder, as out="):
        svdc.sparsify(small(), rows(), settings=QUICK, resume=True)
