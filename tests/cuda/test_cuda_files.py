"""Models on a GPU are saved and loaded like those on the CPU, and runs can move from one device to the other."""

import copy

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import CheckpointError, Interrupted
from svdcompress.export import check_parity
from svdcompress.layers import variational_layers
from svdcompress.pipeline import run
from svdcompress.recipe import Training, load_recipe
from svdcompress.sources import InMemory
from svdcompress.train import fit

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Convolutions in full float32, not in TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def fresh():
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(24, 3)]
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), *head)


def model_of(posterior="independent"):
    """A model on the device, with masks held, in eval()."""
    model = svdc.convert(svdc.convert_dropout(fresh()), posterior=posterior, log_sigma2=-6.0).cuda().eval()
    masks = {name: torch.ones_like(mask) for name, mask in svdc.relevance(model, 50.0).items()}
    masks["0"][:2], masks["6"][:, 8:12] = False, False
    return svdc.hold(model, masks), torch.rand(8, 1, 6, 6).cuda()


@pytest.mark.parametrize("posterior", ["independent", "rank-one"])
def test_a_file_holds_the_same_bits_whatever_the_device(tmp_path, posterior):
    model, x = model_of(posterior)
    svdc.set_likelihood(model, "classification")
    svdc.save(model, tmp_path / "there.safetensors", extra={"of": "a GPU"})
    svdc.save(copy.deepcopy(model).cpu(), tmp_path / "here.safetensors", extra={"of": "a GPU"})
    assert (tmp_path / "there.safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()
    for into in (fresh().cuda().eval(), svdc.convert(fresh(), posterior=posterior).cuda().eval()):
        loaded = svdc.load(tmp_path / "there.safetensors", into)
        assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cuda"}
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
        assert all(layer.mask.is_cuda and layer.posterior == posterior for _, layer in variational_layers(loaded))
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6)
    here = svdc.load(tmp_path / "there.safetensors", fresh()).eval()
    with torch.no_grad():
        torch.testing.assert_close(here(x.cpu()), model(x).cpu(), rtol=1e-4, atol=1e-5)


def test_a_file_of_another_model_leaves_that_on_the_device_as_it_was(tmp_path):
    model, _ = model_of()
    svdc.save(model, tmp_path / "a.safetensors")
    other = nn.Sequential(nn.Linear(3, 3)).cuda()
    before = other[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match="made for another model"):
        svdc.load(tmp_path / "a.safetensors", other)
    assert type(other[0]) is nn.Linear and other[0].weight.is_cuda and torch.equal(other[0].weight, before)


def test_a_pruned_model_is_loaded_onto_the_device(tmp_path):
    model, x = model_of()
    small = svdc.prune(model, x)
    svdc.save(small, tmp_path / "small.safetensors")
    loaded = svdc.load(tmp_path / "small.safetensors", fresh().cuda()).eval()
    assert loaded[0].out_channels == small[0].out_channels < 6 and loaded[0].weight.is_cuda
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)
    alike = svdc.mc_predict(loaded, x, 2000).mean - svdc.mc_predict(model, x, 2000).mean
    assert float(alike.abs().max()) < 0.02


@pytest.mark.parametrize("monte_carlo", [False, True])
def test_a_model_on_the_device_is_exported_and_stays_there(tmp_path, monte_carlo):
    """The file computes what the model does, checked by onnxruntime on the CPU."""
    model, x = model_of()
    found = svdc.export_onnx(model, tmp_path / "model.onnx", x, monte_carlo=monte_carlo)
    assert found.path.is_file() and all(own.is_cuda for own in model.parameters())
    import onnxruntime

    session = onnxruntime.InferenceSession(str(found.path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feeds = {names[0]: x.cpu().numpy()}
    if monte_carlo:
        feeds["samples"] = torch.tensor(2000).numpy()
        outputs = [value.name for value in session.get_outputs()]
        mean = torch.from_numpy(session.run(None, feeds)[outputs.index("mean")])
        expected = svdc.mc_predict(model, x, 2000).mean.float().cpu()
        torch.testing.assert_close(mean, expected, rtol=0.1, atol=0.02)
    else:
        assert check_parity(found.path, model, x) < 1e-3
        with torch.no_grad():
            expected = model(x).cpu()
        torch.testing.assert_close(torch.from_numpy(session.run(None, feeds)[0]), expected, rtol=1e-3, atol=1e-4)


def examples(n=300):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, 1, 6, 6, generator=generator)
    return InMemory(x, (x.mean((1, 2, 3)) * 30).long() % 3)


SETTINGS = {"epochs": 4, "batch_size": 50, "lr": 0.01}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_fit_goes_on_on_another_device(tmp_path, first, then, optimizer):
    """Its optimizer's state moves along, although parameters are channels last only on a GPU."""
    settings = Training(**SETTINGS, optimizer=optimizer)

    def trained(device, state=None, last=None, model=None):
        model = svdc.convert(fresh()) if model is None else model
        loss = nn.functional.cross_entropy
        done = fit(model, examples(), loss, settings, device=device, state=state, last_epoch=last)
        return model, done

    part, _ = trained(first, tmp_path / "state.pt", 2)
    whole, done = trained(then, tmp_path / "state.pt")
    assert len(done.history) == 4 and next(whole.parameters()).device.type == torch.device(then).type
    assert all(own.is_contiguous() for own in whole.parameters())
    _, once = trained(then)
    losses = [row["nll"] for row in done.history]
    assert losses[-1] < losses[0] and losses[2] < losses[0]  # no jump in the loss after resuming
    assert abs(losses[-1] - once.history[-1]["nll"]) < 0.25
    assert not torch.equal(whole[0].weight.cpu(), part[0].weight.cpu())


DIGITS = ["data.limit=400", "dense.epochs=3", "train.epochs=4", "recover.epochs=2", "uncertainty.samples=5"]
DIGITS += ["model.args={sizes: [64, 24, 10]}", "report.latency=false"]


@pytest.mark.parametrize(("first", "then"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_that_was_stopped_goes_on_on_another_device(tmp_path, monkeypatch, first, then):
    from svdcompress.train import _loop

    finish, seen = _loop.Loop._finish, []

    def stop_soon(self, row):
        finish(self, row)
        seen.append((row["stage"], self._work.device.type))
        if len(seen) == 5:  # in the second epoch of `train`
            self._save()
            raise Interrupted("stopped by the test")

    monkeypatch.setattr(_loop.Loop, "_finish", stop_soon)
    with pytest.raises(Interrupted):
        run(load_recipe("digits", [*DIGITS, f"device={first}"]), tmp_path / "run")
    results = run(load_recipe("digits", [*DIGITS, f"device={then}"]), tmp_path / "run", resume=True)
    stages, devices = zip(*seen, strict=True)
    assert stages == ("dense",) * 3 + ("train",) * 4 + ("recover",) * 2
    assert devices == (torch.device(first).type,) * 5 + (torch.device(then).type,) * 4
    assert results["verified"]["passed"] is True and results["device"].startswith(then)


def test_a_finished_run_is_opened_and_moved(tmp_path):
    run(load_recipe("digits", [*DIGITS, "device=cuda"]), tmp_path / "run")
    opened = svdc.load_run(tmp_path / "run")
    assert {own.device.type for own in opened.model.parameters()} == {"cpu"}  # a file does not record the device it was made on
    inputs, _ = next(iter(opened.data.test.batches(50)))
    expected = svdc.mc_predict(opened.model, inputs, 500)
    there = copy.deepcopy(opened.model).cuda()
    found = svdc.mc_predict(there, inputs, 500)
    assert found.mean.is_cuda and float((found.mean.cpu() - expected.mean).abs().max()) < 0.1
    with torch.no_grad():
        torch.testing.assert_close(there(inputs.cuda()).cpu(), opened.model(inputs), rtol=1e-3, atol=1e-4)
        assert opened.dense.cuda()(inputs.cuda()).is_cuda
    svdc.save(there, tmp_path / "again.safetensors")
    again = svdc.load(tmp_path / "again.safetensors", copy.deepcopy(opened.dense).cpu())
    for name, tensor in opened.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
