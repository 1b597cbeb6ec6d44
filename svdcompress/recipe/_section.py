"""The base of a recipe's sections, and types that they share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

from svdcompress.recipe._checks import moment, numbers_are_numbers, plain_values


class Section(BaseModel):
    """Base of all sections: fields are checked, also on assignment, numbers are finite, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        return numbers_are_numbers(value, cls.model_fields[str(info.field_name)].annotation)


Moment = Annotated[float | str, BeforeValidator(moment)]
"""A point in training: a number of epochs, or a share of all of them such as "30%"."""


Plain = Annotated[dict[str, Any], BeforeValidator(plain_values)]
"""Settings that are passed on: only what YAML and JSON both can hold, so that the stored recipe says the same."""


def in_epochs(moment: float | str, epochs: int) -> float:
    """A `Moment` as a number of epochs."""
    return epochs * float(moment.removesuffix("%")) / 100 if isinstance(moment, str) else float(moment)


def short(field: str) -> BeforeValidator:
    """Let a section be written as one string, the value of its main field."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, str) else value)
