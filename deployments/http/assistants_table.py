"""Every registered workflow is one system assistant; its id is the one that LangGraph's own server would give it."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid5

from deployments.http.errors import shown
from pbkv_ray.errors import NotFoundError

Json = dict[str, Any]

# LangGraph's namespace for graphs, so that ids stay the same for whoever moves between servers.
_NAMESPACE = UUID("6ba7b821-9dad-11d1-80b4-00c04fd430c8")


def assistant_id(workflow: str) -> str:
    return str(uuid5(_NAMESPACE, workflow))


class Assistants:
    """`workflows` maps a workflow's name to one sentence about it; `since_s` is when they were registered."""

    def __init__(self, workflows: Mapping[str, str], since_s: float) -> None:
        at = datetime.fromtimestamp(since_s, UTC).isoformat()
        self._rows: dict[str, Json] = {
            name: {
                "assistant_id": assistant_id(name),
                "graph_id": name,
                "name": name,
                "description": description,
                "config": {},
                "context": {},
                "metadata": {"created_by": "system"},
                "version": 1,
                "created_at": at,
                "updated_at": at,
            }
            for name, description in workflows.items()
        }
        self._by_id = {row["assistant_id"]: name for name, row in self._rows.items()}

    @property
    def rows(self) -> list[Json]:
        return list(self._rows.values())

    def workflow(self, name_or_id: str) -> str:
        """The workflow behind an assistant id or a graph id. Raises NotFoundError."""
        name = self._by_id.get(name_or_id, name_or_id)
        if name not in self._rows:
            known = ", ".join(sorted(self._rows)) or "none"
            raise NotFoundError(f"assistant {shown(name_or_id)} is unknown; the workflows here are: {known}")
        return name

    def row(self, name_or_id: str) -> Json:
        return self._rows[self.workflow(name_or_id)]

    def named(self, run: Json) -> Json:
        """A run as the protocol shows it, where `assistant_id` is the id; the name is our `workflow`."""
        name = run.get("assistant_id")
        return {**run, "assistant_id": assistant_id(name), "workflow": name} if name in self._rows else run
