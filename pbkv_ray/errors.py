"""Every error of ours, by who is at fault. A message names the value, the rule and the remedy."""


class PbkvError(Exception):
    """Base of all our errors. `exit_code` is what the CLI ends with, `status` what HTTP answers."""

    exit_code = 1
    status = 500


class InputError(PbkvError):
    """The caller's request cannot be served as it is; nothing was changed."""

    exit_code = 2
    status = 422


class ConfigError(InputError):
    """A setting is outside what it may be; raised at start, not at first use."""


class NotFoundError(InputError):
    """The named thing does not exist."""

    status = 404


class ConflictError(InputError):
    """The thing exists and its state forbids the request."""

    status = 409


class UnavailableError(PbkvError):
    """A part of ours is not there (yet, or any more); trying again may help."""

    status = 503


class EngineError(UnavailableError):
    """The SGLang engine failed or answered an error."""


class EngineLostError(EngineError):
    """The engine or its replica died during the call: the same question may be asked again, of another."""


class SetupError(PbkvError):
    """Something that this machine must provide (a download, a tool, a permission) is missing."""

    exit_code = 3
    status = 503


class StoreError(UnavailableError):
    """The database of runs does not answer; what was asked of it may or may not be stored."""
