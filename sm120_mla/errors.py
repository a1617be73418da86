"""Typed errors. Each names the argument, the value, what was expected and what to do."""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CaptureError",
    "CaseFileError",
    "GrowthDuringCaptureError",
    "HostSyncError",
    "IndexValueError",
    "LayoutError",
    "NonFiniteError",
    "OvertakenError",
    "Sm120MlaError",
    "StaleAddressError",
    "SuiteNotFoundError",
    "UnavailableError",
]


class Sm120MlaError(Exception):
    """Base of every error this package raises on purpose."""


class ArgumentError(Sm120MlaError, ValueError):
    """An argument is at fault.

    Attributes: ``argument`` (name), ``value`` (as given or a short description of it),
    ``expected`` and ``remedy`` (what to do).
    """

    def __init__(self, argument: str, value: object, expected: str, remedy: str) -> None:
        self.argument, self.value, self.expected, self.remedy = argument, value, expected, remedy
        super().__init__(f"{argument} = {value}: expected {expected}. {remedy}")

    def __reduce__(self) -> tuple[object, ...]:  # survives xdist and subprocess boundaries
        return type(self), (self.argument, str(self.value), self.expected, self.remedy)


class LayoutError(ArgumentError):
    """A cache view that the page layout cannot address."""


class IndexValueError(ArgumentError):
    """A token index, length, slot or block id out of its range (values are validated)."""


class NonFiniteError(ArgumentError):
    """The quantiser met NaN or inf; the message names token and tile."""


class CaseFileError(ArgumentError):
    """A case file that cannot be read or has the wrong schema."""


class SuiteNotFoundError(ArgumentError):
    """``verify`` was asked to run outside a checkout that holds the suite."""


class UnavailableError(Sm120MlaError, RuntimeError):
    """Something this machine or environment lacks (a package, a GPU, a mode)."""

    def __init__(self, what: str, why: str, remedy: str) -> None:
        self.what, self.why, self.remedy = what, why, remedy
        super().__init__(f"{what} is not available: {why}. {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.why, self.remedy)


class CaptureError(Sm120MlaError, RuntimeError):
    """Something a capturing stream would refuse."""


class GrowthDuringCaptureError(CaptureError):
    """A persistent buffer would have to be allocated or grown while a graph is being captured."""


class HostSyncError(CaptureError):
    """An operation that needs a value on the host was called during capture."""


class StaleAddressError(CaptureError):
    """A graph was replayed although memory it recorded has been freed."""


class OvertakenError(Sm120MlaError, RuntimeError):
    """A split result was read after a later split wrote into the shared destination."""
