"""What of a database's URL may be shown: nothing that is, or could be meant as, a password. Called by `databases`.

People forget a part of a URL, or the percent signs of a character, and then a password stands where something else is
read. So of what is no URL only the kind of database is shown, of a URL no user name, and a part of it only if it looks
like what it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus

if TYPE_CHECKING:
    import sqlalchemy as sa

HIDDEN = "***"

# Schemes that may be shown: those that SQLAlchemy has, and what hosts hand out.
_SCHEMES = frozenset({"sqlite", "postgresql", "postgres", "mysql", "mariadb", "mssql", "oracle"})

_HOST = re.compile(r"[\w.-]+|[0-9a-fA-F:.]+")
_NAME = re.compile(r"[\w.$-]+")
_SECRET_NAME = re.compile(r"pass|pwd|secret|token|key|auth|credential", re.IGNORECASE)
_NO_PATH = re.compile(r":[^/]*@|(pass\w*|pwd|secret|token)\s*=", re.IGNORECASE)


def is_garbled(text: str) -> bool:
    """Whether a URL can be read in a way that nobody has meant, such as with a part of a password for the host."""
    scheme, _, rest = text.partition("://")
    body = rest.partition("?")[0]
    if scheme.partition("+")[0] == "sqlite":
        return _NO_PATH.search(body) is not None
    return body.count("@") > 1


def scheme_of(text: str) -> str:
    """Return the kind of database that is meant, as the beginning of a URL; empty where that isn't known."""
    scheme = text.partition("://")[0].partition("+")[0]
    return f"{scheme}://" if scheme in _SCHEMES else ""


def shown(url: sa.URL) -> str:
    """Return a server's URL for people: kind, host and database. A port is shown only where it can be nothing else."""
    host = _plain(url.host, _HOST)
    port = f":{url.port}" if url.port is not None and url.username is not None else ""
    database = _plain(url.database, _NAME)
    return f"{url.drivername}://{host}{port}" + (f"/{database}" if database else "")


def masked(text: str, url: sa.URL) -> str:
    """Return what a driver says without what may be a password."""
    for secret in sorted(set(_secrets(url)), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _plain(part: str | None, looks: re.Pattern[str]) -> str:
    return "" if not part else part if looks.fullmatch(part) else HIDDEN


def _secrets(url: sa.URL) -> Iterator[str]:
    """Yield what isn't to be shown, in each way that it may be written."""
    parts = [str(url.password) if url.password is not None else None]
    if url.password is None:  # then what is read as the user or the port may have been meant as one
        parts += [url.username, str(url.port) if url.port is not None and url.username is None else None]
    parts += [url.host if _plain(url.host, _HOST) == HIDDEN else None]
    parts += [url.database if _plain(url.database, _NAME) == HIDDEN and url.get_backend_name() != "sqlite" else None]
    for name, value in url.query.items():
        if _SECRET_NAME.search(name):
            parts += [value] if isinstance(value, str) else value
    for part in filter(None, parts):
        yield from filter(None, {part, part.strip(), quote(part), quote(part, safe=""), quote_plus(part)})
        yield from filter(None, {repr(part)[1:-1], " ".join(part.split())})
