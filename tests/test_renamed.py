"""Former names work for one more release and say what to use instead."""

from __future__ import annotations

import pytest
import torch

from svdcompress import uncertainty
from svdcompress.layers import ARD, LogUniform, RankOne, Sampler, variational_layers
from svdcompress.renamed import renamed_arguments


@pytest.mark.parametrize("prior", [ARD(), LogUniform()], ids=str)
def test_a_prior_still_takes_its_mask_as_keep(prior):
    torch.manual_seed(0)
    mean, log_sigma2, mask = torch.randn(3, 4), torch.randn(3, 4), torch.rand(3, 4) > 0.4
    with pytest.warns(DeprecationWarning, match="'keep' is called 'mask' now"):
        former = prior.kl(mean, log_sigma2, keep=mask)
    assert torch.equal(former, prior.kl(mean, log_sigma2, mask=mask)) and former != prior.kl(mean, log_sigma2)


def test_so_does_a_posterior():
    import svdcompress as svdc

    ((_, layer),) = variational_layers(svdc.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)), posterior=RankOne()))
    with pytest.warns(DeprecationWarning, match="'keep' is called 'mask' now"):
        assert layer.posterior.spread(layer, keep=torch.zeros(2, 3, dtype=torch.bool)) is None


def test_pictures_of_a_comparison_by_their_former_name(tmp_path):
    with pytest.warns(DeprecationWarning, match="draw is now plot"):
        assert uncertainty.draw({"contenders": [], "task": "regression"}, tmp_path) == []
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        uncertainty.no_such  # noqa: B018


def test_the_noise_that_members_keep():
    sampler = Sampler()
    with pytest.warns(DeprecationWarning, match="Sampler.draws is now Sampler.noises"):
        assert sampler.draws is sampler.noises


def test_present_names_say_nothing(recwarn):
    @renamed_arguments(old="new")
    def twice(new: int) -> int:
        return 2 * new

    assert twice(2) == twice(new=2) == 4 and not recwarn.list
    with pytest.raises(TypeError, match="multiple values"), pytest.warns(DeprecationWarning):
        twice(2, old=3)
