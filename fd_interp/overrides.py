"""Any field of a run from the command line: `--task.persistence 0.3 --training.optimizer.kind adamw`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from fd_interp.config import InputError
from fd_interp.training.run import Run


def override(run: Run, arguments: Sequence[str]) -> Run:
    """The run with the fields that `--path.to.field value` pairs name; several values make a list.

    A new `kind` (of optimizer, model, task or spacing of snapshots) starts from that kind's own defaults, wherever it
    stands among the arguments.

    Raises:
        InputError: a field that does not exist, with the nearest names; or a value that does not fit.
    """
    fields = run.model_dump(mode="json")
    for path, value in sorted(_pairs(arguments), key=lambda pair: not pair[0].endswith(".kind")):
        _set(fields, path.replace("-", "_").split("."), value)
    return Run(**fields)


class Field(NamedTuple):
    """One line of the list of what can be changed."""

    path: str
    value: str
    meaning: str


def fields_of(value: BaseModel, prefix: str = "") -> Iterator[Field]:
    """Every field below a value, with its present value and its meaning."""
    for name, info in type(value).model_fields.items():
        inner = getattr(value, name)
        if isinstance(inner, BaseModel):
            yield from fields_of(inner, f"{prefix}{name}.")
        else:
            yield Field(prefix + name, _short(inner), info.description or "")


def _short(value: object) -> str:
    if isinstance(value, tuple) and any(isinstance(item, tuple) for item in value):
        return json.dumps(value, separators=(",", ":"))  # no spaces, so that it can be typed back as one word
    if isinstance(value, tuple):
        return " ".join(f"{item:.4g}" if isinstance(item, float) else str(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    return "none" if value is None else str(value)


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    remaining = list(arguments)
    while remaining:
        option, _, attached = remaining.pop(0).partition("=")
        if not option.startswith("--") or len(option) < 3:
            raise InputError(f"'{option}' is not an option; fields are given as --path.to.field value")
        values = [attached] if attached else []
        while not attached and remaining and not remaining[0].startswith("--"):
            values.append(remaining.pop(0))
        if not values:
            raise InputError(f"{option} needs a value")
        parsed = [_parsed(value) for value in values]
        yield option[2:], parsed[0] if len(parsed) == 1 else parsed


def _parsed(text: str) -> Any:
    try:
        return None if text == "none" else json.loads(text)
    except json.JSONDecodeError:
        return text


def _set(fields: dict[str, Any], path: list[str], value: Any) -> None:
    *outer, last = path
    for depth, name in enumerate(outer):
        inner = fields.get(name)
        if not isinstance(inner, dict):
            # Left to the validation of the run, which knows the names that would be right.
            fields[name] = _nested(path[depth + 1 :], value)
            return
        fields = inner
    if isinstance(fields.get(last), dict) and isinstance(value, str) and "kind" in fields[last]:
        fields, last = fields[last], "kind"
    if last == "kind" and fields.get("kind") != value:
        fields.clear()
    fields[last] = [value] if isinstance(fields.get(last), list) and not isinstance(value, list) else value


def _nested(path: list[str], value: Any) -> Any:
    return {path[0]: _nested(path[1:], value)} if path else value
