"""Private Ed25519 keys: made, read and locked by whoever signs. Apart from `library.ed25519`, because their
formats cost a process that only verifies twice what verifying does to import."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from library.errors import fail


def generate(passphrase: bytes | None) -> tuple[bytes, bytes]:
    """A new key: PKCS#8 PEM (encrypted when a passphrase is given) and its 32 raw public bytes."""
    key = Ed25519PrivateKey.generate()
    locked = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked)
    return pem, key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def load_private(pem: bytes, passphrase: bytes | None) -> tuple[Ed25519PrivateKey, bytes]:
    """The key of a PKCS#8 PEM and its raw public bytes. E0754 for the passphrase, E0753 for anything else."""
    try:
        key = load_pem_private_key(pem, passphrase if b"ENCRYPTED" in pem else None)
    except TypeError as error:
        raise fail("E0754", str(error), hint="give ESPER_PASSPHRASE_FILE or ESPER_PASSPHRASE_FD") from error
    except ValueError as error:
        code = "E0754" if passphrase and b"ENCRYPTED" in pem else "E0753"
        raise fail(code, f"private key cannot be read: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise fail("E0753", "private key is not an Ed25519 key")
    return key, key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
