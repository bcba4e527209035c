"""Every error sinkscope raises on purpose, and its warnings.

Messages follow one pattern: what is wrong, what was expected, what came, what to do.
"""

from __future__ import annotations


class SinkscopeError(Exception):
    """Base of all errors raised by sinkscope.

    Args:
        what: one sentence that names the problem.
        expected: what would have been right.
        got: what came instead.
        fix: what the caller can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object | None = None,
        got: object | None = None,
        fix: str | None = None,
    ) -> None:
        parts = [what.rstrip(".") + "."]
        if expected is not None:
            parts.append(f"Expected: {expected}.")
        if got is not None:
            parts.append(f"Got: {got}.")
        if fix is not None:
            parts.append(f"To fix it: {fix}.")
        super().__init__(" ".join(parts))


class InvalidInputError(SinkscopeError, ValueError):
    """An argument that no model could satisfy: a bad shape, an unknown name, an empty text."""


class NotApplicableError(SinkscopeError):
    """The model lacks the part that the measure is about (no query bias, no position table)."""


class ProcessedWeightsError(SinkscopeError):
    """The weights were folded or centred, so the raw parts no longer mean what they are named."""


class IdentityError(SinkscopeError):
    """A decomposition does not add up to what the model itself computed."""


class ConformanceError(SinkscopeError):
    """A model view does not give what the protocol of `ModelView` says."""


class EditError(SinkscopeError):
    """An ablation could not be carried out where it was asked for."""


class LoadError(SinkscopeError):
    """A model, a prompt file or a result could not be read."""


class WriteError(SinkscopeError):
    """A result could not be written."""


class MemoryLimitError(SinkscopeError, MemoryError):
    """Memory does not suffice, not even for one prompt at a time."""


class NoEffectWarning(UserWarning):
    """An ablation left its tensor bit for bit as it was, or its hook was never reached."""


class SmallerBatchWarning(UserWarning):
    """Memory did not suffice for a batch, so that the run goes on with half as many prompts."""


class BosWarning(UserWarning):
    """The BOS token is missing, doubled, or otherwise not what the caller may think."""
