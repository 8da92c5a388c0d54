"""What SGLang loads of ours in each of its processes (entry-point group `sglang.srt.plugins`)."""

from importlib import import_module

# Modules with a `register()` that adds our implementation to one of SGLang's registries. Imported only inside
# SGLang's processes, in this order; SGLang logs what a failing plug-in raises and goes on without it.
REGISTRATIONS = ("pbkv_ray.engine.orphans", "pbkv_ray.engine.attention", "pbkv_ray.engine.radix")


def register() -> None:
    for module in REGISTRATIONS:
        import_module(module).register()
