"""Jacobians of each example's heads with respect to the kept weights, whatever the model is made of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_map

from svdcompress.batch import first_tensor, map_tensors
from svdcompress.calibrate._kept import AsFunction, Kept
from svdcompress.errors import ModelError, SvdcError
from svdcompress.hooks import hooked
from svdcompress.likelihoods import Likelihood


def flat_heads(likelihood: Likelihood, heads: Any) -> Tensor:
    """(B, H): the heads in the order of `noise_root`."""
    if likelihood.name == "gaussian":
        return torch.cat([head.reshape(len(head), -1) for head in heads], 1)
    if likelihood.classes and heads.dim() > 2:
        heads = heads.movedim(likelihood.dim, -1)
    return heads.reshape(len(heads), -1)


class Jacobians:
    """Computes the heads of a batch, and the Jacobian of each example's heads with respect to the kept weights: (B, H, K).

    By vmap; if that refuses the model (packed sequences, branches that depend on values), example by example, with the same
    result. together: whether vmap has taken the model so far. Raises ModelError if neither works.
    """

    def __init__(self, model: nn.Module, kept: Kept, likelihood: Likelihood) -> None:
        self.function, self.likelihood = AsFunction(model, kept, likelihood), likelihood
        self.together = True

    def __call__(self, inputs: Any) -> tuple[Any, Tensor]:
        try:
            heads = self._heads(inputs)
            shape = (*flat_heads(self.likelihood, heads).shape, len(self.function.vector))
            found = self._at_once(inputs, shape) if self.together else None
            if found is None:
                self.together = False
                found = self._one_by_one(inputs)
            if found.shape != shape:
                raise ModelError("its outputs for an example have another shape when it is called on fewer examples")
        except Exception as error:  # the user's model may raise anything
            why = str(error) if isinstance(error, SvdcError) else f"{type(error).__name__}: {error}"
            raise ModelError(
                f"no Laplace approximation is possible for this model, because it has no Jacobian for each example alone: {why}"
            ) from error
        return heads, found

    @torch.no_grad()
    def _heads(self, inputs: Any) -> Any:
        if len(first_tensor(inputs)) > 1:
            return self.function(self.function.vector, inputs)
        return tree_map(lambda head: head[:1], self.function(self.function.vector, _twice(inputs, 0)))

    def _at_once(self, inputs: Any, shape: tuple[int, ...]) -> Tensor | None:
        """The Jacobians by vmap; None if it does not work for the model."""

        def single(vector: Tensor, inputs: Any) -> Tensor:
            return self._flat(vector, map_tensors(inputs, lambda t: t.unsqueeze(0)))[0]

        try:
            with _for_vmap(self.function.model):
                found = vmap(jacrev(single), (None, 0), randomness="error")(self.function.vector, inputs).detach()
        except Exception:  # a model may raise anything under vmap; calling it example by example decides
            return None
        return found if found.shape == shape else None

    def _one_by_one(self, inputs: Any) -> Tensor:
        """The Jacobians by a backward pass for each head of each example."""
        rows, before = [], _randomness()
        for index in range(len(first_tensor(inputs))):
            with torch.enable_grad():
                vector = self.function.vector.clone().requires_grad_()
                heads = self._flat(vector, _twice(inputs, index))[0]
            rows.append(torch.stack([torch.autograd.grad(head, vector, retain_graph=True)[0] for head in heads]))
        if any(not torch.equal(one, other) for one, other in zip(before, _randomness(), strict=True)):
            raise ModelError("it draws random numbers in eval()")
        return torch.stack(rows)

    def _flat(self, vector: Tensor, inputs: Any) -> Tensor:
        return flat_heads(self.likelihood, self.function(vector, inputs))


def _twice(inputs: Any, index: int) -> Any:
    """A batch of one example twice: some models drop a dimension of size 1."""
    return map_tensors(inputs, lambda t: t[[index, index]])


def _randomness() -> list[Tensor]:
    """The states of torch's random generators."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


@contextmanager
def _for_vmap(model: nn.Module) -> Iterator[None]:
    """While the body runs, recurrent layers work under vmap: their states are batched as inputs are, their operations plain."""
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="There is a performance drop")
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")  # from setting the flags below
        if recurrent:  # oneDNN's LSTM takes thirty times as long
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        hooks = (layer.register_forward_pre_hook(_batched_state, with_kwargs=True) for layer in recurrent)
        stack.enter_context(hooked(hooks))
        yield


def _batched_state(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments with a state (0 if none is given) that the layer may write to under vmap, made by `Tensor.new_zeros`."""
    if not args or not isinstance(args[0], Tensor) or args[0].dim() != 3:
        return None
    x, *given = args
    state = given[0] if given else kwargs.get("hx")
    if state is None:
        layers = layer.num_layers * (2 if layer.bidirectional else 1)
        sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size]
        zeros = tuple(x.new_zeros(layers, x.shape[0 if layer.batch_first else 1], size) for size in sizes)
        state = zeros if isinstance(layer, nn.LSTM) else zeros[0]
    else:
        state = tree_map(lambda tensor: tensor + x.new_zeros(tensor.shape), state)
    return (x, state), {}
