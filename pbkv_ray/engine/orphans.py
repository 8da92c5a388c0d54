"""SGLang's processes end with the process that started them, from their first imports on.

SGLang asks the kernel for it (PR_SET_PDEATHSIG) once a scheduler runs, seconds after it was spawned; a parent that
dies before leaves an orphan that loads its model and serves nobody.
"""

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping

PARENT = "PBKV_ENGINE_PARENT"  # the pid of the process that started the engine, inherited by the engine's processes
_PR_SET_PDEATHSIG = 1


def mark_parent(environ: MutableMapping[str, str]) -> None:
    """Called by the process that is about to start an engine."""
    environ[PARENT] = str(os.getpid())


def register() -> None:
    """In an engine's process: die with the parent, at once if it is dead already. Elsewhere: nothing."""
    parent = os.environ.get(PARENT)
    if parent is None or int(parent) == os.getpid() or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(int(parent), 0)
    except ProcessLookupError:
        os._exit(1)
    except PermissionError:
        pass  # it lives
