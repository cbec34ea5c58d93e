"""The errors that this project raises on purpose; all derive from `FGPUError`."""

from __future__ import annotations


class FGPUError(Exception):
    """An error with a stable ``code`` and a message that is safe to show a user."""

    code = "error"


class BadAmount(FGPUError):
    """An amount that cannot be parsed or is out of range."""

    code = "bad_amount"


class BadSettings(FGPUError):
    """A setting that cannot work. The message is one line."""

    code = "bad_settings"


class InvalidTransition(FGPUError):
    """A state change that the life cycle does not allow: a bug or a lost race."""

    code = "invalid_transition"


class StaleVersion(FGPUError):
    """The store changed since the snapshot was read; plan again."""

    code = "stale_version"


class UnknownSession(FGPUError):
    """No session has this id."""

    code = "unknown_session"


class SessionExists(FGPUError):
    """The user's server already has a live session."""

    code = "session_exists"


class TooManyPending(FGPUError):
    """The user's pending requests would exceed the limit."""

    code = "too_many_pending"


class OverQuota(TooManyPending):
    """A request exceeds a pending quota, or is larger than a quota and could never start."""

    code = "over_quota"


class StoreUnavailable(FGPUError):
    """The database cannot be reached or is of another version."""

    code = "store_unavailable"


class ProbeFailed(FGPUError):
    """The GPUs could not be read. Callers must not treat this as "no GPU"."""

    code = "probe_failed"


class BadImageName(FGPUError):
    """An image name or tag that no engine accepts. The message says what would work."""

    code = "bad_image_name"


class UnknownImage(FGPUError):
    """The private image does not exist, or the caller may not see it."""

    code = "no_such_image"


class ImageRefused(FGPUError):
    """The action on a private image is impossible now. The message says why, and what would work."""

    code = "image_refused"


class ImageNameTaken(ImageRefused):
    """Another private image of the owner has this name and tag."""

    code = "image_name_taken"


class OverImageQuota(ImageRefused):
    """The owner's private images would exceed their quota in number or size."""

    code = "over_image_quota"
