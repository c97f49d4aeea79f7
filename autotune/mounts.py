"""Which file system a path lies on, for those that several machines share. Reads /proc/self/mounts, or is given it."""

from __future__ import annotations

import re
from pathlib import Path

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
