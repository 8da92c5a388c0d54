"""What a batch costs on a GPU: prefill by new tokens and depth, decode by batch and context, transfers by bytes.

A roofline with two efficiencies: a batch takes the longer of its arithmetic and its memory traffic. Presets use
public figures only; the efficiencies are stated assumptions, the same for every policy. `calibrated` replaces the
roofline by coefficients that `pbkv replay calibrate` fitted to a real engine.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pbkv_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Model:
    """A dense transformer in bfloat16."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def attention_flops(self) -> int:
        """Of one new token, per token of its context: scores and weighted sum, a multiply and an add each."""
        return 4 * self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Gpu:
    flops: float  # dense bfloat16 tensor peak, 1/s
    bandwidth: float  # memory, bytes/s
    memory: float  # bytes
    host_link: float  # one direction, bytes/s, as measured in practice


# Model cards on the Hugging Face hub: Qwen/Qwen3-14B and Qwen/Qwen3-32B ("Model Overview" and config.json).
MODELS = {
    "qwen3-14b": Model(14.8e9, 40, 40, 8, 128),
    "qwen3-32b": Model(32.8e9, 64, 64, 8, 128),
}
# NVIDIA data sheets, dense (without sparsity) bf16: RTX A6000 (154.8 TF, 768 GB/s, 48 GB, PCIe 4), A100 80GB SXM
# (312 TF, 2,039 GB/s, PCIe 4), H100 SXM (989 TF, 3.35 TB/s, PCIe 5), H200 SXM (989 TF, 4.8 TB/s, 141 GB, PCIe 5).
# Host links: 20 GB/s is the PBKV paper's own figure for its A6000 machine; the others are about 80 % of the link.
GPUS = {
    "a6000": Gpu(154.8e12, 768e9, 48e9, 20e9),
    "a100": Gpu(312e12, 2.039e12, 80e9, 25e9),
    "h100": Gpu(989e12, 3.35e12, 80e9, 50e9),
    "h200": Gpu(989e12, 4.8e12, 141e9, 50e9),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds. All coefficients are per replica (tensor parallelism is in them).

    prefill = prefill_s + new tokens x token_s + (new tokens x context) x pair_s, at least `read_s`
    decode  = step_s + batch x row_s + context tokens of the batch x context_s
    """

    name: str
    prefill_s: float
    token_s: float
    pair_s: float
    read_s: float
    step_s: float
    row_s: float
    context_s: float
    transfer_tokens_s: float  # host to device, tokens a second

    def prefill(self, chunks: Sequence[tuple[int, int]]) -> float:
        """chunks: (new tokens, tokens before them) of every request in the batch."""
        new = sum(n for n, _ in chunks)
        pairs = sum(n * (before + n / 2) for n, before in chunks)
        return max(self.read_s, self.prefill_s + new * self.token_s + pairs * self.pair_s)

    def decode_step(self, batch: int, context: int) -> float:
        """One step of `batch` requests with `context` tokens in all."""
        return self.step_s + batch * self.row_s + context * self.context_s

    def decode(self, batch: int, context: int, steps: int) -> float:
        """`steps` steps in a row; every step adds one token to every request's context."""
        return steps * self.decode_step(batch, context) + batch * self.context_s * steps * (steps - 1) / 2

    def load(self, tokens: int) -> float:
        return tokens / self.transfer_tokens_s


def roofline(model: str, gpu: str, tensor_parallel: int = 1, compute: float = 0.5, memory: float = 0.7) -> Cost:
    """compute, memory: the shares of the two peaks that a serving engine reaches. Assumptions: 0.5 of the tensor peak
    in prefill and 0.7 of the bandwidth in decode are what well-tuned engines report for dense bf16 models.

    Raises ConfigError for an unknown name, and where the weights leave no room for KV cache.
    """
    if model not in MODELS or gpu not in GPUS:
        raise ConfigError(
            f"no preset for {model!r} on {gpu!r}; models: {', '.join(MODELS)}; GPUs: {', '.join(GPUS)}; "
            "or give a file made by `pbkv replay calibrate`"
        )
    m, g, tp = MODELS[model], GPUS[gpu], tensor_parallel
    weights = 2 * m.parameters
    if weights > 0.9 * g.memory * tp:
        raise ConfigError(f"{model} ({weights / 1e9:.0f} GB) does not fit {tp} x {gpu}; raise the tensor parallelism")
    flops, bandwidth = g.flops * tp * compute, g.bandwidth * tp * memory
    read_s = weights / bandwidth
    return Cost(
        name=f"{model}/{gpu}/tp{tp}",
        prefill_s=0.002,  # launch and scheduling of a batch
        token_s=2 * m.parameters / flops,
        pair_s=m.attention_flops / flops,
        read_s=read_s,
        step_s=0.002 + read_s,
        row_s=2 * m.parameters / flops,
        context_s=m.kv_bytes / bandwidth,
        transfer_tokens_s=g.host_link * tp / m.kv_bytes,
    )


def pool_tokens(model: str, gpu: str, tensor_parallel: int = 1, share: float = 0.88) -> int:
    """Device KV tokens that are left of `share` of the memory after the weights."""
    m, g = MODELS[model], GPUS[gpu]
    return int((share * g.memory * tensor_parallel - 2 * m.parameters) / m.kv_bytes)


def load_cost(text: str) -> Cost:
    """ "MODEL/GPU[/tpN]" of the presets, or a path of a calibration file."""
    path = Path(text)
    if path.suffix == ".json":
        if not path.is_file():
            raise ConfigError(f"there is no calibration file {text!r}; make one with `pbkv replay calibrate`")
        try:
            return Cost(**json.loads(path.read_text())["cost"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{text!r} is no calibration file ({error}); make one with `pbkv replay calibrate`"
            ) from None
    parts = text.lower().split("/")
    tp = parts[2].removeprefix("tp") if len(parts) == 3 else "1"
    if len(parts) not in (2, 3) or not tp.isdigit():
        raise ConfigError(f"cost {text!r} is not of the form MODEL/GPU[/tpN], for instance qwen3-14b/a6000")
    return roofline(parts[0], parts[1], int(tp))


def save_cost(path: str | Path, cost: Cost, measured: dict[str, object]) -> None:
    """Write a calibration file; `measured` is kept beside the coefficients as their evidence."""
    Path(path).write_text(json.dumps({"cost": asdict(cost), "measured": measured}, indent=1) + "\n")
