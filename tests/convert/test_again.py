"""A second conversion, and filters together with patterns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import svdcompress as svdc
from svdcompress.errors import ModelError


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    "other", [{"prior": "log-uniform"}, {"share": "input"}, {"threshold": 2.0}, {"variance_dtype": "float32"}]
)
def test_a_second_conversion_with_other_settings_is_an_error(other):
    model = svdc.convert(pair(), include=["0"])
    with pytest.raises(ModelError, match=rf"0 is already variational, with {next(iter(other))}="):
        svdc.convert(model, **other)
    assert type(model[2]) is nn.Linear
    svdc.convert(model, exclude=["0"], **other)  # the variational layer is excluded
    svdc.convert(model[0], threshold=3.0)  # the same setting again
    assert model[0].prior == "ard" and hasattr(model[2], "log_sigma2")


@pytest.mark.parametrize("posterior", ["independent", "rank-one"])
def test_a_second_conversion_that_starts_elsewhere_is_an_error(posterior):
    model = svdc.convert(pair(), include=["0"], log_sigma2=-10.0, posterior=posterior)
    with pytest.raises(ModelError, match=r"0 is already variational, with log variances that start at -10; .* start at -2"):
        svdc.convert(model, log_sigma2=-2.0, posterior=posterior)
    assert type(model[2]) is nn.Linear
    svdc.convert(model, log_sigma2=-10.0, posterior=posterior)
    with torch.no_grad():
        for own in model[0].variance_parameters().values():
            own.add_(1)
    svdc.convert(model, log_sigma2=-10.0, posterior=posterior)  # a trained model does not count as starting elsewhere


def test_a_filter_decides_beside_the_patterns():
    seen = []

    def small(module, name):
        seen.append((type(module), name))
        return module.weight.numel() < 10

    entries = {entry.name: entry for entry in svdc.plan(pair(), filter_fn=small)}
    assert not entries["0"].converted and entries["0"].reason == "excluded by filter_fn" and entries["2"].converted
    assert seen == [(nn.Linear, "0"), (nn.Linear, "2")]
    model = svdc.convert(pair(), filter_fn=small)
    assert type(model[0]) is nn.Linear and hasattr(model[2], "log_sigma2")
    with pytest.raises(ModelError, match="nothing to convert"):
        svdc.convert(pair(), exclude=["2"], filter_fn=small)


def test_two_starts_of_the_variances_are_an_error():
    model = pair()
    with pytest.raises(ModelError, match="log_sigma2 and log_alpha both say where log variances start"):
        svdc.convert(model, log_sigma2=-8.0, log_alpha=-6.0)
    assert type(model[0]) is nn.Linear
