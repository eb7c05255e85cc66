"""Ed25519 through `cryptography`: reached only through library.crypto, when a signature is due."""

from __future__ import annotations

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


@lru_cache(maxsize=64)
def _public(raw: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(raw)


def verify(raw_public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` over `message` was made by the key of the 32 raw bytes."""
    try:
        _public(raw_public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
