"""What must hold on a GPU too. Skipped without one; `make gpu` runs these tests where there is one."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.pipeline import run
from svdcompress.recipe import load_recipe
from svdcompress.selection import Ranking

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
    )
    return svdc.convert(model)


def batch(n=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 1, 16, 16, generator=generator), torch.randint(10, (n,), generator=generator)


def test_the_kl_and_its_gradients_are_those_of_the_cpu():
    here = network()
    there = copy.deepcopy(here).cuda()
    for model in (here, there):
        svdc.kl_divergence(model).backward()
    assert float(svdc.kl_divergence(there)) == pytest.approx(float(svdc.kl_divergence(here)), rel=1e-4)
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        if a.grad is not None:
            assert b.grad is not None
            torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-3, atol=1e-5)


def test_draws_have_the_moments_of_explicit_weight_samples():
    model = network().cuda().eval()
    x = batch(4)[0].cuda()
    with torch.no_grad():
        for layer in (model[0], model[5]):
            layer.log_sigma2.fill_(-5.0)
    torch.manual_seed(0)
    found = svdc.mc_predict(model, x, samples=4000, task="regression").mean
    torch.manual_seed(1)
    total = torch.zeros_like(found)
    weights = {layer: layer.weight.detach().clone() for layer in (model[0], model[5])}
    with torch.no_grad():
        for _ in range(4000):
            for layer, mean in weights.items():
                layer.weight.copy_(mean + torch.randn_like(mean) * (0.5 * layer.log_sigma2).exp())
            total += model(x)
    torch.testing.assert_close(found, total / 4000, rtol=0.1, atol=0.08)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_step_trains_under_autocast(precision):
    model = network().cuda()
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=1000)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, y = (part.cuda() for part in batch())
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            loss = elbo(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0]


def test_a_compiled_step_computes_what_the_plain_one_does():
    model = network().cuda().eval()
    x = batch()[0].cuda()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model)(x), model(x), rtol=1e-3, atol=1e-3)


def test_a_model_on_the_gpu_is_pruned_exactly_and_stays_there():
    model = network().cuda().eval()
    masks = {name: mask.clone() for name, mask in svdc.relevance(model, 50.0).items()}
    masks["5"][:, :64] = False  # nothing reads half of the channels
    x = batch(8)[0].cuda()
    small = svdc.prune(model, x, masks=masks)
    assert next(small.parameters()).is_cuda and small[0].out_channels == 4
    with torch.no_grad():
        expected = svdc.hold(model, masks)(x)
        torch.testing.assert_close(small(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_whole_run_on_the_gpu(tmp_path, precision):
    sets = ["data.limit=400", "dense.epochs=3", "train.epochs=4", "recover.epochs=2", "uncertainty.samples=5", "device=cuda"]
    recipe = load_recipe("digits", [*sets, *(f"{stage}.precision={precision}" for stage in ("dense", "train", "recover"))])
    results = run(recipe, tmp_path / "run")
    assert results["device"].startswith("cuda") and results["verified"]["passed"] is True
    assert max(results["parity"].values()) < 1e-3


def test_units_are_ranked_by_the_outputs_as_on_the_cpu():
    model, x = network().eval(), batch(64)[0]
    here = Ranking(model, x[:2], examples=x.split(2))
    there = Ranking(model, x[:2], examples=x.split(2), device=torch.device("cuda"))
    assert not next(model.parameters()).is_cuda
    np.testing.assert_allclose(there._score, here._score, rtol=1e-2)


def test_a_search_that_begins_without_pressure(tmp_path):
    sets = ["data.limit=400", "dense.epochs=3", "train.epochs=4", "recover.epochs=2", "uncertainty.samples=5", "device=cuda"]
    search = ["search.goal=parameters=4x", "search.trials=1", "search.levels=1", "train.beta={final: 1.0e-6}"]
    results = run(load_recipe("digits", [*sets, *search]), tmp_path / "run")
    assert results["search"]["trials"][0]["pressure"] == -7.0 and results["verified"]["passed"] is True


def test_layers_are_reconstructed_as_on_the_cpu():
    here = network().eval()
    masks = {name: torch.ones_like(mask) for name, mask in svdc.relevance(here, 50.0).items()}
    masks["0"][:4], masks["5"][:, :64] = False, False
    there, x = copy.deepcopy(here).cuda(), batch(256)[0]
    found = svdc.reconstruct(here, x, masks)
    moved = svdc.reconstruct(there, x.cuda(), {name: mask.cuda() for name, mask in masks.items()})
    assert next(there.parameters()).is_cuda
    np.testing.assert_allclose([moved.before, moved.after], [found.before, found.after], rtol=1e-2)
    torch.testing.assert_close(there[5].weight.cpu(), here[5].weight, rtol=5e-2, atol=1e-3)


@pytest.mark.parametrize("long", [0, 10**12])
def test_a_search_for_bytes_measures_its_files(tmp_path, monkeypatch, long):
    """Options are judged on the device; the chosen ones are pruned and written on the CPU."""
    monkeypatch.setattr("svdcompress.pipeline._choose_masks.LONG", long)
    monkeypatch.setattr("svdcompress.pipeline._choose_masks.best_option", lambda options: options[-1])  # so one is measured
    sets = ["data.limit=400", "dense.epochs=3", "train.epochs=2", "recover.epochs=1", "uncertainty.samples=0", "device=cuda"]
    search = ["search.goal=bytes=3x", "search.trials=1", "search.levels=1", "train.beta={final: 1.0e-6}"]
    results = run(load_recipe("digits", [*sets, *search]), tmp_path / "run")
    assert results["search"]["trials"][0]["mixture"] is not None and results["verified"]["passed"] is True


class Viewing(nn.Module):
    """Flattens the output of a convolution with `view`, which fails on channels-last outputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 10)

    def forward(self, x):
        x = self.conv(x.reshape(-1, 1, 8, 8)).relu()
        return self.head(x.view(-1, 4 * 36))


@pytest.mark.parametrize("posterior", ["variational", "laplace-diagonal"])
def test_a_model_that_lies_on_the_device_is_made_smaller(tmp_path, posterior):
    torch.manual_seed(0)
    x = torch.rand(300, 64)
    y, model = (x[:, :10]).argmax(1), Viewing().cuda()
    settings = {"train.epochs": 2, "recover.epochs": 1, "dense.epochs": 2, "uncertainty.samples": 5, "device": "cuda"}
    more = {"trained": False, "settings": settings | {"calibrate.posterior": posterior}, "out": tmp_path / "run"}
    found = svdc.sparsify(model, (x, y), **more)
    assert found.results["verified"]["passed"] is True and next(model.parameters()).is_cuda
