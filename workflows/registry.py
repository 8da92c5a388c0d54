"""The workflows that this server runs, by name."""

from typing import Final

from workflows import finance, hover, swe
from workflows.spec import WorkflowSpec, find

__all__ = ["REGISTRY", "WorkflowSpec", "get"]

REGISTRY: Final[dict[str, WorkflowSpec]] = {spec.name: spec for spec in (hover.SPEC, swe.SPEC, finance.SPEC)}


def get(name: str) -> WorkflowSpec:
    """Raises NotFoundError."""
    return find(REGISTRY, name)
