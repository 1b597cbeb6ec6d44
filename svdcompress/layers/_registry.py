"""Strategies that files store by name and settings: classes that register themselves when they are defined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from svdcompress.errors import ModelError

Found = TypeVar("Found", bound="Named")


class Named:
    """A strategy with a name. To add your own, define a subclass with a `name`; defining the class registers it.

    It equals any other of its class with the same settings and, if it has no settings, its name, as in
    `layer.prior == "ard"`.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str]
    """What messages call it, such as "prior"."""
    registry: ClassVar[dict[str, Any]]
    """All classes of this kind, by name."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__dict__.get("name")
        if not name:
            return
        known = cls.registry.get(name)
        if known is not None and known.__module__.startswith("svdcompress.") and known.__module__ != cls.__module__:
            raise ModelError(f"{cls.__name__}: the package has a {cls.kind} called {name!r}; give yours another name")
        cls.registry[name] = cls

    def settings(self) -> dict[str, Any]:
        """Arguments of the constructor that recreate this strategy: plain values, for the manifest of a file."""
        return {}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.name == other and not self.settings()
        return type(other) is type(self) and isinstance(other, Named) and other.settings() == self.settings()

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return repr(self) if self.settings() else self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.settings().items())})"


def chosen(base: type[Found], value: Any) -> Found:
    """The strategy of this kind that is given, or that a name or a manifest's {"name": ..., "settings": ...} describes.

    Raises ModelError for an unknown name, with a list of the known ones; for settings that do not fit; and for a class
    without a name of its own, which no file could identify.
    """
    kind = base.kind
    if isinstance(value, base):
        if base.registry.get(value.name) is not type(value):
            raise ModelError(
                f"{kind}: {type(value).__name__} has no name of its own; give the class one, as in name = 'mine', so that "
                "checkpoints can say which it is"
            )
        return value
    name, settings = (value.get("name"), value.get("settings", {})) if isinstance(value, Mapping) else (value, {})
    if not isinstance(name, str) or name not in base.registry:
        raise ModelError(
            f"{kind}: unknown {name!r}; use one of {', '.join(base.registry)}, or define (import) your own class of that name "
            "first: a subclass of svdcompress.layers." + base.__name__
        )
    try:
        return base.registry[name](**settings)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{kind}: the settings {settings!r} do not fit {name!r} ({error})") from error


def stored(value: Named) -> str | dict[str, Any]:
    """The JSON-able form for a manifest: the name, with the settings if there are any."""
    settings = value.settings()
    return {"name": value.name, "settings": settings} if settings else value.name
