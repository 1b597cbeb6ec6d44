"""Loading a checkpoint onto a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from svdcompress.batch import unwrapped
from svdcompress.checkpoint._manifest import read_manifest, read_tensors
from svdcompress.checkpoint._problems import OPTIONAL, problems
from svdcompress.checkpoint._save import SETTINGS
from svdcompress.convert import fold_like, leave_fused_paths, unchanged_on_error
from svdcompress.errors import CheckpointError, UsageError, shortened
from svdcompress.layers import (
    BernoulliDropout,
    GaussianDropout,
    VariationalLayer,
    check_posterior,
    keep_channels,
    parse_share,
    parse_threshold,
    variational_class,
    variational_layers,
)
from svdcompress.likelihoods import Likelihood, from_stored, set_likelihood

_NOISE = {"BernoulliDropout": BernoulliDropout, "GaussianDropout": GaussianDropout}


def load(path: str | Path, model: nn.Module) -> nn.Module:
    """Load what `save` wrote onto a fresh model from the same factory, dense or converted, in place; returns the model.

    Values and dtypes are restored bit for bit; each tensor stays on the model's device. For a model wrapped by torch.compile
    or data-parallel training, the model within is loaded. Warns if two layers shared a parameter in the file but have one
    each in the model. Raises CheckpointError for a file that is missing, truncated, foreign or changed after it was written,
    and for a model that does not fit; the model is then unchanged.

    Example:
        >>> svdc.save(svdc.convert(model), "model.safetensors")
        >>> svdc.load("model.safetensors", torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)))
    """
    manifest = read_manifest(path)
    likelihood = _likelihood(path, manifest)
    within = unwrapped(model)
    try:
        tensors = read_tensors(path, manifest)
        tensors.update({alias: tensors[name] for alias, name in manifest["ties"].items()})
        modules = dict(within.named_modules(remove_duplicate=False))
        plain = {name: modules[name] for name in manifest.get("folded", {}) if name in modules}
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError) as error:
        reason = shortened(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{path}: damaged ({reason})") from error
    try:
        with unchanged_on_error(within):
            found = [*_fold(plain, manifest, tensors), *problems(within, manifest, tensors)]
            if found:
                more = f" (and {len(found) - 6} more)" if len(found) > 6 else ""
                text = "; ".join(shortened(problem, 300) for problem in found[:6])
                raise CheckpointError(f"{path}: made for another model than {type(within).__name__}: {text}{more}")
            _apply(within, manifest, tensors)
            if likelihood is not None:
                set_likelihood(within, likelihood)
    except CheckpointError:
        raise
    except Exception as error:
        reason = shortened(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{path}: damaged, or made for another model than {type(within).__name__} ({reason})") from error
    if apart := _untied(within, manifest["ties"]):
        warnings.warn(
            f"{path}: {apart} share one tensor in the file but are separate in this model, each with its own KL: tie them "
            "before further training",
            stacklevel=2,
        )
    return model


def _untied(model: nn.Module, ties: Mapping[str, str]) -> str:
    """The first pair of names for one parameter in the file but two in the model, as "A and B"; "" if there is none."""
    own = dict(model.named_parameters(remove_duplicate=False))
    pairs = ((alias, name) for alias, name in ties.items() if alias in own and name in own)
    return next((f"{alias} and {name}" for alias, name in pairs if own[alias] is not own[name]), "")


def _fold(plain: Mapping[str, nn.Module], manifest: dict[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Make layers plain that were plain when saved but compute their weight in each forward here; yields the problems."""
    for name, module in plain.items():
        try:
            fold_like(module, manifest["folded"][name], f"{name}.bias".lstrip(".") in tensors)
        except ValueError as error:
            yield f"{name}: {error}"


def _likelihood(path: str | Path, manifest: dict[str, Any]) -> Likelihood | None:
    stored = manifest.get("likelihood")
    try:
        return from_stored(stored) if stored else None
    except UsageError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _apply(model: nn.Module, manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    _convert(model, manifest)
    take_attributes(model, manifest["surgery"])
    untrained = [own for _, own in variational_layers(model) if not own.variance_stepped and not own.variance_heard]
    for name, tensor in tensors.items():
        _set(model, name, tensor)
    for layer in untrained:
        layer.take_as_loaded()
    for name, module in model.named_modules():
        if isinstance(module, VariationalLayer):
            for key in OPTIONAL:
                if f"{name}.{key}".lstrip(".") not in tensors:
                    setattr(module, key, None)
            module.train(module.training)  # forget what it derived from its old weights
            if module.log_sigma2.shape != module.weight.shape:
                raise ValueError(f"{name}: the variances have shape {tuple(module.log_sigma2.shape)}, unlike the weight")
    for name, module in model.named_modules():
        _check_lengths(name, module)


def _check_lengths(name: str, module: nn.Module) -> None:
    """Raises ValueError if a layer's own sizes (in_features, ...) disagree with its weight, as code relies on them."""
    weight = module._parameters.get("weight")
    if weight is None:
        return
    own: Any = module
    if isinstance(module, nn.Linear):
        expected: tuple[int, ...] = (own.out_features, own.in_features)
    elif isinstance(module, nn.modules.conv._ConvNd):
        if own.groups < 1 or own.in_channels % own.groups or own.out_channels % own.groups:
            raise ValueError(
                f"{name}: {own.in_channels} and {own.out_channels} channels cannot be divided into {own.groups} groups"
            )
        first, second = (own.in_channels, own.out_channels) if own.transposed else (own.out_channels, own.in_channels)
        expected = (first, second // own.groups, *own.kernel_size)
    else:
        return
    if tuple(weight.shape) != expected:
        raise ValueError(f"{name}: the weight has shape {tuple(weight.shape)}, but its attributes imply {expected}")


def take_attributes(model: nn.Module, surgery: dict[str, Any]) -> None:
    """Set the attributes that pruning changed (in_features, num_heads, ...) and the channels that modules keep, as `surgery`
    records them, and attach the record to the model, in place."""
    for name, attributes in surgery.get("attributes", {}).items():
        module = model.get_submodule(name)
        for attribute, value in attributes.items():
            old = getattr(module, attribute)
            setattr(module, attribute, type(old)(value) if isinstance(old, tuple | list) else value)
    for name, kept in surgery.get("kept", {}).items():
        keep_channels(model.get_submodule(name), kept["dim"], kept["kept"])
    object.__setattr__(model, "surgery", surgery)


def _convert(model: nn.Module, manifest: dict[str, Any]) -> None:
    shared: dict[int, Any] = {}
    for name, layer in manifest["layers"].items():
        module = model.get_submodule(name)
        own = {key: layer[key] for key in SETTINGS}  # in any of the forms that a layer takes them in
        own |= {"share": parse_share(own["share"]), "threshold": parse_threshold(own["threshold"])}
        posterior = check_posterior(layer.get("posterior", "independent"))
        start = shared.get(id(module.weight))
        if not isinstance(module, VariationalLayer):
            kind: Any = variational_class(type(module))
            module = kind.from_dense(module, log_sigma2=0.0 if start is None else start, posterior=posterior, **own)
        elif module.posterior != posterior:
            module.set_variances(posterior, start)
        for key, value in own.items():
            setattr(module, key, value)
        shared[id(module.weight)] = module.variance_parameters()
    leave_fused_paths(model)
    for name, layer in manifest["dropout"].items():
        old = model.get_submodule(name)
        new = _NOISE[layer["class"]](layer["p"], channels=layer["channels"]).train(old.training)
        if type(old) is type(new):
            old.p, old.channels = new.p, new.channels
        else:
            for parent in list(model.modules()):
                for key in [key for key, child in parent._modules.items() if child is old]:  # it may have several names
                    setattr(parent, key, new)


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in its place; parameters keep their identity, ties, device and `requires_grad`."""
    prefix, _, key = name.rpartition(".")
    module: Any = model.get_submodule(prefix)
    old = getattr(module, key, None)
    if isinstance(old, Tensor):
        old.data = tensor.to(old.device, copy=True)
    elif key == "bias":
        module.bias = nn.Parameter(tensor.to(module.weight.device, copy=True), requires_grad=module.weight.requires_grad)
    else:
        setattr(module, key, tensor.to(module.weight.device, copy=True))
