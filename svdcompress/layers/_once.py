"""Hand-written derivatives, which cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_C: Any = torch._C  # its stubs do not declare DelayedError

_ERROR = (
    b"svdcompress: second derivatives are not supported through the KL or through the draws of variational layers in "
    b"train(); in eval() they work through the layers (docs/guides.md, training loops out of the ordinary)"
)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the gradients of a `backward` raise RuntimeError if they are differentiated, also with respect to saved inputs.

    torch's own decorator raises only for derivatives with respect to the incoming gradient, if that requires one: where it
    is constant, as at the end of a loss, second derivatives were silently 0.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return found
        several = found if isinstance(found, tuple) else (found,)
        given = [one for one in (*grads, *ctx.saved_tensors) if isinstance(one, Tensor) and one.requires_grad]
        fresh = [one.detach() if isinstance(one, Tensor) else one for one in several]
        refused = _C._functions.DelayedError(_ERROR, len(fresh) + len(given))(*fresh, *given)
        return refused[: len(fresh)] if isinstance(found, tuple) else refused[0]

    return wrapper
