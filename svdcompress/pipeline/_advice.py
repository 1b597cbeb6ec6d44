"""What a user should hear before a long run: settings that are unlikely to suit the model."""

from __future__ import annotations

from torch import nn

from svdcompress.convert import plan
from svdcompress.recipe import Recipe, in_epochs

LARGE = 5_000_000
"""Parameters from which a model counts as large: pretrained ResNets and transformers, not the small nets of MNIST."""

HARD = 10.0
"""Converted weights per training example from which beta = 1 on a large model prunes very hard (ResNet-50 on ImageNet: 20)."""


def advice(recipe: Recipe, model: nn.Module, examples: int) -> list[str]:
    """Warnings, one line each; model: the dense one. examples: N, the number of training examples."""
    entries = plan(model, recipe.convert.include, recipe.convert.exclude)
    weights = sum(entry.parameters for entry in entries if entry.converted)
    total = sum(p.numel() for p in model.parameters())
    train, beta = recipe.train, recipe.train.beta
    lines = []
    if beta.final >= 1 and total >= LARGE and weights / examples >= HARD:
        lines.append(
            f"train.beta.final={beta.final:g} with {weights:,} weights and N={examples:,} examples is likely to prune "
            "very hard; on large models 0.05 to 0.2 is a better start"
        )
    if recipe.convert.log_sigma2 > -12 and total >= LARGE:
        lines.append(
            f"convert.log_sigma2={recipe.convert.log_sigma2:g} is much noise for a large pretrained model; -15 suits better"
        )
    if beta.name in ("linear", "cosine") and in_epochs(beta.stop, train.epochs) > train.epochs:
        lines.append(f"train.beta.stop={beta.stop} lies beyond train.epochs={train.epochs}: beta never reaches {beta.final:g}")
    if beta.name == "additive" and beta.step * train.epochs < beta.final:
        lines.append(f"beta rises by {beta.step:g} an epoch and ends at {beta.step * train.epochs:g}, not at {beta.final:g}")
    if weights < 0.5 * total:
        share = 100 * weights / total
        lines.append(f"only {share:.0f}% of the {total:,} parameters are in layers to be converted (svdc inspect tells why)")
    if examples < 500:
        lines.append(f"only {examples} training examples: the KL counts for 1/{examples} each, so expect much to be pruned")
    return lines
