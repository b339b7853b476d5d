"""The errors that runflat raises on purpose.

RunflatError
  UserError           what was asked for cannot be done; the message is one paragraph for people; exit code 2
    ConfigError       a configuration key, type, value or combination
    DataError         the training text or its tokenizer
    ModelError        a model that cannot be built or sharded
    PlanError         a layout that is not possible: degree, dead slots, batch, memory
    CheckpointError   a checkpoint that is missing, damaged, or does not fit
    TraceError        a file of failure events
    PowerError        power limits: no driver, a limits file that others can change, no agent
  RunError            the job was possible but failed; exit code 1

The message of a `UserError` says the value, the limit that it broke and what to do about it.
"""

from typing import ClassVar

INTERRUPTED = 130
"""Status with which the command line ends after Ctrl-C, which is no error."""


class RunflatError(Exception):
    """Root of the tree, for whoever wants to catch all of it; only its subclasses are raised.

    Attributes:
        exit_code: status with which the command line ends when this error reaches it.
    """

    exit_code: ClassVar[int] = 1


class UserError(RunflatError):
    """What was asked for cannot be done; nothing was changed, and the message says what to do."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A configuration key is unknown, has the wrong type or value, or contradicts another."""


class DataError(UserError):
    """The training text or its tokenizer cannot be read, or is too short for what was asked."""


class ModelError(UserError):
    """A model cannot be built or sharded; the message names the module and the reason."""


class PlanError(UserError):
    """A layout is impossible: the degree, the dead slots, the batch or the memory."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, could not be written, or does not fit the model."""


class TraceError(UserError):
    """A file of failure events cannot be read or contradicts itself."""


class PowerError(UserError):
    """Power limits cannot be read or set here, or the file that bounds them cannot be trusted."""


class RunError(RunflatError):
    """A job that was possible has failed; the message carries the first cause."""
