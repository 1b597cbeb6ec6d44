"""Reading, overriding, checking and writing recipes; errors name the file and the field."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from svdcompress.errors import RecipeError, nearest, shortened
from svdcompress.recipe._auto import EARLIER, as_written, from_earlier
from svdcompress.recipe._find import find_recipe
from svdcompress.recipe._schema import Recipe
from svdcompress.recipe._yaml import LONGEST, parse_yaml

WITHOUT_RECIPE = {"convert.share": {"weight": 0.8, "input": 0.2}}
"""Defaults for a command that names a model and no recipe: they aim at smaller shapes, the defaults of a recipe at zeros."""


def load_recipe(
    path: str | Path | None = None, overrides: Sequence[str] = (), fields: Mapping[str, Any] | None = None
) -> Recipe:
    """The recipe of a file, with overrides applied.

    path: a YAML file, or the name of a shipped recipe such as "digits"; None: the defaults alone.
    overrides: "train.epochs=30" and the like; the value is read as YAML.
    fields: {dotted field: value} set before the overrides (what command-line options become).

    Raises RecipeError, naming the file (or the override) and the field, with the nearest known name for an unknown one.
    """
    origin = "recipe" if path is None else str(path)
    content = {} if path is None else _read(find_recipe(path))
    origins: dict[str, str] = {}
    for field, value in (fields or {}).items():
        _put(content, field, value, origin)
        origins[field] = "option"
    for override in overrides:
        field, value = _parse(override)
        _put(content, field, value, f"--set {override}")
        origins[field] = f"--set {override}"
    return parse_recipe(content, origin, origins)


def changed(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    """A copy of a recipe with other values, set in the same way as the `fields` of `load_recipe`. Raises RecipeError."""
    content: Any = parse_yaml(dump_recipe(recipe))
    for field, value in fields.items():
        _put(content, field, value, "settings")
    return parse_recipe(content)


def parse_recipe(content: Mapping[str, Any], origin: str = "recipe", origins: Mapping[str, str] | None = None) -> Recipe:
    """A recipe from a mapping. Raises RecipeError; `origin` and `origins` ({field: origin}) are what its message names."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise RecipeError(_explain(error, origin, origins or {})) from None
    except RecursionError:
        raise RecipeError(f"{origin}: nested too deep") from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every field but those that are not set and that `recover.optimizer: auto` chooses."""
    return yaml.safe_dump(as_written(recipe), sort_keys=False, allow_unicode=True, width=100)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > 4 * LONGEST:
            raise RecipeError(f"{path}: {path.stat().st_size:,} bytes, too large for a recipe")
        text = path.read_text(encoding="utf-8")
        content = parse_yaml(text)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RecipeError(
            f"{path}{where}: not YAML: {shortened(str(getattr(error, 'problem', None) or 'not text'))}"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of sections such as 'model:', not {type(content).__name__}")
    return from_earlier(content) if text.startswith(EARLIER) else content


def _parse(override: str) -> tuple[str, Any]:
    field, equals, text = override.partition("=")
    if not equals or not field.strip():
        raise RecipeError(f"--set {override}: write it as section.field=value, such as train.epochs=30")
    try:
        return field.strip(), parse_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None)
        raise RecipeError(f"--set {shortened(override)}: the value is not YAML{f': {problem}' if problem else ''}") from error


def _put(content: dict[str, Any], field: str, value: Any, origin: str) -> None:
    if not isinstance(field, str):
        raise RecipeError(f"{origin}: {shortened(repr(field))} is not a field; write section.field, such as train.epochs")
    *sections, last = field.split(".")
    place: Any = content
    model: Any = Recipe
    for depth, section in enumerate(sections):
        inner = place.setdefault(section, {})
        model = section_of(model, section)
        if isinstance(inner, str) and model is not None:
            inner = place[section] = {next(iter(model.model_fields)): inner}
        if inner is None:
            inner = place[section] = {}
        if not isinstance(inner, dict):
            raise RecipeError(f"{origin}: {'.'.join(sections[: depth + 1])} has no fields; it is {shortened(repr(inner))}")
        place = inner
    if isinstance(value, str) and isinstance(place.get(last), dict) and (inner := section_of(model, last)) is not None:
        place[last][next(iter(inner.model_fields))] = value  # `--set data=mnist:DIR` leaves the section's other fields
        return
    if not sections and isinstance(value, Mapping) and section_of(Recipe, last) is not None:
        for name, inner in value.items():  # fields that are not named stay
            _put(content, f"{last}.{name}", inner, origin)
        return
    place[last] = value


def section_of(model: Any, field: str) -> type[BaseModel] | None:
    """The section class that a field of a section holds (inside a list, too), or None."""
    if model is None or field not in model.model_fields:
        return None
    return _section_in(model.model_fields[field].annotation)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (list, types.UnionType, typing.Union, typing.Annotated):
        return next((found for arg in typing.get_args(annotation) if (found := _section_in(arg))), None)
    return None


def _explain(error: ValidationError, origin: str, origins: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors():
        loc = [part for part in problem["loc"] if not _is_tag(part)]
        field = shortened(".".join(str(part) for part in loc), 120)
        where = next((text for name, text in origins.items() if f"{field}.".startswith(f"{name}.")), None)
        where = where or next((text for name, text in origins.items() if name.startswith(f"{field}.")), origin)
        where = origin if where == "option" else where
        if problem["type"] == "extra_forbidden":
            text = f"unknown field{_nearest(loc)}"
        else:
            text = problem["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
            if not isinstance(problem["input"], dict):
                text += f" (got {shortened(repr(problem['input']))})"
        line = f"{where}: {field}: {text}" if field else f"{where}: {text}"
        if not any(line.startswith(f"{where}: {field}:") for line in lines):  # one line per field: unions report each branch
            lines.append(line)
    return "\n".join(lines)


def _is_tag(part: Any) -> bool:
    """Whether a part of an error's location is pydantic's name for a branch of a union, not a field."""
    return isinstance(part, str) and (
        part in ("float", "str", "int", "constrained-float") or part.startswith(("list[", "dict[", "literal[", "function-"))
    )


def _nearest(loc: list[Any]) -> str:
    model: Any = Recipe
    for part in loc[:-1]:
        if isinstance(part, str):
            model = section_of(model, part)
    if model is None:
        return ""
    known = list(model.model_fields)
    sections = {name: section for name in known if (section := section_of(model, name))}
    inside = [f"{name}.{loc[-1]}" for name, section in sections.items() if loc[-1] in section.model_fields]
    if inside:
        return f"; did you mean {' or '.join('.'.join(map(str, [*loc[:-1], name])) for name in inside[:3])}?"
    if close := nearest(str(loc[-1]), known):
        return f"; did you mean {'.'.join(map(str, [*loc[:-1], close]))}?"
    return f"; known fields: {', '.join(known)}"
