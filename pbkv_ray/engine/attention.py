"""`pbkv_cpu_rows`: an attention backend for the CPU that computes only the new rows of a prompt."""


def register() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend("pbkv_cpu_rows")
    def build(runner):  # type: ignore[no-untyped-def]
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return TorchNativeAttnBackend(runner)
