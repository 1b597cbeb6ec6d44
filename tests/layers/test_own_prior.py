"""A prior and posteriors that only this file defines: they train, prune, save, load, sample and export."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

import svdcompress as svdc
from svdcompress.errors import CheckpointError, ModelError
from svdcompress.layers import Posterior, Prior, VariationalLinear, set_posterior


class Fixed(Prior):
    """N(0, scale^2)."""

    name = "test-fixed"

    def __init__(self, scale: float = 0.5) -> None:
        self.scale = scale

    def settings(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def terms(self, mean: Tensor, log_sigma2: Tensor) -> Tensor:
        ratio = (mean.square() + log_sigma2.exp()) / self.scale**2
        return 0.5 * (ratio - 1 - log_sigma2 + 2 * math.log(self.scale))

    def start(self, weight: Tensor) -> float:
        return -7.0


class PerOutput(Posterior):
    """One variance for all weights of an output unit."""

    name = "test-per-output"
    parameters = ("log_sigma2_output",)

    def start(self, layer, log_sigma2):
        return {"log_sigma2_output": layer.canonical(log_sigma2).mean((2, 3), keepdim=True)}

    def log_sigma2(self, layer):
        return layer.as_weight(layer.log_sigma2_output)


class Waves(Posterior):
    """A few numbers for a whole layer, which cannot be cut along any axis of the weight."""

    name = "test-waves"
    parameters = ("waves",)

    def __init__(self, count: int = 3) -> None:
        self.count = count

    def settings(self):
        return {"count": self.count}

    def basis(self, layer) -> Tensor:
        places = torch.linspace(0, 1, layer.weight.numel(), dtype=layer.weight.dtype)
        return torch.stack([torch.cos(math.pi * k * places) for k in range(self.count)])

    def start(self, layer, log_sigma2):
        return {"waves": torch.linalg.lstsq(self.basis(layer).T, log_sigma2.reshape(-1, 1)).solution[:, 0]}

    def log_sigma2(self, layer):
        return (layer.waves @ self.basis(layer)).view_as(layer.weight)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 12), nn.ReLU(), nn.Linear(12, 3))


def converted(posterior) -> nn.Sequential:
    """Our prior and posterior in the first two layers, next to ordinary ones."""
    model = net()
    svdc.convert(model, include=["0", "3"], prior=Fixed(0.3), posterior=posterior)
    return svdc.convert(model, include=["5"], log_sigma2=-8.0)


def variances(layer) -> Tensor:
    """The oracle: the variance of each weight from the layer's own parameters, written out."""
    name = layer.posterior.name
    if name == "test-per-output":
        rows = [row.item() for row in layer.log_sigma2_output.flatten()]
        return torch.stack([torch.full_like(layer.weight[o], math.exp(row)) for o, row in enumerate(rows)])
    if name == "test-waves":
        n = layer.weight.numel()
        found = [sum(w * math.cos(math.pi * k * i / (n - 1)) for k, w in enumerate(layer.waves.tolist())) for i in range(n)]
        return torch.tensor(found).exp().view_as(layer.weight)
    return layer.log_sigma2.detach().exp()


@torch.no_grad()
def draws(model: nn.Sequential, x: Tensor, count: int) -> Tensor:
    """Outputs (count, batch, 3), each from one explicit draw of all weights."""
    kept = {layer: (layer.relevant(), variances(layer).sqrt()) for layer in model if hasattr(layer, "log_sigma2")}
    found = []
    for _ in range(count):
        y = x
        for layer in model:
            if layer not in kept:
                y = layer(y)
                continue
            keep, sigma = kept[layer]
            weight = (layer.weight + sigma * torch.randn_like(layer.weight)) * keep
            bias = layer.bias
            if layer.bias_sigma2 is not None:
                bias = bias + layer.bias_sigma2.sqrt() * torch.randn_like(bias)
            y = F.conv2d(y, weight, bias) if weight.dim() == 4 else F.linear(y, weight, bias)
        found.append(y)
    return torch.stack(found)


def same_moments(ours: Tensor, oracle: Tensor) -> None:
    """z-tests of mean and variance; ours, oracle: (draws, ...)."""
    spread = (oracle.var(0) * (1 / len(ours) + 1 / len(oracle))).sqrt()
    assert ((ours.mean(0) - oracle.mean(0)).abs() / spread).max() < 5
    noise = (2 / len(ours) + 2 / len(oracle)) ** 0.5 * 2  # of a log variance, with room for heavy tails
    assert (ours.var(0) / oracle.var(0)).log().abs().max() < 4 * noise


def test_the_kl_is_the_definition():
    model = converted("test-per-output")
    layer = model[3]
    posterior = Normal(layer.weight, variances(layer).sqrt())
    want = kl_divergence(posterior, Normal(torch.zeros(()), torch.tensor(0.3)))
    torch.testing.assert_close(layer.kl(), want.sum(), rtol=1e-4, atol=1e-3)
    layer.mask = torch.rand(layer.weight.shape) > 0.7
    torch.testing.assert_close(layer.kl(), want[layer.mask].sum(), rtol=1e-4, atol=1e-3)


def test_it_starts_where_the_prior_says():
    model = converted("independent")
    assert (model[0].log_sigma2 == -7).all() and (model[5].log_sigma2 == -8).all()
    assert (svdc.convert(nn.Linear(2, 3)).log_sigma2 == -10).all()


@pytest.mark.parametrize("posterior", [PerOutput(), Waves(4), "rank-one"], ids=str)
def test_from_training_to_files(posterior, tmp_path):
    model, dense = converted(posterior), net()
    x, y = torch.randn(16, 1, 6, 6), torch.randint(0, 3, (16,))

    # Training: the variances move in the direction of the objective's gradient.
    elbo = svdc.ELBO(model, nn.CrossEntropyLoss(), num_examples=20_000)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    before = [variances(layer) for layer in (model[0], model[3], model[5])]
    values = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = elbo(model(x), y)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < values[0]
    assert all((variances(layer) > old).any() for layer, old in zip((model[0], model[3], model[5]), before, strict=True))
    model.eval()

    # Sampling, against explicit draws of the weights.
    some = x[:2]
    with torch.no_grad(), svdc.sampling(model):
        ours = torch.stack([model(some) for _ in range(600)])
    same_moments(ours, draws(model, some, 600))

    # Pruning: the pruned model computes the same as the masked model and draws from the same distribution.
    masks = {name: mask.clone() for name, mask in svdc.relevance(model, 100.0).items()}
    masks["0"][2], masks["3"][[1, 4, 7]], masks["5"][:, 9] = False, False, False
    masks["3"] &= torch.rand(12, 96) > 0.2
    small = svdc.prune(model, x, masks=masks).eval()
    assert small[3].weight.shape == (8, 80) and small[0].weight.shape[0] == 5
    svdc.hold(model, masks)
    torch.testing.assert_close(small(some), model(some), rtol=1e-4, atol=1e-5)
    with torch.no_grad(), svdc.sampling(small):
        ours = torch.stack([small(some) for _ in range(600)])
    same_moments(ours, draws(model, some, 600))
    cuttable = posterior != Waves(4)
    assert (small[3].posterior == posterior) is cuttable and small[5].posterior == "independent"
    assert [note for note in small.pruning.notes if "its posterior is independent now" in note] == small.pruning.notes
    assert bool(small.pruning.notes) is not cuttable

    # Files: exact, with ordinary layers too, loaded into a dense model and a converted one.
    for one, start in ((model, net()), (small, dense), (small, svdc.convert(net()))):
        svdc.save(one, tmp_path / "m.safetensors")
        again = svdc.load(tmp_path / "m.safetensors", start).eval()
        assert torch.equal(again(some), one(some))
        for ours, theirs in zip(svdc.layers.variational_layers(again), svdc.layers.variational_layers(one), strict=True):
            assert torch.equal(ours[1].log_sigma2, theirs[1].log_sigma2)
            assert (ours[1].prior, ours[1].posterior) == (theirs[1].prior, theirs[1].posterior)
        assert again[0].prior == Fixed(0.3)

    # Export: the deterministic file and the Monte-Carlo one.
    svdc.export_onnx(small, tmp_path / "m.onnx", x)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    np.testing.assert_allclose(session.run(None, {"input": x.numpy()})[0], small(x).detach(), rtol=1e-3, atol=1e-4)
    svdc.export_onnx(small, tmp_path / "mc.onnx", x, monte_carlo=True, task="regression")
    session = onnxruntime.InferenceSession(str(tmp_path / "mc.onnx"))
    feeds = {"input": some.numpy(), "samples": np.array(2000), "seed": np.array(1)}
    names = [output.name for output in session.get_outputs()]
    got = dict(zip(names, session.run(None, feeds), strict=True))
    oracle = draws(model, some, 800).double()
    z = (torch.from_numpy(got["mean"]) - oracle.mean(0)) / (oracle.var(0) * (1 / 800 + 1 / 2000)).sqrt()
    assert z.abs().max() < 5
    assert (torch.from_numpy(got["epistemic"]) / oracle.var(0)).log().abs().max() < 0.5


def test_the_manifest_says_what_is_new_and_nothing_else(tmp_path):
    def layers(model) -> dict[str, Any]:
        svdc.save(model, tmp_path / "m.safetensors")
        with safe_open(str(tmp_path / "m.safetensors"), "pt") as file:
            return json.loads(file.metadata()["svdcompress"])["layers"]

    ordinary = layers(svdc.convert(net()))["3"]
    assert set(ordinary) == {"class", "prior", "share", "threshold", "variance_dtype"} and ordinary["prior"] == "ard"
    own = layers(converted(Waves(4)))
    assert own["3"]["prior"] == {"name": "test-fixed", "settings": {"scale": 0.3}}
    assert own["3"]["posterior"] == {"name": "test-waves", "settings": {"count": 4}}
    assert own["5"] == {**ordinary}
    assert layers(converted("test-per-output"))["0"]["posterior"] == "test-per-output"


@pytest.mark.parametrize("registry", [Prior.registry, Posterior.registry], ids=["prior", "posterior"])
def test_a_file_can_name_only_what_is_known_here(registry, tmp_path, monkeypatch):
    svdc.save(converted(Waves(4)), tmp_path / "m.safetensors")
    name = "test-fixed" if registry is Prior.registry else "test-waves"
    monkeypatch.delitem(registry, name)
    model = net()
    kind = "prior" if registry is Prior.registry else "posterior"
    with pytest.raises(CheckpointError, match=rf"{kind}: unknown '{name}'.*your own class of that name first"):
        svdc.load(tmp_path / "m.safetensors", model)
    assert type(model[3]) is nn.Linear


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("prior", {"name": "test-fixed", "settings": {"size": 3}}, "settings"),
        ("prior", {"settings": {}}, "name"),
        ("posterior", 3, "posterior"),
        ("posterior", {"name": "rank-one"}, "missing"),
    ],
)
def test_damaged_manifests_are_refused(key, value, word, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "m.safetensors"
    svdc.save(converted("independent"), path)
    with safe_open(str(path), "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        manifest = json.loads(file.metadata()["svdcompress"])
    del manifest["sha256"]  # as in a file of an earlier version
    manifest["layers"]["3"][key] = value
    save_file(held, str(path), {"svdcompress": json.dumps(manifest)})
    with pytest.raises(CheckpointError, match=word):
        svdc.load(path, net())


def test_parameters_of_other_lengths_are_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "m.safetensors"
    svdc.save(svdc.convert(net(), posterior="rank-one"), path)
    with safe_open(str(path), "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        manifest = json.loads(file.metadata()["svdcompress"])
    del manifest["sha256"]  # as in a file of an earlier version
    held["3.log_sigma2_row"] = torch.zeros(1, 11, 1, 1)
    save_file(held, str(path), {"svdcompress": json.dumps(manifest)})
    with pytest.raises(CheckpointError, match=r"log_sigma2|expand|size"):
        svdc.load(path, net())


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ModelError, match="share: the prior 'test-fixed' does not support 'input'"):
        svdc.convert(net(), prior=Fixed(), share="input")
    with pytest.raises(ModelError, match="posterior: unknown 'low-rank'; use one of independent, rank-one"):
        svdc.convert(net(), posterior="low-rank")
    model = net()

    class Nameless(Prior):
        """A prior without a name."""

    with pytest.raises(ModelError, match="Nameless has no name of its own"):
        svdc.convert(model, prior=Nameless())
    assert not hasattr(model[0], "log_sigma2")

    class Wrong(Posterior):
        name = "test-wrong"
        parameters = ("wrong",)

        def start(self, layer, log_sigma2):
            return {"wrong": torch.zeros(3)}

        def log_sigma2(self, layer):
            return layer.wrong

    with pytest.raises(ModelError, match=r"gives log variances of shape \(3,\)"):
        svdc.convert(model, posterior="test-wrong")
    with pytest.raises(ModelError, match="the package has a prior called 'ard'"):

        class Other(Prior):
            name = "ard"


def test_a_second_conversion_with_another_posterior_is_an_error():
    model = svdc.convert(net(), posterior="rank-one")
    with pytest.raises(
        ModelError, match="with posterior='rank-one'; converting it again does not change this to 'independent'"
    ):
        svdc.convert(model)
    svdc.convert(model, posterior="rank-one")


def test_priors_equal_their_names_and_those_of_the_same_settings():
    layer = VariationalLinear(2, 3, prior=Fixed(0.3))
    assert layer.prior == Fixed(0.3) and layer.prior != Fixed(0.4) and layer.prior != "ard"
    assert VariationalLinear(2, 3).prior == "ard" and VariationalLinear(2, 3).prior != "log-uniform"
    assert "prior=Fixed(scale=0.3)" in repr(layer) and "prior=ard" in repr(VariationalLinear(2, 3))
    layer.prior = "ard"
    assert layer.apart


def test_tied_layers_share_the_parameters_of_a_posterior():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    svdc.convert(model, posterior="test-per-output", include=["0", "1"])
    assert model[0].log_sigma2_output is model[1].log_sigma2_output
    torch.testing.assert_close(svdc.kl_divergence(model), model[0].kl())
    set_posterior([model[0], model[1]], "independent")
    assert model[0].log_sigma2 is model[1].log_sigma2 and "log_sigma2_output" not in dict(model[0].named_parameters())


def test_models_that_were_pickled_before_and_what_dynamo_reads():
    """Up to torch 2.11, Dynamo takes an entry of __dict__ under a property's name for that property and recurses endlessly."""
    model = converted("independent")
    layer = model[0]
    assert not {name for name in vars(layer) if isinstance(getattr(type(layer), name, None), property)}
    old = dict(vars(layer))
    old["prior"], old["posterior"] = old.pop("_prior"), old.pop("_posterior")
    again = type(layer).__new__(type(layer))
    again.__setstate__(old)
    assert again.prior == layer.prior and again.posterior == layer.posterior and "prior" not in vars(again)
    x = torch.randn(3, layer.in_channels, 8, 8)
    assert torch.equal(again.eval()(x), layer.eval()(x))
