"""Files whose inputs have open dimensions, at sizes that no check has seen, against plain layers with given weights."""

import numpy as np
import pytest
import torch
from export_run import numbers, run, session
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ExportError, UsageError
from svdcompress.export import check_parity, read_metadata, write_compact

IMAGE, TEXT = {"input": {2: "height", 3: "width"}}, {"ids": {1: "length"}, "keep": {1: "length"}}


class UNet(nn.Module):
    """Takes even heights and widths only."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.down, self.up = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        fine = self.norm(self.first(x)).relu()
        return self.last(torch.cat([fine, self.up(self.down(fine).relu())], 1))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.line, self.last = nn.Conv2d(1, 5, 3, stride=2), nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.line(self.conv(x).relu().mean((2, 3))).tanh())


class Tokens(nn.Module):
    """Takes up to 24 tokens; the padded ones do not count."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(30, 8), nn.Embedding(24, 8)
        self.query, self.key, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids, keep):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        scores = self.query(x) @ self.key(x).mT
        x = scores.masked_fill(keep[:, None] == 0, -1e9).softmax(-1) @ x
        return self.last((x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))


def images(*shape):
    return {"input": torch.randn(shape[0], 1, *shape[1:])}


def tokens(rows, length):
    keep = torch.ones(rows, length, dtype=torch.long)
    keep[0, length // 2 :] = 0
    return {"ids": torch.randint(30, (rows, length)), "keep": keep}


CASES = {  # the model, an example, its open dimensions, the task, inputs of other sizes
    "an image from an image": (UNet, images(2, 16, 12), IMAGE, "regression", [images(1, 2, 40), images(5, 22, 6)]),
    "classes of an image": (Pooled, images(2, 12, 12), IMAGE, "classification", [images(4, 7, 31), images(1, 20, 3)]),
    "classes of a text": (Tokens, tokens(2, 24), TEXT, "classification", [tokens(1, 2), tokens(4, 17)]),
    "a number for each position": (
        lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)),
        {"input": torch.randn(2, 9, 3)},
        {"input": {1: "length"}},
        "regression",
        [{"input": torch.randn(3, 2, 3)}, {"input": torch.randn(1, 50, 3)}],
    ),
}


def made(make):
    """A variational model and a plain one of its class, with the same other parameters."""
    torch.manual_seed(0)
    dense = make().eval()
    exclude = ["last"] if make is Tokens else []  # used once per row: its outputs would have noise, and no weight be drawn
    model = svdc.convert(make(), exclude=exclude, log_sigma2=-4.0).eval()
    state = model.state_dict()
    dense.load_state_dict({name: state[name] for name in dense.state_dict()})
    return model, dense


@torch.no_grad()
def put(model, dense, layout=(), noise=()):
    """Put the relevant means into the plain model, moved by a draw's noise as the file's metadata says."""
    plain = dict(dense.named_modules())
    for name, layer in model.named_modules():
        if hasattr(layer, "log_sigma2"):
            plain[name].weight.copy_(layer.weight * (layer.log_sigma2 - layer.weight.square().log() < 3))
    for call in layout:
        count = int(np.prod(call["shape"]))
        part, noise = noise[:count], noise[count:]
        layer, weight = model.get_submodule(call["layer"]), plain[call["layer"]].weight
        assert call["of"] == "weight"
        moved = torch.zeros_like(weight)
        moved[(weight != 0) if call.get("kept") else torch.ones_like(weight, dtype=torch.bool)] = part
        weight += (layer.log_sigma2 / 2).exp() * (weight != 0) * moved


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_file_takes_other_sizes(tmp_path, case):
    make, example, axes, task, others = CASES[case]
    model, dense = made(make)
    given = example["input"] if list(example) == ["input"] else example
    file = svdc.export_onnx(model, tmp_path / "a.onnx", given, task=task, dynamic_axes=axes)
    put(model, dense)
    at = session(file.path)
    for value in at.get_inputs():
        assert [(i, size) for i, size in enumerate(value.shape) if isinstance(size, str)] == [
            (0, "batch"),
            *axes[value.name].items(),
        ]
    for inputs in (example, *others):
        (got,) = at.run(None, {name: value.numpy() for name, value in inputs.items()})
        np.testing.assert_allclose(got, dense(*inputs.values()).numpy(), atol=2e-6)
    written = {name: {str(dim): axis for dim, axis in dims.items()} for name, dims in axes.items()}
    assert read_metadata(file.path)["dynamic_axes"] == written
    assert check_parity(file.path, model, given) < 1e-5


@pytest.mark.parametrize("case", ["an image from an image", "classes of a text", "a number for each position"])
@torch.no_grad()
def test_a_monte_carlo_file_takes_other_sizes(tmp_path, case):
    make, example, axes, task, others = CASES[case]
    model, dense = made(make)
    given = example["input"] if list(example) == ["input"] else example
    tau = {"tau": 4.0} if task == "regression" else {}
    path = tmp_path / "mc.onnx"
    svdc.export_onnx(model, path, given, monte_carlo=True, task=task, noise="input", dynamic_axes=axes, **tau)
    at, layout = session(path), read_metadata(path)["noise"]
    for inputs in (example, *others):
        rows = len(next(iter(inputs.values())))
        noise = torch.randn(6, numbers(layout, rows))
        draws = []
        for row in noise:
            put(model, dense, layout, row)
            draws.append(dense(*inputs.values()).double())
        draws = torch.stack(draws)
        draws = draws.softmax(-1) if task == "classification" else draws
        got = run(at, 6, **{name: value.numpy() for name, value in inputs.items()}, noise=noise.numpy())
        np.testing.assert_allclose(got["mean"], draws.mean(0), atol=3e-6)
        if task == "regression":
            np.testing.assert_allclose(got["epistemic"], draws.var(0, correction=0), rtol=1e-4, atol=1e-6)
    if task == "regression":  # the outputs' sizes have the inputs' names
        names = {axis for dims in axes.values() for axis in dims.values()}
        assert {size for size in at.get_outputs()[0].shape if isinstance(size, str)} == {"batch", *names}


@torch.no_grad()
def test_noise_on_the_outputs_of_layers_after_the_pooling(tmp_path):
    """Layers that are used once per row have noise on their output, whatever the image's size."""
    model, dense = made(Pooled)
    path = tmp_path / "mc.onnx"
    svdc.export_onnx(model, path, images(2, 12, 12)["input"], monte_carlo=True, dynamic_axes=IMAGE)
    assert "output" in {call["of"] for call in read_metadata(path)["noise"]}
    x = images(3, 9, 21)["input"]
    got = run(session(path), 4000, input=x.numpy(), seed=np.array(3))
    weights = [
        {"layer": name, "of": "weight", "shape": list(layer.weight.shape)}
        for name, layer in model.named_modules()
        if hasattr(layer, "log_sigma2")
    ]
    draws = []
    for row in torch.randn(4000, sum(model.get_submodule(call["layer"]).weight.numel() for call in weights)):
        put(model, dense, weights, row)
        draws.append(dense(x).double().softmax(-1))
    draws = torch.stack(draws)
    np.testing.assert_allclose(got["mean"], draws.mean(0), atol=0.01)
    np.testing.assert_allclose(got["variance"] - got["mean"] * (1 - got["mean"]), 0, atol=1e-5)
    information = -(draws.mean(0) * draws.mean(0).log()).sum(-1) + (draws * draws.log()).sum(-1).mean(0)
    np.testing.assert_allclose(got["mutual_information"], information, rtol=0.15)


def test_the_form_without_zeros_takes_them_too(tmp_path):
    model, _ = made(UNet)
    with torch.no_grad():
        model.last.weight[:, :6] = 0
    svdc.export_onnx(model, tmp_path / "a.onnx", images(2, 16, 12)["input"], dynamic_axes=IMAGE)
    file = write_compact(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert check_parity(file.path, model, images(2, 16, 12)["input"]) < 1e-5
    x = images(2, 6, 30)["input"]
    with torch.no_grad():
        np.testing.assert_allclose(session(file.path).run(None, {"input": x.numpy()})[0], model(x).numpy(), atol=2e-6)


@pytest.mark.parametrize(
    "axes, said",
    [
        ({"x": {2: "height"}}, r"the file has no input 'x'; its inputs are input"),
        ({"input": {0: "rows"}}, r"input: dimension 0 cannot be named 'rows': the first one, the batch, is open anyway"),
        ({"input": {4: "depth"}}, r"dimension 4 cannot be named 'depth': the input has 4, counted from 0"),
        ({"input": {-1: "width"}}, r"dimension -1 cannot be named 'width': the input has 4, counted from 0"),
        ({"input": {2: "the height"}}, r"dimension 2: 'the height' is no name for it"),
        ({"input": {2: "batch"}}, r"'batch' is no name for it"),
        ({"input": {2: "samples"}}, r"'samples' is no name for it"),
        ({"input": [2]}, r"input: \[2\] is no mapping of dimensions to names, as in \{2: 'height'\}"),
        ({"input": {"h": "height"}}, r"dimension h cannot be named 'height'"),
        ({"input": {2: "size", 3: "size"}}, r"called 'size' and has the size 12, but another one of this name has 16"),
        ({"input": {1: "channels"}}, r"dimension 1 has the size 1 in the example; give an example where it is at least 2"),
    ],
)
def test_dimensions_that_cannot_be_open_are_named(tmp_path, axes, said):
    with pytest.raises(UsageError, match=f"^dynamic_axes: .*{said}"):
        svdc.export_onnx(UNet(), tmp_path / "a.onnx", torch.randn(2, 1, 16, 12), dynamic_axes=axes)
    assert not list(tmp_path.iterdir())


def test_a_model_that_takes_one_size_only(tmp_path):
    flat = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    with pytest.raises(
        ExportError, match=r"no other sizes than those of the example; with height 5 and width 4 it fails: mat1"
    ):
        svdc.export_onnx(flat, tmp_path / "a.onnx", torch.randn(2, 1, 8, 6), dynamic_axes=IMAGE)


def test_dropout_at_each_position_needs_fixed_sizes(tmp_path):
    model = svdc.convert_dropout(nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.2), nn.Linear(6, 2))).eval()
    x, axes = torch.randn(2, 9, 3), {"input": {1: "length"}}
    with pytest.raises(ExportError, match=r"monte_carlo: how much noise '1' takes depends on the sizes in dynamic_axes"):
        svdc.export_onnx(model, tmp_path / "a.onnx", x, monte_carlo=True, dynamic_axes=axes)
    svdc.export_onnx(model, tmp_path / "a.onnx", x, dynamic_axes=axes)


class Depends(nn.Module):
    """Does something else at some lengths."""

    def __init__(self, how):
        super().__init__()
        self.conv, self.how = nn.Conv1d(2, 3, 3, padding=1), how

    def forward(self, x):
        return self.how(x, self.conv)


WAYS = {
    "longer": (16, lambda x, conv: conv(x).mean(2) * (10.0 if x.shape[2] > 20 else 1.0)),
    "shorter": (16, lambda x, conv: conv(x).mean(2) if x.shape[2] > 5 else conv(x).sum(2)),
    "odd": (246, lambda x, conv: conv(nn.functional.pad(x, (0, 1)) if x.shape[2] % 2 else x).mean(2)),
    "loop": (9, lambda x, conv: sum(conv(x)[:, :, i] for i in range(x.shape[2]))),
    "first five": (20, lambda x, conv: conv(x)[:, :, :5]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_depends_on_its_size_is_refused(tmp_path, way):
    length, how = WAYS[way]
    for more in ({}, {"monte_carlo": True, "task": "regression"}):
        model = svdc.convert(Depends(how), log_sigma2=-4.0).eval()
        with pytest.raises(
            ExportError, match=r"dynamic_axes: (length \d+: the model computes something else|the model's code)"
        ):
            svdc.export_onnx(
                model, tmp_path / "a.onnx", torch.randn(2, 2, length), dynamic_axes={"input": {2: "length"}}, **more
            )
    assert not list(tmp_path.iterdir())


def test_parity_is_checked_at_other_sizes_than_the_examples(tmp_path):
    """A model that divides by the example's length agrees with the mean only there."""
    torch.manual_seed(0)
    mean, fixed = Depends(lambda x, conv: conv(x).mean(2)), Depends(lambda x, conv: conv(x).sum(2) / 16)
    fixed.load_state_dict(mean.state_dict())
    x = torch.randn(2, 2, 16)
    for axes in ({"input": {2: "length"}}, {}):
        svdc.export_onnx(mean, tmp_path / "a.onnx", x, dynamic_axes=axes)
        assert check_parity(tmp_path / "a.onnx", mean, x) < 1e-5
        if axes:
            with pytest.raises(ExportError, match="'output' differs from PyTorch"):
                check_parity(tmp_path / "a.onnx", fixed, x)
        else:
            check_parity(tmp_path / "a.onnx", fixed, x)


def test_dimensions_as_in_a_files_metadata(tmp_path):
    svdc.export_onnx(UNet(), tmp_path / "a.onnx", torch.randn(2, 1, 16, 12), dynamic_axes={"input": {"2": "height"}})
    assert session(tmp_path / "a.onnx").get_inputs()[0].shape == ["batch", 1, "height", 12]
