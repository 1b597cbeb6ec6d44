"""Other ways to a network of the same size, from the same dense start and in one run: what readers compare this package with.

    python -m venv peers && echo "$(.venv/bin/python -c 'import site; print(*site.getsitepackages())')" \\
        > peers/lib/python3.11/site-packages/ours.pth
    peers/bin/pip install --no-deps cplxmodule==2022.6
    peers/bin/python benchmarks/peers.py --data FOLDER_OF_THE_IDX_FILES [--recipe mnist-lenet300 ...] [--seeds 0 1 2]

"ours" is `svdc sparsify` of the recipe (a run that exists in --runs is not repeated). Every other peer starts from that run's
own dense weights and uses its training examples, its augmentation (none in the recipes whose names end in -still), its
optimizer and as many epochs as its fine-tuning and recovery together. Peers that prune weights end with as many non-zero
weights as the run; those that remove units end with no more parameters (torch-pruning cannot drop inputs, as the -units
recipes do).

Pruning by magnitude or by torch-pruning is gradual (Zhu & Gupta 2018, arXiv 1710.01878: the sparsity rises as 1 - (1 - t)^3
over the first half of the epochs), with one fall of the learning rate over all epochs, the better of two plans for it
(controls.md). cplxmodule's layers train with the recipe's own beta in its first stage; then as many weights as ours has are
kept, those with the lowest log alpha, and are trained as masked dense ones in its second stage.

A package that is not installed is left out, with a message. Results are written after each peer to
benchmarks/results/peers.json and peers.md; stored results are not computed again without --again.
"""

from __future__ import annotations

import argparse
import copy
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from controls import Magnitude, change, judged, stages_of, train
from mnist import HERE, RECIPES, machine, read, run, write
from torch import Tensor, nn

from svdcompress.pipeline import OpenRun, open_run
from svdcompress.recipe import in_epochs

TAYLOR_BATCHES = 10
"""The number of batches whose gradients torch-pruning's Taylor scores use, before each pruning step."""


@dataclass
class Budget:
    """The size limits of a network: non-zero weights in matrices and kernels, and parameters including biases."""

    weights: int
    parameters: int


# Peers: each takes a finished run, its dense model and the budget, and returns the network made from it


def magnitude(opened: OpenRun, model: nn.Module, budget: Budget, score: Callable[[Tensor], Tensor] = torch.abs) -> nn.Module:
    """Gradual global pruning of single weights."""
    stages = stages_of(opened.recipe, "one fall")
    train(model, opened.data.train, stages, Magnitude(model, budget.weights, _ramp(opened), score), opened.recipe.seed)
    return model


def lamp(weight: Tensor) -> Tensor:
    """A weight's square over the sum of its layer's squares that are no smaller (Lee et al. 2021, arXiv 2010.07611)."""
    squares, order = weight.square().flatten().sort()
    scores = torch.empty_like(squares)
    scores[order] = squares / squares.flip(0).cumsum(0).flip(0).clamp_min(1e-38)
    return scores.view_as(weight)


def cplxmodule(opened: OpenRun, model: nn.Module, budget: Budget, kind: str) -> nn.Module:
    """Layers of cplxmodule, trained with their penalty, cut to the budget by log alpha, then trained as masked dense ones."""
    from cplxmodule.nn import relevance

    names = [name for name, layer in model.named_modules() if type(layer) in (nn.Linear, nn.Conv2d)]
    for name in names:
        _swap(model, name, lambda layer: getattr(relevance, type(layer).__name__ + kind)(**_arguments(layer)))
    examples = len(opened.data.train)
    final = _beta(opened)
    stages = stages_of(opened.recipe, "two falls")
    penalty = lambda epoch: final(epoch) / examples * sum(relevance.penalties(model))  # noqa: E731
    train(model, opened.data.train, stages[:1], lambda epoch: None, opened.recipe.seed, penalty)
    alphas = [model.get_submodule(name).log_alpha.detach() for name in names]
    limit = torch.cat([alpha.flatten() for alpha in alphas]).kthvalue(budget.weights).values
    print(f"  cplxmodule {kind}: log alpha below {float(limit):.2f} leaves {budget.weights:,} weights", flush=True)
    masks = [(alpha <= limit).float() for alpha in alphas]
    for name in names:
        _swap(model, name, lambda layer: _dense_class(layer)(**_arguments(layer)))
    weights = [model.get_submodule(name).weight for name in names]

    def hold(epoch: float) -> None:
        with torch.no_grad():
            for weight, mask in zip(weights, masks, strict=True):
                weight.mul_(mask)

    hold(0.0)
    train(model, opened.data.train, stages[1:], hold, opened.recipe.seed)
    return model


def torch_pruning(opened: OpenRun, model: nn.Module, budget: Budget, importance: str) -> nn.Module:
    """torch-pruning's own pruner, global, with one small cut in each epoch of the first half."""
    import torch_pruning as tp

    data, ramp = opened.data.train, _ramp(opened)
    inputs = next(iter(data.batches(2)))[0]
    taylor = importance == "Taylor"
    head = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)][-1]
    pruner = tp.pruner.BasePruner(
        model,
        inputs,
        importance=tp.importance.GroupTaylorImportance() if taylor else tp.importance.GroupMagnitudeImportance(p=2),
        global_pruning=True,
        pruning_ratio=0.999,
        iterative_steps=2000,
        ignored_layers=[head],
    )
    start, last = _parameters(model), -1

    def prune(epoch: float) -> bool:
        nonlocal last
        if epoch < 0 or int(min(epoch, ramp)) == last:
            return False
        last = int(min(epoch, ramp))
        target = budget.parameters + (start - budget.parameters) * (1 - min(last / ramp, 1.0)) ** 3
        before = _parameters(model)
        while _parameters(model) > target:
            if taylor:
                _gradients(model, data, seed=pruner.current_step)
            now = _parameters(model), pruner.current_step
            pruner.step()
            if now[1] >= pruner.iterative_steps:
                raise RuntimeError(f"torch-pruning stopped at {now[0]:,} parameters, {target:,.0f} were wanted")
        return _parameters(model) < before

    train(model, data, stages_of(opened.recipe, "one fall"), prune, opened.recipe.seed)
    return model


Peer = Callable[[OpenRun, nn.Module, Budget], nn.Module]
PEERS: dict[str, tuple[str | None, Peer]] = {
    "gradual magnitude, global": (None, magnitude),
    "gradual magnitude, LAMP": (None, lambda *given: magnitude(*given, score=lamp)),
    "cplxmodule, ARD": ("cplxmodule", lambda *given: cplxmodule(*given, kind="ARD")),
    "cplxmodule, VD": ("cplxmodule", lambda *given: cplxmodule(*given, kind="VD")),
    "torch-pruning, magnitude": ("torch-pruning", lambda *given: torch_pruning(*given, importance="magnitude")),
    "torch-pruning, Taylor": ("torch-pruning", lambda *given: torch_pruning(*given, importance="Taylor")),
}
"""For each name: the package that is needed, and the peer's function."""


def _ramp(opened: OpenRun) -> float:
    return 0.5 * (opened.recipe.train.epochs + opened.recipe.recover.epochs)


def _beta(opened: OpenRun) -> Callable[[float], float]:
    """The recipe's linear schedule of beta."""
    settings = opened.recipe.train
    start, stop = (in_epochs(moment, settings.epochs) for moment in (settings.beta.start, settings.beta.stop))
    final = float(settings.beta.final)
    return lambda epoch: final * min(max((epoch - start) / max(stop - start, 1e-9), 0.0), 1.0)


def _gradients(model: nn.Module, data: Any, seed: int) -> None:
    """Accumulate the gradients of the loss over the first few batches, in the order that this seed gives."""
    model.zero_grad(set_to_none=True)
    for index, (x, y) in enumerate(data.batches(100, shuffle=seed)):
        if index == TAYLOR_BATCHES:
            return
        nn.functional.cross_entropy(model(x), y).backward()


def _swap(model: nn.Module, name: str, make: Callable[[nn.Module], nn.Module]) -> None:
    """Replace a layer by another one, which gets its weight and bias."""
    old = model.get_submodule(name)
    new = make(old)
    new.load_state_dict({key: value for key, value in old.state_dict().items() if key in ("weight", "bias")}, strict=False)
    model.set_submodule(name, new)


def _dense_class(layer: nn.Module) -> type[nn.Module]:
    return nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d


def _arguments(layer: Any) -> dict[str, Any]:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    names = ("in_features", "out_features") if isinstance(layer, nn.Linear) else names
    return {name: getattr(layer, name) for name in names} | {"bias": layer.bias is not None}


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# A run and its peers


def compared(folder: Path, wanted: Iterable[str], known: dict[str, Any], store: Callable[[dict[str, Any]], None]) -> None:
    """Train the wanted peers without stored results, and store after each; a change is our network's error minus theirs."""
    opened = open_run(folder)
    report = opened.results
    budget = Budget(sum(layer["weights"] for layer in report["layers"]), report["sparse"]["parameters"])
    stages = {name: getattr(opened.recipe, name).epochs for name in ("dense", "train", "recover")}
    known |= {"seed": opened.recipe.seed, "epochs": stages, "augment": opened.recipe.data.augment, "budget": vars(budget)}
    nets = known.setdefault("nets", {})
    ours, wrong = judged(opened.model, opened, {})
    nets["ours"] = {**ours, "weights": budget.weights, "parameters": budget.parameters}
    start, missed = judged(opened.dense, opened, {})
    nets["dense start"] = {**start, "parameters": _parameters(opened.dense), "change": change(missed, wrong)}
    store(known)
    for name in wanted:
        if name in nets:
            continue
        begun = time.process_time()
        model = PEERS[name][1](opened, copy.deepcopy(opened.dense), budget).eval()
        seconds = time.process_time() - begun
        figures, missed = judged(model, opened, {})
        nets[name] = {
            **figures,
            "parameters": _parameters(model),
            "change": change(missed, wrong),
            "seconds": round(seconds, 1),
        }
        store(known)
        print(f"{folder.name}: {name}: {figures['test_error']:.2f}% at {figures['weights']:,} weights", flush=True)


def table(results: dict[str, Any]) -> str:
    """Markdown: for each recipe our network, its dense start and the peers."""
    lines = [
        "# Peers",
        "",
        "Written by `benchmarks/peers.py`, which says how each is trained. All networks of a seed have the same dense start,",
        "training digits, augmentation and number of epochs. Means over the seeds, in brackets each seed's. The change is the",
        "error of our network less that of the row, in points, with its paired 95% interval on the test digits of each seed.",
        "Weights are those that are not 0; parameters are counted as stored, zeros and biases too.",
    ]
    for recipe, runs in results["recipes"].items():
        runs = [runs[seed] for seed in sorted(runs, key=int)]
        first = runs[0]
        moved = "moved by up to a pixel, in all stages" if first["augment"] else "as they are"
        epochs = first["epochs"]
        lines += ["", f"## {recipe}", ""]
        lines += [f"Dense start {epochs['dense']} epochs, then {epochs['train']} + {epochs['recover']}; digits {moved}.", ""]
        lines += ["| net | seeds | weights | parameters | test error % | validation error % | change by seed | CPU seconds |"]
        lines += ["|---" * 8 + "|"]
        for name in ("ours", "dense start", *PEERS):
            found = [(run["seed"], run["nets"][name]) for run in runs if name in run["nets"]]
            if found:
                lines.append(_row(name, found))
    missing = [f"{name}: {reason}" for name, reason in results.get("missing", {}).items()]
    lines += ["", *(["Left out: " + "; ".join(missing) + ".", ""] if missing else [])]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines += [f"{results['machine']['cpu']}, one thread, beside other work; {versions}.", ""]
    return "\n".join(lines)


def _row(name: str, found: list[tuple[int, dict[str, Any]]]) -> str:
    nets = [net for _, net in found]
    cells = [name, ", ".join(str(seed) for seed, _ in found)]
    cells += [f"{mean(net[key] for net in nets):,.0f}" for key in ("weights", "parameters")]
    for key in ("test_error", "validation_error"):
        values = [net[key] for net in nets]
        cells.append(f"{mean(values):.2f}" + (f" ({', '.join(f'{v:.2f}' for v in values)})" if len(values) > 1 else ""))
    changes = [net["change"] for net in nets if "change" in net]
    cells.append("; ".join(f"{change:+.2f} [{low:+.2f}, {high:+.2f}]" for change, low, high in changes))
    times = [net["seconds"] for net in nets if net.get("seconds")]
    cells.append(f"{mean(times):,.0f}" if times else "")
    return f"| {' | '.join(cells)} |"


def available(wanted: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """The wanted peers whose package is installed, and why the others are left out."""
    there, missing = [], {}
    for name in wanted:
        package = PEERS[name][0]
        try:
            if package is not None:
                version(package)
            there.append(name)
        except PackageNotFoundError:
            missing[name] = f"{package} is not installed"
    return there, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder of MNIST's four IDX files, where our own runs are still to be made")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="may be given several times; mnist-lenet300")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="may be given several times; all by default")
    parser.add_argument("--again", action="store_true", help="train those again whose results are stored")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs" / "benchmarks", help="where our own runs are")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where peers.json and peers.md go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for folder in (options.runs, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    wanted, missing = available(options.peer or PEERS)
    path = options.results / "peers.json"
    for seed in options.seeds:
        for recipe in options.recipe or ["mnist-lenet300"]:
            if run(recipe, seed, options.data, options.runs) is None:
                sys.exit(f"{recipe}, seed {seed}: no finished run in {options.runs}, and it could not be made (--data)")
            stored = read(path).get("recipes", {}).get(recipe, {}).get(str(seed), {})
            if options.again:
                stored["nets"] = {name: net for name, net in stored.get("nets", {}).items() if name not in wanted}

            def store(found: dict[str, Any], recipe: str = recipe, seed: int = seed) -> None:
                results = read(path) or {"recipes": {}}  # another process may have added to it
                results["recipes"].setdefault(recipe, {})[str(seed)] = found
                known = {name for runs in results["recipes"].values() for one in runs.values() for name in one["nets"]}
                results["missing"] = {name: why for name, why in missing.items() if name not in known}
                results["machine"], results["versions"] = machine(), _versions()
                write(path, results)
                path.with_suffix(".md").write_text(table(results), encoding="utf-8")

            compared(options.runs / f"{recipe}-{seed}", wanted, stored, store)
    for name, reason in missing.items():
        print(f"left out: {name}: {reason}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in sorted({package for package, _ in PEERS.values() if package} | {"svdcompress"}):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
