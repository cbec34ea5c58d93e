"""Secrets in a backup, encrypted with a passphrase that is in no backup."""

from __future__ import annotations

import base64
import os

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from fgpuspawner.backup.databases import BackupFailed

SALT = 16
LEAST = 12
"""Shortest length of a passphrase."""


def sealed(plain: bytes, passphrase: str) -> bytes:
    """Return a secret encrypted: a random salt, then a Fernet token."""
    if len(passphrase) < LEAST:
        raise BackupFailed(f"the passphrase has {len(passphrase)} characters; take at least {LEAST}")
    salt = os.urandom(SALT)
    return salt + _fernet(passphrase, salt).encrypt(plain)


def opened(secret: bytes, passphrase: str) -> bytes:
    """Return the decrypted secret; raises BackupFailed if the passphrase is wrong, or the secret was changed."""
    try:
        return _fernet(passphrase, secret[:SALT]).decrypt(secret[SALT:])
    except InvalidToken:
        raise BackupFailed("the passphrase is not that of the backup's secrets") from None


def _fernet(passphrase: str, salt: bytes) -> Fernet:
    # Each guess costs 128 MiB and half a second.
    key = Scrypt(salt=salt, length=32, n=2**17, r=8, p=1).derive(passphrase.encode())
    return Fernet(base64.urlsafe_b64encode(key))
