"""Reads YAML that is unambiguous and of bounded size: no duplicate keys, no aliases that multiply, no endless nesting."""

from __future__ import annotations

from typing import Any

import yaml

from svdcompress.errors import shortened
from svdcompress.files import DEEPEST

LONGEST = 2**20
"""Most characters of a YAML text; recipes have a few thousand."""

MOST = 100_000
"""Most values in a YAML text, with each alias counted as what it stands for."""


class TooLarge(yaml.YAMLError):
    """A text that is longer, deeper or, with aliases followed, larger than any recipe, or not readable. problem: why."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class _Loader(yaml.SafeLoader):
    """The safe loader, without duplicate keys and with bounds on depth and size (aliases followed) that hold as it reads."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[str, int] = {}  # of what each anchor stands for
        self._open: list[tuple[str | None, int]] = []  # anchor and size so far of each open collection

    def get_event(self) -> Any:
        """The parser's next event. Raises TooLarge where it goes beyond the bounds."""
        event = super().get_event()
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in self._open):
                raise TooLarge("a value that contains itself")
            self._add(self._sizes.get(event.anchor, 1))
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor:
                self._sizes[event.anchor] = 1
            self._add(1)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._open.append((event.anchor, 1))
            if len(self._open) > DEEPEST:
                raise TooLarge(f"nested more than {DEEPEST} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = self._open.pop()
            if anchor:
                self._sizes[anchor] = size
            self._add(size)
        return event

    def _add(self, size: int) -> None:
        if self._open:
            anchor, own = self._open[-1]
            size += own
            self._open[-1] = (anchor, size)
        if size > MOST:
            raise TooLarge(f"more than {MOST:,} values with its aliases expanded")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As in the safe loader, but refuse a key that occurs twice: the last one would silently win."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int | float | bool | None):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {shortened(str(key), 60)!r} occurs twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, with `safe_load`'s types. Raises yaml.YAMLError for anything else.

    Aliases are allowed, but with them followed the text must not hold more than MOST values.
    """
    if len(text) > LONGEST:
        raise TooLarge(f"{len(text):,} characters; at most {LONGEST:,} are read")
    try:
        return yaml.load(text, _Loader)  # a SafeLoader  # nosec B506
    except (ValueError, OverflowError, RecursionError, AttributeError, TypeError, KeyError, IndexError) as error:
        # numbers of thousands of digits, dates that do not exist, values of tags that do not fit them
        raise TooLarge(f"a value that cannot be read ({shortened(str(error))})") from error
