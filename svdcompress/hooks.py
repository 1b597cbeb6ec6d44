"""Forward hooks that last as long as a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the block. handles: from `register_forward_hook` and its like; if they come from a generator
    and a registration fails, those before it are removed, too."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield
