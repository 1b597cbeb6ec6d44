"""How noisy gradients are with one draw of the weights per batch (as in bayesian-torch), over one draw per pre-activation.

    python benchmarks/gradient_noise.py [--draws 200]

Both estimators have the same expectation. Compared is the variance of the gradient of the NLL over draws of the noise, for
the same weights, variances and batch, summed over all means and over all log variances: at the variances that training starts
with, and at larger ones. Results go to benchmarks/results/gradient_noise.json and gradient_noise.md.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from typing import Any

import torch
from speed import RESULTS, ROWS, Row, machine
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.layers import variational_layers

NAMES = ("LeNet-300-100, batch 100", "LeNet-5, batch 64")
LOG_SIGMA2 = (-10.0, -6.0)

Gradients = tuple[Tensor, Tensor]
"""The gradients of all means, and of all log variances."""


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).double()


def local_reparameterisation(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Gradients]:
    """Our estimator: gradients of the layers as they train."""
    layers = [layer for _, layer in variational_layers(model.train())]

    def draw() -> Gradients:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        return flat([layer.weight.grad for layer in layers]), flat([layer.log_sigma2.grad for layer in layers])

    return draw


def draw_of_weights(model: nn.Module, dense: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Gradients]:
    """Reparameterization of the weights, `w = mu + sigma eps`, with one draw per batch; `dense` holds the draws."""
    posterior = dict(variational_layers(model))
    pairs = [(layer, dense.get_submodule(name)) for name, layer in posterior.items()]

    def draw() -> Gradients:
        dense.zero_grad()
        noises = []
        with torch.no_grad():
            for layer, other in pairs:
                noises.append(torch.randn_like(layer.weight) * (layer.log_sigma2 / 2).exp())
                other.weight.copy_(layer.weight + noises[-1])
        nn.functional.cross_entropy(dense(x), y).backward()
        means = [other.weight.grad for _, other in pairs]
        return flat(means), flat([grad * noise / 2 for grad, noise in zip(means, noises, strict=True)])

    return draw


def variances(draw: Callable[[], Gradients], draws: int) -> tuple[float, float]:
    """The variance over draws, summed over the means and summed over the log variances."""
    square, sums = [0.0, 0.0], [torch.zeros(1), torch.zeros(1)]
    for _ in range(draws):
        for index, gradient in enumerate(draw()):
            sums[index] = sums[index] + gradient
            square[index] += float(gradient.square().sum())
    first, second = ((square[index] - float(sums[index].square().sum()) / draws) / (draws - 1) for index in (0, 1))
    return first, second


def measure(row: Row, log_sigma2: float, draws: int) -> dict[str, float]:
    """Ratios of the variances: one draw of the weights, over local reparameterization."""
    torch.manual_seed(0)
    dense, x = row.make(), torch.randn(row.shape)
    y = torch.randint(10, (len(x),))
    model = svdc.convert(copy.deepcopy(dense), log_sigma2=log_sigma2)
    shared = variances(draw_of_weights(model, dense, x, y), draws)
    local = variances(local_reparameterisation(model, x, y), draws)
    return {"means": shared[0] / local[0], "log variances": shared[1] / local[1]}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    where = results["machine"]
    lines = [
        "# Noise of gradients: one draw of the weights for a batch, over local reparameterisation",
        "",
        f"Ratios of variances over {results['draws']} draws, summed over the parameters; torch {where['versions']['torch']}, "
        "seed 0, random batches and weights as they are initialised.",
        "",
        "| work | log_sigma2 | gradient of the means | of the log variances |",
        "|---|---|---|---|",
    ]
    for row in results["rows"]:
        lines.append(f"| {row['work']} | {row['log_sigma2']:g} | {row['means']:.2f} | {row['log variances']:.2f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200)
    draws = parser.parse_args().draws
    torch.set_num_threads(1)
    found = []
    for name in NAMES:
        for log_sigma2 in LOG_SIGMA2:
            found.append({"work": name, "log_sigma2": log_sigma2, **measure(ROWS[name], log_sigma2, draws)})
            print(found[-1], flush=True)
    results = {"machine": machine(), "draws": draws, "rows": found}
    (RESULTS / "gradient_noise.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "gradient_noise.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
