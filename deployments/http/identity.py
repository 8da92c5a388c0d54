"""How a foreign harness names its run and agent: every alias in one table, ours first.

A name that the caller does not give stays None. Ids are checked before use; a bad one is refused, never cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deployments.http.errors import shown
from pbkv_ray.errors import InputError

Field = Literal["run_id", "parent_run_id", "agent", "workflow", "final"]

MAX_ID_LENGTH = 160  # leaves room for the prefix that keeps foreign runs apart from ours (controller: 256)

# header -> field, in order of precedence
HEADERS: tuple[tuple[str, Field], ...] = (
    ("x-pbkv-run-id", "run_id"),
    ("x-pbkv-agent", "agent"),
    ("x-pbkv-workflow", "workflow"),
    ("x-pbkv-run-final", "final"),
    ("x-pbkv-parent-run-id", "parent_run_id"),
    # NVIDIA Dynamo, now and before 1.5
    ("x-dynamo-session-id", "run_id"),
    ("x-dynamo-parent-session-id", "parent_run_id"),
    ("x-dynamo-session-final", "final"),
    ("x-dynamo-trajectory-id", "run_id"),
    ("x-dynamo-parent-trajectory-id", "parent_run_id"),
    ("x-dynamo-trajectory-final", "final"),
    # Claude Code, Codex, opencode
    ("x-claude-code-session-id", "run_id"),
    ("x-claude-code-parent-agent-id", "parent_run_id"),
    ("session-id", "run_id"),
    ("x-codex-parent-thread-id", "parent_run_id"),
    ("x-session-affinity", "run_id"),
    ("x-parent-session-id", "parent_run_id"),
    # NeMo Agent Toolkit
    ("x-prefix-id", "run_id"),
    # Ray Serve and AIBrix, vLLM's proposals, SMG, llm-d
    ("x-session-id", "run_id"),
    ("x-aibrix-session-key", "run_id"),
    ("x-continuation-id", "run_id"),
    ("x-smg-routing-key", "run_id"),
    ("x-llm-d-inference-fairness-id", "run_id"),
    ("x-gateway-inference-fairness-id", "run_id"),
)

# path in the body -> field; read after the headers
BODY: tuple[tuple[tuple[str, ...], Field], ...] = (
    (("nvext", "agent_context", "session_id"), "run_id"),
    (("nvext", "agent_context", "trajectory_id"), "run_id"),
    (("nvext", "agent_context", "parent_trajectory_id"), "parent_run_id"),
    (("nvext", "agent_context", "trajectory_final"), "final"),
    (("nvext", "session_control", "session_id"), "run_id"),
    (("nvext", "agent_hints", "prefix_id"), "run_id"),
    (("program_id",), "run_id"),  # ThunderAgent
    (("agent_id",), "agent"),  # KVFlow
    (("session_id",), "run_id"),  # SGLang
)

_TRUE = ("1", "true", "yes")
_FALSE = ("0", "false", "no", "")


@dataclass(frozen=True, slots=True)
class Identity:
    run_id: str | None = None
    parent_run_id: str | None = None
    agent: str | None = None
    workflow: str | None = None
    final: bool = False


def identify(headers: Mapping[str, str], body: Mapping[str, Any]) -> Identity:
    """Who the caller says it is. Raises InputError for an id that is empty, too long or not printable."""
    found: dict[Field, str | bool] = {}
    for header, name in HEADERS:
        value = headers.get(header)
        if value is not None and name not in found:
            found[name] = _checked(f"header {header}", name, value)
    for path, name in BODY:
        value = _at(body, path)
        if value is not None and name not in found:
            found[name] = _checked(f"field {'.'.join(path)}", name, value)
    return Identity(**found)  # type: ignore[arg-type]


def _at(body: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = body
    for part in path:
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value


def _checked(where: str, name: Field, value: object) -> str | bool:
    if name == "final":
        if isinstance(value, bool):
            return value
        word = value.strip().lower() if isinstance(value, str) else None
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise InputError(f"{where} is {shown(value)}; it must be true or false")
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_LENGTH or not value.isprintable():
        raise InputError(f"{where} is {shown(value)}; an id is 1 to {MAX_ID_LENGTH} printable characters")
    return value
