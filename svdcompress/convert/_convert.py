"""Converts dense layers to variational ones and back, in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from svdcompress.convert._derived import MARK, fold_all
from svdcompress.convert._plan import ALREADY, Filter, entries
from svdcompress.errors import ModelError
from svdcompress.layers import (
    DEFAULT_THRESHOLD,
    DROPOUT_CLASSES,
    BernoulliDropout,
    GaussianDropout,
    Posterior,
    Prior,
    Share,
    Threshold,
    VariationalLayer,
    check_posterior,
    check_prior,
    check_variance_dtype,
    parse_share,
    parse_threshold,
    start_at,
    variational_class,
    variational_layers,
)

WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""Wrappers for training on several devices, which register the parameters of a model when they wrap it."""


def convert(
    model: nn.Module,
    *,
    prior: str | Prior = "ard",
    posterior: str | Posterior = "independent",
    share: Share = "weight",
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    filter_fn: Filter | None = None,
    log_sigma2: float | None = None,
    log_alpha: float | None = None,
    threshold: Threshold = DEFAULT_THRESHOLD,
    variance_dtype: str = "auto",
    derived: str = "keep",
    example_inputs: Any = None,
) -> nn.Module:
    """Turn Linear and convolution layers into variational ones, in place; returns the model.

    Weights are kept bit for bit, and parameters, hooks and module objects stay the same objects (an optimizer made before does
    not know the new `log_sigma2`). Tied layers are converted once and stay tied. Log variances have the dtype of their
    weights. In half precision they hardly train, which it warns of: convert `model.float()` and train under autocast.

    prior: "ard" (Kharitonov et al. 2018), "log-uniform" (Molchanov et al. 2017), or a `Prior`.
    posterior: "independent", a variance for each weight; "rank-one", a term for each output plus one for each input, which
        saves a wide layer a second matrix product and a second weight-sized tensor; or a `Posterior`.
    share: which weights share a prior variance: "weight", "input", "output", "layer", a list (equal parts), or {name: part}.
    include, exclude: fnmatch patterns on dotted module names; a layer is converted if one of `include` and none of `exclude`
        matches it (any of its names, if it has several) or a module that contains it.
    filter_fn: takes a module and its dotted name; if it returns False, the layer is left out, in addition to those that the
        patterns leave out.
    log_sigma2: initial value of every log variance: near -10 for small nets, -15 for large pretrained ones. None: the prior's
        choice, -10 for the priors of this package.
    log_alpha: initial log alpha of a layer's root-mean-square weight, instead of `log_sigma2`: each layer gets noise in
        proportion to its weights, whatever their scale; -6 means 5%.
    threshold: limit on log alpha, at or above which a weight is irrelevant in `eval()`; one number or {share: limit}.
    variance_dtype: precision in which variances are computed: "float32", "bfloat16", or "auto" for bfloat16 if the chip is
        fast at it and the layer is large enough to benefit.
    derived: what to do with layers whose weight is computed from other tensors in each forward pass (weight_norm,
        spectral_norm, torch.nn.utils.prune, weight-standardized convolutions): "keep" leaves them as they are; "fold" first
        computes the weight once, as in `eval()`, and turns them into plain layers with new parameters.
    example_inputs: inputs for one pass in `eval()` (a tensor, a tuple of positional inputs or a dict of keyword inputs), which
        finds layers whose weight other code reads past them (`F.linear(x, self.fc.weight)`). They are left dense, since masks
        and noise would have no effect there. Without it they are converted, and `ELBO` and `prune` report it later.

    `plan` shows what is done with each layer. Raises ModelError if a pattern matches no module, if nothing is left to convert,
    for an unknown prior, posterior or share, for a share that the prior does not support, for `log_sigma2` together with
    `log_alpha`, if the model cannot run on the example inputs, if it is wrapped for training on several devices (convert
    first), or if a selected layer is already variational with other settings; the model is then unchanged.

    Example:
        >>> svdc.convert(model, share=["weight", "input"], exclude=["2"])
        >>> model[0].log_sigma2.shape
        torch.Size([16, 8])
    """
    if log_sigma2 is not None and log_alpha is not None:
        raise ModelError("log_sigma2 and log_alpha both say where log variances start; leave one of them out")
    prior, posterior = check_prior(prior), check_posterior(posterior)
    check_variance_dtype(variance_dtype)
    share, threshold = parse_share(share), parse_threshold(threshold)
    prior.check_share(share)
    found = entries(model, include, exclude, derived, example_inputs, filter_fn)
    chosen: list[Any] = [module for entry, module in found if entry.converted]
    if not chosen and not any(isinstance(module, VariationalLayer) for module in model.modules()):
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry, _ in found[:8]) or "it has no layers"
        raise ModelError(f"nothing to convert in {type(model).__name__} ({reasons})")
    if chosen:
        _check_unwrapped(model)
    settings: dict[str, Any] = {
        "prior": prior,
        "share": share,
        "threshold": threshold,
        "variance_dtype": variance_dtype,
        "posterior": posterior,
    }
    _check_same((entry.name, module, settings) for entry, module in found if entry.reason == ALREADY)
    if log_sigma2 is not None:
        _check_start(((entry.name, module) for entry, module in found if entry.reason == ALREADY), log_sigma2)
    # All layers of a weight get the same variances, so that tied weights keep one posterior.
    shared: dict[int, Any] = {id(layer.weight): layer for _, layer in variational_layers(model)}
    fold_all(module for entry, module in found if entry.converted and entry.note)
    for module in chosen:
        kind: Any = variational_class(type(module))
        tied = shared.get(id(module.weight))
        if tied is None:
            start = log_sigma2 if log_alpha is None else start_at(module.weight, log_alpha)
            layer = kind.from_dense(module, log_sigma2=start, **settings)
        else:
            own = {**settings, "posterior": tied.posterior}
            layer = kind.from_dense(module, log_sigma2=tied.variance_parameters(), **own)
        shared[id(layer.weight)] = layer
    leave_fused_paths(model)
    made = [(entry.name, module) for entry, module in found if entry.converted]
    warn_of_half_precision(made, stacklevel=3)
    _warn_of_small_weights(made, stacklevel=3)
    return model


def _check_unwrapped(model: nn.Module) -> None:
    """Raise ModelError for a wrapped model: a wrapper that averages or shards parameters does not know those added later."""
    for name, module in model.named_modules():
        found = WRAPPERS & {kind.__name__ for kind in type(module).__mro__}
        if found:
            where = f" ({name})" if name else ""
            raise ModelError(
                f"the model is wrapped in {found.pop()}{where}, which would leave the new log_sigma2 out, so each rank would "
                "train its own: call svdcompress.convert(model) first, and wrap it afterwards"
            )


IN_FLOAT32 = "keep them in float32, as svdcompress.convert(model.float()) does, and train under torch.autocast"


def warn_of_half_precision(layers: list[tuple[str, Any]], stacklevel: int, remedy: str = IN_FLOAT32) -> None:
    """Warn of log variances trained in half precision: near -10, 16-bit numbers are further apart than a training step.

    remedy: what to do instead, in the terms of who trains.
    """
    trained = [
        (name, layer.weight.dtype)
        for name, layer in layers
        if layer.weight.dtype.itemsize < 4 and any(own.requires_grad for own in layer.variance_parameters().values())
    ]
    if trained:
        dtype = str(trained[0][1]).removeprefix("torch.")
        names = ", ".join(name or "the model itself" for name, _ in trained[:4])
        warnings.warn(
            f"log variances cannot be trained in {dtype}, where optimizer steps are lost to rounding ({names}"
            f"{' ...' if len(trained) > 4 else ''}): {remedy}",
            stacklevel=stacklevel,
        )


SMALL = 3e-4
"""Root mean square of weights below which log alpha's constant (`EPS`, 1e-8) exceeds a tenth of their mean square."""


def _warn_of_small_weights(layers: list[tuple[str, Any]], stacklevel: int) -> None:
    with torch.no_grad():
        sizes = {name: float(layer.weight.float().square().mean().sqrt()) for name, layer in layers if not layer.weight.is_meta}
    small = {name: size for name, size in sizes.items() if 0 < size < SMALL}
    if small:
        names = ", ".join(f"{name or 'the model itself'} {size:.1g}" for name, size in list(small.items())[:4])
        warnings.warn(
            "weights this small are taken for noise: relevance and KL add 1e-8 to their squares (root mean squares: "
            f"{names}{' ...' if len(small) > 4 else ''}). Inputs far above 1 are the usual reason: scale the inputs down and "
            "the weights up",
            stacklevel=stacklevel,
        )


def _check_same(layers: Iterable[tuple[str, Any, dict[str, Any]]]) -> None:
    """Raise ModelError if a second conversion asks for other settings than the first did, as it would not change them."""
    for name, layer, settings in layers:
        for key, wanted in settings.items():
            if getattr(layer, key) != wanted:
                found = f"{key}={_shown(getattr(layer, key))}"
                raise ModelError(
                    f"{name or type(layer).__name__} is already variational, with {found}; converting it again does not change "
                    f"this to {_shown(wanted)}: set layer.{key} = {_shown(wanted)}, leave the layer out (exclude, filter_fn), "
                    "or start from svdcompress.to_dense(model)"
                )


def _check_start(layers: Iterable[tuple[str, Any]], log_sigma2: float) -> None:
    """Like `_check_same`, for the initial log variances, as long as nothing has changed them."""
    for name, layer in layers:
        if layer.variance_moved or layer.log_sigma2.is_meta:
            continue
        start = layer.log_sigma2.detach().float()
        if not torch.allclose(start, torch.full_like(start, log_sigma2), rtol=0.01, atol=1e-6):  # as near as bfloat16 comes
            raise ModelError(
                f"{name or type(layer).__name__} is already variational, with log variances that start at {start.mean():g}; "
                f"converting it again does not make them start at {log_sigma2:g}: set layer.log_sigma2.data yourself, leave "
                "the layer out (exclude, filter_fn), or start from svdcompress.to_dense(model)"
            )


def _shown(value: Any) -> str:
    return repr(str(value) if isinstance(value, Prior | Posterior) else value)


def fold_derived_weights(model: nn.Module, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> dict[str, str]:
    """Turn layers whose weight is computed from other tensors in each forward pass into plain layers, in place, without
    converting anything; exact in `eval()`. Returns {name: what it was}.

    include, exclude: as for `convert`, whose `derived="fold"` does this to the layers that it converts.
    Raises ModelError if a pattern matches no module; the model is then unchanged.

    Example:
        >>> svdc.fold_derived_weights(torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 3))))
    """
    found = [(entry.name, module) for entry, module in entries(model, include, exclude, "fold", None) if entry.note]
    fold_all(module for _, module in found)
    return {name: vars(module)[MARK] for name, module in found}


def to_dense(model: nn.Module) -> nn.Module:
    """Turn every variational layer back into its torch.nn class, in place: the mean, with irrelevant weights at 0.

    Layers that share a weight but have different masks get a weight each. Raises ModelError for a layer whose weight has been
    computed from other tensors since its conversion.

    Example:
        >>> type(svdc.to_dense(svdc.convert(model))[0])
        <class 'torch.nn.modules.linear.Linear'>
    """
    layers = dict(variational_layers(model))
    for name, layer in layers.items():
        if "weight" not in layer._parameters:
            raise ModelError(
                f"{name or type(layer).__name__}: its weight has been computed from other tensors since it was converted (a "
                "parametrization): remove that first, as torch.nn.utils.parametrize.remove_parametrizations does"
            )
    first: dict[torch.Tensor, torch.Tensor] = {}  # by weight, the mask of the first of its layers
    for layer, keep in [(layer, layer.relevant()) for layer in layers.values()]:
        layer.mask = keep  # decided for all before any weight changes: tied layers would see each other's zeros
        if not torch.equal(first.setdefault(layer.weight, keep), keep):
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
    for layer in layers.values():
        layer.to_dense()
    return model


def convert_dropout(model: nn.Module, p: float | None = None, gaussian: bool = False) -> nn.Module:
    """Turn torch's dropout layers into MC-dropout ones that obey `sampling`, in place; returns the model.

    p: a rate for all of them (None: each keeps its own). gaussian: multiplicative Gaussian noise of the same variance.
    Raises ModelError if the model has no dropout layer.
    """
    kind = GaussianDropout if gaussian else BernoulliDropout
    made: dict[nn.Module, nn.Module] = {}  # one object under several names stays one
    for parent in list(model.modules()):
        child: Any
        for name, child in list(parent._modules.items()):  # named_children would give each object once only
            if type(child) in DROPOUT_CLASSES:
                if child not in made:
                    layer = kind(child.p if p is None else p, channels=DROPOUT_CLASSES[type(child)])
                    made[child] = layer.train(child.training)
                setattr(parent, name, made[child])
    if not made:
        raise ModelError(f"{type(model).__name__} has no dropout layer (torch.nn.Dropout, Dropout1d, Dropout2d or Dropout3d)")
    leave_fused_paths(model)
    return model


def leave_fused_paths(model: nn.Module) -> None:
    """Keep torch's transformer encoder off its fused inference path, which reads weights past our layers and skips dropout."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
