"""A layer's prior and posterior, and the parameters that define the variances of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from svdcompress.errors import ModelError
from svdcompress.layers._sampling import StochasticLayer, weight_of
from svdcompress.layers._share import as_weight, canonical
from svdcompress.layers.posteriors import Posterior, check_posterior
from svdcompress.layers.priors import Prior, check_prior

Start = float | nn.Parameter | Mapping[str, nn.Parameter] | None
"""The initial log variance (None: the prior's), or the parameters that a layer shares with another."""

LEVEL = "_svdcompress_level"
"""The attribute of parameters on the meta device that tells where they have to begin."""


class Weighted(StochasticLayer):
    """A layer whose weights have a prior and a posterior; `VariationalLayer` defines what it computes with them."""

    transposed: ClassVar[bool] = False  # for layers whose torch.nn class has no such attribute (Linear)

    weight: Tensor

    def _start(self, prior: Prior, posterior: Posterior, log_sigma2: Start) -> None:
        self.prior, self.posterior = prior, posterior
        if isinstance(log_sigma2, nn.Parameter):
            log_sigma2 = {"log_sigma2": log_sigma2}
        if isinstance(log_sigma2, Mapping):
            level: float | None = next((getattr(own, LEVEL, None) for own in log_sigma2.values()), None)
        else:
            level = prior.start(self.weight) if log_sigma2 is None else float(log_sigma2)
            log_sigma2 = self._fresh(self._begun(self.weight, level))
        self._level: float | None = None  # where variances without values, which were made on the meta device, have to begin
        self._empty_at: Any = None  # what memory held when they got some
        if any(own.is_meta for own in log_sigma2.values()):
            self._level = level
            for own in log_sigma2.values():
                setattr(own, LEVEL, level)  # for a layer that shares them
        self._take_variances(log_sigma2)

    def _begun(self, weight: Tensor, level: float) -> dict[str, Tensor]:
        """The parameters of the variances at a level, for a weight."""
        return self.posterior.start(self, torch.full_like(weight, level, memory_format=torch.contiguous_format))

    @property
    def variance_empty(self) -> bool:
        """Whether the variances have no values yet: they are on the meta device, or have come from there (`to_empty`), and
        nothing has been written to the memory that they got."""
        own = list(self.variance_parameters().values())
        if any(each.is_meta for each in own):
            return True
        before = self.__dict__.get("_empty_at")
        return before is not None and not _written(before, own)

    def _first_values(self, weight: Tensor | None) -> dict[str, Tensor]:
        """The parameters of variances that are empty, for a weight that is about to be loaded; {} if they cannot be told."""
        level = self.__dict__.get("_level")
        if level is None or weight is None or weight.shape != self.weight.shape:
            return {}
        return self._begun(weight.detach(), level)

    # Both are properties, so that they can be set by name. Their values are stored under other names: up to torch 2.11,
    # Dynamo mistakes __dict__[name] for the property and never returns.

    @property
    def prior(self) -> Prior:
        """The prior, which defines the KL and log alpha; may be set by name."""
        return self._named("_prior")

    @prior.setter
    def prior(self, prior: str | Prior) -> None:
        self._prior = check_prior(prior)

    @property
    def posterior(self) -> Posterior:
        """The posterior, which defines the parameters of the variances; `set_posterior` changes it."""
        return self._named("_posterior")

    @posterior.setter
    def posterior(self, posterior: str | Posterior) -> None:
        self._posterior = check_posterior(posterior)

    def _named(self, name: str) -> Any:
        found = self.__dict__.get(name)
        if found is None:
            raise AttributeError(f"{type(self).__name__} has no {name[1:]} yet")
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in ("prior", "posterior"):  # models pickled by former versions
            if name in state:
                state[f"_{name}"] = state.pop(name)
        super().__setstate__(state)

    @property
    def log_sigma2(self) -> Tensor:
        """Log variance of each weight, in the weight's shape."""
        own = self._parameters.get("log_sigma2")
        if own is not None:
            return own
        if "log_sigma2" in self.posterior.parameters:  # a layer that is still being made
            raise AttributeError(f"{type(self).__name__} has no log_sigma2 yet")
        return self.posterior.log_sigma2(self)

    def variance_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that define the variances of the weights, by name: `log_sigma2`, unless the posterior has
        others."""
        own: Any = self._parameters
        for name in self.posterior.parameters:
            if name not in own:
                raise ModelError(
                    f"{type(self).__name__}: its {name} is no longer a parameter (a parametrization?), but the KL, pruning and "
                    "files need one: remove the parametrization and, for example, clamp its values after each step"
                )
        return {name: own[name] for name in self.posterior.parameters}

    @property
    def variance_moved(self) -> bool:
        """Whether anything has written to the variances since the layer was made: an optimizer, or a checkpoint."""
        return bool(self.__dict__.get("_loaded")) or self.variance_stepped

    @property
    def variance_stepped(self) -> bool:
        """The same, except for a checkpoint that was loaded before training."""
        made = self.__dict__.get("_made_at")
        return made is None or _written(made, list(self.variance_parameters().values()))

    @property
    def variance_heard(self) -> bool:
        """Whether a backward pass has reached the variances since the layer was made, even if its gradient was not kept."""
        kept = any(parameter.grad is not None for parameter in self.variance_parameters().values())
        return kept or bool(self.__dict__.get("_heard"))

    def take_as_loaded(self) -> None:
        """Let the variances count as loaded from a checkpoint and not yet stepped by an optimizer."""
        self._note_variances()
        self._loaded = True

    def _note_variances(self) -> None:
        self._made_at = [(_version(own), _checksum(own)) for own in self.variance_parameters().values()]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Weighted:
        made = self.__dict__.get("_made_at")
        empty = self.__dict__.get("_level") is not None and self.variance_empty
        names = () if made is None else self.posterior.parameters
        before = {name: own.detach() for name in names if (own := self._parameters.get(name)) is not None}
        super()._apply(fn, recurse)
        # A cast to another precision changes their bits, but it is not an optimizer step.
        cast = any(getattr(self, name).dtype != own.dtype for name, own in before.items())
        if cast and not _written(made, list(before.values())):
            self._note_variances()
        if empty and not any(own.is_meta for own in self.variance_parameters().values()):
            self._empty_at = [(_version(own), _checksum(own)) for own in self.variance_parameters().values()]
        return self

    def set_variances(self, posterior: Posterior, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        """Replace the posterior by another, with the same variances or the nearest that it can represent; `set_posterior`
        does this for all layers that share a weight. parameters: those of a tied layer to share (None: new ones)."""
        with torch.no_grad():
            log_sigma2 = self.log_sigma2.detach().clone()
        wanted = any(parameter.requires_grad for parameter in self.variance_parameters().values())
        for name in self.posterior.parameters:
            delattr(self, name)
        self.posterior = posterior
        self._take_variances(self._fresh(posterior.start(self, log_sigma2), wanted) if parameters is None else parameters)

    def _fresh(self, values: Mapping[str, Tensor], wanted: bool | None = None) -> dict[str, nn.Parameter]:
        wanted = self.weight.requires_grad if wanted is None else wanted
        # Parameters created in inference mode could never be trained.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            own = {name: value.clone() if value.is_inference() else value for name, value in values.items()}
            return {name: nn.Parameter(value.detach().contiguous(), requires_grad=wanted) for name, value in own.items()}

    def _take_variances(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if set(parameters) != set(self.posterior.parameters):
            raise ModelError(
                f"posterior: {self.posterior.name!r} has the parameters {', '.join(self.posterior.parameters)}, but was given "
                f"{', '.join(parameters)}"
            )
        for name in self.posterior.parameters:
            self.register_parameter(name, parameters[name])
        if self.log_sigma2.shape != self.weight.shape:
            raise ModelError(
                f"posterior: {self.posterior.name!r} gives log variances of shape {tuple(self.log_sigma2.shape)} for a weight "
                f"of shape {tuple(self.weight.shape)}"
            )
        self._note_variances()
        self._loaded = False
        self._heard: list[bool] = []
        for parameter in parameters.values():
            if parameter.requires_grad:
                _listen(parameter, self._heard)

    @property
    def _groups(self) -> int:
        return getattr(self, "groups", 1)

    def canonical(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape seen as (groups, outputs per group, inputs per group, kernel positions)."""
        return canonical(tensor, self._groups, self.transposed)

    def as_weight(self, view: Tensor, outputs: int | None = None) -> Tensor:
        """The inverse of `canonical`; dimensions of size 1 are broadcast. outputs: number per group (None: the weight's)."""
        return as_weight(view, self.weight.shape, self._groups, self.transposed, outputs)


def _written(made: Any, now: Sequence[Tensor]) -> bool:
    """Whether something has written to tensors since their versions and checksums were noted."""
    if [version for version, _ in made] != [_version(own) for own in now]:
        return True
    # Fused optimizers do not raise the version counters.
    return [total for _, total in made] != [_checksum(own) for own in now]


def _version(parameter: Tensor) -> int | None:
    return None if parameter.is_inference() else parameter._version


@torch.no_grad()
def _checksum(parameter: Tensor) -> int | None:
    """The sum of a parameter's bit patterns as integers, the same on each device; None if it has no values yet."""
    if parameter.is_meta:
        return None
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.dtype.itemsize]
    return int(parameter.detach().view(bits).sum(dtype=torch.int64))


def _listen(parameter: nn.Parameter, heard: list[bool]) -> None:
    """Note the first gradient that reaches a parameter. The hook does not refer to a layer: otherwise layers and parameters
    would keep each other in memory."""

    def note(gradient: Tensor) -> None:
        heard.append(True)
        hook.remove()

    hook = parameter.register_hook(note)


def set_posterior(model: nn.Module | Iterable[nn.Module], posterior: str | Posterior) -> None:
    """Give variational layers another posterior in place, with the same variances or the nearest that it can represent.

    Its parameters are new: create the optimizer afterwards. In this way a long training may begin with cheaper variances and
    continue with one for each weight: `svdc.set_posterior(model, "independent")`.

    model: a model, or the layers themselves. Layers that share a weight keep sharing its variances if all of them are given.
    posterior: as for `convert`. Raises ModelError for an unknown name.
    """
    wanted = check_posterior(posterior)
    modules = model.modules() if isinstance(model, nn.Module) else model
    made: dict[Any, dict[str, nn.Parameter]] = {}
    for layer in [one for one in modules if isinstance(one, Weighted) and one.posterior != wanted]:
        key = weight_of(layer)
        layer.set_variances(wanted, made.get(key))
        made[key] = layer.variance_parameters()
