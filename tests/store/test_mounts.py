"""Network file systems are recognised by the mount table, and never touched for it."""

from pathlib import Path

import pytest

from autoflash.store import mounts
from autoflash.store.mounts import network_filesystem

_LINE = "36 35 98:0 / {} rw,noatime shared:1 - {} {} rw"


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """Makes a mount table: / on ext4, and the given folders on the given types."""

    def mount(*others):
        table = [("/", "ext4"), *others]
        text = "\n".join(
            _LINE.format(str(place).replace(" ", "\\040"), kind, "host:/x") for place, kind in table
        )
        (tmp_path / "mountinfo").write_text(text + "\n")
        monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "mountinfo")

    return mount


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse.s3fs"]
)
def test_a_network_file_system_is_named(kind, mounted):
    mounted(("/shared", kind))
    assert network_filesystem(Path("/shared/team/autoflash.sqlite")) == kind
    assert network_filesystem(Path("/shared")) == kind
    assert network_filesystem(Path("/sharedx/autoflash.sqlite")) is None


@pytest.mark.parametrize("kind", ["xfs", "tmpfs", "overlay", "fuseblk", "fuse.fuse-overlayfs"])
def test_a_local_one_is_not(kind, mounted):
    mounted(("/local", kind))
    assert network_filesystem(Path("/local/autoflash.sqlite")) is None


def test_the_deepest_and_the_last_mount_counts(mounted):
    mounted(("/a", "nfs"), ("/a/b", "ext4"), ("/c", "ext4"), ("/c", "nfs4"))
    assert network_filesystem(Path("/a/x")) == "nfs"
    assert network_filesystem(Path("/a/b/x")) is None
    assert network_filesystem(Path("/c/x")) == "nfs4"


def test_names_with_spaces_and_dots(mounted):
    mounted(("/my share", "cifs"))
    assert network_filesystem(Path("/my share/x")) == "cifs"
    assert network_filesystem(Path("/other/../my share/./x")) == "cifs"


def test_links_are_followed_from_local_folders_only(tmp_path, mounted, monkeypatch):
    share = tmp_path / "share"
    share.mkdir()
    (tmp_path / "absolute").symlink_to(share)
    (tmp_path / "relative").symlink_to("share/deep")
    (tmp_path / "twice").symlink_to("./absolute/..//relative")
    (share / "link").symlink_to("/")
    mounted((share, "nfs4"))
    real, looked = Path.readlink, []
    monkeypatch.setattr(Path, "readlink", lambda self: looked.append(self) or real(self))
    for name in ("absolute", "relative", "twice", "share"):
        assert network_filesystem(tmp_path / name / "link" / "x.sqlite") == "nfs4"
    assert not [place for place in looked if share in (place, *place.parents) and place != share]
    assert network_filesystem(tmp_path / "file.sqlite") is None


def test_a_circle_of_links_ends(tmp_path, mounted):
    mounted()
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert network_filesystem(tmp_path / "a" / "x") is None


def test_without_a_mount_table_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "none")
    assert network_filesystem(Path("/shared/x")) is None


def test_this_systems_table_is_understood(tmp_path):
    # Whatever the tests run on, a table that holds / can be read.
    table = mounts._read_mounts(mounts._MOUNTS.read_text()) if mounts._MOUNTS.exists() else None
    assert table is None or Path("/") in table
    network_filesystem(tmp_path)
