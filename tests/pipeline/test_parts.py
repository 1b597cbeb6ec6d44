"""Parts of a run tested separately: models that read fewer inputs, batches for onnxruntime, folders reused."""

from functools import partial

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from svdcompress import convert, coupled_relevance, hold, prune, relevance
from svdcompress.errors import OutputError
from svdcompress.export import check_parity, export_onnx
from svdcompress.layers import variational_layers
from svdcompress.pipeline import feed, prepare
from svdcompress.pipeline._convert import mildest, shrinking
from svdcompress.pipeline._folder import discard
from svdcompress.pipeline._select import Select, bare, faster, whole, widened
from svdcompress.recipe import load_recipe
from svdcompress.selection import choose, rule
from svdcompress.sources import Data, InMemory


def test_a_model_without_its_dead_inputs_takes_whole_inputs_still():
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))).eval()
    masks = {name: mask.clone() for name, mask in relevance(model, 50.0).items()}
    masks["0"][:, [1, 4, 5]] = False
    x = torch.randn(7, 8)
    small = prune(model, x, masks=masks, remove_inputs=True)
    report = small.pruning.to_dict()
    served = whole(small, report)
    assert isinstance(served, Select) and served.index.tolist() == [0, 2, 3, 6, 7]
    assert bare(served) is small and bare(small) is small
    with torch.no_grad():
        assert torch.allclose(served(x), hold(model, masks)(x), atol=1e-6)
    assert whole(model, {"inputs_kept": None}) is model


def selected(first, shape, last, index):
    torch.manual_seed(0)
    small = nn.Sequential(first, nn.ReLU(), nn.Flatten(), last)
    return Select(convert(small).eval(), index, 1), torch.randn(2, *shape)


@pytest.mark.parametrize(
    ("first", "shape", "last"),
    [
        (nn.Linear(3, 6), (8,), nn.Linear(6, 2)),
        (nn.Sequential(nn.Flatten(), nn.Linear(3, 6)), (8,), nn.Linear(6, 2)),
        (nn.Conv2d(3, 4, 3, padding=1), (8, 5, 5), nn.Linear(100, 2)),
        (nn.Conv1d(3, 4, 3), (8, 5), nn.Linear(12, 2)),
    ],
    ids=["linear", "flattened", "conv2d", "conv1d"],
)
def test_weights_of_zero_do_what_a_selection_does(first, shape, last):
    model, x = selected(first, shape, last, [6, 0, 3])
    wide = widened(model, x)
    other = torch.randn(5, *shape)
    with torch.no_grad():
        assert torch.allclose(wide(other), model(other), atol=1e-6)
    before, after = (next(m.weight for m in net.modules() if hasattr(m, "weight")) for net in (model, wide))
    assert after.shape[1] == 8 and before.shape[1] == 3 and (after[:, [1, 2, 4, 5, 7]] == 0).all()


@pytest.mark.parametrize(
    ("first", "shape", "last"),
    [
        (nn.LayerNorm(3), (8,), nn.Linear(3, 2)),
        (nn.Conv2d(3, 3, 3, groups=3), (8, 5, 5), nn.Linear(27, 2)),
        (nn.Linear(5, 6), (8, 5), nn.Linear(18, 2)),  # reads along another dimension
    ],
    ids=["norm", "depthwise", "other dimension"],
)
def test_inputs_that_something_else_reads_are_selected(first, shape, last):
    model, x = selected(first, shape, last, [6, 0, 3])
    assert widened(model, x) is None


def test_inputs_that_are_read_twice_are_selected():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.a(x) + self.b(x * 2) if x.shape[1] == 3 else self.a(x)

    assert widened(Select(convert(Twice()).eval(), [6, 0, 3], 1), torch.randn(2, 8)) is None


@pytest.mark.parametrize(("gather", "everything", "gathers"), [(1.0, 2.0, True), (2.0, 1.0, False)])
def test_the_faster_file_stays_and_knows_its_inputs(tmp_path, monkeypatch, gather, everything, gathers):
    model, x = selected(nn.Linear(3, 6), (8,), nn.Linear(6, 2), [6, 0, 3])
    times = {"gather": {"batch_1": gather, "batch_128": 1.0}, "all": {"batch_1": everything, "batch_128": 1.0}}
    monkeypatch.setattr("svdcompress.cost.latencies", lambda paths, feed: times)
    first = export_onnx(model, tmp_path / "model.onnx", x)
    file, gathered = faster(model, x, first, lambda batch: None, partial(export_onnx, example_inputs=x))
    assert gathered is gathers and [path.name for path in tmp_path.iterdir()] == ["model.onnx"] == [file.path.name]
    assert file.bytes == file.path.stat().st_size and check_parity(file.path, model, x) < 1e-5
    assert any(node.op_type == "Gather" for node in onnx.load(file.path).graph.node) is gathers


def test_batches_for_onnxruntime_have_any_size_and_the_names_of_the_inputs(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, left, right):
            return self.layer(left) + self.layer(right)

    x, y = (torch.randn(5, 3), torch.randn(5, 3)), torch.zeros(5).long()
    file = tmp_path / "two.onnx"
    export_onnx(Two(), file, x)

    def made(inputs):
        examples = InMemory(inputs, y)
        return feed(Data(examples, examples, examples, "classification", 2), file)

    pair = made(x)(12)
    assert set(pair) == {"left", "right"}
    assert np.array_equal(pair["right"][5:10], x[1].numpy()) and len(pair["left"]) == 12
    assert set(made({"a": x[0], "b": x[1]})(2)) == {"a", "b"}
    assert made(x[0])(1).shape == (1, 3)


def test_a_folder_is_taken_back_only_if_nothing_was_trained(tmp_path):
    prepare(tmp_path / "new")
    (tmp_path / "new" / "recipe.yaml").write_text("model: mlp")
    discard(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    prepare(tmp_path / "trained")
    (tmp_path / "trained" / "state" / "dense.pt").write_bytes(b"x")
    discard(tmp_path / "trained")
    assert (tmp_path / "trained" / "state" / "dense.pt").exists()


def test_a_folder_left_by_a_kill_before_the_recipe_is_free_and_a_finished_run_is_not_resumed(tmp_path):
    prepare(tmp_path / "killed")
    assert prepare(tmp_path / "killed") == ""
    (tmp_path / "killed" / "recipe.yaml").write_text("model: mlp")
    with pytest.raises(OutputError, match="holds a run that is not finished"):
        prepare(tmp_path / "killed")
    assert prepare(tmp_path / "killed", resume=True) == ""
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "recipe.yaml").write_text("model: mlp")
    (tmp_path / "done" / "report.json").write_text("{}")
    with pytest.raises(OutputError, match="is finished; its figures: svdc report"):
        prepare(tmp_path / "done", resume=True)


class Residual(nn.Module):
    """A stream of 6 units that `stem` and `outer` write and `inner` and `head` read."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.outer, self.head = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(x + self.outer(torch.tanh(self.inner(x))))


@pytest.mark.parametrize("side", ["input", "output"])
def test_masks_of_coupled_units_go_or_stay_as_a_whole(side):
    torch.manual_seed(0)
    model, x = convert(Residual(), share=side), torch.randn(4, 4)
    readers = ("inner", "head") if side == "input" else ("stem", "outer")
    with torch.no_grad():
        for name, layer in model.named_children():
            layer.log_sigma2.fill_(-8.0)
            layer.weight.copy_(torch.randn_like(layer.weight).sign())
            rows = layer.weight if side == "output" else layer.weight.T
            noise = layer.log_sigma2 if side == "output" else layer.log_sigma2.T
            if name in readers:
                noise[1] = 9.0  # unit 1 is irrelevant for both
            if name == readers[0]:
                noise[2], rows[2] = 9.0, 1e-3  # unit 2 is irrelevant for one of them, but the other needs it
            elif name == readers[1]:
                rows[2] = 60.0

    def chosen(coupled):
        settings = [f"relevance.coupled={coupled}", f"convert.share={side}", "relevance.candidates=[3]"]
        chosen = choose(model, load_recipe(None, settings), lambda m: {"error": 1.0, "nll": 0.0}, x)
        masks, curve = chosen.masks, chosen.curve
        assert {point["threshold"]: point["nonzero"] for point in curve}[3.0] == masks.kept + 20  # plus the biases
        units = {name: masks[name].T if side == "input" else masks[name] for name in readers}
        return [[bool(units[name][unit].any()) for name in readers] for unit in range(6)], units

    alone, _ = chosen("false")
    assert alone[1] == [False, False] and alone[2] == [False, True]
    together, units = chosen("true")
    assert together == [[True, True], [False, False], *[[True, True]] * 4]
    assert all(units[name][unit].all() for name in readers for unit in (0, 2, 3, 4, 5))
    assert chosen("auto")[0] == together
    assert all(layer.mask is None for _, layer in model.named_children())
    recipe = load_recipe(None, ["train.shrink=0", f"convert.share={side}", "relevance.threshold=3"])
    at_once = shrinking(recipe, x)["shrink"].keywords["masks"](model)
    assert all(torch.equal(at_once[name].T if side == "input" else at_once[name], units[name]) for name in readers)


def chain():
    """Channels that one layer reads in several columns, so layers share nothing."""
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.parametrize(("make", "shape"), [(Residual, (4, 4)), (chain, (4, 1, 4, 4))], ids=["residual", "chain"])
@pytest.mark.parametrize("share", ["weight", "layer", "input", "output", ["weight", "input"]])
def test_auto_couples_only_what_layers_share(make, shape, share):
    torch.manual_seed(0)
    model, x = convert(make(), share=share).eval(), torch.randn(shape)
    with torch.no_grad():
        for _, layer in variational_layers(model):
            layer.weight.normal_()
            layer.log_sigma2.copy_(2 + torch.randn(layer.weight.shape))
    before = torch.get_rng_state()
    found = rule(model, load_recipe(None).relevance, x)(2.0)
    assert torch.equal(torch.get_rng_state(), before)
    coupled = make is Residual and share not in ("weight", "layer")
    together = coupled_relevance(model, x, threshold=2.0, side="output" if share == "output" else "input")
    expected = together if coupled else relevance(model, 2.0)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if share not in ("output", "layer"):
        assert any(not torch.equal(together[name], mask) for name, mask in relevance(model, 2.0).items())


def test_the_mildest_threshold_takes_layers_own_limits_where_candidates_name_none():
    own = ["convert.threshold={weight: 4, input: 5}", "convert.layers=[{match: '1', threshold: {output: 6}}]"]
    found = mildest(load_recipe("digits", [*own, "relevance.candidates=[2, {weight: 1}]"]))
    assert found == {"weight": 2.0, "input": 5.0, "output": 6.0, "layer": 3.0}
    assert mildest(load_recipe("digits", own)) is None


def test_shrinking_takes_the_mildest_threshold_and_the_settings_of_pruning():
    x = torch.randn(3, 9)
    wanted = ["train.shrink=50%", "train.epochs=8", "prune.round_to=8", "prune.protect=[fc1]"]
    candidates = "relevance.candidates=[2.0, {weight: 3.0, input: 1.0}]"
    found = shrinking(load_recipe("digits", [*wanted, candidates]), x)
    assert found["shrink_from"] == 4
    options = found["shrink"].keywords
    assert options["inputs"] is x and (options["round_to"], options["protect"]) == (8, ["fc1"])
    model = convert(nn.Sequential(nn.Linear(9, 9)), threshold=-1.0).eval()
    model[0].log_sigma2.data.normal_()
    masks = options["masks"](model)
    assert torch.equal(masks["0"], relevance(model, 3.0)["0"]) and not torch.equal(masks["0"], relevance(model, 2.0)["0"])
    model[0].share = {"input": 1.0}
    assert torch.equal(options["masks"](model)["0"], relevance(model, 2.0)["0"])
    own = shrinking(load_recipe("digits", wanted), x)["shrink"].keywords["masks"](model)
    assert torch.equal(own["0"], relevance(model)["0"])
    assert shrinking(load_recipe("digits"), None) == {}
