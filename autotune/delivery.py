"""The file in which the user wants the answer beside the run directory: looked at first, written last.

Called by `autotune.api`, so that it holds for Python and the command line, and for who goes on with a search.
"""

from __future__ import annotations

from pathlib import Path

from autotune.errors import InputError
from autotune.files import check_savable
from autotune.result import TuningResult


def wanted_file(output: str | Path | None) -> str | None:
    """Return where the answer is wanted, from wherever the search is gone on with; fail in second 0, not after an hour.

    Raises:
        InputError: It can't be written.
    """
    if output is None:
        return None
    path = Path(output).absolute()
    try:
        check_savable(path)
    except OSError as error:
        raise _refused(Path(output), error) from None
    return str(path)


def deliver(result: TuningResult | None, path: str | None) -> None:
    """Write the answer, if there is one and it is wanted somewhere.

    Raises:
        InputError: It can't be written any more.
    """
    if result is None or path is None:
        return
    try:
        result.save(path)
    except OSError as error:
        raise _refused(Path(path), error) from None


def _refused(path: Path, error: OSError) -> InputError:
    return InputError(f"--output {path}: can't be written: {error.strerror}")
