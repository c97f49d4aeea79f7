"""Which file system a path lies on, for those that several machines share. Reads /proc/self/mounts, or is given it."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from autotune.errors import InputError

# Where what outlasts a search is kept: `$AUTOTUNE_HOME`, by default `~/.local/share/autotune`. The default follows
# the XDG base directory specification (https://specifications.freedesktop.org/basedir/latest): `$XDG_DATA_HOME` moves
# it, if that is an absolute path. Nothing is made before something is written; whoever reads takes a missing folder
# for an empty one.


def home() -> Path:
    """Return the folder of all lasting things; it need not exist.

    Raises:
        InputError: Neither `$AUTOTUNE_HOME` nor a home directory is known, or the former is a URL.
    """
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
    """Return the folder `parts` of the home, made if need be.

    Raises:
        InputError: It can't be written.
    """
    folder = home().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"{folder}: can't be written: {error.strerror} (AUTOTUNE_HOME names another)") from None
    return folder


MOUNTS = Path("/proc/self/mounts")

# By the names in /proc/self/mounts. SQLite's locks and its write-ahead log, which is shared memory, hold within one
# machine only (https://www.sqlite.org/wal.html, https://www.sqlite.org/howtocorrupt.html section 2.1). 9p is left out:
# sandboxes and virtual machines show their own disk as that.
NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "pvfs2", "panfs", "wekafs"}
    | {"glusterfs", "ocfs2", "gfs2", "acfs", "davfs", "ncpfs"}
    | {
        f"fuse.{name}"
        for name in (
            *("sshfs", "glusterfs", "ceph", "ceph-fuse", "beegfs", "juicefs", "moosefs", "mfs", "lizardfs", "davfs2"),
            *("s3fs", "goofys", "mount-s3", "gcsfuse", "blobfuse", "blobfuse2", "rclone", "alluxio-fuse"),
        )
    }
)


def network_kind(path: Path, mounts: str | None = None) -> str | None:
    """Return the kind of network file system that `path` lies on, or will once it is made; None on any other.

    Args:
        path: It need not exist.
        mounts: The text of /proc/self/mounts; read if None. Where there is none, nothing is known.
    """
    if mounts is None:
        try:
            mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    kind, covered = "", -1
    resolved = path.resolve()
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(_plain(fields[1]))
        # Of mounts one over the other the last is seen.
        if resolved.is_relative_to(point) and len(point.parts) >= covered:
            kind, covered = fields[2], len(point.parts)
    return kind if kind in NETWORK_KINDS else None


def _plain(escaped: str) -> str:
    r"""Return a mount point as it is: a space is written as \040 (`man 5 proc_pid_mounts`, `man 3 getmntent`)."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), escaped)
