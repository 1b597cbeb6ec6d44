"""Other uses of a run's epochs: dense training, torch-pruning to our MACs or parameters, pruning of single weights to our
size."""

from __future__ import annotations

import math
import pickle
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from controls import Magnitude
from slices import Slice
from torch import Tensor, nn

from svdcompress import cost
from svdcompress.batch import call, main_output, to_device
from svdcompress.errors import SvdcError
from svdcompress.layers import arranged_convolutions
from svdcompress.pipeline import OpenRun
from svdcompress.sources import import_name
from svdcompress.train import LrFactor, norms, resolved_precision, seed_everything
from svdcompress.train._dropout import Rates, share_of_rates

PRUNE_EVERY = 25
"""Training steps between two steps of a pruner."""

TAYLOR_BATCHES = 4
"""The number of batches whose gradients torch-pruning's Taylor scores use, before each pruning step."""

STEPS_OF_HEADS = 36
"""Steps of torch-pruning if it drops attention heads: a little more than one of 48 heads in each step, as it fails (1.6.1, an
UnboundLocalError) at a step too small for one."""


@dataclass(frozen=True)
class Way:
    """The epochs from the dense network to ours, our multiply-accumulates, and how many weights may be left: as many as ours
    has parameters, or non-zeros if the goal counts these. by_weights: whether a peer that removes units goes by that number
    and not by multiply-accumulates, as the goal does."""

    epochs: int
    macs: int
    left: int = 0
    by_weights: bool = False

    @property
    def size(self) -> int:
        """How large a network may be from which units are removed, by `size_of`."""
        return self.left if self.by_weights else self.macs

    def size_of(self, model: nn.Module, example: Any) -> int:
        """The parameters or multiply-accumulates of a network."""
        return sum(p.numel() for p in model.parameters()) if self.by_weights else macs(model, example)


class Loss:
    """The loss of a batch, as in the run's recovery.

    Cross-entropy (of labels, or of the dense network's answers), squared error, or the Gaussian likelihood of a mean and a
    log variance; mixed with the dense network's answers if the run distills. distilled: whether it may be mixed with them.
    """

    def __init__(self, opened: OpenRun, device: torch.device, distilled: bool = True) -> None:
        recipe = opened.recipe
        self.task, self.unlabelled, self.distill = recipe.task, recipe.data.unlabelled, opened.recovery.distill
        wanted = self.unlabelled or (self.distill.weight > 0 and distilled)
        self.teacher = opened.dense.to(device).eval() if wanted else None

    def __call__(self, model: nn.Module, x: Any, y: Tensor) -> Tensor:
        output = main_output(call(model, x)).float()
        if self.teacher is None:
            return self._of_targets(output, y)
        with torch.no_grad():
            answer = main_output(call(self.teacher, x)).float()
        if self.unlabelled:
            return nn.functional.cross_entropy(output, answer.softmax(1))
        weight, temperature = self.distill.weight, self.distill.temperature
        if self.task == "classification":
            soft = temperature**2 * nn.functional.cross_entropy(output / temperature, (answer / temperature).softmax(1))
        else:
            soft = self._of_targets(output, answer.chunk(2, 1)[0] if self.task == "gaussian" else answer)
        return (1 - weight) * self._of_targets(output, y) + weight * soft

    def of_scores(self, model: nn.Module, x: Any, y: Tensor) -> Tensor:
        """The loss whose gradients score units. Without labels, the class that the dense network takes for each example is the
        target: a network that still is the dense one has no gradient towards its own answers."""
        if not self.unlabelled:
            return self(model, x, y)
        assert self.teacher is not None
        with torch.no_grad():
            answer = main_output(call(self.teacher, x)).argmax(1)
        return self._of_targets(main_output(call(model, x)).float(), answer)

    def _of_targets(self, output: Tensor, y: Tensor) -> Tensor:
        if self.task == "classification":
            return nn.functional.cross_entropy(output, y)
        if self.task == "gaussian":
            mean, log_variance = output.chunk(2, 1)
            return nn.functional.gaussian_nll_loss(mean, y.view(mean.shape).float(), log_variance.exp())
        return nn.functional.mse_loss(output, y.view(output.shape).float())


Prune = Callable[[float], bool | None]
Peer = Callable[[nn.Module, OpenRun, Way, Loss], Prune]


def idle(epoch: float) -> bool:
    """Prune nothing."""
    return False


def nothing(*given: Any) -> Prune:
    """A control that prunes nothing."""
    return idle


def torch_pruning(model: nn.Module, opened: OpenRun, way: Way, loss: Loss, *, taylor: bool, evenly: bool = False) -> Prune:
    """torch-pruning's own pruner, gradual: what is removed of the MACs (of the parameters, if the goal counts weights) rises
    as 1 - (1 - t)^3 in the first half of the epochs. It ranks the units of all layers together, or (evenly) those of each
    layer apart, so that each loses the same share."""
    import torch_pruning as tp

    device = next(model.parameters()).device
    example = to_device(next(iter(opened.data.train.batches(2)))[0], device)
    score = tp.importance.GroupTaylorImportance() if taylor else tp.importance.GroupMagnitudeImportance(p=2)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    heads: dict[nn.Module, int] = {
        layer: 4 for name, layer in layers.items() if name.endswith(("self.query", "self.key", "self.value"))
    }
    pruner = tp.pruner.BasePruner(
        model,
        example,
        importance=score,
        global_pruning=not evenly,
        pruning_ratio=0.99,
        iterative_steps=STEPS_OF_HEADS if heads else 400,
        ignored_layers=[list(layers.values())[-1]],
        num_heads=heads,
        prune_num_heads=bool(heads),
        prune_head_dims=False,
        head_pruning_ratio=0.9,
        output_transform=main_output,
    )
    start = way.size_of(model, example)

    def prune(epoch: float) -> bool:
        target = way.size + (start - way.size) * (1 - min(epoch / (0.5 * way.epochs), 1.0)) ** 3
        changed = False
        while (size := way.size_of(model, example)) > target:
            if pruner.current_step >= pruner.iterative_steps:
                raise RuntimeError(f"torch-pruning ended at a size of {size:,}; {target:,.0f} were wanted")
            if taylor:
                model.zero_grad(set_to_none=True)
                batches = opened.data.train.batches(32, shuffle=pruner.current_step, device=device)
                for x, y in islice(batches, TAYLOR_BATCHES):
                    loss.of_scores(model, x, y).backward()
            model.to("cpu")  # on a GPU the pruner would wait at each score that it reads, and for other work there
            pruner.step()
            model.to(device)
            layer: Any
            for layer in model.modules():  # as in torch-pruning's own example for BERT
                if hasattr(layer, "attention_head_size") and hasattr(layer, "query"):
                    layer.num_attention_heads = pruner.num_heads[layer.query]
                    layer.attention_head_size = layer.query.out_features // layer.num_attention_heads
            changed = True
        return changed

    return prune


def magnitude(model: nn.Module, opened: OpenRun, way: Way, loss: Loss) -> Prune:
    """Gradual global pruning of single weights; biases and normalization are kept and count."""
    others = sum(p.numel() for p in model.parameters() if p.dim() < 2)
    return Magnitude(model, way.left - others, 0.5 * way.epochs)


NOT_DISTILLED = "torch-pruning, Taylor, not distilled"
"""Fine-tuned on labels alone, as in torch-pruning's examples; all other rows also learn from the dense network's answers."""

EVENLY = ("torch-pruning, magnitude, evenly", "torch-pruning, Taylor, evenly")
"""The same share of each layer's units is removed. Run only if named: a VGG-16 whose units are ranked together keeps single
units in some layers."""

PEERS: dict[str, Peer] = {
    "dense, trained as long": nothing,
    "torch-pruning, magnitude": lambda *given: torch_pruning(*given, taylor=False),
    "torch-pruning, Taylor": lambda *given: torch_pruning(*given, taylor=True),
    NOT_DISTILLED: lambda *given: torch_pruning(*given, taylor=True),
    "gradual magnitude, single weights": magnitude,
    EVENLY[0]: lambda *given: torch_pruning(*given, taylor=False, evenly=True),
    EVENLY[1]: lambda *given: torch_pruning(*given, taylor=True, evenly=True),
}


def peers_of(opened: OpenRun) -> list[str]:
    """The names of this run's peers, without `EVENLY`; also without `NOT_DISTILLED` if it would equal another (no
    distillation, or no labels)."""
    distils = opened.recovery.distill.weight > 0 and not opened.recipe.data.unlabelled
    return [name for name in PEERS if name not in EVENLY and (name != NOT_DISTILLED or distils)]


def optimizer_of(model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    """The optimizer that the recipe's recovery names."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), settings.lr, settings.momentum, weight_decay=settings.weight_decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[settings.optimizer]
    return kind(model.parameters(), settings.lr, weight_decay=settings.weight_decay)


def train(model: nn.Module, opened: OpenRun, way: Way, name: str, file: Path, slot: Slice) -> tuple[nn.Module, float]:
    """Train with the settings of the run's recovery and one fall of the learning rate; returns the model and the seconds taken.

    The model returned may be a new one.

    name: one of `PEERS`, or of another network, of which nothing is pruned.
    file: stores the state after each epoch (for torch-pruning, once its pruning has ended), for a later slice; it is kept at
    the end.
    """
    recipe, data, device = opened.recipe, opened.data.train, next(model.parameters()).device
    settings, first, state = opened.recovery, 0, None
    peer, loss = PEERS.get(name, nothing), Loss(opened, device, distilled=name != NOT_DISTILLED)
    earlier, begun = 0.0, time.monotonic()
    layout: Any = torch.channels_last if device.type == "cuda" else torch.preserve_format  # as the package trains ours
    if file.is_file():
        kept = unpickled(file)
        earlier = kept.get("seconds", 0.0)  # of earlier slices
        first, model, state, prune = kept["epochs"], kept["model"].to(device), kept["optimizer"], kept["prune"]
    else:
        prune = peer(model, opened, way, loss)
    half, how = resolved_precision(settings.precision, device) == "bf16", dropout_of(opened)
    model.to(memory_format=layout)
    optimizer = optimizer_of(model, settings)
    if state is not None:
        optimizer.load_state_dict(state)
    factor, batches = LrFactor(settings.schedule, way.epochs), math.ceil(len(data) / settings.batch_size)
    rates = Rates(model)
    for epoch in range(first, way.epochs):
        model.train()
        for module in norms(model) if settings.norms == "keep" else ():
            module.eval()
        seed_everything(recipe.seed, "peer", epoch)
        for index, (x, y) in enumerate(data.batches(settings.batch_size, shuffle=1000 * recipe.seed + epoch, device=device)):
            now = epoch + index / batches
            rates.set(share_of_rates(how, now / way.epochs))
            if index % PRUNE_EVERY == 0 and prune(now):
                model.to(memory_format=layout)
                optimizer = optimizer_of(model, settings)
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * factor(now)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=half), arranged_convolutions([model, opened.dense]):
                found = loss(model, x, y)
            found.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf)
            optimizer.step()
            if isinstance(prune, Magnitude):
                prune(-1.0)
            slot.check()
        print(f"  epoch {epoch + 1}/{way.epochs}, last loss {float(found.detach()):.3f}", flush=True)
        alike = peer is nothing or isinstance(prune, Magnitude)
        if alike or epoch + 1 > 0.5 * way.epochs:  # before that, torch-pruning's pruner would have to be stored, too
            kept = {"epochs": epoch + 1, "model": model, "optimizer": optimizer.state_dict(), "prune": prune if alike else idle}
            rates.set(1.0)
            torch.save(kept | {"seconds": earlier + time.monotonic() - begun}, file)
    rates.set(1.0)
    if isinstance(prune, Magnitude):
        prune(math.inf)
    if device.type == "cuda":
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return model.eval(), earlier + time.monotonic() - begun


def dropout_of(opened: OpenRun) -> str:
    """How dropout was treated in the run's recovery ("on", "off" or "rising"), and so in that of its peers."""
    asked = opened.recovery.dropout
    return asked if asked != "auto" else dropout_told(opened.results["notes"])


def dropout_told(notes: list[str]) -> str:
    """What `recover.dropout: auto` has chosen, by a run's notes."""
    said = next((line for line in notes if line.startswith("recover.dropout:")), "")
    left = {"rise to their own": "rising", "so it is off": "off"}
    return next((how for words, how in left.items() if words in said), "on")


def file_of(folder: Path, run: str, peer: str, end: str = "") -> Path:
    """Where a peer of a run is stored while it trains."""
    return folder / f"{run}-{peer.replace(', ', '-').replace(' ', '-')}{end}.pt"


class _Moved(pickle.Unpickler):
    """Finds classes of benchmarks/models/ that were pickled in another folder: their modules are named after their paths."""

    def find_class(self, module: str, name: str) -> Any:
        if named := re.fullmatch(r"_svdc_(\w+)_[0-9a-f]+", module):
            return import_name(f"{Path(__file__).resolve().parent / 'models' / named[1]}.py:{name}", SvdcError, "peer")
        return super().find_class(module, name)


def unpickled(file: Path) -> Any:
    """A stored peer, fully or partly trained, loaded onto the CPU; the files are our own."""
    return torch.load(
        file, map_location="cpu", weights_only=False, pickle_module=SimpleNamespace(__name__="pickle", Unpickler=_Moved)
    )


def macs(model: nn.Module, example: Any) -> int:
    """Multiply-accumulates of one example, counted as the package counts ours."""
    training = model.training
    found = cost.measure(model.eval(), example).macs
    model.train(training)
    return found
