"""The workflows that an application runs: any mapping of names to WorkflowSpecs, named as `module:attribute`."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from pbkv_ray.errors import ConfigError
from workflows.spec import WorkflowSpec, find


class Workflows:
    """Raises ConfigError when `path` names no such mapping."""

    def __init__(self, path: str) -> None:
        module, _, attribute = path.partition(":")
        if not module or not attribute:
            raise ConfigError(f"registry is {path!r}; give module:attribute, as in mine:REGISTRY")
        try:
            specs = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"registry is {path!r}, which cannot be loaded ({error}); give module:attribute"
            ) from error
        if not isinstance(specs, Mapping) or not all(isinstance(spec, WorkflowSpec) for spec in specs.values()):
            raise ConfigError(f"registry {path!r} is no mapping of names to WorkflowSpecs")
        self._specs: Mapping[str, WorkflowSpec] = specs

    def __iter__(self) -> Iterator[WorkflowSpec]:
        return iter(self._specs.values())

    def get(self, name: str) -> WorkflowSpec:
        """Raises NotFoundError."""
        return find(self._specs, name)
