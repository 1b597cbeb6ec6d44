"""Units that the graph allows to be removed but the model does not: found before a search masks them."""

import torch
from torch import nn
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.pipeline import run
from svdcompress.pipeline._stays import that_stay
from svdcompress.recipe import load_recipe
from svdcompress.relevance import relevance

PRUNING = {"protect": [], "remove_inputs": False, "round_to": 1}


class Attention(nn.Module):
    """Attention as often written: the number of heads and their width are fixed numbers, not sizes of a tensor."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        count, length, width = x.shape
        q, k, v = self.qkv(x).reshape(count, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(count, length, width))


class Net(nn.Module):
    """Eight pixels of a digit at a time, one block, ten classes; sizes: an argument of the recipe's own model."""

    def __init__(self, sizes=()):
        super().__init__()
        self.embed, self.attention = nn.Linear(8, 16), Attention()
        self.hidden, self.back, self.norm, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.embed(x.reshape(-1, 8, 8))
        x = x + self.attention(self.norm(x))
        x = x + self.back(F.gelu(self.hidden(self.norm(x))))
        return self.head(x.mean(1))


class Squeezed(nn.Module):
    """Fails with one hidden unit, and only then, because its outputs are squeezed."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x).squeeze(1)
        return self.last(x if x.dim() == 2 else x[:, None, None].expand(-1, 1, 2).flatten(1))


def stays(model, x):
    model = svdc.convert(model).eval()
    return that_stay(model, x, relevance(model), PRUNING, 60.0)


def test_heads_that_the_model_counts_by_itself_stay_and_say_why():
    torch.manual_seed(0)
    found = stays(Net(), torch.randn(2, 64))
    assert list(found) == ["attention.qkv"] and "shape" in found["attention.qkv"]


def test_what_goes_without_trouble_does_not_stay():
    torch.manual_seed(0)
    assert stays(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(2, 8)) == {}


def test_what_fails_with_one_unit_alone_may_go():
    torch.manual_seed(0)
    assert stays(Squeezed(), torch.randn(2, 8)) == {}


def test_a_search_masks_none_of_them_and_knows_what_is_the_least(tmp_path):
    recipe = ["model=tests.pipeline.test_stays:Net", "data.limit=300", "dense.epochs=1", "train.epochs=0", "recover.epochs=0"]
    recipe += [
        "search.goal=macs=20x",
        "search.trials=1",
        "uncertainty.samples=0",
        "export.onnx=false",
        "calibrate.posterior=variational",
    ]
    results = run(load_recipe("digits", recipe), tmp_path / "run")
    assert any(note.startswith("attention.qkv: a search leaves its units") for note in results["notes"])
    layers = {row["name"]: row for row in results["layers"]}
    assert layers["attention.qkv"]["shape_after"] == layers["attention.qkv"]["shape_before"]
    assert not any("left masked" in group["reason"] for group in results["pruning"]["groups"])
    dense, left = results["dense"]["macs"], results["sparse"]["macs"]
    qkv = 8 * 16 * 48
    assert results["search"]["least"] >= qkv and qkv <= left < dense
    assert any("cannot be reached" in line for line in results["warnings"])
