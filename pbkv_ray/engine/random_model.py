"""The tiny random-weight model: what tests and benchmarks load where no answer matters.

Its weights depend on the recipe alone, so that two machines make the same model (with the same PyTorch).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_MARKER = "tiny_random_weight_model.json"
_SHAPES: dict[str, dict[str, int]] = {
    "nano": {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "25m": {
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """`tokenizer` is "bytes" or the name of the model whose tokenizer was taken."""

    size: str
    seed: int
    tokenizer: str
    version: int = 1

    def __str__(self) -> str:
        return f"the tiny random-weight model of size {self.size}, seed {self.seed}, tokenizer {self.tokenizer}"


def recipe_of(folder: Path) -> Recipe | None:
    """The recipe that `folder` was made by; None when it is not one of ours."""
    try:
        return Recipe(**json.loads((folder / _MARKER).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def make(recipe: Recipe, tokenizer: Path | None, folder: Path) -> None:
    """Write the model (float32) and its tokenizer (that of the model folder `tokenizer`, else bytes)."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    words: Any = _byte_tokenizer() if tokenizer is None else AutoTokenizer.from_pretrained(str(tokenizer))
    config = Qwen3Config(
        **_SHAPES[recipe.size],
        vocab_size=-(-len(words) // 64) * 64,
        max_position_embeddings=32_768,
        rope_theta=1_000_000.0,
        # Tied, a random model repeats its last token for ever: every word is most similar to itself.
        tie_word_embeddings=False,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        initializer_range=_SHAPES[recipe.size]["hidden_size"] ** -0.5,  # keeps activations near one in size
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Qwen3ForCausalLM(config)
    model.to(torch.float32).save_pretrained(folder)
    words.save_pretrained(folder)
    (folder / _MARKER).write_text(json.dumps(asdict(recipe)) + "\n")


def _byte_tokenizer() -> Any:
    """One token a byte, ChatML's special tokens first; works for any text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=32_768,
        chat_template=_CHATML,
    )
