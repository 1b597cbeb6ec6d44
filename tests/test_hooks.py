"""Hooks that last as long as a block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from svdcompress.hooks import hooked


def ran(layer: nn.Module, seen: list) -> int:
    """How many hooks of a layer run in a call."""
    seen.clear()
    layer(torch.zeros(1, 2))
    return len(seen)


def test_hooks_run_in_the_block_and_are_gone_after_it_or_after_an_error():
    layer, seen = nn.Linear(2, 2), []
    own = layer.register_forward_hook(lambda *given: seen.append("of the user"))
    with hooked(layer.register_forward_hook(lambda *given: seen.append(given)) for _ in range(2)):
        assert ran(layer, seen) == 3
    assert ran(layer, seen) == 1
    with pytest.raises(ZeroDivisionError), hooked([layer.register_forward_pre_hook(lambda *given: seen.append(given))]):
        assert ran(layer, seen) == 2
        raise ZeroDivisionError
    assert ran(layer, seen) == 1
    own.remove()


def test_hooks_before_one_that_cannot_be_registered_are_gone_too():
    layer, seen = nn.Linear(2, 2), []
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(RuntimeError), hooked(each.register_forward_hook(seen.append) for each in (layer, scripted)):
        pytest.fail("the block began")  # pragma: no cover
    assert ran(layer, seen) == 0
