"""The errors that this project raises on purpose; all derive from `FGPUError`."""

from __future__ import annotations


class FGPUError(Exception):
    """An error with a stable ``code`` and a message that is safe to show a user."""

    code = "error"

    def __init_subclass__(cls, *, code: str = "") -> None:
        super().__init_subclass__()
        cls.code = code or cls.code


class BadAmount(FGPUError, code="bad_amount"):
    """An amount that cannot be parsed or is out of range."""


class BadSettings(FGPUError, code="bad_settings"):
    """A setting that cannot work. The message is one line."""


class InvalidTransition(FGPUError, code="invalid_transition"):
    """A state change that the life cycle does not allow: a bug or a lost race."""


class StaleVersion(FGPUError, code="stale_version"):
    """The store changed since the snapshot was read; plan again."""


class UnknownSession(FGPUError, code="unknown_session"):
    """No session has this id."""


class SessionExists(FGPUError, code="session_exists"):
    """The user's server already has a live session."""


class TooManyPending(FGPUError, code="too_many_pending"):
    """The user's pending requests would exceed the limit."""


class OverQuota(TooManyPending, code="over_quota"):
    """A request exceeds a pending quota, or is larger than a quota and could never start."""


class StoreUnavailable(FGPUError, code="store_unavailable"):
    """The database cannot be reached or is of another version."""


class ProbeFailed(FGPUError, code="probe_failed"):
    """The GPUs could not be read. Callers must not treat this as "no GPU"."""


class BadImageName(FGPUError, code="bad_image_name"):
    """An image name or tag that no engine accepts. The message says what would work."""


class UnknownImage(FGPUError, code="no_such_image"):
    """The private image does not exist, or the caller may not see it."""


class ImageRefused(FGPUError, code="image_refused"):
    """The action on a private image is impossible now. The message says why, and what would work."""


class ImageNameTaken(ImageRefused, code="image_name_taken"):
    """Another private image of the owner has this name and tag."""


class OverImageQuota(ImageRefused, code="over_image_quota"):
    """The owner's private images would exceed their quota in number or size."""
