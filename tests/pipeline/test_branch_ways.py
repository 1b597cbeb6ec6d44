"""Ways to a latency on which whole residual branches go, with a latency that is known: a part for each block that is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnx
import pytest
import torch
from test_ways import data_of, ways_of
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress import cost
from svdcompress.convert import convert
from svdcompress.errors import PruneError
from svdcompress.pipeline._choose_masks import chosen
from svdcompress.pipeline._cool import _way_to
from svdcompress.pipeline._unit_ways import Units
from svdcompress.recipe import load_recipe
from svdcompress.search import CLOSE

BLOCKS, WIDTH, DENSE = 6, 10, 8.0


class Blocks(nn.Module):
    """Six residual blocks, of which the odd ones add next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.inner = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(BLOCKS))
        self.outer = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(BLOCKS))
        with torch.no_grad():
            self.last.weight.mul_(4)
            for number, layer in enumerate(self.outer):
                layer.weight.mul_(0.05 if number % 2 else 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = x + outer(inner(x).relu())
        return self.last(x)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model, its data and inputs. Each block that is there takes a millisecond, of which half depends on its width."""
    torch.manual_seed(0)
    model: Any = convert(Blocks(), log_sigma2=-12.0).eval()
    data, x, _ = data_of(model, 4)

    def costs(ways: Units, masks: Any) -> dict[str, float]:
        alive = [int(masks[f"outer.{number}"].any(0).sum()) for number in range(BLOCKS)]
        took = 2.0 + sum(0.5 + 0.5 * units / WIDTH for units in alive if units)
        return {"macs": float(56 + 16 * sum(max(units, 1) for units in alive)), "latency": took / DENSE}

    monkeypatch.setattr(Units, "_costs", costs)
    return model, data, x


def silent(way: Any) -> set[int]:
    return {number for number in range(BLOCKS) if not way.masks[f"outer.{number}"].any()}


def test_the_fewest_branches_that_are_enough_go(made: Any) -> None:
    model, _, x = made
    to_size = ways_of(model, x, "latency", 5 / DENSE, enough=False)
    usual = to_size.usual()
    ways = {way.name: way for way in to_size.others_than(usual)}
    way = ways["branches"]
    assert silent(way) == {1, 3, 5} and way.size == 5 / DENSE  # those that matter least, and no units of others
    assert usual.size is not None and way.size <= usual.size * (1 + CLOSE)
    assert all(way.masks[f"outer.{number}"].all() for number in (0, 2, 4))
    half, most = ways["branches-50%"], ways["branches-75%"]
    assert {1} <= silent(half) <= silent(most) <= silent(way)
    for one in (half, most):
        assert one.size is not None and one.size <= max(usual.size, 5 / DENSE) * (1 + CLOSE)
    for one in (way, most, half):
        again = to_size.again(json.loads(json.dumps(one.stored())))
        assert all(torch.equal(mask, again[name]) for name, mask in one.masks.items())


def test_they_are_taken_if_they_lose_less(made: Any) -> None:
    model, data, x = made
    way, record = chosen(ways_of(model, x, "latency", 5 / DENSE, enough=False), data, "auto", "cpu")
    assert way.name == record["chosen"] == "branches"
    told = {one["name"]: one for one in record["candidates"]}
    assert told["branches"]["size"] == 5 / DENSE and told["branches"]["nll"] < told["global"]["nll"]


def test_units_do_the_rest_if_all_branches_are_not_enough(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, x = made
    before = Units._costs

    def slow(ways: Units, masks: Any) -> dict[str, float]:
        found = before(ways, masks)
        return found | {"latency": found["latency"] + 0.5 / DENSE * int(masks["stem"].any(1).sum())}  # 12 ms as it is

    monkeypatch.setattr(Units, "_costs", slow)
    to_size = ways_of(model, x, "latency", 5 / DENSE, enough=False)
    assert (to_size.usual().size or 0.0) > 5 / DENSE  # that way keeps one unit of each layer
    way = {way.name: way for way in to_size.others_than(to_size.usual())}["branches"]
    assert len(silent(way)) >= BLOCKS - 1 and not way.masks["stem"].all()
    assert way.size is not None and way.size <= 5 / DENSE
    assert to_size.least() == 2.5 / DENSE


def test_a_way_that_gets_there_is_taken_if_the_usual_one_cannot(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, x = made
    with torch.no_grad():
        for layer in (model.outer[1], model.outer[3], model.outer[5]):
            layer.weight.mul_(40)  # all blocks matter, so that branches lose more than units
    way, record = chosen(ways_of(model, x, "latency", 4.5 / DENSE, enough=False), data, "auto", "cpu")
    told = {one["name"]: one for one in record["candidates"]}
    assert told[record["usual"]]["size"] > 4.5 / DENSE >= way.size  # type: ignore[operator]
    assert way.name == record["chosen"] and "branches" in way.name


def test_narrower_layers_may_save_nothing(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data, x = made

    def blocks_alone(ways: Units, masks: Any) -> dict[str, float]:
        there = [number for number in range(BLOCKS) if masks[f"outer.{number}"].any()]
        units = sum(max(int(masks[f"outer.{number}"].any(0).sum()), 1) for number in range(BLOCKS))
        return {"macs": float(56 + 16 * units), "latency": (2 + len(there)) / DENSE}

    monkeypatch.setattr(Units, "_costs", blocks_alone)
    to_size = ways_of(model, x, "latency", 5 / DENSE, enough=False)
    usual = to_size.usual()
    assert usual.size == 1.0 and not usual.free and usual.count is None
    way, record = chosen(to_size, data, "auto", "cpu")
    assert way.size is not None and way.size <= 5 / DENSE and record is not None and "branches" in record["chosen"]


def test_steps_on_the_way_go_no_further_than_its_end(made: Any) -> None:
    model, data, x = made
    to_size = ways_of(model, x, "latency", 5 / DENSE, enough=False)
    way, _ = chosen(to_size, data, "auto", "cpu")
    assert way.name == "branches" and to_size.aim_of(way) == way.count != to_size.aim()
    natural, gone = to_size.natural, []
    for part in range(1, 5):
        masks = to_size.part(natural * (way.count / natural) ** (part / 4), way.name)  # type: ignore[operator]
        assert masks is not None
        gone.append({number for number in range(BLOCKS) if not masks[f"outer.{number}"].any()})
    assert gone[0] <= gone[1] <= gone[2] <= gone[3] == silent(way)
    assert to_size.aim_of(to_size.usual()) == to_size.aim()


def test_steps_aim_at_the_end_of_the_chosen_way(made: Any, tmp_path: Path) -> None:
    model, data, x = made
    to_size, file = ways_of(model, x, "latency", 5 / DENSE, enough=False), tmp_path / "cooling.json"
    way, _ = chosen(to_size, data, "auto", "cpu")
    found = _way_to(to_size, lambda ways: way, file)
    assert found == (to_size.natural, way.count, "branches")
    assert _way_to(Mock(), Mock(side_effect=AssertionError), file) == found  # a resumed trial follows the same way


def test_a_whole_run_removes_branches_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product in a file takes a millisecond, whatever its size."""
    torch.manual_seed(0)
    model = Blocks().eval()
    x = torch.randn(600, 4)
    with torch.no_grad():
        y = model(x).argmax(1)

    def products(path: Any) -> int:
        return sum(node.op_type in ("Gemm", "MatMul") for node in onnx.load(path).graph.node)

    def latencies(paths: Any, make_input: Any, batch_sizes: Any = (1, 128), **more: Any) -> Any:
        return {name: {f"batch_{batch}": float(products(path)) for batch in batch_sizes} for name, path in paths.items()}

    monkeypatch.setattr(cost, "latencies", latencies)
    settings = {"train.epochs": 0, "recover.epochs": 0, "uncertainty.samples": 0, "report.html": False}
    found = svdc.sparsify(model, (x, y), goal="latency=0.6", settings=settings, out=tmp_path / "run")
    assert products(tmp_path / "run" / "dense.onnx") == 2 + 2 * BLOCKS
    assert products(tmp_path / "run" / "model.onnx") == 2 + 2 * 3  # three blocks are 8 of 14
    results = json.loads((tmp_path / "run" / "report.json").read_text())
    search = results["search"]
    assert search["reached"] and search["trials"][0]["mixture"]["chosen"].startswith("branches")
    assert search["least"] == 2.0 and results["verified"]["failed"] == 0
    gone = {number for number in range(BLOCKS) if not found.model.outer[number].relevant().any()}  # type: ignore[union-attr]
    assert gone == {1, 3, 5}
    assert any("no weight is left in 6 layers (inner.1, " in note for note in results["notes"])


def test_without_a_choice_the_least_size_is_that_of_units(made: Any) -> None:
    model, _, x = made
    to_size = ways_of(model, x, "latency", 5 / DENSE, enough=False)
    to_size.context.recipe = load_recipe(None, ["search.goal=latency=2x", "search.mixture=off"])
    assert to_size.least() > 5 / DENSE


def test_sizes_that_are_no_latency_have_no_such_ways(made: Any) -> None:
    model, _, x = made
    to_size = ways_of(model, x, "macs", 600.0, enough=False)
    assert not any("branches" in way.name for way in to_size.others_than(to_size.usual()))


def test_branches_that_cannot_be_pruned_are_left_out(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, x = made
    before = Units._costs

    def refused(ways: Units, masks: Any) -> dict[str, float]:
        if not masks["outer.1"].any():
            raise PruneError("the model reads the shape of this block")
        return before(ways, masks)

    monkeypatch.setattr(Units, "_costs", refused)
    to_size = ways_of(model, x, "latency", 5 / DENSE, enough=False)
    assert not any("branches" in way.name for way in to_size.others_than(to_size.usual()))
