"""The architectures of the zoo: all of torchvision's up to a size, and the smallest of each of timm's families.

    python benchmarks/zoo_nets.py            # prints timm's

timm knows more than a thousand names, most of them sizes of a few hundred designs. A family is a file of timm and the letters
that a name begins with ("resnet" of resnet18, in resnet.py); of each family, the architecture with the name that sounds
smallest is taken.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = 30_000_000
"""Architectures with more parameters are left out, with this reason: their smaller siblings have the same design."""

SIDES = (64, 96, 128, 160, 192, 224, 256, 288, 299, 384)
"""Image sides, in the order in which they are tried; an architecture gets the first one on which it runs."""


SMALL = (
    *(
        "test",
        "atto",
        "zepto",
        "femto",
        "pico",
        "nano",
        "micro",
        "xxs",
        "xxsmall",
        "xxtiny",
        "xs",
        "xsmall",
        "xtiny",
        "tiny",
        "ti",
    ),
    *(
        "mini",
        "t",
        "n",
        "small",
        "lite",
        "s",
        "b0",
        "a0",
        "s0",
        "sa0",
        "l0",
        "0",
        "18",
        "1",
        "10",
        "12",
        "26",
        "39",
        "medium",
        "m",
    ),
    *("base", "b"),
)
"""Parts of the names of small architectures, the smallest first."""


def choose() -> list[str]:
    """The smallest architecture of each family by its name: a family is a file of timm and the letters a name begins with."""
    import timm

    def size(name: str) -> tuple[int, list[int], int, str]:
        parts = re.findall(r"[a-z]*[0-9]+|[a-z]+", name)
        ranks = [SMALL.index(part) for part in (*parts, *re.findall("[0-9]+", name)) if part in SMALL]
        return min(ranks, default=99), [int(n) for n in re.findall("[0-9]+", name)], len(name), name

    best: dict[tuple[str, str], str] = {}
    for name in timm.list_models():
        key = timm.models._registry._model_to_module[name], re.match(r"[a-z]+", name)[0]  # type: ignore[index]
        best[key] = min(best.get(key, name), name, key=size)
    return sorted(set(best.values()))


def names() -> list[str]:
    """All architectures as "source:name", including torchvision's quantized ones (which `build` skips with a reason)."""
    found = []
    with contextlib.suppress(ImportError):
        found += [f"timm:{name}" for name in choose()]
    with contextlib.suppress(ImportError):
        import torchvision

        found += [f"torchvision:{name}" for name in torchvision.models.list_models()]
    return found


def turn(name: str) -> tuple[int, str]:
    """The sort key of a name in a run: names that sound small come first, from both sources."""
    own = name.partition(":")[2]
    parts = [part for part in re.findall(r"[a-z]+|[0-9]+", own) if part in SMALL]
    heavy = any(part in own for part in ("rcnn", "fcos", "ssd", "retinanet", "raft", "large", "giant", "huge"))
    return (99 if heavy else min((SMALL.index(part) for part in parts), default=50)), own


class Skipped(Exception):
    """Raised with the reason why an architecture is not run."""


def build(name: str) -> tuple[nn.Module, Any]:
    """A network without pretrained weights, with 10 classes if they can be set, and two examples on which it runs.

    Raises Skipped with the reason.
    """
    source, _, own = name.partition(":")
    if source == "torchvision" and own.startswith("quantized_"):
        raise Skipped("made for quantised inference: its layers are no torch.nn ones")
    last = "no size of image fits"
    for make, inputs in (_timm if source == "timm" else _torchvision)(own):
        torch.manual_seed(0)
        try:
            model = make().eval()
        except TypeError as error:
            last = f"{error}"
            continue
        except (ImportError, OSError, RuntimeError, ValueError, AssertionError) as error:
            last = f"does not build offline: {type(error).__name__}: {str(error)[:120]}"
            continue
        count = sum(p.numel() for p in model.parameters())
        if count > LARGEST:
            raise Skipped(f"{count / 1e6:.0f} million parameters, above {LARGEST / 1e6:.0f}")
        try:
            with torch.no_grad():
                model(*inputs) if isinstance(inputs, tuple) else model(inputs)
            return model, inputs
        except Exception as error:
            last = f"does not run: {type(error).__name__}: {str(error)[:120]}"
    raise Skipped(last)


def _timm(name: str) -> Iterator[tuple[Any, Any]]:
    import timm

    known = timm.get_pretrained_cfg(name)
    default = (known.input_size if known else None) or (3, 224, 224)
    if not (known and known.fixed_input_size):
        for side in (s for s in SIDES if s < default[1]):
            yield lambda: timm.create_model(name, pretrained=False, num_classes=10), _image(side, default[0])
    for side in (64, 96, 112, 128):
        if side < default[1]:
            yield (
                lambda side=side: timm.create_model(name, pretrained=False, num_classes=10, img_size=side),
                _image(side, default[0]),
            )
    yield lambda: timm.create_model(name, pretrained=False, num_classes=10), torch.randn(2, *default)


def _torchvision(name: str) -> Iterator[tuple[Any, Any]]:
    from torchvision import models

    module = models.get_model_builder(name).__module__
    own: dict[str, Any] = {"weights": None}
    if "detection" not in module and "optical_flow" not in module:
        own["num_classes"] = 10
    if "detection" in module or "segmentation" in module:
        own["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        own |= {"aux_logits": False, "init_weights": True}

    def make(**more: Any) -> nn.Module:
        return models.get_model(name, **own, **more)

    if "optical_flow" in module:
        yield make, (torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128))
        return
    if "video" in module:
        for frames, side in ((8, 64), (8, 112), (16, 112), (16, 224)):
            yield make, torch.randn(2, 3, frames, side, side)
        return
    for side in SIDES:
        if "vision_transformer" in module and side in (64, 96):
            yield lambda side=side: make(image_size=side), _image(side)
        if "maxvit" in module and side == 64:
            yield lambda: make(input_size=(64, 64)), _image(64)
        yield make, _image(side)


def _image(side: int, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, side, side)


def shake(model: nn.Module, inputs: Any) -> None:
    """Make biases, norms, scales and statistics neither 0 nor 1, so that constants of dead units matter; in place.

    Statistics are those of noise, with some more noise added: with arbitrary ones deep networks would overflow.
    """
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point() or parameter.numel() < 2:
                continue
            if key == "bias":
                nn.init.normal_(parameter, std=0.3)
            elif key == "weight" and parameter.dim() > 1 and not isinstance(module, nn.Embedding):
                size = 1 / parameter[0].numel() ** 0.5
                if parameter.std() < size / 2:  # initialized near 0: outputs would hardly depend on inputs
                    nn.init.normal_(parameter, std=size)
            elif bool((parameter == parameter.flatten()[0]).all()):
                nn.init.uniform_(parameter, 0.5, 1.5)
    norms: list[Any] = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
    ]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        examples = [torch.randn(8, *t.shape[1:]) for t in (inputs if isinstance(inputs, tuple) else (inputs,))]
        model(*examples)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()
            norm.running_var.clamp_(min=1e-3).mul_(torch.empty_like(norm.running_var).uniform_(0.5, 1.5))
            norm.running_mean.add_(torch.randn_like(norm.running_mean) * 0.3 * norm.running_var.sqrt())


if __name__ == "__main__":
    print("\n".join(choose()))
