"""What the agents of `swe` share: the state of a run and the start of every prompt."""

from typing_extensions import TypedDict

from agents.conversation import Memory, clip

PREAMBLE = """\
You are one of five agents that repair a Python program together.

planner reads the report of the problem, chooses the file to change and says in one sentence what is wrong.
coder writes the whole corrected file in one code block.
tester runs the tests and reports in one sentence what they showed.
analyser reads a failed test and says in one sentence what the coder must change.
committer describes the change in one line for the project's history.

The rules for all agents:
- Change as little as possible. Keep the names, the arguments and the style of the file.
- The tests are right. Never change a test, never write a special case for a value that a test uses.
- Do not import anything that the file did not import before.
- Do not print, do not read input, do not open files or connections.
- Answer in the form that is asked for and nothing else. No greeting, no explanation.

An example. The problem: double(4) returns 6. It must return 8.
numbers.py
```python
def double(x):
    return x + 2
```
planner: {"wrong": "double adds two, it must multiply by two"}
coder:
```python
def double(x):
    return x * 2
```
tester: {"report": "All tests passed: double(4) is 8."}
committer: {"subject": "Multiply by two in double"}
When a test fails, analyser: {"change": "Replace + 2 by * 2 in the return statement."}"""


class SweState(TypedDict, total=False):
    """The input is the first group; `exit_code`, `patch` and `message` are the result."""

    statement: str
    files: dict[str, str]  # what the coder may change, as it was at first
    tests: dict[str, str]  # the tests of an exercise
    checkout: str  # a folder below PBKV_CHECKOUTS; empty for an exercise
    targets: list[str]  # paths in the checkout: the files that may be changed
    test_paths: list[str]  # paths in the checkout: what the tester runs
    max_tries: int

    target: str  # the file that the planner chose
    plan: str
    patch: dict[str, str]  # the coder's last version of what it changed
    tries: int
    exit_code: int  # pytest's own; above 5: stopped, or ended without a result
    output: str  # the end of pytest's output
    report: str
    diagnosis: str
    message: str
    memory: Memory


def task(state: SweState) -> str:
    """The problem and the files as they were at first: the same for all agents and all tries of a run."""
    files = "".join(f"\n{path}\n```python\n{text.strip()}\n```" for path, text in state["files"].items())
    return f"The problem: {clip(state['statement'].strip(), 4_000)}{files}"
