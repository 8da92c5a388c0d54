"""What the server must know of a workflow. `workflows.registry` lists the shipped ones."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langgraph.graph import StateGraph
from pydantic import BaseModel, ValidationError

from pbkv_ray.errors import InputError, NotFoundError
from pbkv_ray.graph.client import LLM
from workflows.records import records

Json = dict[str, Any]
Graph = StateGraph[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True)
class WorkflowSpec:
    """One workflow.

    build:   the graph, not compiled: the runner compiles it with its own checkpointer. Raises ConfigError when
             this machine cannot run it.
    agents:  the graph nodes that call the LLM.
    samples: inputs to try it with.
    read:    inputs from a file (or folder) in the official format of the data set; by default JSON lines (or a JSON
             list) of inputs. Raises InputError.
    """

    name: str
    description: str
    build: Callable[[LLM], Graph]
    agents: tuple[str, ...]
    input_model: type[BaseModel]
    samples: Callable[[], list[Json]] = list
    read: Callable[[Path], Iterator[Json]] = records
    recursion_limit: int = 25

    def checked(self, data: Any) -> Json:
        """A run's input with its defaults filled in: what the graph starts from. Raises InputError."""
        try:
            return self.input_model.model_validate(data).model_dump()
        except ValidationError as error:
            raise InputError(f"the input of {self.name} is wrong: {_sentence(error)}") from error


def find(specs: Mapping[str, WorkflowSpec], name: str) -> WorkflowSpec:
    """Raises NotFoundError, which lists the known names."""
    try:
        return specs[name]
    except KeyError:
        raise NotFoundError(f"workflow {name!r:.80} is unknown; known are {', '.join(sorted(specs))}") from None


def _sentence(error: ValidationError) -> str:
    """At most three faults, each with its place; values are shortened, an input may be large."""
    faults = [
        f"{'.'.join(map(str, fault['loc'])) or 'the whole'}: {fault['msg']} (got {fault['input']!r:.60})"
        for fault in error.errors(include_url=False)[:3]
    ]
    return "; ".join(faults)
