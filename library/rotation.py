"""Changes to who is trusted, each one a new root-signed version: keys added, rotated and revoked, artifacts
barred.
"""

from __future__ import annotations

from typing import Any

from library.errors import fail
from library.keys import ROLES, new_key
from library.trust import Role, TrustDocument, TrustStore


def add_key(store: TrustStore, role: str, passphrase: bytes | None = None) -> str:
    """A further key in `role`; the newest local one signs from now on. Its id."""
    return _add(store, role, passphrase, keep_old=True)


def rotate_key(store: TrustStore, role: str, passphrase: bytes | None = None) -> str:
    """A new key that takes over signing. Old compiler and validator keys still verify what they signed; an
    old root key loses its say. Its id."""
    return _add(store, role, passphrase, keep_old=role != "root")


def _add(store: TrustStore, role: str, passphrase: bytes | None, *, keep_old: bool) -> str:
    if role not in ROLES:
        raise fail("E0720", f"role {role!r} is not one of {', '.join(ROLES)}")
    store.bootstrap()
    keyid, raw = new_key(store.home, role, passphrase)

    def change(current: TrustDocument) -> dict[str, Any]:
        listed = current.roles[role]
        keyids = (*listed.keyids, keyid) if keep_old else (keyid,)
        roles = {**current.roles, role: Role(keyids, min(listed.threshold, len(keyids)))}
        return {"keys": {**current.keys, keyid: raw}, "roles": roles}

    store.amend(change)
    return keyid


def trust_key(store: TrustStore, role: str, raw: bytes, keyid: str) -> TrustDocument:
    """Trust somebody else's public key in `role`; on first use there are keys of one's own from then on."""
    store.bootstrap()
    known = store.document_or_expired()
    if keyid in known.roles[role].keyids:
        return known

    def change(current: TrustDocument) -> dict[str, Any]:
        listed = current.roles[role]
        keyids = tuple(dict.fromkeys((*listed.keyids, keyid)))
        roles = {**current.roles, role: Role(keyids, listed.threshold)}
        return {"keys": {**current.keys, keyid: raw}, "roles": roles}

    return store.amend(change)


def revoke_key(store: TrustStore, prefix: str, from_sequence: int = 1) -> str:
    """Void what a key signed from ledger entry `from_sequence` on (1: everything); its id. E0721, E0722,
    E0720.
    """
    current = store.document_or_expired()
    found = [keyid for keyid in current.keys if keyid.startswith(prefix)] if len(prefix) >= 8 else []
    if len(found) != 1:
        code = "E0722" if found else "E0721"
        raise fail(
            code, f"{len(found)} keys start with {prefix!r} (8 digits or more are needed)", node=prefix
        )
    keyid = found[0]
    if keyid in current.roles["root"].keyids:
        raise fail("E0720", "a root key is not revoked but rotated", hint="esper-library keys rotate root")

    def change(current: TrustDocument) -> dict[str, Any]:
        earlier = current.revoked_keys.get(keyid, from_sequence)
        return {"revoked_keys": {**current.revoked_keys, keyid: max(1, min(earlier, from_sequence))}}

    store.amend(change)
    return keyid


def bar_artifact(store: TrustStore, digest: str) -> TrustDocument:
    """Put a container's digest on the deny list, where no writer of a library can take it off."""
    return store.amend(lambda current: {"revoked_artifacts": current.revoked_artifacts | {digest}})


def bar_policy(store: TrustStore, policy: str) -> TrustDocument:
    """Void every verdict under a gauntlet policy that turned out broken."""
    return store.amend(lambda current: {"revoked_policies": current.revoked_policies | {policy}})
