"""Agents of the shipped workflows: one a file, each a prompt, an output model and `run(llm, state)`.

An agent is a graph node that calls the LLM. Copy a file and change those three things to make your own.
"""

PROJECT = "pbkv-ray"  # `workflows` looks for it: another well-known distribution has our import name
