"""`$AUTOTUNE_HOME`: where it is, and the measurements of devices and models in it.

The default is `~/.local/share/autotune`, by the XDG base directory specification
(https://specifications.freedesktop.org/basedir/latest). A folder is made when something is first written to it.

Timings of single operators and observations (how far predictions were off, by
type of model) are stored by the fingerprint of a device, with its drivers, libraries and cores. A family's trace is
compressed JSON, stored by a digest of all that decides it: figures of the model, shape of its inputs, family, installed
packages, code of autotune.
"""

import contextlib
import fcntl
import functools
import gzip
import hashlib
import importlib.resources
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.cost.corrections import Observation
from autotune.cost.family import Family, shape_of
from autotune.cost.profile import Profile
from autotune.cost.rates import rates_by_table
from autotune.errors import InputError
from autotune.value import V, Value, read_value, write_bytes, write_value
from autotune.values.estimate import Rates, Timings
from autotune.values.hardware import Hardware, installed_versions
from autotune.values.workload import Workload

logger = logging.getLogger(__name__)

_MOST_OBSERVATIONS = 300  # the latest; a regression over them takes milliseconds
_MOST_TRACES_BYTES = 64 << 20  # all together, compressed; a family takes some 10 KB


def home() -> Path:
    """Return the folder of all lasting things, which need not exist; InputError: there is none, or it is a URL."""
    named = os.environ.get("AUTOTUNE_HOME")
    if named and "://" in named:  # not shown: it may hold a password
        raise InputError("AUTOTUNE_HOME names a folder, and is a URL; a database is named by AUTOTUNE_RECORD")
    try:
        if named:
            return Path(named).expanduser().absolute()
        data = os.environ.get("XDG_DATA_HOME", "")
        base = Path(data) if Path(data).is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        raise InputError("this user has no home directory: set AUTOTUNE_HOME to a folder that can be written") from None
    return base / "autotune"


def writable(*parts: str) -> Path:
    """Return a folder of the home, made if need be; InputError: it can't be written."""
    folder = home().joinpath(*parts)
    try:
        home().mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"{folder}: can't be written: {error.strerror} (AUTOTUNE_HOME names another)") from None
    return folder


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[Path]:
    """Keep other processes from changing the files of a folder, where its file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


class Observations(Value):
    """Of one device and one type of model."""

    observations: tuple[Observation, ...] = ()


def rates_of(hardware: Hardware) -> Rates:
    """Return the rates of a device by its data sheet, with the timings that are stored of it."""
    return rates_by_table(hardware).model_copy(update={"timings": read_timings(hardware)})


def _stored(kind: type[V], *parts: str) -> V | None:
    """Return the value of a file of the home; None: there is none, or, after a warning, it can't be read."""
    try:
        path = home().joinpath(*parts)
        return read_value(kind, path)
    except (FileNotFoundError, NotADirectoryError, InputError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't what autotune writes"
        logger.warning("autotune: %s is ignored: %s", path, reason)
        return None


def read_observations(hardware: Hardware, model_type: str) -> tuple[Observation, ...]:
    """Return the observations of earlier searches; none if they can't be read."""
    known = _stored(Observations, "corrections", hardware.fingerprint, f"{model_type}.json")
    return () if known is None else known.observations


def add_observations(hardware: Hardware, model_type: str, observations: Sequence[Observation]) -> None:
    """Store observations for the next search; where the home can't be written, a warning says so."""
    try:
        with _changing(writable("corrections", hardware.fingerprint)) as folder:
            new = {observation.key: observation for observation in observations}
            kept = [o for o in read_observations(hardware, model_type) if o.key not in new]
            latest = Observations(observations=(*kept, *new.values())[-_MOST_OBSERVATIONS:])
            write_value(latest, folder / f"{model_type}.json")
    except Exception as error:
        logger.warning("observations of %s are not stored: %s", model_type, error)


def read_timings(hardware: Hardware) -> Timings | None:
    return _stored(Timings, "operators", f"{hardware.fingerprint}.json")


def add_timings(hardware: Hardware, found: Timings) -> None:
    """Store times of operators beside those that are stored, if the home can be written; the latest stay."""
    with contextlib.suppress(OSError, InputError), _changing(writable("operators")) as folder:
        both = (read_timings(hardware) or found).updated(found)
        names = ("operators", "optimizers")
        latest = {name: dict(list(getattr(both, name).items())[-20_000:]) for name in names}  # some hundred models'
        write_value(both.model_copy(update=latest), folder / f"{hardware.fingerprint}.json")


def read_trace(workload: Workload, parameters: int, family: Family) -> Profile | None:
    """Return the stored trace of a family; None if there is none. A file that can't be read is removed without a word.

    `parameters`: number of parameters of the model, to which the trace was extended.
    """
    path = _trace_path(workload, parameters, family)
    if path is None or not path.exists():
        return None
    with contextlib.suppress(OSError, EOFError, zlib.error, ValueError):  # of a garbled file, or another's
        found = Profile.model_validate_json(gzip.decompress(path.read_bytes()))
        os.utime(path)
        if found.family == family:
            return found
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def write_trace(workload: Workload, parameters: int, profile: Profile) -> None:
    """Store a trace; the oldest go if all are too large. Where the home can't be written, nothing is stored."""
    path = _trace_path(workload, parameters, profile.family)
    if path is None:
        return
    with contextlib.suppress(OSError, InputError):
        writable(path.parent.name)
        write_bytes(gzip.compress(profile.model_dump_json().encode(), 5, mtime=0), path)
        total, ours = 0, path.parent.glob(f"{'[0-9a-f]' * 32}.json.gz")  # beside files of the user's
        for file in sorted(ours, key=lambda file: file.stat().st_mtime, reverse=True):
            total += file.stat().st_size
            if total > _MOST_TRACES_BYTES:
                file.unlink()


def _trace_path(workload: Workload, parameters: int, family: Family) -> Path | None:
    """Return the file of a trace; None: there is no home, or code of the model's own, which may change, decides it."""
    model = workload.model
    if model.source == "own" or model.trust_remote_code or workload.own_code is not None:
        return None
    figures = model.model_dump(mode="json", exclude={"reference", "name", "source", "path", "revision"})
    inputs = shape_of(workload).model_dump(mode="json"), family.model_dump(mode="json")
    decides = (figures, parameters, *inputs, installed_versions(), _code_digest())
    name = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()
    try:
        return home() / "traces" / f"{name[:32]}.json.gz"
    except InputError:
        return None


@functools.cache
def _code_digest() -> str:  # a checkout changes without its version
    folders = [importlib.resources.files("autotune") / name for name in ("cost", "training", "values")]
    files = sorted((f for d in folders for f in d.iterdir() if f.name.endswith(".py")), key=lambda f: (f.name, str(f)))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
