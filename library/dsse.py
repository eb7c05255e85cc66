"""DSSE v1 envelopes over in-toto Statements v1. The signature is checked first,
then those same bytes are parsed."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from esper_ir.diagnostics import EsperError
from library.canon import JsonLimits, canonical_json, parse_json
from library.crypto import verify
from library.errors import fail

IN_TOTO = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "urn:esper:provenance:1"
VERDICT = "urn:esper:verdict:1"
ANNOTATION = "urn:esper:annotation:1"
TRUST = "application/vnd.esper.trust+json"
CHECKPOINT = "application/vnd.esper.checkpoint+json"
_LIMITS = JsonLimits(max_bytes=4 << 20, max_depth=32)
_MAX_SIGNATURES = 16
_BEFORE = b'{"_type":"%b","predicate":' % STATEMENT.encode()
_KEYID, _SIGNATURE = 64, 88  # characters
_FIRST, _THEN, _LAST = b'{"payload":"', b'","sig":"', b'"}]}'


@dataclass(frozen=True)
class Signer:
    """One private key in use: `sign` takes the message and returns 64 bytes."""

    role: str
    keyid: str
    sign: Callable[[bytes], bytes]


@dataclass(frozen=True)
class Opened:
    """A verified envelope: the payload bytes that were signed and
    the distinct trusted keys that signed them."""

    payload: bytes
    keyids: tuple[str, ...]


def pae(payload_type: str, payload: bytes) -> bytes:
    """Pre-authentication encoding of DSSE v1: what is signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def seal(payload: bytes, payload_type: str, signers: Iterable[Signer]) -> bytes:
    """Envelope bytes with one signature per signer."""
    message = pae(payload_type, payload)
    signatures = [{"keyid": s.keyid, "sig": base64.b64encode(s.sign(message)).decode()} for s in signers]
    document = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": payload_type,
        "signatures": signatures,
    }
    return canonical_json(document)


def open_envelope(
    envelope: bytes,
    payload_type: str,
    keys: Mapping[str, bytes],
    *,
    threshold: int = 1,
    what: str = "envelope",
) -> Opened:
    """Payload of an envelope signed by `threshold` distinct keys of `keys` (keyid to raw public key).

    E0745 malformed or of another type, E0744 not enough good signatures. Key ids are hints: only the
    signature decides.
    """
    payload, signatures = _decode(envelope, payload_type, what)
    message = pae(payload_type, payload)
    good: list[str] = []
    for keyid, signature in signatures:
        raw = keys.get(keyid)
        if raw is not None and keyid not in good and verify(raw, signature, message):
            good.append(keyid)
        if len(good) >= threshold:
            return Opened(payload, tuple(good))
    named = ", ".join(keyid[:16] for keyid, _ in signatures) or "nobody"
    raise fail(
        "E0744",
        f"{what}: {len(good)} of {threshold} needed signatures by trusted keys (signed by {named})",
        hint="`esper-library trust show` lists the keys that count; ESPER_KEYS (the folder of the keys that "
        "signed it), `trust add` or a new verdict mends it",
    )


def _decode(envelope: bytes, payload_type: str, what: str) -> tuple[bytes, list[tuple[str, bytes]]]:
    try:
        parts = _parts(envelope, payload_type)
        if parts is not None:
            payload, keyid, signature = parts
            return _plain(payload), [(keyid.decode(), _plain(signature))]
        document = parse_json(envelope, _LIMITS)
        if document.keys() != {"payload", "payloadType", "signatures"}:
            raise ValueError("wrong keys")
        rows = document["signatures"]
        if document["payloadType"] != payload_type:
            raise ValueError(f"payload type {document['payloadType']!r} is not {payload_type!r}")
        if len(rows) > _MAX_SIGNATURES or any(row.keys() != {"keyid", "sig"} for row in rows):
            raise ValueError("signature list malformed")
        payload = _plain(document["payload"])
        return payload, [(str(row["keyid"]), _plain(row["sig"])) for row in rows]
    except (ValueError, TypeError, AttributeError, KeyError, binascii.Error) as error:
        raise fail("E0745", f"{what} is malformed: {error}") from error


def _plain(text: bytes | str) -> bytes:
    """`base64.b64decode(text, validate=True)` without its looking at what it is given."""
    return binascii.a2b_base64(text, strict_mode=True)


def _parts(envelope: bytes, payload_type: str) -> tuple[bytes, bytes, bytes] | None:
    """Payload, key id and signature of what `seal` writes with one signer, by their places; None for anything
    spelled otherwise, which the parser reads. No text in base64 or hexadecimal holds a quote, so that a place
    and what stands there decide as a parser would."""
    middle = b'","payloadType":"%b","signatures":[{"keyid":"' % payload_type.encode()
    at = len(envelope) - len(_LAST) - _SIGNATURE - len(_THEN) - _KEYID
    payload, end = envelope[len(_FIRST) : at - len(middle)], at + _KEYID + len(_THEN)
    fits = (
        envelope.startswith(_FIRST) and envelope.endswith(_LAST) and envelope.endswith(middle, 0, max(at, 0))
    )
    keyid, signature = envelope[at : at + _KEYID], envelope[end : -len(_LAST)]
    if not fits or envelope[at + _KEYID : end] != _THEN or len(envelope) > _LIMITS.max_bytes:
        return None
    return (payload, keyid, signature) if keyid.isalnum() else None


def statement(name: str, digest: str, predicate_type: str, predicate: Mapping[str, Any]) -> bytes:
    """in-toto Statement v1 about the artifact `name` with container digest `digest`."""
    return canonical_json(
        {
            "_type": STATEMENT,
            "subject": [{"name": name, "digest": {"sha256": digest}}],
            "predicateType": predicate_type,
            "predicate": dict(predicate),
        }
    )


def _inside(payload: bytes, name: str, digest: str, predicate_type: str) -> Any:
    """The predicate of what `statement` writes about exactly this artifact; None where anything around it is
    spelled otherwise, which the parser may look at."""
    subject = f'[{{"digest":{{"sha256":"{digest}"}},"name":"{name}"}}]'
    after = f',"predicateType":"{predicate_type}","subject":{subject}}}'.encode()
    if not payload.startswith(_BEFORE) or not payload.endswith(after, len(_BEFORE)):
        return None
    try:
        return parse_json(payload[len(_BEFORE) : -len(after)], _LIMITS)
    except EsperError:
        return None


def read_statement(payload: bytes, name: str, digest: str, predicate_type: str) -> dict[str, Any]:
    """The predicate, after checking that the statement is of this type
    and about exactly this artifact: E0746."""
    wanted = [{"name": name, "digest": {"sha256": digest}}]
    inside = _inside(payload, name, digest, predicate_type)
    if isinstance(inside, dict):
        return inside
    document = parse_json(payload, _LIMITS)
    if not isinstance(document, dict) or document.get("_type") != STATEMENT:
        raise fail("E0745", "signed payload is not an in-toto Statement v1", node=name)
    if document.get("predicateType") != predicate_type:
        raise fail(
            "E0746",
            f"statement is of type {document.get('predicateType')!r}, not {predicate_type!r}",
            node=name,
        )
    if document.get("subject") != wanted:
        raise fail("E0746", f"statement is not about artifact {name} with digest {digest}", node=name)
    predicate = document.get("predicate")
    if not isinstance(predicate, dict):
        raise fail("E0745", "statement has no predicate", node=name)
    return predicate
