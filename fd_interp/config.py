"""Frozen, validated values: the base of everything that a run is made of, and the one error that users see."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails


class InputError(ValueError):
    """Something given is wrong. The message is one sentence that names it and says what would be right."""


T = TypeVar("T", bound="Frozen")


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that offers the names closest to `name`, or all of them when none is close."""
    known = list(known)
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known))}"


class Frozen(BaseModel):
    """An immutable value with named, checked fields; an unknown field is an error that offers the nearest names.

    Raises:
        InputError: one sentence for each wrong field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InputError("; ".join(_sentence(type(self), detail) for detail in error.errors())) from None

    def __eq__(self, other: object) -> bool:
        """By fields alone: what a value has computed and kept says nothing about it."""
        return type(self) is type(other) and all(
            getattr(self, name) == getattr(other, name) for name in type(self).model_fields
        )

    def model_copy(self: T, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> T:
        """A copy with some fields changed, checked like any other; what was derived from the old ones stays behind."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**fields | dict(update or {}))


def _sentence(owner: type[BaseModel], detail: ErrorDetails) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
        return f"{owner.__name__} has no field '{where}', {nearest(where, owner.model_fields)}"
    if detail["type"] == "missing":
        return f"{owner.__name__} needs the field '{where}'"
    message = detail["msg"].removeprefix("Value error, ")
    if not where:
        return message
    return f"{where}: {message}" + ("" if detail["type"] == "value_error" else f", not {detail['input']!r}")
