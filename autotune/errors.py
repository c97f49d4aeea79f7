"""The errors a user can meet, and the exit code of each class.

Anything else that reaches the command line is a bug of ours (exit code 1); Ctrl-C is 130.
"""

import contextlib
import difflib
import errno
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

# Words for users, by pydantic's name of an error (https://docs.pydantic.dev/latest/errors/validation_errors), whose own
# words are for programmers. Other errors, such as those of our own checks, have words for users already.
_WORDS = {
    "greater_than": "expected a number above {gt:g}",
    "greater_than_equal": "expected {ge:.10g} or more",
    "less_than": "expected a number below {lt:g}",
    "less_than_equal": "expected {le:.10g} or less",
    "finite_number": "expected a finite number",
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    **dict.fromkeys(("int_parsing", "int_parsing_size", "int_type", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "expected a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "expected true or false"),
    "string_type": "expected text",
    **dict.fromkeys(("list_type", "tuple_type"), "expected a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "expected names with their values"),
}


def complaint(error: Mapping[str, Any]) -> str:
    """Return the words for one of pydantic's errors: the expected value, with the choices if there are any."""
    context = error.get("ctx", {})
    if error["type"] in ("enum", "literal_error"):
        choices = str(context["expected"])
        near = suggestion(str(error["input"]), re.findall(r"'(.*?)'", choices))
        return "expected " + choices.replace("'", "") + near
    words = _WORDS.get(error["type"])
    return words.format(**context) if words is not None else str(error["msg"]).removeprefix("Value error, ")


def located(error: "ValidationError", whole: str = "") -> str:
    """Return the first mistake after its place, or that of the `whole`: 'best.config.optim: is missing'."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])) or whole, complaint(first))))


def first_complaint(error: "ValidationError") -> str:
    """Return what is wrong with the first wrong field; if it may have several types, what each of them expects."""
    errors = error.errors()
    several = dict.fromkeys(complaint(e) for e in errors if e["loc"][:1] == errors[0]["loc"][:1])
    first, *others = several
    return " or ".join((first, *(words.removeprefix("expected ") for words in others)))


EXIT_BUG = 1
EXIT_INTERRUPTED = 130


class AutotuneError(Exception):
    """An error with a one-line message for the user and an exit code."""

    exit_code = EXIT_BUG


class InputError(AutotuneError):
    """Something the user wrote can't be used."""

    exit_code = 2


class UnknownModelError(InputError):
    """The model is neither in the catalogue, nor a directory, nor a cached or reachable hub id."""


class SearchSpaceError(InputError):
    """A search-space file is malformed; the message gives file, path and what is expected."""


class RunDirectoryError(InputError):
    """A run directory can't be written, is in use, or holds another search."""


class CodeError(InputError):
    """The user's code ended before it called `Trainer.train`; the message says how."""


class LoopError(CodeError):
    """The user's code trains in a loop of its own."""


class RecordError(InputError):
    """The lasting record can't be read or written: unreachable, in use, damaged or of a newer autotune."""


class MachineError(AutotuneError):
    """The machine lacks something that was asked for."""

    exit_code = 3


class InfrastructureError(AutotuneError):
    """The processes that run trials could not be started or kept, or their device failed."""

    exit_code = 4


class NothingFitsError(AutotuneError):
    """No configuration fits; the message names the closest miss and what would make it fit."""

    exit_code = 5


class NothingPassedError(AutotuneError):
    """Every configuration that completed a trial failed afterwards; the message says how the fastest did."""

    exit_code = 6


DISK_IS_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # as an OSError says it


@contextlib.contextmanager
def writing(where: str, kind: type[AutotuneError] = InputError) -> Iterator[None]:
    """Turn an OSError into an error of a `kind` about `where`, as '--output FILE'; a full disk is infrastructure."""
    try:
        yield
    except OSError as error:
        told = InfrastructureError if error.errno in DISK_IS_FULL else kind
        raise told(f"{where}: can't be written: {error.strerror}") from None


@contextlib.contextmanager
def explaining_files() -> Iterator[None]:
    """Turn an error of a file's name, a full disk or a current directory that was removed into one for users."""
    try:
        yield
    except OSError as error:
        where = f"{str(error.filename)[:100]}: " if error.filename else ""
        if error.errno in DISK_IS_FULL:
            raise InfrastructureError(f"{where}the disk is full") from None
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"{where}the name is too long") from None
        if error.errno == errno.ENOENT and not error.filename:  # by os.getcwd
            raise InputError("the current directory has been removed; change to one that exists") from None
        raise
    except ValueError as error:
        if "surrogates not allowed" not in str(error):  # Python's stand-ins for bytes that are no UTF-8
            raise
        raise InputError("the path of a file or of this folder isn't UTF-8 text; rename it") from None


class NoEffectError(Exception):
    """A setting that was asked for did not take effect; a trial in which that is seen is invalid."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the names nearest to `word`, or an empty string.

    >>> suggestion("precison", ["precision", "optim"])
    " (did you mean 'precision'?)"
    """
    originals = {k.lower(): k for k in known}
    near = difflib.get_close_matches(word.lower(), originals, n=3, cutoff=0.6)
    if not near:
        return ""
    return f" (did you mean {' or '.join(repr(originals[n]) for n in near)}?)"


def resuming(run_directory: Path) -> str:
    """Return the command that goes on with a search, for a shell."""
    return f"`autotune resume {shlex.quote(str(run_directory))}`"


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, cut to 300 characters."""
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) <= 300 else message[:297] + "..."
