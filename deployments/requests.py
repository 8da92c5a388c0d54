"""What a request for a run must hold before anything is stored."""

from dataclasses import replace

from deployments.encoding import plain
from deployments.execution import check_modes, command_of
from deployments.graphs import Graphs
from deployments.service import RunRequest
from deployments.threads import checked_id, checked_metadata
from pbkv_ray.errors import InputError


def checked_request(request: RunRequest, graphs: Graphs, max_steps: int) -> RunRequest:
    """The request with its input as the workflow has it. InputError, NotFoundError."""
    graphs.spec(request.workflow)
    check_modes(request.stream_mode)
    checked_metadata(request.metadata)
    if request.thread_id is not None:
        checked_id("thread_id", request.thread_id)
    limit = request.config.get("recursion_limit")
    if limit is not None and not (isinstance(limit, int) and 1 <= limit <= max_steps):
        raise InputError(f"recursion_limit is {limit!r}; it must be 1..{max_steps}")
    if request.command is not None:
        if request.input is not None:
            raise InputError("input and command were both given; a run starts with one of them")
        if request.thread_id is None:
            raise InputError("a command needs the thread that waits for it; give the thread's id")
        command_of(request.command)
    elif request.input is not None:
        return replace(request, input=plain(graphs.validated(request.workflow, request.input)))
    elif request.thread_id is None:
        raise InputError(f"a new run of {request.workflow!r} needs an input")
    return request
