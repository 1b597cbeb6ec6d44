"""Makes models by name: built-in ones, the user's own factories, torchvision, timm, Hugging Face."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from svdcompress.errors import DependencyError, ModelError
from svdcompress.recipe import ModelSection
from svdcompress.sources._names import check_folder, import_name, is_python_name
from svdcompress.sources._nets import NETS
from svdcompress.sources.given import shown

_FRESH: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
"""For models that came with weights: names of the tensors that their checkpoint did not hold, such as a new head."""

_OTHERS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""For models that were made in half or double precision: the name of that precision."""


def make_model(section: ModelSection) -> nn.Module:
    """Make the model that a recipe names, on the CPU, with weights drawn from torch's generator.

    A model in half precision, as `hf:` folders may store it, is converted to float32 (see `came_in`): in half precision, log
    variances near -10 are coarser than a training step and would never move. So is one in double precision, to match the data.

    Raises ModelError for an unknown name, arguments that do not fit, or a factory that fails or returns something else;
    DependencyError if a package is missing.
    """
    model = _named(section)
    lazy = [name for name, module in model.named_modules() if isinstance(module, LazyModuleMixin)]
    if lazy:  # a run makes the model again for each file that it reads, with no examples at hand
        raise ModelError(
            f"model: {shown(section.name)} has lazy layers without shapes ({', '.join(lazy[:3])}): call it on a batch once, in "
            "its factory or before you pass it"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ModelError(f"model: {shown(section.name)} has weights on the meta device, without values; make it on the CPU")
    model = model.cpu()  # a model passed in Python may be on the device it was trained on, and so would weights read into it
    others = [p.dtype for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16, torch.float64)]
    if others:
        model = model.float()
        _OTHERS[model] = str(others[0]).removeprefix("torch.")
    return model


def came_in(model: nn.Module) -> str | None:
    """The precision in which `make_model` found a model: "bfloat16", "float16" or "float64"; None: float32."""
    return _OTHERS.get(model)


def _named(section: ModelSection) -> nn.Module:
    name = section.name
    if not name:
        raise ModelError(f"model: no model is named; use one of {', '.join(NETS)}, package.module:factory, ./file.py:make, ...")
    kind, _, rest = name.partition(":")
    if kind == "hf":
        return _hugging_face(rest, section.args)
    if kind == "torchvision" and rest:
        models = _import("torchvision.models", "torchvision", name)
        return _made(lambda **args: models.get_model(rest, **args), name, {"weights": None, **section.args})
    if kind == "timm" and rest:
        timm = _import("timm", "timm", name)
        return _made(lambda **args: timm.create_model(rest, **args), name, {"pretrained": False, **section.args})
    if name in NETS:
        return _made(NETS[name], name, section.args)
    if is_python_name(name):
        return _made(import_name(name, ModelError, "model"), name, section.args)
    raise ModelError(
        f"model: unknown name {name!r}; use one of {', '.join(NETS)}, package.module:factory, ./file.py:make, "
        "torchvision:NAME, timm:NAME or hf:FOLDER_OR_ID"
    )


def _made(factory: Any, name: str, args: dict[str, Any]) -> nn.Module:
    try:
        model = factory if isinstance(factory, nn.Module) and not args else factory(**args)
    except Exception as error:  # whatever the user's factory raises
        given = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise ModelError(f"model: {name}({given}) failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: {name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _import(module: str, package: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DependencyError(f"model: {name} needs the package {package}: pip install {package}") from error


def arrives_trained(section: ModelSection, model: nn.Module) -> bool:
    """Whether `make_model` returned a model with all its weights trained: an `hf:` model, or one requested as pretrained.

    False if part of it was newly initialized, such as a head for another number of classes (see `fresh_weights`), and for
    built-in names and factories, about which nothing is known.
    """
    kind = str(section.name).partition(":")[0]
    if kind == "hf":
        return section.args.get("pretrained", True) is not False and not fresh_weights(model)
    if kind == "torchvision":
        return section.args.get("weights") is not None
    return kind == "timm" and bool(section.args.get("pretrained")) and "num_classes" not in section.args


def fresh_weights(model: nn.Module) -> list[str]:
    """Names of the weights that a pretrained `hf:` model's checkpoint did not hold, or held in another shape."""
    return _FRESH.get(model, [])


def image_statistics(section: ModelSection) -> dict[str, list[float]] | None:
    """{"mean", "std"} by which an `hf:` folder's preprocessor_config.json normalizes images, or None if it has none."""
    kind, _, place = str(section.name).partition(":")
    file = Path(place) / "preprocessor_config.json"
    if kind != "hf" or not os.path.isfile(file):
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = {"mean": list(content["image_mean"]), "std": list(content["image_std"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if content.get("do_normalize", True) else None


def _hugging_face(place: str, args: dict[str, Any]) -> nn.Module:
    """A transformers model by folder or id; `auto` names the class (default: the one in its config). Remote code is off."""
    check_folder(place, ModelError, "model: hf")
    transformers = _import("transformers", "transformers", f"hf:{place}")
    args = dict(args)
    auto, pretrained = args.pop("auto", None), args.pop("pretrained", True)
    if auto is not None and not hasattr(transformers, str(auto)):
        raise ModelError(f"model.args.auto: transformers has no class {auto!r}; AutoModelForSequenceClassification is one")
    try:
        with _quietly(transformers):
            config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **args)
            names = [auto] if auto else list(config.architectures or [])
            cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), transformers.AutoModel)
            if not (
                isinstance(cls, type) and (issubclass(cls, transformers.PreTrainedModel) or cls.__name__[:9] == "AutoModel")
            ):
                raise TypeError(f"{cls!r:.80} is not a model class")
            if not pretrained:
                return cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
            extra: dict[str, Any] = {"trust_remote_code": False} if cls.__name__.startswith("Auto") else {}
            extra["ignore_mismatched_sizes"] = "num_labels" in args  # a new head for other classes
            model, info = cls.from_pretrained(place, config=config, output_loading_info=True, **extra)
    except Exception as error:  # transformers raises many kinds of errors
        reason = (str(error).splitlines() or [""])[0]
        here = "" if os.path.isdir(place) else f" (and the current folder contains no folder {place})"
        raise ModelError(f"model: hf:{place}: {type(error).__name__}: {reason}{here}") from error
    fresh = [*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])]
    _FRESH[model] = sorted(map(str, fresh))
    return model


@contextmanager
def _quietly(transformers: Any) -> Iterator[None]:
    """Turn off transformers' own progress bars and messages: what matters in them is reported by this package."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
