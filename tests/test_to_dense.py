"""Layers made dense again: tied layers that keep different weights, and layers whose weight was replaced by another's."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import svdcompress as svdc
from svdcompress.errors import ModelError


class Half(nn.Module):
    def forward(self, weight):
        return 0.5 * weight


def tied():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return svdc.convert(nn.Sequential(first, nn.Tanh(), second), log_sigma2=-3.0).eval()


def by_hand(x, weight, masks, biases):
    (one, two), (first, second) = masks, biases
    return ((x @ (weight * one).T + first).tanh()) @ (weight * two).T + second


@pytest.mark.parametrize("how", ["held", "thresholds"])
@pytest.mark.parametrize(
    "make", [svdc.to_dense, lambda model: svdc.to_sparse(model, torch.rand(3, 4))], ids=["dense", "sparse"]
)
@pytest.mark.filterwarnings("ignore:to_sparse")
def test_tied_layers_that_keep_different_weights_are_untied(make, how):
    """Both masks used to be applied to the shared weight."""
    model, x = tied(), torch.rand(3, 4)
    masks = [torch.rand(4, 4) > 0.5, torch.rand(4, 4) > 0.5]
    if how == "held":
        svdc.hold(model, {"0": masks[0], "2": masks[1]})
    else:
        model[0].threshold = {"weight": 1.0}
        masks = [model[0].relevant(), model[2].relevant()]
    assert not torch.equal(*masks)
    with torch.no_grad():
        wanted = by_hand(x, model[0].weight, masks, (model[0].bias, model[2].bias))
        torch.testing.assert_close(model(x), wanted)
        made = make(model)
        torch.testing.assert_close(made(x), wanted)


def test_tied_layers_that_keep_the_same_weights_stay_tied():
    model = tied()
    mask = torch.rand(4, 4) > 0.5
    svdc.hold(model, {"0": mask, "2": mask})
    made = svdc.to_dense(model)
    assert made[0].weight is made[2].weight and torch.equal(made[0].weight != 0, mask)


def test_a_weight_that_is_computed_since_is_refused_and_the_model_stays():
    model, x = svdc.convert(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))).eval(), torch.rand(2, 4)
    parametrize.register_parametrization(model[1], "weight", Half())
    before = model(x)
    with pytest.raises(ModelError, match=r"1: its weight has been computed from other tensors since it was converted"):
        svdc.to_dense(model)
    assert torch.equal(model(x), before) and isinstance(model[0], svdc.layers.VariationalLayer)


def test_a_log_variance_that_is_computed_is_named():
    model = svdc.convert(nn.Sequential(nn.Linear(4, 3)))
    parametrize.register_parametrization(model[0], "log_sigma2", Half())
    with pytest.raises(ModelError, match="its log_sigma2 is no longer a parameter"):
        svdc.kl_divergence(model)


def test_a_strict_state_without_masks_drops_them_with_a_warning():
    model = svdc.convert(nn.Sequential(nn.Linear(4, 4)))
    svdc.hold(model, {"0": torch.eye(4, dtype=torch.bool)})
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.load_state_dict(own, strict=False)
    assert model[0].mask is not None
    with pytest.warns(UserWarning, match="the state has no mask, so the layer's own was removed"):
        model.load_state_dict(own)
    assert model[0].mask is None


def test_weights_far_below_one_are_warned_of(recwarn):
    layer = nn.Linear(40, 50)
    svdc.convert(nn.Sequential(nn.Linear(4, 4)))
    nn.init.zeros_(zero := nn.Linear(3, 3).weight)
    assert not len(recwarn) and not zero.any()
    layer.weight.data.normal_(0, 1e-5)
    with pytest.warns(UserWarning, match=r"weights this small are taken for noise.*\(root mean squares: 0 1e-05\)"):
        svdc.convert(nn.Sequential(layer))
