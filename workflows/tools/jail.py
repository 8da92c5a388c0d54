"""Runs one command confined. A script of its own: `workflows.tools.sandbox` starts it as `python -I jail.py SPEC`.

With `isolate` the command gets namespaces of its own (user, mount, process, network, IPC, host name) and sees a root
folder in memory of bounded size: the interpreter read only, a copy of `folder` at WORK, an empty /tmp. It has no
network, no home, and no process but its own; they all die with this one, and this one dies with its parent.
A caller that is not root needs the kernel to allow user namespaces; root needs CAP_SYS_ADMIN and drops to a user of
no one's. Without `isolate` only the resource limits hold. Exits like the command, 128 + n for signal n, or
FAILED after one line that says why the command was not started. Linux 5.14 or later (process limits per namespace).
"""

import ctypes
import json
import os
import platform
import resource
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn

FAILED: Final = 125
FAILED_PREFIX: Final = "pbkv-jail: "
WORK: Final = "/pbkv-sandbox"  # where the command runs

# <linux/sched.h>: mount, host name, IPC, user, process and network namespaces
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (1 << bit for bit in (17, 26, 27, 28, 29, 30))
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH: Final = 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_READ_ONLY_NOSUID_NODEV: Final = 1 | 2 | 4
_SYS_MOUNT_SETATTR: Final = 442  # the same on every architecture
_SYS_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_NO_ONES_UID: Final = 2_000_000_000  # plus our process id: two jails never share a process count
_NOBODY: Final = 65_534

_libc = ctypes.CDLL(None, use_errno=True)


def main(spec: dict[str, Any]) -> int:
    _die_with_parent()
    if not spec["isolate"]:
        _run(spec)
    privileged = os.geteuid() == 0
    uid = _NO_ONES_UID + os.getpid() if privileged else os.getuid()
    _leave_namespaces(privileged)
    first = os.fork()  # the first process of the new process namespace: when it ends, all the others are killed
    if first:
        return _wait_for(first)
    _die_with_parent()
    _build_root(Path(spec["root"]), spec)
    if privileged:
        uid = _become(uid, Path(WORK))
        _die_with_parent()  # a change of user clears it
    command = os.fork()
    if command == 0:
        _run(spec)
    os._exit(_wait_for(command))


def _leave_namespaces(privileged: bool) -> None:
    uid, gid = os.getuid(), os.getgid()
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET | (0 if privileged else _NEWUSER)
    _check(_libc.unshare(flags), "unshare")
    if not privileged:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount(None, Path("/"), None, _MS_REC | _MS_PRIVATE)


def _build_root(root: Path, spec: dict[str, Any]) -> None:
    """Makes `root` the root folder and WORK the current one; nothing else of the machine stays reachable."""
    size = f"size={spec['disk_bytes']},nr_inodes=20000,mode=0755"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    for path in map(Path, spec["read_only"]):
        target = root / path.relative_to("/")
        if path.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path.readlink())
        elif path.exists():
            _bind(path, target)
            _make_read_only(target)
    for name in _DEVICES:
        _bind(Path("/dev", name), root / "dev" / name)
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "proc").mkdir()
    with suppress(OSError):  # a container may forbid it; Python and pytest live without
        _mount("proc", root / "proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    shutil.copytree(spec["folder"], root / WORK.strip("/"), symlinks=True)
    os.chdir(root)
    _check(_libc.syscall(_SYS_PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir(WORK)


def _become(uid: int, work: Path) -> int:
    """Gives up root for a user that owns `work` and nothing else."""
    os.setgroups([])
    try:
        os.setresgid(uid, uid, uid)
    except OSError:  # a container that maps few users
        uid = _NOBODY
        os.setresgid(uid, uid, uid)
    for path in (work, *work.rglob("*")):
        os.chown(path, uid, uid, follow_symlinks=False)
    os.setresuid(uid, uid, uid)
    return uid


def _run(spec: dict[str, Any]) -> NoReturn:
    for name, limit in spec["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    if not spec["isolate"]:
        os.chdir(spec["folder"])
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def _wait_for(pid: int) -> int:
    """The exit status of `pid`; reaps whatever else is handed to us on the way."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _bind(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount(str(source), target, None, _MS_BIND | _MS_REC)


def _make_read_only(target: Path) -> None:
    attributes = (ctypes.c_uint64 * 4)(_ATTR_READ_ONLY_NOSUID_NODEV, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    path = os.fsencode(target)
    failed = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, ctypes.byref(attributes), size)
    _check(failed, f"mount_setattr {target}")


def _mount(source: str | None, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, str(target), kind, options)]
    _check(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def _check(failed: int, what: str) -> None:
    if failed:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


if __name__ == "__main__":
    try:
        code = main(json.loads(sys.argv[1]))
    except (OSError, KeyError, ValueError, shutil.Error) as error:
        print(f"{FAILED_PREFIX}{error}", flush=True)
        code = FAILED
    os._exit(code)
