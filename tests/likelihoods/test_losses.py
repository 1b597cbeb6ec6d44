"""Losses by name, against torch's own and torch.distributions."""

import pytest
import torch
from torch.nn import functional as F

from svdcompress.errors import RecipeError
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import LossSection


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 3, generator=generator)
    return logits, torch.tensor([0, 1, 2, 0, 1, 1, 2]), torch.randn(7, generator=generator)


def test_classes_are_weighed_and_smoothed(batch):
    logits, labels, _ = batch
    weights = torch.tensor([1.0, 2.0, 4.0])
    found = make_loss(LossSection(label_smoothing=0.2), class_weights=weights)(logits, labels)
    share = torch.full((7, 3), 0.2 / 3)
    share[torch.arange(7), labels] += 0.8
    by_hand = -(share * weights * logits.log_softmax(1)).sum() / weights[labels].sum()
    assert found == pytest.approx(float(by_hand), rel=1e-6)
    assert make_loss(LossSection())((logits, "another"), labels) == pytest.approx(float(F.cross_entropy(logits, labels)))


def test_binary_weighs_the_positive_class(batch):
    logits, _, values = batch
    logit, target = logits[:, :1], (values > 0).long()
    signs = torch.where(target[:, None] > 0, logit, -logit)
    plain = -F.logsigmoid(signs)
    assert make_loss(LossSection(name="binary"))(logit, target) == pytest.approx(float(plain.mean()), rel=1e-6)
    weighed = (plain * torch.where(target[:, None] > 0, 3.0, 1.0)).mean()
    found = make_loss(LossSection(name="binary"), class_weights=torch.tensor([3.0]))(logit, target)
    assert found == pytest.approx(float(weighed), rel=1e-6)


def test_regressions_are_the_likelihoods_of_normals_up_to_a_constant(batch):
    output, _, target = batch
    mean, log_variance = output[:, :1], output[:, 1:2]
    half = torch.log(torch.tensor(2 * torch.pi)) / 2
    exact = -torch.distributions.Normal(mean[:, 0], (log_variance[:, 0] / 2).exp()).log_prob(target).mean() - half
    nll = make_loss(LossSection(name="gaussian-nll"))
    assert nll((mean, log_variance), target) == pytest.approx(float(exact), rel=1e-5)
    assert nll(output[:, :2], target) == pytest.approx(float(exact), rel=1e-5)
    tau = 4.0
    exact = -torch.distributions.Normal(mean[:, 0], tau**-0.5).log_prob(target).mean() - half + torch.log(torch.tensor(tau)) / 2
    assert make_loss(LossSection(name="mse"), tau=tau)(mean, target) == pytest.approx(float(exact), rel=1e-5)


def test_a_loss_of_ones_own(batch):
    output, _, target = batch
    loss = make_loss(LossSection(name="torch.nn.functional:l1_loss", task="regression"))
    assert loss(output[:, 0], target) == pytest.approx(float((output[:, 0] - target).abs().mean()))
    with pytest.raises(RecipeError, match=r"loss\.name: .* has no 'l3_loss'"):
        make_loss(LossSection(name="torch.nn.functional:l3_loss", task="regression"))
