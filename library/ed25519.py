"""Whether an Ed25519 signature is good: reached only through library.crypto, when one is due.

By PyNaCl (libsodium), in two thirds of the time that OpenSSL takes (docs/adr/0002). It refuses keys of small
order, under which anybody can sign. Where it is absent `cryptography` serves, which accepts those keys: they
are refused here.
"""

from __future__ import annotations

try:
    # The compiled part of PyNaCl by itself: its bindings are twenty modules, most of what a first load reads.
    from nacl._sodium import ffi, lib  # pyright: ignore[reportMissingImports]

    _open = lib.crypto_sign_open
    if lib.sodium_init() < 0:
        raise ImportError("libsodium does not start here")

    _Bad: type[Exception] = ValueError

    def _check(raw: bytes, signature: bytes, message: bytes) -> None:
        if len(raw) != 32 or len(signature) != 64:  # C would read on
            raise ValueError("a key has 32 bytes, a signature 64")
        signed = signature + message
        if _open(ffi.NULL, ffi.NULL, signed, len(signed), raw):
            raise ValueError("the signature is not the key's")

except (ImportError, AttributeError):  # absent, or a later one that is built otherwise
    from functools import lru_cache

    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    _Bad = InvalidSignature
    _P = 2**255 - 19
    _ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
    _SMALL = frozenset({0, 1, _P - 1, _ORDER_8, _P - _ORDER_8})  # second coordinates (RFC 8032, 5.1.2)

    @lru_cache(maxsize=64)
    def _key(raw: bytes) -> Ed25519PublicKey:
        y = int.from_bytes(raw, "little") % 2**255
        if y >= _P or y in _SMALL:
            raise ValueError("a key of small order, or not in its one spelling")
        return Ed25519PublicKey.from_public_bytes(raw)

    def _check(raw: bytes, signature: bytes, message: bytes) -> None:
        _key(raw).verify(signature, message)


def verify(raw_public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` over `message` was made by the key of the 32 raw bytes."""
    try:
        _check(raw_public, signature, message)
    except (_Bad, ValueError):
        return False
    return True
