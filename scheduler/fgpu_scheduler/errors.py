"""The root of every error that this project raises on purpose."""

from __future__ import annotations


class FGPUError(Exception):
    """An error with a stable ``code`` and a message that is safe to show a user."""

    code = "error"


class BadAmount(FGPUError):
    """An amount that cannot be read or is outside what is possible."""

    code = "bad_amount"


class BadSettings(FGPUError):
    """A setting of the administrator that cannot work. The message is one line."""

    code = "bad_settings"


class InvalidTransition(FGPUError):
    """A change of state that the life cycle does not know. A bug, or a lost race."""

    code = "invalid_transition"


class StaleVersion(FGPUError):
    """The store changed since the snapshot was read; plan again."""

    code = "stale_version"


class UnknownSession(FGPUError):
    """No session has this id."""

    code = "unknown_session"


class SessionExists(FGPUError):
    """The user's server has a live session already."""

    code = "session_exists"


class TooManyPending(FGPUError):
    """The user's pending requests would exceed the limit."""

    code = "too_many_pending"


class OverQuota(TooManyPending):
    """A request goes over a quota: of what may wait, or it is so large that it could never start."""

    code = "over_quota"


class StoreUnavailable(FGPUError):
    """The database cannot be reached or is of another version."""

    code = "store_unavailable"


class ProbeFailed(FGPUError):
    """The GPUs could not be read. Never to be taken for "no GPU"."""

    code = "probe_failed"


class BadImageName(FGPUError):
    """A name or tag that no engine takes. The message says what would do."""

    code = "bad_image_name"


class UnknownImage(FGPUError):
    """There is no such private image, or not for whoever asks."""

    code = "no_such_image"


class ImageRefused(FGPUError):
    """What was asked for of a private image cannot be done (now). The message says why, and what would do."""

    code = "image_refused"


class ImageNameTaken(ImageRefused):
    """Another private image of the owner has this name and tag."""

    code = "image_name_taken"


class OverImageQuota(ImageRefused):
    """The owner would have more private images, or larger ones, than they may."""

    code = "over_image_quota"
