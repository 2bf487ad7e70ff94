"""Which file systems lie across a network: there SQLite's locks may hang, and its WAL doesn't work.

SQLite, "Write-Ahead Logging": all processes must be on one host, since they share memory.
"""

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    *("9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs"),
    *("nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "wekafs"),
}
# Of what runs in user space (sshfs, s3fs, gcsfuse, ...) nearly all do; containers' layers don't.
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.portal"}
# As many as the kernel follows.
_MOST_LINKS = 40


def network_filesystem(path: Path) -> str | None:
    """The type of the network file system that ``path`` lies on ('nfs4'), or None for a local one.

    Nothing of such a file system is touched, since that might hang: links are followed one by one,
    and only from local ones. None too where the system doesn't say (no /proc).
    """
    try:
        mounts = _read_mounts(_MOUNTS.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return None
    left = list(Path(os.path.abspath(path)).parts[::-1])  # noqa: PTH100 - follows no link
    place = Path(left.pop())
    links = 0
    while left and links <= _MOST_LINKS:
        part = left.pop()
        place = place.parent if part == ".." else place / part
        if _network_type_at(place, mounts):
            continue
        try:
            leads_to = place.readlink()
        except (OSError, ValueError):
            continue  # no link, or nothing at all
        links += 1
        left += leads_to.parts[::-1]
        place = place.parent
        if leads_to.is_absolute():
            place = Path(left.pop())
    return _network_type_at(place, mounts)


def _read_mounts(text: str) -> dict[Path, str]:
    """Type by mount point. What is mounted over another comes later in the table."""
    found = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) > 4 and after:
            found[Path(_unescaped(fields[4]))] = after.split(" ")[0]
    return found


def _unescaped(text: str) -> str:
    """Spaces and the like are written as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _network_type_at(place: Path, mounts: dict[Path, str]) -> str | None:
    kind = next((mounts[folder] for folder in (place, *place.parents) if folder in mounts), "")
    fuse = kind.startswith("fuse.") and kind not in _LOCAL_FUSE
    return kind if fuse or kind in _NETWORK else None
