"""Runs commands on files that an LLM wrote. `workflows.tools.jail` confines them; this side starts and stops it."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from pbkv_ray.errors import ConfigError, InputError, UnavailableError
from workflows.tools import jail

ALLOW_UNSANDBOXED: Final = "PBKV_ALLOW_UNSANDBOXED_TESTS"
_MAX_FILES: Final = 5_000
_NOT_COPIED: Final = shutil.ignore_patterns(".git", ".venv", "__pycache__", "node_modules")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory and CPU time hold for each process, the others for the whole of a command.

    The command's output is a file too: `file_bytes` bounds it, and its last `output_bytes` are kept.
    """

    seconds: float = 20.0
    memory_bytes: int = 512 * 2**20
    processes: int = 32
    file_bytes: int = 8 * 2**20
    disk_bytes: int = 128 * 2**20
    output_bytes: int = 16_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """`exit_code` is the command's, 128 + n when signal n ended it, None when its time was up."""

    exit_code: int | None
    output: str


def safe_path(name: str) -> PurePosixPath:
    """`name` as a path that stays below the folder it is joined to. Raises InputError."""
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and len(name) <= 200
    if not plain or not path.parts or path.is_absolute() or ".." in path.parts or name.startswith("-"):
        raise InputError(f"file name {name!r:.80} is refused; use a relative path without '..', such as pkg/mod.py")
    return path


@cache
def why_forbidden() -> str | None:
    """Why this machine cannot confine a command, found out by confining one; None when it can. Takes 0.1 s."""
    with tempfile.TemporaryDirectory(prefix="pbkv-sandbox-") as folder:
        command = [sys.executable, "-I", "-c", ""]
        arguments = _prepare(Path(folder), command, {}, None, Limits(), isolate=True)
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if done.returncode == 0:
        return None
    return (done.stdout + done.stderr).removeprefix(jail.FAILED_PREFIX).strip() or f"exit code {done.returncode}"


def refusal() -> str | None:
    """Why no Sandbox can be made on this machine and what to do about it; None when one can."""
    reason = why_forbidden()
    if reason is None or os.environ.get(ALLOW_UNSANDBOXED) == "1":
        return None
    return (
        f"this machine cannot run tests in a sandbox ({reason}). Allow user namespaces (on Ubuntu: sysctl "
        "kernel.apparmor_restrict_unprivileged_userns=0; in a container: --privileged), or set "
        f"{ALLOW_UNSANDBOXED}=1 to run code that an LLM wrote with your rights and your network"
    )


class Sandbox:
    """Raises ConfigError when this machine cannot confine and `PBKV_ALLOW_UNSANDBOXED_TESTS` is not 1."""

    def __init__(self, limits: Limits = Limits(), *, at_once: int | None = None) -> None:
        if (said := refusal()) is not None:
            raise ConfigError(said)
        self.isolated = why_forbidden() is None
        self._limits = limits
        self._slots = asyncio.Semaphore(at_once or os.cpu_count() or 1)

    async def run(self, command: Sequence[str], files: Mapping[str, str], base: Path | None = None) -> Outcome:
        """Runs `command` in a new folder: a copy of `base` with `files` (path -> text) written over it.

        The folder and every process of the command are gone when this returns, or is cancelled.
        Raises InputError for refused names or sizes, UnavailableError when the command could not be started.
        """
        async with self._slots:
            folder = Path(tempfile.mkdtemp(prefix="pbkv-sandbox-"))
            try:
                return await self._run(folder, command, files, base)
            finally:
                await _to_the_end(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    async def _run(self, folder: Path, command: Sequence[str], files: Mapping[str, str], base: Path | None) -> Outcome:
        prepared = asyncio.to_thread(_prepare, folder, command, files, base, self._limits, isolate=self.isolated)
        arguments = await _to_the_end(prepared)
        output = folder / "output"
        with output.open("wb") as stream:
            process = subprocess.Popen(  # noqa: ASYNC220 - it starts in milliseconds and is awaited below
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                cwd="/",
                env={},
            )
        exit_code: int | None = None
        try:
            exit_code = await asyncio.wait_for(_ended(process), self._limits.seconds)
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await _to_the_end(_ended(process))
        text = _tail(output, self._limits.output_bytes).replace(str(folder / "work"), jail.WORK)
        if exit_code == jail.FAILED and text.startswith(jail.FAILED_PREFIX):
            raise UnavailableError(f"the sandbox could not start: {text.removeprefix(jail.FAILED_PREFIX).strip()}")
        return Outcome(exit_code, text)


def _prepare(
    folder: Path,
    command: Sequence[str],
    files: Mapping[str, str],
    base: Path | None,
    limits: Limits,
    *,
    isolate: bool,
) -> list[str]:
    """Fills `folder` (work/ and, for the jail, root/) and returns the arguments that start the jail."""
    work = folder / "work"
    (folder / "root").mkdir()
    if base is None:
        work.mkdir()
    else:
        shutil.copytree(base, work, symlinks=True, ignore=_NOT_COPIED)
    for name, text in files.items():
        _write(work, safe_path(name), text)
    _check_size(work, limits)
    spec = {
        "isolate": isolate,
        "folder": str(work),
        "root": str(folder / "root"),
        "read_only": _interpreter_paths(),
        "disk_bytes": limits.disk_bytes,
        "command": list(command),
        "environment": _environment(),
        "limits": {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_CPU": max(1, round(limits.seconds)),
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
            # Outside a namespace of our own this would count every process of the user.
            **({"RLIMIT_NPROC": limits.processes} if isolate else {}),
        },
    }
    return [sys.executable, "-I", "-S", jail.__file__, json.dumps(spec)]


def _write(work: Path, path: PurePosixPath, text: str) -> None:
    target = work / path
    for part in (target, *target.parents):
        if part == work:
            break
        if part.is_symlink():
            raise InputError(f"file name {str(path)!r} leads through the link {part.relative_to(work)}; refused")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def _check_size(work: Path, limits: Limits) -> None:
    sizes = [path.lstat().st_size for path in work.rglob("*")]
    if len(sizes) > _MAX_FILES or sum(sizes) > limits.disk_bytes // 2:
        raise InputError(
            f"the folder to test holds {len(sizes)} files of {sum(sizes)} bytes; "
            f"at most {_MAX_FILES} of {limits.disk_bytes // 2} are copied"
        )


def _interpreter_paths() -> list[str]:
    """What Python needs to run, the outer folders first. Links are made again in the jail."""
    system = [Path(path) for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")]
    settings = [Path("/etc/ld.so.cache"), Path("/etc/alternatives")]
    python = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent}
    python |= {path.resolve() for path in python}
    own = sorted(path for path in python if not any(path.is_relative_to(folder) for folder in system))
    return [str(path) for path in (*system, *settings, *own)]


def _environment() -> dict[str, str]:
    """Nothing of ours, which may hold secrets; the same for everyone, so that runs repeat."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


def _tail(path: Path, count: int) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - count))
        text = file.read(count).decode("utf-8", "replace")
    return text if size <= count else f"[{size - count} bytes dropped]\n{text}"


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of `process`. Not asyncio's own subprocesses: they need a child watcher, which the event loop
    policy that SGLang and Ray set (uvloop's) does not have for other loops."""
    if process.returncode is not None:
        return process.returncode
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()


async def _to_the_end(work: Awaitable[T]) -> T:
    """Awaits `work` to its end also when cancelled meanwhile; the cancellation follows then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
