"""Which units a pretrained network can do without, before its variances have learned anything: DnCNN, just converted.

    git clone --depth 1 https://github.com/SaoYan/DnCNN-PyTorch dncnn
    python benchmarks/start_ranks.py --dncnn dncnn [--epochs 2] [--results FOLDER]

The public weights are converted (log sigma2 -10 everywhere) and units are cut at once to a share of the multiply-accumulates,
ranked by `svdcompress.selection.ranked` with the information alone, which is magnitude at this point, or with 256 training
patches as examples; both also with `svdcompress.reconstruct` on 800 training patches. PSNR is measured on 500 noisy patches
of Set12, before any training, and at half of the multiply-accumulates also after a few epochs of training the means on 1,600
patches (batch 32, Adam from 5e-4 falling to 0, bfloat16). Written to start_ranks.json and .md.
"""

from __future__ import annotations

import argparse
import copy
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from mnist import HERE, machine, write
from torch import Tensor, nn

import svdcompress as svdc
from svdcompress.relevance import hold
from svdcompress.selection import Ranking, whole_units

sys.path.insert(0, str(HERE / "models"))
from denoise import dncnn, patches

LEFT = (0.75, 0.5, 0.25)
TRAINED = 0.5
RANKS = {
    "information": (0, False),
    "information and examples": (256, False),
    "information, reconstructed": (0, True),
    "information and examples, reconstructed": (256, True),
}
"""Training patches as examples, and whether layers are reconstructed, by the name of the rank."""

FITTED = 800


def psnr(model: nn.Module, x: Tensor, noise: Tensor) -> float:
    """The mean PSNR over the patches, in dB."""
    model.eval()
    with torch.no_grad():
        return float(-10 * (model(x) - noise).square().mean((1, 2, 3)).log10().mean())


def trained(model: nn.Module, x: Tensor, noise: Tensor, epochs: int) -> nn.Module:
    """The small network, made dense and trained further."""
    svdc.to_dense(model)
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    steps = epochs * -(-len(x) // 32)
    factor = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    for _ in range(epochs):
        model.train()
        for at in torch.randperm(len(x)).split(32):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(x[at])
            optimizer.zero_grad()
            nn.functional.mse_loss(output.float(), noise[at]).backward()
            optimizer.step()
            factor.step()
    return model


def table(results: dict[str, Any]) -> str:
    """Markdown: PSNR by rank and share."""
    heads = [f"{share:.0%} left" for share in LEFT] + [f"{TRAINED:.0%} left, {results['epochs']} epochs on"]
    lines = [
        "# Ranks of a network just converted",
        "",
        "Written by `benchmarks/start_ranks.py`, which says how. PSNR in dB.",
        "",
    ]
    lines += [f"| rank | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for rank, found in results["ranks"].items():
        lines.append(f"| {rank} | {' | '.join(f'{found[key]:.2f}' for key in [*map(str, LEFT), 'trained'])} |")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return "\n".join([*lines, "", f"Dense: {results['dense']:.2f}. {results['machine']['cpu']}, one thread; {versions}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dncnn", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = torch.load(options.dncnn / "logs" / "DnCNN-S-25" / "net.pth", map_location="cpu", weights_only=True)
    dense = dncnn()
    dense.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})
    x, noise = patches(options.dncnn / "data" / "train", 1600, 0)
    held = patches(options.dncnn / "data" / "Set12", 500, 1)
    path = options.results / "start_ranks.json"
    results: dict[str, Any] = {"dense": psnr(dense, *held), "epochs": options.epochs, "ranks": {}}
    results |= {"machine": machine(), "versions": {one: version(one) for one in ("torch", "svdcompress")}}
    converted = svdc.convert(dense).eval()
    for rank, (count, rebuilt) in RANKS.items():
        model = converted
        ranking, found = Ranking(model, x[:2], examples=x[:count].split(2) if count else None), {}
        for share in LEFT:
            masks = ranking.at({"macs": share}).masks
            if rebuilt:
                masks = whole_units(model, masks)
                model = copy.deepcopy(converted)
                svdc.reconstruct(model, x[:FITTED], masks)
            hold(model, masks)
            found[str(share)] = psnr(model, *held)
            hold(model, None)
            if share == TRAINED:
                small = svdc.prune(model, x[:2], masks=masks, verify=False)
                found["trained"] = psnr(trained(small, x, noise, options.epochs), *held)
        results["ranks"][rank] = found
        print(rank, found, flush=True)
    write(path, results)
    path.with_suffix(".md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
