"""Names of models to models: built-in ones, factories of the user's, torchvision, timm, Hugging Face."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from svdcompress.errors import DependencyError, ModelError
from svdcompress.recipe import ModelSection
from svdcompress.sources._names import import_name, is_python_name
from svdcompress.sources._nets import NETS


def make_model(section: ModelSection) -> nn.Module:
    """A fresh model of the recipe's name, with weights drawn from torch's generator.

    Raises ModelError for an unknown name, arguments that do not fit, or a factory that fails or returns something else;
    DependencyError where a package is missing.
    """
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


def _hugging_face(place: str, args: dict[str, Any]) -> nn.Module:
    """A transformers model by folder or id; `auto` names the class (default: the one of its config). Remote code is off."""
    transformers = _import("transformers", "transformers", f"hf:{place}")
    args = dict(args)
    auto, pretrained = args.pop("auto", None), args.pop("pretrained", True)
    try:
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **args)
        names = [auto] if auto else list(config.architectures or [])
        cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), transformers.AutoModel)
        if pretrained:
            extra = {"trust_remote_code": False} if cls.__name__.startswith("Auto") else {}
            return cls.from_pretrained(place, config=config, **extra)
        return cls.from_config(config) if hasattr(cls, "from_config") else cls(config)
    except Exception as error:  # transformers raises many kinds
        raise ModelError(f"model: hf:{place}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
