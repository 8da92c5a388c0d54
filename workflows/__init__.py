"""Workflows: plain LangGraph graphs of `agents` and tools, each with an entry in `workflows.registry`."""

import agents
from pbkv_ray.errors import ConfigError

if getattr(agents, "PROJECT", None) != "pbkv-ray":
    raise ConfigError(
        f"the package `agents` at {getattr(agents, '__file__', 'an unknown place')} is not pbkv-ray's: another "
        "distribution with this import name (openai-agents has it) comes first on sys.path; uninstall it or use a "
        "virtual environment of its own for pbkv-ray"
    )
