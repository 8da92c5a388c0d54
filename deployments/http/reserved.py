"""What only the server may set, and what a foreign caller may. Dropped fields are counted, by name where known.

Only places that we or SGLang read as settings are cleaned: the top of an OpenAI body, `extra_body` and `nvext` in
it, and a run's `config`. Messages, tools, JSON schemas and workflow inputs are the caller's own content.
"""

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
Count = Callable[[str], None]

# field -> why a caller may not set it
SERVER_ONLY: dict[str, str] = {
    "cache_salt": "separates tenants; derived from the key",
    "extra_key": "separates tenants in SGLang's radix tree",
    "custom_params": "carries our run and agent into the scheduler",
    "custom_logit_processor": "is code",
    "priority": "orders admission and eviction",
    "kv_hints": "is the controller's message to the engine",
    "rid": "is our call id; aborts go by it",
    "session_id": "opens SGLang sessions; read as an alias of the run first",
    "session_params": "opens SGLang sessions",
    "session_control": "opens SGLang sessions",
    "routing_key": "chooses the replica",
    "routing_strategy": "chooses the replica",
    "data_parallel_rank": "chooses the rank",
    "routed_dp_rank": "chooses the rank",
    "disagg_prefill_dp_rank": "chooses the rank",
    "bootstrap_host": "makes the engine connect to a host of the caller's choice",
    "bootstrap_port": "makes the engine connect to a host of the caller's choice",
    "bootstrap_room": "makes the engine connect to a host of the caller's choice",
    "kv_transfer_params": "makes the engine connect to a host of the caller's choice",
    "return_hidden_states": "shows the model's inside and starves the batch; ours come over a channel of their own",
    "return_routed_experts": "shows the model's inside",
    "lora_path": "loads weights by path",
    "lora_id": "loads weights by id",
    "stop_regex": "is matched by Python in the engine, which a hostile pattern halts",
    "program_id": "read as an alias of the run",
    "agent_id": "read as an alias of the agent",
    "nvext": "read for its aliases",
    "pbkv_tenant": "names the tenant",
}

# What an OpenAI body may say: OpenAI's own fields, and those of SGLang's that only shape the caller's own answer.
# A list of what passes, so that a field that a later SGLang adds does not pass by itself.
_OPENAI = (
    "messages", "model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "stop",
    "seed", "temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs",
    "top_logprobs", "response_format", "tools", "tool_choice", "parallel_tool_calls", "user", "metadata",
    "store", "reasoning_effort",
)  # fmt: skip
_SGLANG = (
    "top_k", "min_p", "min_tokens", "repetition_penalty", "regex", "ebnf", "stop_token_ids",
    "no_stop_trim", "ignore_eos", "skip_special_tokens", "continue_final_message", "chat_template_kwargs",
    "separate_reasoning", "stream_reasoning", "return_cached_tokens_details",
)  # fmt: skip
CHAT_FIELDS = frozenset(_OPENAI + _SGLANG)

# A run's config may carry these; everything else in it (callbacks, run_id, ...) is the runner's.
RUN_CONFIG = ("configurable", "max_concurrency", "metadata", "recursion_limit", "run_name", "tags")

# LangGraph reads these from `configurable`; they would reach another thread's checkpoints.
_LANGGRAPH_OWN = ("thread_id", "run_id", "checkpoint_ns", "checkpoint_map", "graph_id", "assistant_id")


def clean_chat(body: Json, count: Count) -> Json:
    """An OpenAI body with the fields of CHAT_FIELDS; `extra_body` is merged as OpenAI's client would have done."""
    merged = dict(body)
    extra = merged.pop("extra_body", None)
    if isinstance(extra, dict):
        merged = {**extra, **merged}
    kept: Json = {}
    for key, value in merged.items():
        if key in CHAT_FIELDS:
            kept[key] = value
        else:
            count(key if key in SERVER_ONLY else "unknown")
    return kept


def clean_config(config: Json, count: Count) -> Json:
    """A run's config without the server's fields and what only the runner may set."""
    kept: Json = {}
    for key, value in config.items():
        if key in RUN_CONFIG:
            kept[key] = value
        else:
            count(key if key in SERVER_ONLY else "config")
    if "configurable" in kept:
        kept["configurable"] = clean_configurable(kept["configurable"], count)
    if "metadata" in kept:
        kept["metadata"] = _without(kept["metadata"], count)
    return kept


def clean_configurable(configurable: Json, count: Count) -> Json:
    """What a graph node may read, without the server's fields and LangGraph's own."""
    own = {key for key in configurable if key in _LANGGRAPH_OWN or key.startswith("__")}
    for _ in own:
        count("configurable")
    return _without({key: value for key, value in configurable.items() if key not in own}, count)


def clean_metadata(metadata: Json, count: Count) -> Json:
    """Metadata is the caller's, but for the field by which we tell tenants apart."""
    if "pbkv_tenant" not in metadata:
        return metadata
    count("pbkv_tenant")
    return {key: value for key, value in metadata.items() if key != "pbkv_tenant"}


def _without(fields: Json, count: Count) -> Json:
    kept: Json = {}
    for key, value in fields.items():
        if key in SERVER_ONLY:
            count(key)
        else:
            kept[key] = value
    return kept
