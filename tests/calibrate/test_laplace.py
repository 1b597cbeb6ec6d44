"""Curvatures against Hessians and finite differences, draws against inverses; nothing here shares code with the package."""

import copy

import numpy as np
import pytest
import torch
from calibration_data import examples_of, mlp_classifier, sparse
from torch import nn
from torch.nn import functional as F

from svdcompress.calibrate import (
    Joint,
    LowRank,
    gauss_newton,
    held,
    joint_draws,
    kept_of,
    kronecker,
    low_rank,
    with_variances,
)
from svdcompress.calibrate._curvature import MOST_WEIGHTS, check_fits, noise_root
from svdcompress.errors import ModelError
from svdcompress.likelihoods import likelihood_for
from svdcompress.uncertainty import mc_predict

CLASSES = likelihood_for("classification")


def matrix(curvature, size):
    found = torch.zeros(size, size, dtype=torch.float64)
    for block in curvature.blocks:
        whole = torch.diag(block.values) if block.vectors is None else block.vectors * block.values @ block.vectors.T
        found[block.where, block.where] = whole
    return found


def slow_jacobian(model, x, masks):
    """The Jacobian (heads, K) of one input by central differences on a float64 copy, one weight at a time in layer order."""
    model = copy.deepcopy(model).double()
    columns = []
    for name, mask in masks.items():
        weight = model.get_submodule(name).weight
        for place in mask.flatten().nonzero().flatten().tolist():
            ends = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    weight.view(-1)[place] += step
                    ends.append(model(x.double().unsqueeze(0)).flatten())
                    weight.view(-1)[place] -= step
            columns.append((ends[0] - ends[1]) / 2e-5)
    return torch.stack(columns, 1)


def masks_of(model):
    return {name: m.mask for name, m in model.named_modules() if hasattr(m, "log_sigma2")}


def slow_gauss_newton(model, x, loss_hessian):
    total = 0.0
    for row in x:
        jacobian = slow_jacobian(model, row, masks_of(model))
        total = total + jacobian.T @ loss_hessian(model.double()(row.double().unsqueeze(0)).flatten()) @ jacobian
        model.float()
    return total.detach()


def softmax_hessian(z):
    return torch.autograd.functional.hessian(lambda z: F.cross_entropy(z.unsqueeze(0), torch.tensor([0])), z.detach())


def test_full_and_diagonal_are_jacobians_and_hessians():
    model, (x, y) = mlp_classifier(9)
    kept = kept_of(model)
    wanted = slow_gauss_newton(model, x, softmax_hessian)
    with held(model):
        full = gauss_newton(model, kept, examples_of(x, y), CLASSES)
        diagonal = gauss_newton(model, kept, examples_of(x, y), CLASSES, "diagonal")
        last = gauss_newton(model, kept, examples_of(x, y), CLASSES, "last-layer")
    assert torch.allclose(matrix(full, len(kept)), wanted, atol=1e-5)
    assert torch.allclose(diagonal.blocks[0].values, wanted.diagonal(), atol=1e-5)
    size = int(model[2].mask.sum())
    assert torch.allclose(matrix(last, len(kept))[-size:, -size:], wanted[-size:, -size:], atol=1e-5)
    assert matrix(last, len(kept))[:-size].abs().sum() == 0


def test_of_a_logistic_regression_it_is_the_hessian():
    model = sparse(nn.Sequential(nn.Linear(3, 3)))
    x, y = torch.randn(20, 3), torch.randint(0, 3, (20,))
    mask, bias = model[0].mask, model[0].bias.detach()

    def nll(kept):
        weight = torch.zeros(9).index_put((mask.flatten().nonzero().flatten(),), kept).view(3, 3)
        return F.cross_entropy(x @ weight.T + bias, y, reduction="sum")

    wanted = torch.autograd.functional.hessian(nll, model[0].weight.detach()[mask])
    kept = kept_of(model)
    found = gauss_newton(model, kept, examples_of(x, y), CLASSES)
    assert torch.allclose(matrix(found, len(kept)).float(), wanted, atol=1e-4)


@pytest.mark.parametrize("task", ["binary", "regression", "gaussian"])
def test_other_likelihoods(task):
    heads = {"binary": torch.randn(4, 3), "regression": torch.randn(4, 3)}.get(task)
    if task == "gaussian":
        heads = (torch.randn(4, 3), torch.randn(4, 3))
    root = noise_root(likelihood_for(task), heads, 2.5)
    found = root @ root.transpose(1, 2)
    if task == "binary":
        p = torch.sigmoid(heads)
        wanted = torch.diag_embed(p * (1 - p))
    elif task == "regression":
        wanted = torch.eye(3).expand(4, 3, 3) * 2.5
    else:  # the Fisher information of a normal distribution: 1 / variance for the mean, 1/2 for the log variance
        wanted = torch.diag_embed(torch.cat([1 / heads[1].exp(), torch.full((4, 3), 0.5)], 1))
    assert torch.allclose(found, wanted, atol=1e-6)


def test_pixels_have_hessians_of_their_own():
    heads = torch.randn(2, 3, 4)
    root = noise_root(CLASSES, heads)
    found = (root @ root.transpose(1, 2)).view(2, 4, 3, 4, 3)
    for image in range(2):
        for a in range(4):
            for b in range(4):
                wanted = softmax_hessian(heads[image, :, a]) if a == b else torch.zeros(3, 3)
                assert torch.allclose(found[image, a, :, b], wanted, atol=1e-6)


def test_kronecker_factors_by_loops():
    torch.manual_seed(1)
    model = sparse(nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)))
    x, y = torch.randn(7, 2, 4, 4), torch.randint(0, 3, (7,))
    kept = kept_of(model)
    with held(model):
        found = matrix(kronecker(model, kept, examples_of(x, y), CLASSES), len(kept))
    conv, linear = model[0], model[3]
    weight = (conv.weight * conv.mask).detach()
    inputs, outputs, positions = 0.0, 0.0, 4
    inputs_linear, outputs_linear = 0.0, 0.0
    for image in x:
        padded = F.pad(image, (1, 1, 1, 1))
        patches = [padded[:, i : i + 3, j : j + 3].flatten() for i in (0, 2) for j in (0, 2)]
        inputs = inputs + sum(torch.outer(a, a) for a in patches)
        before = torch.stack([weight.flatten(1) @ a + conv.bias.detach() for a in patches], 1).view(3, 2, 2)
        head = lambda s: F.linear(torch.tanh(s).flatten(), linear.weight * linear.mask, linear.bias)  # noqa: E731
        jacobian = torch.autograd.functional.jacobian(head, before).view(3, 3, positions)
        hessian = softmax_hessian(head(before))
        outputs = outputs + sum(jacobian[:, :, p].T @ hessian @ jacobian[:, :, p] for p in range(positions)) / positions
        a = torch.tanh(before).flatten()
        inputs_linear, outputs_linear = inputs_linear + torch.outer(a, a), outputs_linear + hessian
    wanted = torch.block_diag(
        torch.kron(outputs, inputs / 7)[conv.mask.flatten()][:, conv.mask.flatten()],
        torch.kron(outputs_linear, inputs_linear / 7)[linear.mask.flatten()][:, linear.mask.flatten()],
    )
    assert torch.allclose(found.float(), wanted.detach(), atol=1e-4)


def covariance(posterior, size):
    factor = posterior.perturb(torch.eye(size, dtype=torch.float64))
    return factor.T @ factor


def test_draws_have_the_inverse_as_covariance():
    model, (x, y) = mlp_classifier(30)
    kept = kept_of(model)
    with held(model):
        full = gauss_newton(model, kept, examples_of(x, y), CLASSES)
    precision = matrix(full, len(kept)).numpy() + 0.3 * np.eye(len(kept))
    joint = Joint(kept, full, 0.3)
    assert np.allclose(covariance(joint, len(kept)).numpy(), np.linalg.inv(precision), atol=1e-8)
    assert np.allclose(joint.variances().numpy(), np.linalg.inv(precision).diagonal(), atol=1e-8)
    values, vectors = np.linalg.eigh(matrix(full, len(kept)).numpy())
    top = (vectors[:, -4:] * values[-4:]) @ vectors[:, -4:].T
    rest = np.diag((matrix(full, len(kept)).numpy() - top).diagonal() + 0.3)
    reduced = LowRank(kept, *low_rank(full, 4, 0.3))
    assert np.allclose(covariance(reduced, len(kept)).numpy(), np.linalg.inv(rest + top), atol=1e-8)


def test_joint_draws_are_the_model_with_each_drawn_weight():
    model, (x, y) = mlp_classifier(6)
    kept = kept_of(model)
    with held(model):
        joint = Joint(kept, gauss_newton(model, kept, examples_of(x, y), CLASSES), 1.0)
        draws = joint_draws(model, joint, examples_of(x, y), CLASSES, 5, seed=3)
    noise = torch.randn(5, len(kept), generator=torch.Generator().manual_seed(3))
    first = int(model[0].mask.sum())
    for index, change in enumerate(joint.perturb(noise)):
        other = copy.deepcopy(model)
        other[0].weight.data[other[0].mask] += change[:first]
        other[2].weight.data[other[2].mask] += change[first:]
        assert torch.allclose(draws.outputs[index], other(x), atol=1e-5)


def test_a_diagonal_posterior_is_other_variances():
    model, (x, y) = mlp_classifier(40)
    kept = kept_of(model)
    with held(model):
        joint = Joint(kept, gauss_newton(model, kept, examples_of(x, y), CLASSES, "diagonal"), 2.0)
        theirs = joint_draws(model, joint, examples_of(x, y), CLASSES, 4000, seed=1).outputs.double().softmax(-1)
    baked = with_variances(model, kept, joint.variances())
    ours = mc_predict(baked, x, 4000, members=True, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(ours.mean, theirs.mean(0), atol=0.02)
    assert torch.allclose(ours.epistemic, theirs.var(0), atol=0.01)
    assert torch.equal(baked(x), model(x))


def test_a_part_of_the_examples_is_scaled_up():
    model, (x, y) = mlp_classifier(40)
    kept = kept_of(model)
    whole = gauss_newton(model, kept, examples_of(x.repeat(5, 1), y.repeat(5)), CLASSES, "diagonal")
    part = gauss_newton(model, kept, examples_of(x.repeat(5, 1), y.repeat(5)), CLASSES, "diagonal", most=150)
    assert part.examples == 150
    assert float(part.blocks[0].values.sum()) == pytest.approx(float(whole.blocks[0].values.sum()), rel=0.1)


def test_what_does_not_fit_and_what_has_no_rule():
    with pytest.raises(ModelError, match="needs a matrix"):
        check_fits(MOST_WEIGHTS + 1)
    model = sparse(nn.Sequential(nn.Conv2d(2, 2, 1, groups=2), nn.Flatten(), nn.Linear(8, 2)))
    x, y = torch.randn(3, 2, 2, 2), torch.randint(0, 2, (3,))
    with pytest.raises(ModelError, match="the Kronecker approximation does not support"):
        kronecker(model, kept_of(model), examples_of(x, y), CLASSES)
    for layer in (model[0], model[2]):
        layer.mask.zero_()
    with pytest.raises(ModelError, match="no weight is left"):
        kept_of(model)


@pytest.mark.parametrize("dim", [1, -1])
def test_positions_that_do_not_count_say_nothing_of_the_weights(dim):
    torch.manual_seed(0)
    last = sparse(nn.Sequential(nn.Linear(4, 3)))
    model = last if dim == -1 else nn.Sequential(Swap(), last, Swap())
    x, y = torch.randn(6, 5, 4), torch.randint(3, (6, 5))
    there = torch.rand(6, 5) < 0.5
    there[0], there[1] = True, False
    likelihood = likelihood_for("classification", dim)
    inputs = x if dim == -1 else x.movedim(1, 2)
    with held(model):
        data = examples_of(inputs, torch.where(there, y, -100))
        full, diagonal = (gauss_newton(model, kept_of(model), data, likelihood, kind) for kind in ("full", "diagonal"))
        chain = kronecker(model, kept_of(model), data, likelihood)
    slow = slow_gauss_newton(last, x[there], softmax_hessian)
    assert np.allclose(matrix(full, len(slow)), slow, atol=1e-5)
    assert np.allclose(diagonal.blocks[0].values, slow.diagonal(), atol=1e-5)
    everywhere = slow_gauss_newton(last, x.flatten(0, 1), softmax_hessian)
    assert float(slow.trace()) < 0.7 * float(everywhere.trace())
    with held(model):
        all_of_them = kronecker(model, kept_of(model), examples_of(inputs, y), likelihood)
    traces = [float(sum(block.values.sum() for block in found.blocks)) for found in (chain, all_of_them)]
    assert traces[0] < 0.7 * traces[1]


class Swap(nn.Module):
    def forward(self, x):
        return x.movedim(1, 2)
