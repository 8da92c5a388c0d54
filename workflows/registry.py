"""The workflows that this server runs, by name."""

from typing import Final

from pbkv_ray.errors import NotFoundError
from workflows import finance, hover, swe
from workflows.spec import WorkflowSpec

__all__ = ["REGISTRY", "WorkflowSpec", "get"]

REGISTRY: Final[dict[str, WorkflowSpec]] = {spec.name: spec for spec in (hover.SPEC, swe.SPEC, finance.SPEC)}


def get(name: str) -> WorkflowSpec:
    """Raises NotFoundError."""
    try:
        return REGISTRY[name]
    except KeyError:
        raise NotFoundError(f"workflow {name!r:.80} is unknown; known are {', '.join(sorted(REGISTRY))}") from None
