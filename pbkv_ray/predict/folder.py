"""A folder of trained nets that a service reads anew when `pbkv train` has written there."""

from pathlib import Path

from pbkv_ray.errors import InputError
from pbkv_ray.predict.inference import ServedNet


class ModelFolder:
    """Watches `<root>/<any>/config.json`; `pbkv train` writes there. One reader at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[Path, tuple[int, int]] = {}
        self.errors: dict[str, str] = {}  # folder -> why it was not loaded

    def fresh(self) -> dict[str, ServedNet]:
        """workflow -> net, of the folders that are new or changed since the last call. Reads files: not for an event
        loop. A folder that cannot be loaded is in `errors` and is tried again when it changes."""
        nets = {}
        for config in sorted(self._root.glob("*/config.json")):
            try:
                status = config.stat()
            except OSError:
                continue
            stamp = (status.st_mtime_ns, status.st_ino)
            if self._seen.get(config) == stamp:
                continue
            self._seen[config] = stamp
            name = config.parent.name
            try:
                net = ServedNet.load(config.parent)
                nets[str(net.facts.get("workflow", name))] = net
                self.errors.pop(name, None)
            except InputError as error:
                self.errors[name] = str(error)
        return nets
