"""Where log alpha starts, which weights share a prior, how fast log sigma2 moves: short fine-tuning of small trained networks.

    python benchmarks/starts.py [--again]

Each network (benchmarks/models/digits.py) is trained once; each row is a fine-tuning of it with the annealed ELBO, in which
beta ends at 10 N / weights, exact removal of units and a short recovery. Errors are on the 597 digits that were not used for
training: the rows compare settings and are no measure of quality. Rows are written to benchmarks/results/starts.json and
starts.md as they come, and not measured again without --again.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from models.digits import NETS, data
from torch import nn

import svdcompress as svdc
from svdcompress.likelihoods import make_loss
from svdcompress.recipe import LossSection, Training
from svdcompress.selection import Coupling
from svdcompress.sources import InMemory
from svdcompress.train import evaluate, factors, fit, steps_of

RESULTS = Path(__file__).resolve().parent / "results"
SHORT = {"epochs": 20, "batch_size": 100, "lr": 1e-3}
"""The command's defaults: 240 steps."""

TUNE = {"epochs": 15, "batch_size": 50, "lr": 1e-4}
"""Settings for fine-tuning a trained network: 360 steps, in which a mean can move by 0.027."""

SHARES: dict[str, Any] = {
    "weight": "weight",
    "0.8 weight, 0.2 input": {"weight": 0.8, "input": 0.2},
    "0.8 weight, 0.1 input, 0.1 output": {"weight": 0.8, "input": 0.1, "output": 0.1},
    "0.5 weight, 0.25 input, 0.25 output": {"weight": 0.5, "input": 0.25, "output": 0.25},
}
STARTS: dict[str, dict[str, Any]] = {
    "log sigma2 -8": {"log_sigma2": -8.0},
    "log sigma2 -10 (default)": {},
    "log sigma2 -15": {"log_sigma2": -15.0},
    "log alpha -6, by layer": {"log_alpha": -6.0},
    "log alpha -3, by layer": {"log_alpha": -3.0},
    "log alpha -6, by weight": {"each": -6.0},
    "log sigma2 -10, moved by up to 9": {"travel": 9.0},
    "log alpha -6, by layer, moved by up to 9": {"log_alpha": -6.0, "travel": 9.0},
}


def loss() -> Any:
    """The cross-entropy."""
    return make_loss(LossSection())


def shifted(x: torch.Tensor) -> torch.Tensor:
    """A batch of digits, all shifted alike by up to a pixel."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    return nn.functional.pad(x, (1, 1, 1, 1))[:, :, 1 + down : 9 + down, 1 + right : 9 + right]


def trained(name: str, examples: InMemory) -> nn.Module:
    """A trained dense network, from the file that the first call makes."""
    file = RESULTS.parent.parent / "runs" / "benchmarks" / f"starts-{name}.pt"
    torch.manual_seed(0)
    net = NETS[name]()
    if file.is_file():
        net.load_state_dict(torch.load(file, weights_only=True))
        return net
    settings = Training(epochs=60, batch_size=50, lr=2e-3, optimizer="adamw", weight_decay=0.05, schedule={"start": "0%"})  # type: ignore[arg-type]
    fit(net, examples, loss(), settings, device="cpu")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), file)
    return net


def row(net: nn.Module, examples: InMemory, held: InMemory, training: dict[str, Any], start: dict[str, Any]) -> dict[str, Any]:
    """Convert, fine-tune, prune, recover. start: arguments of `convert`, "each" (log alpha), "travel" (of log sigma2)."""
    options = dict(start)
    travel, each = options.pop("travel", None), options.pop("each", None)
    model: Any = svdc.convert(copy.deepcopy(net), **options)
    layers = [layer for layer in model.modules() if hasattr(layer, "log_sigma2")]
    if each is not None:
        with torch.no_grad():
            for layer in layers:
                layer.log_sigma2.copy_(each + torch.log(layer.weight.square() + 1e-8))
    settings = Training(**training)
    final = min(1.0, 10 * len(examples) / sum(layer.weight.numel() for layer in layers))
    schedule = svdc.LinearWarmup(0.05 * settings.epochs, 0.3 * settings.epochs, final)
    up = factors(settings, steps_of(settings, len(examples)), schedule)[0]
    rate = None if travel is None else travel / up
    fit(model, examples, loss(), settings, schedule=schedule, lr_log_sigma2=rate, device="cpu")
    x = examples.inputs[:2]
    masks = svdc.relevance(model) if layers[0].share == {"weight": 1.0} else Coupling(model, x).relevance(None, "input")
    small = svdc.prune(model, x, masks=masks)
    recover = Training(epochs=5, batch_size=settings.batch_size, lr=min(5e-4, 2 * settings.lr), schedule={"start": "0%"})  # type: ignore[arg-type]
    fit(small, examples, loss(), recover, stage="recover", schedule=svdc.Constant(final), device="cpu")
    count = sum(p.numel() for p in svdc.to_dense(copy.deepcopy(small)).parameters())
    found = {"sparsity": masks.sparsity, "parameters": count, "dense_parameters": sum(p.numel() for p in net.parameters())}
    errors = {"error": error(small, held), "dense_error": error(net, held)}
    return found | errors


def error(model: nn.Module, held: InMemory) -> float:
    """The percentage of digits that are not recognized."""
    return evaluate(model.eval(), held, "classification")["error"]


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: one table for shares and one for starts."""
    lines = [
        "# Starts and shares",
        "",
        "Written by `benchmarks/starts.py`; one run each, errors on 597 digits (one: 0.17%).",
        "",
    ]
    head = ["| network | setting | weights gone | parameters | error % (dense) |", "|---|---|---|---|---|"]
    texts = {
        "share": "Shares, with the command's defaults (20 epochs of 12 steps, lr 1e-3, log sigma2 from -10).",
        "start": "Starts and learning rates of log sigma2, fine-tuning (15 epochs of 24 steps, lr 1e-4, share weight).",
    }
    for part, text in texts.items():
        lines += [f"## {text}", "", *head]
        for key, one in found.items():
            kind, net, name = key.split("/")
            if kind == part:
                sizes = f"{one['dense_parameters']:,} to {one['parameters']:,}"
                errors = f"{one['error']:.2f} ({one['dense_error']:.2f})"
                lines.append(f"| {net} | {name} | {100 * one['sparsity']:.0f}% | {sizes} | {errors} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure all rows again")
    again = parser.parse_args().again
    torch.set_num_threads(1)
    file = RESULTS / "starts.json"
    found = {} if again or not file.is_file() else json.loads(file.read_text(encoding="utf-8"))
    train, test = data()
    examples, held = InMemory(*train, augment=shifted), InMemory(*test)
    wanted = {f"share/{net}/{name}": (net, SHORT, {"share": share}) for net in NETS for name, share in SHARES.items()}
    wanted |= {f"start/{net}/{name}": (net, TUNE, start) for net in ("cnn", "transformer") for name, start in STARTS.items()}
    for key, (name, training, start) in wanted.items():
        if key not in found:
            found[key] = row(trained(name, examples), examples, held, training, start)
            found = {name: found[name] for name in wanted if name in found}
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            (RESULTS / "starts.md").write_text(table(found), encoding="utf-8")
            print(key, found[key], flush=True)


if __name__ == "__main__":
    main()
