"""Runs pytest on patched files in the sandbox. Its exit code decides the branch; its output feeds the agents."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workflows.tools.sandbox import Sandbox

TIMED_OUT: Final = 124
_UNPROVEN: Final = 123
_PYTEST: Final = (
    *(sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "--no-header", "--color=no"),
    *("-p", "no:cacheprovider", "--"),
)
_DURATION: Final = re.compile(r" in \d+\.\d+s( \(\S+\))?")


@dataclass(frozen=True, slots=True)
class TestResult:
    """`exit_code` is pytest's own (0: all passed), or above 5: killed, timed out, or ended without a summary."""

    __test__ = False  # not a test class, whatever its name

    exit_code: int
    output: str


async def run_tests(
    sandbox: Sandbox, files: Mapping[str, str], tests: Sequence[str], base: Path | None = None
) -> TestResult:
    """`tests` are paths below `base` with `files` written over it. Raises as Sandbox.run does.

    The code under test shares pytest's process: whoever wants to fool the exit code can, this is no referee.
    """
    outcome = await sandbox.run([*_PYTEST, *tests], files, base)
    output = _DURATION.sub("", outcome.output).strip()  # a duration would make the next prompt differ every time
    if outcome.exit_code is None:
        return TestResult(TIMED_OUT, f"{output}\nThe tests were stopped: they took too long.".strip())
    if outcome.exit_code == 0 and not re.search(r"\d+ passed$", output):
        return TestResult(_UNPROVEN, f"{output}\npytest ended without a result.".strip())
    return TestResult(outcome.exit_code, output)
