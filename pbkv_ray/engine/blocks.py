"""The block hashes of a request's prompt, made once, whoever reads them."""

from array import array
from typing import Any

from pbkv_ray.core.ghost import block_hashes


def blocks_of(req: Any, block_tokens: int) -> "array[int]":
    """`core.ghost.block_hashes` of the prompt; kept on the request. All readers of one engine ask for equal blocks."""
    known: array[int] | None = getattr(req, "pbkv_blocks", None)
    if known is None:
        known = req.pbkv_blocks = block_hashes(req.origin_input_ids, block_tokens)
    return known
