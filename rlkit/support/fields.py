"""Fields of a job's parameters: types that also read text, bounds, one line about each field, clear errors.

Papermill passes what it cannot read (``1e-5`` from YAML, ``true``, ``null``) as text. pydantic converts it
and checks types and bounds; this module refuses text that had to be guessed at, and makes the error lines.
"""

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from rlkit.support.checks import hint, shown, unusable_path

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
_NOUNS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
_SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_OUT_OF_RANGE = ("finite_number", "greater_than", "greater_than_equal", "less_than", "less_than_equal")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _plain_number(value):
    """Text becomes a number where it plainly is one (no spaces, not "nan"); a bool is not a number."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value) if value.lstrip("+-").isdigit() and len(value) < 20 else float(value)
    if isinstance(value, (str, bytes, bool)) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        raise PydanticCustomError("not_a_number", "not a number")
    return value


def _path_as_text(value):
    if isinstance(value, bytes):
        raise PydanticCustomError("string_type", "not text")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _usable(value: str):
    if why := unusable_path(value):
        raise ValueError(f"got {shown(value)}, expected text that names something ({why})")
    if not value.strip():
        raise ValueError("got an empty text, expected text")
    return value


PLAIN = BeforeValidator(_plain_number)  # behind the bounds of a number: Annotated[int, Interval(ge=1), PLAIN]
Whole = Annotated[int, PLAIN]
Real = Annotated[float, PLAIN]
Text = Annotated[str, BeforeValidator(_path_as_text), AfterValidator(_usable)]


def say(default, doc: str, **bounds) -> Any:
    """A field: its default, one line about it, and bounds (ge, gt, le, lt)."""
    return Field(default, description=doc, **bounds)


class Checked(type):
    """Metaclass of pydantic dataclasses: one ValueError with a line for each mistake, in the order given.

    ``elsewhere`` of the class, if it has one, says of unknown names why they are not among the fields.
    """

    def __call__(cls, **values):
        try:
            return super().__call__(**values)
        except ValidationError as error:
            order, errors = list(values), error.errors(include_url=False)
            errors.sort(key=lambda e: order.index(e["loc"][0]) if e["loc"] and e["loc"][0] in order else 0)
            raise ValueError("\n".join(_line(cls, e, values) for e in errors)) from None


def unknown(cls, name: str, known=()) -> str:
    """The line for a name that is not a field of this class (or not one of ``known``)."""
    line = f"unknown parameter{hint(name, known or cls.__dataclass_fields__)}"
    return f"{name}: {getattr(cls, 'elsewhere', {}).get(name, line)}"


def schema_of(cls, name: str) -> dict[str, Any]:
    """The field's JSON schema: type, bounds, enum, description; none is " or None" where that is allowed."""
    field = TypeAdapter(cls).json_schema()["properties"][name]
    kinds = field.get("anyOf", [field])
    return field | kinds[0] | {"none": " or None" if {"type": "null"} in kinds else ""}


@contextmanager
def collected(errors: list[str]):
    """A ValueError inside becomes a line of ``errors``."""
    try:
        yield
    except ValueError as error:
        errors.append(str(error))


def given(values: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The values without those of known names that are None, or text for it: they mean the default."""
    unset = ("None", "null", "Null", "NULL", "~")
    is_unset = lambda v: v is None or isinstance(v, str) and v in unset
    return {name: v for name, v in values.items() if name not in known or not is_unset(v)}


def _line(cls, error: Mapping, values: Mapping) -> str:
    """One of pydantic's errors as "name: got X, expected Y"."""
    kind = error["type"]
    if not error["loc"]:  # of the fields together: a check of ours, with names in it
        return str(error["ctx"]["error"])
    name = str(error["loc"][0])
    got = values.get(name, error["input"])  # as it came: the error's input may be converted already
    if kind == "unexpected_keyword_argument":
        return unknown(cls, name)
    if kind == "value_error":  # a check of ours
        return f"{name}: {error['ctx']['error']}"
    schema = schema_of(cls, name)
    if names := schema.get("enum"):
        return f"{name}: got {shown(got)}, expected one of {', '.join(names)}{hint(str(got), names)}"
    noun = _NOUNS[schema["type"]]
    if got is None or kind in _OUT_OF_RANGE or (noun == "a number" and type(got) is int):
        bounds = [(sign, schema[key]) for key, sign in _SIGNS.items() if key in schema]
        limits = " and ".join(f"{sign} {b:{',' if isinstance(b, int) else 'g'}}" for sign, b in bounds)
        return f"{name}: got {shown(got)}, expected {f'{noun} {limits}'.strip()}{schema['none']}"
    if noun == "text":
        noun += " (papermill's -r passes a value as text)"
        return f"{name}: {shown(got)} is a {type(got).__name__}, expected {noun}"
    return f"{name}: {shown(got)} is not {noun}"
