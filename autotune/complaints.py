"""What is wrong with what a user wrote, in words for the user: pydantic's own are for who programs. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from autotune.errors import suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import ValidationError

# By pydantic's name of the error (https://docs.pydantic.dev/latest/errors/validation_errors); what isn't here, such as
# an error that one of our own checks raises, says itself what is wrong.
_WORDS = {
    "greater_than": "expected a number above {gt:g}",
    "greater_than_equal": "expected {ge:.10g} or more",
    "less_than": "expected a number below {lt:g}",
    "less_than_equal": "expected {le:.10g} or less",
    "finite_number": "expected a finite number",
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "expected a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "expected true or false"),
    "string_type": "expected text",
    **dict.fromkeys(("list_type", "tuple_type"), "expected a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "expected names with their values"),
}


def complaint(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, one of pydantic's errors: what was expected, with the choices if there are."""
    context = error.get("ctx", {})
    if error["type"] in ("enum", "literal_error"):
        choices = str(context["expected"])
        near = suggestion(str(error["input"]), re.findall(r"'(.*?)'", choices))
        return "expected " + choices.replace("'", "") + near
    words = _WORDS.get(error["type"])
    return words.format(**context) if words is not None else str(error["msg"]).removeprefix("Value error, ")


def first_complaint(error: ValidationError) -> str:
    """Return what is wrong with the first field that something is wrong with, by all that it might have been."""
    errors = error.errors()
    several = dict.fromkeys(complaint(e) for e in errors if e["loc"][:1] == errors[0]["loc"][:1])
    first, *others = several
    return " or ".join((first, *(words.removeprefix("expected ") for words in others)))
