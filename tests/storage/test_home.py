"""Where lasting things live, and which paths lie on a network file system."""

from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from autotune.errors import InputError
from autotune.storage.home import home, network_kind, writable


def test_the_variable_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path / "mine"))
    assert home() == tmp_path / "mine"


def test_a_tilde_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_HOME", "~/mine")
    assert home() == tmp_path / "mine"


@pytest.mark.parametrize(
    ("data_home", "expected"),
    [
        (None, "{home}/.local/share/autotune"),
        ("", "{home}/.local/share/autotune"),
        ("relative", "{home}/.local/share/autotune"),
        ("/data", "/data/autotune"),
    ],
    ids=["default", "empty", "relative is ignored", "absolute"],
)
def test_otherwise_the_xdg_specification_does(monkeypatch, tmp_path, data_home, expected):
    monkeypatch.delenv("AUTOTUNE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    if data_home is not None:
        monkeypatch.setenv("XDG_DATA_HOME", data_home)
    assert home() == Path(expected.format(home=tmp_path))


def test_nothing_is_made_by_asking(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path / "mine"))
    home()
    assert not list(tmp_path.iterdir())


def test_a_folder_is_made_to_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path / "mine"))
    folder = writable("rates")
    assert folder == tmp_path / "mine" / "rates"
    assert folder.is_dir()
    assert not list(folder.iterdir())


def test_a_home_that_can_not_be_written_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOTUNE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"rates: can't be written: .*AUTOTUNE_HOME") as caught:
        writable("rates")
    assert "\n" not in str(caught.value)


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch):
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AUTOTUNE_HOME")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(InputError, match="set AUTOTUNE_HOME"):
        home()


# Network file systems

Mount = namedtuple("Mount", ["mountpoint", "fstype"])

MOUNTS = [
    Mount("/", "ext4"),
    Mount("/proc", "proc"),
    Mount("/home", "autofs"),
    Mount("/home/ann", "nfs4"),
    Mount("/home/ann/scratch", "xfs"),
    Mount("/mnt/our data", "cifs"),
    Mount("/mnt/ssh", "fuse.sshfs"),
    Mount("/lustre", "lustre"),
    Mount("/over", "nfs"),
    Mount("/over", "ext4"),
]


@pytest.fixture
def _mounts(monkeypatch):
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: MOUNTS)


@pytest.mark.usefixtures("_mounts")
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
    assert network_kind(Path(path)) == kind


@pytest.mark.usefixtures("_mounts")
def test_a_link_leads_where_it_points(tmp_path):
    (tmp_path / "link").symlink_to("/lustre/home")
    assert network_kind(tmp_path / "link" / "record.db") == "lustre"


def test_where_mounts_can_not_be_listed_nothing_is_known(monkeypatch):
    def fail(all: bool) -> list[Mount]:
        raise FileNotFoundError("/proc/self/mounts")

    monkeypatch.setattr(psutil, "disk_partitions", fail)
    assert network_kind(Path("/lustre")) is None


def test_the_mounts_of_this_machine_can_be_listed():
    assert network_kind(Path("/proc")) is None
