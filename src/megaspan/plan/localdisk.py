"""Which folders are on a local disk: not in memory, and not on another machine.

What layers keep is put on disk because the host's memory is full: a folder in memory would take the very bytes that were to be
saved, and the kernel would end the run in its third hour. One on a network makes every step wait. Both are looked for before
anything is planned.

Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
from pathlib import Path

from megaspan.human import UserError

_IN_MEMORY = ("tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs")
_NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "pvfs2", "orangefs", "wekafs",
    "fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.geesefs", "fuse.rclone",
    "fuse.juicefs", "fuse.blobfuse", "fuse.blobfuse2", "fuse.mount-s3", "fuse.mountpoint-s3", "fuse.seaweedfs",
)  # fmt: skip


def kind_of(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of file system under `folder` in the kernel's word, such as ext4 or nfs4; empty where nobody knows."""
    place, found, depth = Path(os.path.realpath(folder)), "", -1
    try:
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(before.split(" ")[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        # A later line with the same mount point lies on top of the earlier one.
        if (place == point or point in place.parents) and len(point.parts) >= depth:
            found, depth = after.split(" ")[0], len(point.parts)
    return found


def refuse_kind(folder: Path, *, allow_network: bool) -> None:
    """Refuses a folder that is no place on a local disk.

    Raises:
        UserError: it lies in memory, or, unless `allow_network`, on another machine.
    """
    kind = kind_of(folder)
    if kind in _IN_MEMORY:
        raise UserError(
            f"offload_folder {folder} lies in memory ({kind}), which is what the disk is to save",
            do="Name a folder on a local disk, or remove offload_folder and raise host_memory",
            option="offload_folder",
        )
    if kind in _NETWORK and not allow_network:
        raise UserError(
            f"offload_folder {folder} is on a network file system ({kind}), which every step would wait for",
            do="Name a folder on a local disk, or add allow_slow_disk: true",
            option="offload_folder",
        )
