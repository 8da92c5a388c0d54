"""The sandbox: what code from an LLM may not do, it cannot do."""

import asyncio
import os
import sys
import textwrap
from pathlib import Path

import pytest

from pbkv_ray.errors import ConfigError, InputError
from workflows.tools import sandbox as module
from workflows.tools.sandbox import Limits, Outcome, Sandbox, safe_path, why_forbidden

needs_isolation = pytest.mark.skipif(
    why_forbidden() is not None, reason=f"this machine cannot confine: {why_forbidden()}"
)
QUICK = Limits(seconds=20, memory_bytes=256 * 2**20, processes=12, file_bytes=2**20, disk_bytes=8 * 2**20)


async def run_code(code: str, limits: Limits = QUICK, **files: str) -> Outcome:
    return await Sandbox(limits).run([sys.executable, "-I", "main.py"], {"main.py": textwrap.dedent(code), **files})


def processes_with(mark: str) -> list[int]:
    """Processes of this machine whose command line holds `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


async def test_a_command_sees_its_files_and_says_how_it_ended() -> None:
    outcome = await run_code("print(open('a.txt').read()); raise SystemExit(3)", **{"a.txt": "hello"})
    assert outcome == Outcome(3, "hello\n")


@needs_isolation
async def test_an_endless_loop_is_stopped() -> None:
    assert await run_code("while True: pass", Limits(seconds=0.5)) == Outcome(None, "")


@needs_isolation
async def test_a_fork_bomb_runs_into_the_process_limit() -> None:
    outcome = await run_code(
        """
        import os, sys, time
        children = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                children += 1
        except BlockingIOError:
            print("stopped", 0 < children < 12)
        """
    )
    assert outcome == Outcome(0, "stopped True\n")


@needs_isolation
async def test_memory_is_bounded() -> None:
    outcome = await run_code(
        """
        try:
            bytearray(300 * 2**20)
        except MemoryError:
            print("refused")
        """
    )
    assert outcome == Outcome(0, "refused\n")


@needs_isolation
async def test_a_file_is_bounded_and_so_are_all_files_together() -> None:
    outcome = await run_code(
        """
        import errno
        def fill(name, megabytes):
            with open(name, "wb", buffering=0) as file:
                try:
                    for _ in range(megabytes * 16):
                        file.write(bytes(2**16))
                except OSError as error:
                    return errno.errorcode[error.errno]
        print(fill("one", 2))
        print({fill(f"/tmp/{n}", 1) for n in range(20)} - {None})
        """
    )
    assert outcome == Outcome(0, "EFBIG\n{'ENOSPC'}\n")


@needs_isolation
async def test_output_is_bounded_and_its_end_is_kept() -> None:
    limits = Limits(seconds=20, output_bytes=20, file_bytes=2**20)
    outcome = await run_code("print('x' * 5000)\nprint('the end')", limits)
    assert outcome == Outcome(0, "[4989 bytes dropped]\nxxxxxxxxxxx\nthe end\n")
    endless = await run_code("while True: print('x' * 5000)", limits)
    assert endless.exit_code not in (0, None)


@needs_isolation
async def test_there_is_no_network() -> None:
    listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    outcome = await run_code(
        f"""
        import socket
        for address in (("127.0.0.1", {port}), ("192.0.2.1", 80)):
            try:
                socket.create_connection(address, timeout=5)
                print("connected")
            except OSError as error:
                print(type(error).__name__)
        print([name for _, name in socket.if_nameindex()])
        """
    )
    listener.close()
    assert outcome == Outcome(0, "ConnectionRefusedError\nOSError\n['lo']\n") or (
        outcome == Outcome(0, "OSError\nOSError\n['lo']\n")
    )


@needs_isolation
async def test_nothing_of_the_machine_can_be_read_or_changed(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    outcome = await run_code(
        f"""
        import os, sys
        def attempt(work):
            try:
                work()
                return "done"
            except OSError as error:
                return type(error).__name__
        print(attempt(lambda: open({str(secret)!r})))
        print(attempt(lambda: open("/etc/passwd")))
        print(attempt(lambda: open(os.path.join(sys.prefix, "x"), "w")))
        print(attempt(lambda: os.kill({os.getpid()}, 0)))
        print(attempt(lambda: os.setuid(0)) if os.getuid() else "root")
        print(attempt(lambda: os.chroot("/tmp")))
        print(sorted(os.environ) == {sorted(module._environment())!r})
        """
    )
    refused = ["FileNotFoundError", "FileNotFoundError", "OSError", "ProcessLookupError"]
    assert outcome == Outcome(0, "\n".join([*refused, "PermissionError", "PermissionError", "True", ""]))


@needs_isolation
async def test_a_process_that_leaves_the_group_dies_too() -> None:
    mark = f"mark-{os.getpid()}-left"
    outcome = await run_code(
        f"""
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "{mark}"], start_new_session=True)
        """
    )
    assert outcome.exit_code == 0
    assert processes_with(mark) == []


async def _started(mark: str) -> None:
    while not processes_with(mark):
        await asyncio.sleep(0.01)


@needs_isolation
async def test_a_cancelled_run_kills_its_processes_and_removes_its_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    mark = f"mark-{os.getpid()}-cancelled"
    code = f"""
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)", "{mark}"], start_new_session=True)
        """
    task = asyncio.create_task(run_code(code))
    await asyncio.wait_for(_started(mark), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_with(mark) == []
    assert list(tmp_path.iterdir()) == []


@needs_isolation
async def test_the_event_loop_stays_free_while_a_command_runs() -> None:
    mark = f"mark-{os.getpid()}-free"
    code = f"""
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)", "{mark}"])
        """
    task = asyncio.create_task(run_code(code))
    await asyncio.wait_for(_started(mark), 20)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize(
    "name", ["../a.py", "/etc/passwd", "a/../../b.py", "", ".", "a\\b.py", "a\nb.py", "-p", "a" * 201, "a\0b"]
)
async def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is refused"):
        safe_path(name)
    with pytest.raises(InputError, match="is refused"):
        await Sandbox(QUICK).run([sys.executable, "-c", ""], {name: "x"})


async def test_a_link_in_a_checkout_does_not_lead_a_patch_outside(tmp_path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    base = tmp_path / "base"
    base.mkdir()
    (base / "link").symlink_to(outside)
    (base / "file").symlink_to(outside / "victim")
    for name in ("link/x.py", "file"):
        with pytest.raises(InputError, match="leads through the link"):
            await Sandbox(QUICK).run([sys.executable, "-c", ""], {name: "x"}, base)
    assert list(outside.iterdir()) == []


async def test_a_checkout_that_is_too_large_is_refused(tmp_path) -> None:
    (tmp_path / "big").write_bytes(bytes(5 * 2**20))
    with pytest.raises(InputError, match="at most 5000 of 4194304 are copied"):
        await Sandbox(QUICK).run([sys.executable, "-c", ""], {}, tmp_path)


def test_a_machine_that_cannot_confine_needs_a_word_from_its_owner(monkeypatch) -> None:
    monkeypatch.setattr(module, "why_forbidden", lambda: "unshare: Operation not permitted")
    monkeypatch.delenv("PBKV_ALLOW_UNSANDBOXED_TESTS", raising=False)
    with pytest.raises(ConfigError, match=r"Operation not permitted.*PBKV_ALLOW_UNSANDBOXED_TESTS=1"):
        Sandbox()
    monkeypatch.setenv("PBKV_ALLOW_UNSANDBOXED_TESTS", "1")
    assert not Sandbox().isolated


async def test_without_confinement_the_other_limits_still_hold(monkeypatch) -> None:
    monkeypatch.setattr(module, "why_forbidden", lambda: "unshare: Operation not permitted")
    monkeypatch.setenv("PBKV_ALLOW_UNSANDBOXED_TESTS", "1")
    mark = f"mark-{os.getpid()}-open"
    code = f"""
        import os, subprocess, sys
        print(os.getcwd(), flush=True)
        subprocess.run([sys.executable, "-c", "import time; time.sleep(60)", "{mark}"])
        """
    assert await run_code(code, Limits(seconds=1.5)) == Outcome(None, "/pbkv-sandbox\n")
    assert processes_with(mark) == []
    assert await run_code("bytearray(600 * 2**20)") != Outcome(0, "")
