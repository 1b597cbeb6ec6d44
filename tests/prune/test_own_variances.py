"""User-defined posteriors under surgery: parameters in the weight's layout with a shape that also fits the canonical view."""

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.layers import Posterior


class PerInput(Posterior):
    """A term for each input, in the layout of a convolution's weight: (1, in, 1, 1)."""

    name, parameters = "per-input-of-test", ("terms",)

    def start(self, layer, log_sigma2):
        return {"terms": log_sigma2.mean((0, 2, 3), keepdim=True)}

    def log_sigma2(self, layer):
        return layer.terms.expand_as(layer.weight)


class PerOutput(Posterior):
    """A term for each output, in the canonical view: (groups, out, 1, 1)."""

    name, parameters = "per-output-of-test", ("terms",)

    def start(self, layer, log_sigma2):
        return {"terms": layer.canonical(log_sigma2).mean((2, 3), keepdim=True)}

    def log_sigma2(self, layer):
        return layer.as_weight(layer.terms)


@pytest.mark.parametrize("posterior", [PerInput, PerOutput])
def test_variances_go_with_the_units_that_they_are_of(posterior):
    torch.manual_seed(0)
    convs = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
    model = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2])
    svdc.convert(model, posterior=posterior(), threshold=99.0)
    with torch.no_grad():
        model[2].terms.copy_(torch.linspace(-9, -2, 8).view(1, 8, 1, 1))
        model[0].bias[:2] = 0
        model[2].bias[6:] = 0
    masks = {name: torch.ones_like(model[int(name)].weight, dtype=torch.bool) for name in "024"}
    masks["0"][:2] = masks["2"][:, :2] = masks["2"][6:] = masks["4"][:, 6:] = False
    svdc.hold(model, masks)
    before = model[2].terms.detach().clone()
    small = svdc.prune(model.eval(), torch.randn(2, 3, 6, 6))
    wanted = model[2].log_sigma2.detach()[:6, 2:]
    torch.testing.assert_close(small[2].log_sigma2.detach(), wanted, rtol=0, atol=1e-6)
    assert torch.equal(model[2].terms, before)  # the given model is unchanged
    kept = posterior is PerOutput
    assert (small[2].posterior == posterior.name) is kept
