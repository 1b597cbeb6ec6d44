"""Ways of cutting a large model are judged on pruned copies; the figures equal those with masks."""

import pytest
import torch
from test_cool import SHAPES
from test_search import searching
from torch import nn

from svdcompress.errors import PruneError
from svdcompress.layers import variational_layers
from svdcompress.pipeline import _choose_masks, _judged, _unit_ways, run
from svdcompress.sources import Data, InMemory

DEEP = "model.args={sizes: [64, 48, 24, 48, 24, 10]}", "dense.epochs=10"  # in a smaller network most ways leave the same units
SHORT = (*SHAPES, *DEEP, "train.lr=1.0e-6", "search.mixture=auto")


@pytest.mark.parametrize("positions", [1, 6])
def test_the_nll_of_many_positions_is_that_of_their_examples(monkeypatch, positions):
    """Beyond the limit it is taken as it is, as examples may be too few for their errors; one class each needs none."""
    monkeypatch.setattr(_judged, "TEMPERED", 20)
    torch.manual_seed(0)
    model, x = nn.Conv1d(2, 3, 1).eval(), torch.randn(30, 2, positions)
    y = torch.randint(3, (30, positions))
    examples = InMemory(x, y)
    found = _judged.judged(model, examples, Data(examples, examples, examples, "classification", 3), "cpu")
    if positions == 1:
        assert found.nll is None
    else:
        with torch.no_grad():
            each = nn.functional.cross_entropy(model(x), y, reduction="none").mean(1)
        torch.testing.assert_close(found.nll.float(), each)


@pytest.fixture
def sizes(monkeypatch):
    """The number of weights of each model that was used to judge a way."""
    found, losses = [], _choose_masks.losses

    def noted(model, *args, **kwargs):
        found.append(sum(layer.weight.numel() for _, layer in variational_layers(model)))
        return losses(model, *args, **kwargs)

    monkeypatch.setattr(_choose_masks, "losses", noted)
    return found


def watched(monkeypatch):
    """For each judged way, whether it left the large model unchanged."""
    asked, option = [], _choose_masks.option

    def noted(model: nn.Module, *args, **kwargs):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        found = option(model, *args, **kwargs)
        after = model.state_dict()
        asked.append(after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before))
        return found

    monkeypatch.setattr(_choose_masks, "option", noted)
    return asked


@pytest.mark.parametrize("reconstruct", ["auto", "off"])
def test_small_ones_and_masked_ones_are_judged_alike(tiny_recipe, tmp_path, monkeypatch, sizes, reconstruct):
    recipe = searching(tiny_recipe, *SHORT, "search.goal='macs=5x'", f"search.reconstruct={reconstruct}")  # four ways differ
    masked = run(recipe, tmp_path / "masked")["search"]["trials"][0]
    whole = max(sizes)
    assert set(sizes) == {whole} and len(sizes) > 3
    sizes.clear()
    monkeypatch.setattr(_choose_masks, "LONG", 0)
    unchanged = watched(monkeypatch)
    small = run(recipe, tmp_path / "small")["search"]["trials"][0]
    assert len(sizes) > 3 and max(sizes) < whole / 3 and len(unchanged) > 3 and all(unchanged)
    assert small["mixture"]["chosen"] == masked["mixture"]["chosen"]
    for one, other in zip(small["mixture"]["candidates"], masked["mixture"]["candidates"], strict=True):
        assert one["name"] == other["name"] and one["nll"] == pytest.approx(other["nll"], rel=1e-5)
    files = [tmp_path / name / "model.safetensors" for name in ("small", "masked")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_one_that_cannot_be_pruned_is_judged_with_its_masks(tiny_recipe, tmp_path, monkeypatch, sizes):
    """Pruning fails only during the choice; the cut that is chosen is made elsewhere."""
    monkeypatch.setattr(_choose_masks, "LONG", 0)
    small = _unit_ways.Units.small

    def failing(self, masks):
        owners.append(self)
        with monkeypatch.context() as patch:
            patch.setattr(_unit_ways, "prune", refused)
            return small(self, masks)

    asked, owners = [], []

    def refused(*args, **kwargs):
        asked.append(True)
        raise PruneError("two heads are needed")

    monkeypatch.setattr(_unit_ways.Units, "small", failing)
    trial = run(searching(tiny_recipe, *SHORT), tmp_path / "run")["search"]["trials"][0]
    assert len(asked) == len({id(owner) for owner in owners}) < len(owners)  # once for each choice: it would fail every time
    assert len(set(sizes)) == 1 and len(trial["mixture"]["candidates"]) > 1
