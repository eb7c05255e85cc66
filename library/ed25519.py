"""Whether an Ed25519 signature is good: reached only through library.crypto, when one is due.

By PyNaCl (libsodium), in two thirds of the time that OpenSSL takes (docs/adr/0002). It refuses keys of small
order, under which anybody can sign. Where it is absent `cryptography` serves, which accepts those keys: they
are refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

try:
    from nacl.exceptions import BadSignatureError as _Bad
    from nacl.signing import VerifyKey

    def _checker(raw: bytes) -> Callable[[bytes, bytes], Any]:
        return VerifyKey(raw).verify

except ImportError:
    from cryptography.exceptions import InvalidSignature as _Bad
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    _P = 2**255 - 19
    _ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
    _SMALL = frozenset({0, 1, _P - 1, _ORDER_8, _P - _ORDER_8})  # second coordinates (RFC 8032, 5.1.2)

    def _checker(raw: bytes) -> Callable[[bytes, bytes], Any]:
        y = int.from_bytes(raw, "little") % 2**255
        if y >= _P or y in _SMALL:
            raise ValueError("a key of small order, or not in its one spelling")
        key = Ed25519PublicKey.from_public_bytes(raw)
        return lambda message, signature: key.verify(signature, message)


_cached = lru_cache(maxsize=64)(_checker)


def verify(raw_public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` over `message` was made by the key of the 32 raw bytes."""
    try:
        _cached(raw_public)(message, signature)
    except (_Bad, ValueError):
        return False
    return True
