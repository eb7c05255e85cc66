"""Which signatures are good, by both verifiers: vectors of RFC 8032, and what a strict verifier refuses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.source import ROOT

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
# RFC 8032, 7.1: secret, public, message, signature.
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
        "d25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
        "387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc659"
        "4a7c15e9716ed28dc027beceea1ec40a",
    ),
]
# Every encoding of a point of order 1, 2, 4 or 8, also those of a coordinate that is not reduced.
ORDER_8 = int.from_bytes(
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"
)
SMALL = [y + (sign << 255) for y in (0, 1, P - 1, P, P + 1, ORDER_8, P - ORDER_8) for sign in (0, 1)]


@pytest.fixture(params=["nacl", "cryptography"])
def ed25519(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """library.ed25519 as it is where PyNaCl is installed, and where it is not."""
    if request.param == "nacl":
        pytest.importorskip("nacl")
    else:
        monkeypatch.setitem(sys.modules, "nacl", None)
    # Another module than the one that the library holds.
    spec = importlib.util.spec_from_file_location("_ed25519", ROOT / "library" / "ed25519.py")
    assert spec is not None and spec.loader is not None
    for name in [n for n in sys.modules if n.startswith("nacl.")] if request.param != "nacl" else ():
        monkeypatch.delitem(sys.modules, name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert hasattr(module, "_open") == (request.param == "nacl")
    return module


@pytest.mark.parametrize(("secret", "public", "message", "signature"), VECTORS)
def test_vectors(ed25519: ModuleType, secret: str, public: str, message: str, signature: str) -> None:
    raw, text, made = bytes.fromhex(public), bytes.fromhex(message), bytes.fromhex(signature)
    assert ed25519.verify(raw, made, text)
    assert Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)).sign(text) == made
    assert not ed25519.verify(raw, made, text + b"x") and not ed25519.verify(raw, made[:-1], text)
    for at in range(64):
        wrong = bytearray(made)
        wrong[at] ^= 1
        assert not ed25519.verify(raw, bytes(wrong), text), at


def test_the_other_spellings_of_a_signature(ed25519: ModuleType) -> None:
    """S and S + the group's order solve the same equation: only the reduced one is a signature."""
    _, public, message, signature = (bytes.fromhex(part) for part in VECTORS[2])
    s = int.from_bytes(signature[32:], "little")
    for more in range(1, 8):
        other = signature[:32] + (s + more * ORDER).to_bytes(32, "little")
        assert not ed25519.verify(public, other, message)


def test_keys_under_which_anybody_signs(ed25519: ModuleType) -> None:
    """R = identity, S = 0 holds for every eighth message at least, whoever wrote it."""
    nothing = (1).to_bytes(32, "little") + bytes(32)
    for y in SMALL:
        key = y.to_bytes(32, "little")
        assert not any(ed25519.verify(key, nothing, b"%d" % n) for n in range(64)), hex(y)


def test_what_is_no_key_or_no_signature(ed25519: ModuleType) -> None:
    _, public, message, signature = (bytes.fromhex(part) for part in VECTORS[2])
    for key in (b"", public[:31], public + b"\0", (2).to_bytes(32, "little"), b"\xff" * 32):
        assert not ed25519.verify(key, signature, message)
    for made in (b"", signature[:63], signature + b"\0", bytes(64)):
        assert not ed25519.verify(public, made, message)


def test_a_first_load_reads_no_more_than_it_needs() -> None:
    pytest.importorskip("nacl")
    text = "import sys, library.ed25519; print([m for m in sys.modules if m.startswith('nacl.bindings')])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
