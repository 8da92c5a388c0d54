"""A foreign harness's script with only `openai`: models, a whole answer, a stream, and an error.

`python -m tests.e2e.openai_script URL` runs it against any server; it prints what it saw.
"""

import json
import sys
from typing import Any

from openai import BadRequestError, NotFoundError, OpenAI, UnprocessableEntityError

Json = dict[str, Any]


def exercise(url: str, api_key: str = "none", run_id: str = "openai-script") -> Json:
    """Two calls of one run, the second one its last. Raises AssertionError where the protocol says what must be."""
    client = OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    messages: Any = [{"role": "user", "content": "Say hello."}]
    run = {"x-pbkv-run-id": run_id, "x-pbkv-agent": "greeter", "x-pbkv-workflow": "greeting"}
    whole = client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, temperature=0, extra_headers=run
    )
    assert whole.usage is not None and whole.usage.prompt_tokens > 0, whole
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={**run, "x-pbkv-run-final": "true"},
        extra_body={"cache_salt": "mine", "priority": 99},  # dropped: only the server may set them
    )
    pieces, usage, reason = [], None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reason = choice.finish_reason or reason
    assert usage is not None and usage.prompt_tokens == whole.usage.prompt_tokens, usage
    # Without being asked for, the usage stays out of the stream.
    plain = list(client.chat.completions.create(model=model, messages=messages, max_tokens=2, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain), plain
    refused = []
    try:
        client.chat.completions.create(model=model, messages=[])
    except (BadRequestError, UnprocessableEntityError) as error:
        refused.append(type(error).__name__)
    try:
        client.models.retrieve("no/such-model")
    except NotFoundError as error:
        refused.append(type(error).__name__)
    assert len(refused) == 2, refused
    return {
        "model": model,
        "text": whole.choices[0].message.content,
        "streamed": "".join(pieces),
        "reason": reason,
        "refused": refused,
        "usage": usage.model_dump(include={"prompt_tokens", "completion_tokens"}),
    }


if __name__ == "__main__":
    print(json.dumps(exercise(sys.argv[1]), indent=1))
