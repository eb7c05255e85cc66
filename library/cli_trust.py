"""Commands about keys and the trust store."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import click

from library.bundle import read_file
from library.cli_base import as_json, emit, table, when
from library.crypto import keyid_of
from library.errors import fail
from library.keys import ROLES, key_path, passphrase_from_environment
from library.paths import refuse_inside, trust_home
from library.rotation import add_key, bar_policy, revoke_key, rotate_key, trust_key
from library.trust import TrustStore, replace_file

PREFIX = "esper-ed25519"


def register(main: click.Group) -> None:
    """Add these commands to the tool."""
    main.add_command(keys_group)
    main.add_command(trust_group)


def store() -> TrustStore:
    """The trust home of this user."""
    return TrustStore(trust_home())


@click.group("keys")
def keys_group() -> None:
    """Keys of this user, one directory per role. ESPER_PASSPHRASE_FILE or ESPER_PASSPHRASE_FD encrypts new
    ones.
    """


@keys_group.command("list")
@as_json
def keys_list(as_json: bool) -> None:
    """Keys that the trust store lists, and whether the private half is here."""
    home = store()
    document = home.document()
    found = [
        {
            "role": role,
            "keyid": keyid,
            "public": f"{PREFIX}:{role}:{base64.b64encode(document.keys[keyid]).decode()}",
            "private": key_path(home.home, role, keyid).exists(),
            "revoked_from": document.revoked_keys.get(keyid),
        }
        for role in ROLES
        for keyid in document.roles[role].keyids
    ]
    if as_json:
        emit("keys", {"version": document.version, "keys": found})
        return
    lines = [
        (k["role"], k["keyid"], "here" if k["private"] else "-", _revoked(k["revoked_from"])) for k in found
    ]
    table(("ROLE", "KEY", "PRIVATE", "REVOKED"), lines)


def _revoked(sequence: object) -> str:
    return "-" if sequence is None else f"from ledger entry {sequence}"


@keys_group.command("new")
@click.argument("role", type=click.Choice(ROLES))
@as_json
def keys_new(role: str, as_json: bool) -> None:
    """Add a key to ROLE, signed into the trust store by the local root key. The newest one signs."""
    _told(add_key(store(), role, passphrase_from_environment()), role, as_json)


@keys_group.command("rotate")
@click.argument("role", type=click.Choice(ROLES))
@as_json
def keys_rotate(role: str, as_json: bool) -> None:
    """A new key takes over in ROLE; what the old one signed stays good until it is revoked."""
    _told(rotate_key(store(), role, passphrase_from_environment()), role, as_json)


@keys_group.command("revoke")
@click.argument("key")
@click.option(
    "--from", "sequence", default=1, show_default=True, help="Ledger entry from which signatures are void."
)
@as_json
def keys_revoke(key: str, sequence: int, as_json: bool) -> None:
    """Void what KEY (its id or 8 digits of it) signed, from a ledger entry on."""
    _told(revoke_key(store(), key, sequence), "revoked", as_json)


def _told(keyid: str, role: str, as_json: bool) -> None:
    if as_json:
        emit("key", {"role": role, "keyid": keyid})
    else:
        click.echo(f"{role} {keyid}")


@click.group("trust")
def trust_group() -> None:
    """The trust store: which keys count for what, root-signed, versioned, expiring."""


@trust_group.command("show")
@as_json
def trust_show(as_json: bool) -> None:
    """The current version."""
    document = store().document_or_expired()
    if as_json:
        emit("trust", {**document.to_json(), "expired": document.expires < time.time()})
        return
    click.echo(f"version {document.version}, expires {when(document.expires)}")
    for name, role in document.roles.items():
        click.echo(f"  {name:10} {role.threshold} of {', '.join(k[:16] for k in role.keyids)}")
    for keyid, sequence in document.revoked_keys.items():
        click.echo(f"  revoked    {keyid[:16]} from ledger entry {sequence}")
    barred = (len(document.revoked_artifacts), len(document.revoked_policies))
    click.echo(f"  barred     {barred[0]} artifacts, {barred[1]} policies")


@trust_group.command("renew")
@as_json
def trust_renew(as_json: bool) -> None:
    """Sign the same content again with a later expiry."""
    _version(store().amend().version, as_json)


@trust_group.command("export")
@click.argument("place", type=click.Path(path_type=Path))
@as_json
def trust_export(place: Path, as_json: bool) -> None:
    """Write the signed document to PLACE, for others to import. It holds public keys only."""
    home = store()
    refuse_inside(place, home.home)
    replace_file(place, home.envelope())
    _version(home.document_or_expired().version, as_json)


@trust_group.command("import")
@click.argument("place", type=click.Path(path_type=Path))
@as_json
def trust_import(place: Path, as_json: bool) -> None:
    """Install a first or the next version: signed by the roots of the version here and of the new one."""
    _version(store().install(read_file(place)).version, as_json)


@trust_group.command("add")
@click.argument("role", type=click.Choice(["compiler", "validator"]))
@click.argument("public")
@as_json
def trust_add(role: str, public: str, as_json: bool) -> None:
    """Trust somebody else's key in ROLE: PUBLIC is the text that their `keys list --json` shows."""
    try:
        prefix, _, text = public.split(":")
        raw = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise fail("E0720", f"public key must read {PREFIX}:<name>:<base64>") from error
    if prefix != PREFIX or len(raw) != 32:
        raise fail("E0720", f"public key must read {PREFIX}:<name>:<base64 of 32 bytes>")
    _version(trust_key(store(), role, raw, keyid_of(raw)).version, as_json)


@trust_group.command("bar-policy")
@click.argument("policy")
@as_json
def trust_bar_policy(policy: str, as_json: bool) -> None:
    """Void every verdict made under POLICY, the digest of a gauntlet's rules that turned out broken."""
    _version(bar_policy(store(), policy).version, as_json)


def _version(version: int, as_json: bool) -> None:
    if as_json:
        emit("trust-version", {"version": version})
    else:
        click.echo(f"trust store version {version}")
