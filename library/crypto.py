"""The door to library.ed25519 and library.private_keys: a process that only lists or stores unsigned things
never pays for PyNaCl or `cryptography`, and one that only verifies not for the formats of private keys."""

from __future__ import annotations

import hashlib
from types import ModuleType
from typing import Any

# DER SubjectPublicKeyInfo of an Ed25519 key is this prefix and the 32 raw bytes (RFC 8410).
_SPKI = bytes.fromhex("302a300506032b6570032100")


_verifier: ModuleType | None = None


def _door() -> ModuleType:
    global _verifier
    if _verifier is None:
        from library import ed25519

        _verifier = ed25519
    return _verifier


def _private() -> ModuleType:
    from library import private_keys

    return private_keys


def warm() -> None:
    """Pay the import now rather than at the first signature that is verified."""
    _door()


def verify(raw_public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the key made `signature` over `message`."""
    return _door().verify(raw_public, signature, message)


def generate(passphrase: bytes | None = None) -> tuple[bytes, bytes]:
    """A new key: PKCS#8 PEM and raw public bytes."""
    return _private().generate(passphrase)


def load_private(pem: bytes, passphrase: bytes | None = None) -> tuple[Any, bytes]:
    """Private key object (has `.sign(bytes)`) and raw public bytes."""
    return _private().load_private(pem, passphrase)


def keyid_of(raw_public: bytes) -> str:
    """SHA-256 of the key's SubjectPublicKeyInfo in DER."""
    return hashlib.sha256(_SPKI + raw_public).hexdigest()
