"""What graph nodes without an LLM do: retrieve, calculate, run tests."""
