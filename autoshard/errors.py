"""Every error that autoshard raises on purpose.

Each one says what is wrong, what was got, what would be allowed and how to
mend it, and each is also the builtin kind that a caller would expect.
The command line turns `AutoshardError.exit_code` into its exit status.
"""

from __future__ import annotations


class AutoshardError(Exception):
    """Base of all deliberate errors; `exit_code` is what the command line returns."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        got: object | None = None,
        allowed: object | None = None,
        remedy: str | None = None,
    ) -> None:
        """Compose one message.

        Args:
            what: the fault, in one clause, naming the thing at fault.
            got: the offending value, shown as given.
            allowed: what would have been accepted.
            remedy: what the reader can do about it.
        """
        self.what, self.got, self.allowed, self.remedy = what, got, allowed, remedy
        parts = [what]
        if got is not None:
            parts.append(f"got: {got}")
        if allowed is not None:
            parts.append(f"allowed: {allowed}")
        if remedy is not None:
            parts.append(f"remedy: {remedy}")
        super().__init__("; ".join(parts))


class InputError(AutoshardError, ValueError):
    """A file, option or argument is wrong."""

    exit_code = 2


class PlanError(InputError):
    """A plan is malformed, altered, stale or made for something else."""


class InfeasibleError(AutoshardError, ValueError):
    """The request cannot be met: the tables do not fit the given memory."""

    exit_code = 2


class UnsupportedError(AutoshardError, ValueError):
    """A combination (device, optimizer, data type, sharding type) that does not run."""

    exit_code = 2


class ArtifactError(AutoshardError, ValueError):
    """A trained artifact is missing, damaged or made by other versions."""

    exit_code = 2


class DependencyError(AutoshardError, ImportError):
    """A package that this request needs is missing or does not load."""

    exit_code = 2


class WorkerError(AutoshardError, RuntimeError):
    """A worker process failed, died or did not answer in time."""

    exit_code = 1
