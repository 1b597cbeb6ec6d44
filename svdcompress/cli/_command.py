"""How commands take options: flags without a type in the help, and a hint for fields of the recipe typed as options."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

SETTINGS = {"help_option_names": ["-h", "--help"]}
"""Context settings of the application; its commands inherit them."""


def _without_types(params: list[Any]) -> list[Any]:
    """The same options, but flags have no metavar, for which Typer would show <bool>."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose error for an unknown option says how to set the recipe's field of that name."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = getattr(error, "option_name", None)
            takes_fields = any("--set" in param.opts for param in self.params)
            if type(error).__name__ == "NoSuchOption" and name and takes_fields and (fields := fields_named(name)):
                hint = " or ".join(f"--set {field}=VALUE" for field in fields)
                error.message = f"No such option: {name}. It is a field of the recipe: {hint}"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise


class Group(TyperGroup):
    """A group of commands whose own flags have no type in the help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def fields_named(option: str) -> list[str]:
    """Dotted names of the recipe's fields named like an option: ["train.lr", ...] for --lr; those of `train` come first.

    >>> fields_named("--share")
    ['convert.share']
    """
    from pydantic import BaseModel

    from svdcompress.recipe import Recipe

    wanted = option.lstrip("-").replace("-", "_")
    found = []
    for section, field in Recipe.model_fields.items():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel) and wanted in kind.model_fields:
                found.append(f"{section}.{wanted}")
    return sorted(dict.fromkeys(found), key=lambda name: not name.startswith("train."))
