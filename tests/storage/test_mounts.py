"""Which paths lie on a network file system, by a table of mounts."""

from pathlib import Path

import pytest

from autotune.storage.home import MOUNTS, network_kind

TABLE = """\
/dev/sda1 / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
auto.home /home autofs rw 0 0
server:/export/ann /home/ann nfs4 rw,vers=4.2 0 0
/dev/sdb1 /home/ann/scratch xfs rw 0 0
//server/share /mnt/our\\040data cifs rw 0 0
ann@host:/ /mnt/ssh fuse.sshfs rw 0 0
lake /lustre lustre rw 0 0
disk /over nfs rw 0 0
/dev/sdc1 /over ext4 rw 0 0
short line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/record.db", None),
        ("/home/ann/record.db", "nfs4"),
        ("/home/ann/not/made/yet/record.db", "nfs4"),
        ("/home/ann/scratch/record.db", None),
        ("/home/annie/record.db", None),
        ("/mnt/our data/record.db", "cifs"),
        ("/mnt/ssh/record.db", "fuse.sshfs"),
        ("/lustre/record.db", "lustre"),
        ("/over/record.db", None),
    ],
)
def test_the_innermost_mount_counts_and_of_two_at_one_place_the_last(path, kind):
    assert network_kind(Path(path), TABLE) == kind


def test_a_link_leads_where_it_points(tmp_path):
    (tmp_path / "link").symlink_to("/lustre/home")
    assert network_kind(tmp_path / "link" / "record.db", TABLE) == "lustre"


def test_where_no_table_is_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr("autotune.storage.home.MOUNTS", tmp_path / "none")
    assert network_kind(Path("/lustre")) is None


@pytest.mark.skipif(not MOUNTS.exists(), reason="no /proc")
def test_the_table_of_this_machine_can_be_read():
    assert network_kind(Path("/proc")) is None
