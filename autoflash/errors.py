"""Exceptions. Every message names the value, the limit it broke and the next step."""


class AutoFlashError(Exception):
    """Base of every error that AutoFlash raises on purpose."""


class InvalidInputError(AutoFlashError, ValueError):
    """The arguments of a call, a flag or a problem file don't describe an attention problem."""


class UnsupportedError(AutoFlashError, NotImplementedError):
    """A well-formed request that no variant serves on this target."""


class ConfigError(AutoFlashError, ValueError):
    """A config names a parameter, a value or a combination that the kernel doesn't declare."""


class CompileError(AutoFlashError):
    """Triton or its assembler refused a variant; the message holds the reason."""


class OutOfResourcesError(CompileError):
    """A variant compiled, but needs more shared memory or registers than the target has."""


class BusyGpuError(AutoFlashError):
    """The GPU is used by others, and an idle one was required."""


class StoreError(AutoFlashError):
    """The tuning store can't be opened, read or written."""


class MissingRecordError(AutoFlashError, LookupError):
    """Lock mode found no exact record, or the lock file no entry, for a problem."""


class LockError(AutoFlashError):
    """The lock file can't be trusted, or what it locks can't be run here just as it was."""
