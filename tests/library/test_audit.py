"""The ledger: edits, cuts, swaps, forks and rollbacks show, and the first bad entry is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from library import history, ledger, rotation, seen
from library.canon import canonical_json, parse_json, sha256_hex
from library.cli import main
from library.index import DATABASE
from library.merkle import Frontier, Tree, leaf_hash, root_of, verify_consistency, verify_inclusion
from library.store import Library
from tests.library.helpers import make_container, validated

# RFC 6962 test vectors as used by Certificate Transparency implementations: leaves and heads by size.
VECTOR_LEAVES = [
    b"", b"\x00", b"\x10", b"\x20\x21", b"\x30\x31", b"\x40\x41\x42\x43",
    b"\x50\x51\x52\x53\x54\x55\x56\x57", b"\x60\x61\x62\x63\x64\x65\x66\x67\x68\x69\x6a\x6b\x6c\x6d\x6e\x6f",
]  # fmt: skip
VECTOR_HEADS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def test_tree_heads_are_those_of_the_rfc() -> None:
    frontier = Frontier()
    for leaf, head in zip(VECTOR_LEAVES, VECTOR_HEADS, strict=True):
        frontier = frontier.append(leaf_hash(leaf))
        assert frontier.root().hex() == head
        assert Frontier.unpack(frontier.size, frontier.pack()) == frontier
    assert Frontier().root() == hashlib.sha256(b"").digest()


@given(st.integers(1, 70), st.data())
@settings(max_examples=60, deadline=None)
def test_proofs_hold_and_wrong_ones_do_not(size: int, data: st.DataObject) -> None:
    leaves = [leaf_hash(b"%d" % i) for i in range(size)]
    tree, index = Tree(leaves), data.draw(st.integers(0, size - 1))
    root, path = root_of(leaves), tree.inclusion(index, size)
    assert verify_inclusion(leaves[index], index, size, path, root)
    assert not verify_inclusion(leaf_hash(b"x"), index, size, path, root)
    assert not verify_inclusion(leaves[index], (index + 1) % (size + 1), size, path, root) or size == 1
    old = data.draw(st.integers(1, size))
    growth, old_root = tree.consistency(old, size), root_of(leaves[:old])
    assert verify_consistency(old, size, old_root, root, growth)
    if old < size:
        assert not verify_consistency(old, size, leaf_hash(b"y"), root, growth)
        assert not verify_consistency(old, size, old_root, leaf_hash(b"y"), growth)


@pytest.fixture
def busy(home: Path) -> Path:
    """A library with a history, closed (so its head is signed)."""
    with Library.open(home) as lib:
        one, two = validated(lib, 1), validated(lib, 2)
        lib.supersede(one, two, "better")
        lib.annotate(two, {"risk_score": 0.5})
        lib.put_artifact(make_container(3))
    return home


def findings(home: Path) -> list[tuple[str, str]]:
    with Library.open(home, readonly=True) as lib:
        return [(f.code, f.subject) for f in history.audit(lib).findings]


def edit(home: Path, *statements: str) -> None:
    connection = apsw.Connection(str(home / DATABASE))
    for statement in statements:
        connection.execute(statement).fetchall()
    connection.close()


def test_a_sound_history_is_sound(busy: Path) -> None:
    with Library.open(busy, readonly=True) as lib:
        report = history.audit(lib)
        assert report.findings == () and report.first_bad is None and report.checkpoints >= 1
        assert report.entries == ledger.state(lib.index)[0] == len(list(ledger.entries(lib.index)))


EDITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "body": ("E0760", ("UPDATE ledger SET body = CAST(replace(body, 'better', 'butter') AS BLOB)",)),
    "leaf": ("E0760", ("UPDATE ledger SET leaf = zeroblob(32) WHERE seq = 4",)),
    "removed": ("E0760", ("DELETE FROM ledger WHERE seq = 3",)),
    "cut": ("E0761", ("DELETE FROM ledger WHERE seq > 5",)),
    "state row": ("E0760", ("UPDATE ledger_state SET size = size + 1",)),
    "frontier": ("E0760", ("UPDATE ledger_state SET frontier = zeroblob(length(frontier))",)),
    "checkpoint moved": (
        "E0762",
        ("UPDATE checkpoints SET size = 2 WHERE size = (SELECT max(size) FROM checkpoints)",),
    ),
    "artifact state": ("E0763", ("UPDATE artifacts SET state = 'VALIDATED' WHERE state = 'SUPERSEDED'",)),
    "artifact digest": ("E0763", (f"UPDATE artifacts SET digest = '{'0' * 64}' WHERE num = 1",)),
    "artifact sequence": ("E0763", ("UPDATE artifacts SET seq = 1 WHERE num = 1",)),
    "provenance": ("E0763", ("UPDATE artifacts SET envelope = x'00' WHERE num = 1",)),
    "artifact gone": ("E0763", ("PRAGMA foreign_keys=OFF", "DELETE FROM artifacts WHERE num = 3")),
    "blueprint state": ("E0763", ("UPDATE blueprints SET state = 'ARCHIVED'",)),
    "verdict": ("E0763", ("UPDATE verdicts SET envelope = x'00' WHERE num = 1",)),
    "verdict gone": ("E0763", ("DELETE FROM verdicts WHERE num = 2",)),
    "annotation": ("E0763", ("UPDATE annotations SET envelope = x'00'",)),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_show(busy: Path, name: str) -> None:
    code, statements = EDITS[name]
    edit(busy, *statements)
    assert code in {c for c, _ in findings(busy)}


def test_swapped_entries_name_the_first(busy: Path) -> None:
    edit(
        busy,
        "UPDATE ledger SET seq = -4 WHERE seq = 4",
        "UPDATE ledger SET seq = 4 WHERE seq = 5",
        "UPDATE ledger SET seq = 5 WHERE seq = -4",
    )
    with Library.open(busy, readonly=True) as lib:
        assert history.audit(lib).first_bad == 4


def rechain(home: Path, change: Callable[[int, dict], None], keep: int | None = None) -> None:
    """Rewrite the ledger so that every hash fits again: what only somebody who controls the database can
    do.
    """
    connection = apsw.Connection(str(home / DATABASE))
    bodies = [row[0] for row in connection.execute("SELECT body FROM ledger ORDER BY seq")][:keep]
    connection.execute("DELETE FROM ledger")
    frontier, head = Frontier(), ledger.GENESIS
    for seq, body in enumerate(bodies, 1):
        value = parse_json(body)
        change(seq, value)
        value["prev"] = head.hex()
        body = canonical_json(value)
        head = leaf_hash(body)
        frontier = frontier.append(head)
        connection.execute("INSERT INTO ledger VALUES (?, ?, ?)", (seq, body, head))
    connection.execute(
        "UPDATE ledger_state SET size = ?, head = ?, frontier = ?", (frontier.size, head, frontier.pack())
    )
    connection.close()


def test_a_rewritten_past_contradicts_what_was_signed_and_seen(busy: Path) -> None:
    def backdate(seq: int, value: dict) -> None:
        value["time"] -= 1000.0

    rechain(busy, backdate)
    codes = {c for c, _ in findings(busy)}
    assert codes == {"E0761", "E0762"}
    edit(busy, "DELETE FROM checkpoints")
    assert {c for c, _ in findings(busy)} == {"E0761"}


def test_a_clean_cut_shows_against_what_was_seen(busy: Path) -> None:
    rechain(busy, lambda seq, value: None, keep=4)
    edit(busy, "DELETE FROM checkpoints")
    assert "E0761" in {c for c, _ in findings(busy)}


def test_a_restored_old_copy_shows_until_accepted(busy: Path, tmp_path: Path) -> None:
    shutil.copytree(busy, tmp_path / "old")
    with Library.open(busy) as lib:
        lib.put_artifact(make_container(9))
        origin, keys = lib.origin, lib.trust.home
    shutil.rmtree(busy)
    shutil.copytree(tmp_path / "old", busy)
    assert [c for c, _ in findings(busy)] == ["E0761"]
    seen.forget(keys, origin)
    assert findings(busy) == []


def test_another_librarys_ledger_is_refused(busy: Path, tmp_path: Path) -> None:
    with Library.open(tmp_path / "second") as other:
        other.put_artifact(make_container(1))
    edit(busy, f"UPDATE meta SET value = '{'0' * 32}' WHERE key = 'origin'")
    assert "E0761" in {c for c, _ in findings(busy)}


def test_proofs_can_be_given_to_others(busy: Path) -> None:
    with Library.open(busy, readonly=True) as lib:
        size = ledger.last_checkpoint(lib.index)
        for seq in range(1, size + 1):
            proof = history.prove_entry(lib, seq)
            leaf = leaf_hash(canonical_json(proof["entry"]))
            root = history.open_checkpoint(lib, size, canonical_json(proof["checkpoint"]))
            path = [bytes.fromhex(node) for node in proof["path"]]
            assert verify_inclusion(leaf, proof["index"], size, path, root)
        growth = history.prove_growth(lib, 3)
        roots = (bytes.fromhex(growth["old_root"]), bytes.fromhex(growth["new_root"]))
        assert verify_consistency(3, size, *roots, [bytes.fromhex(n) for n in growth["path"]])


def test_entries_name_bytes(busy: Path) -> None:
    with Library.open(busy, readonly=True) as lib:
        put = next(e for e in ledger.entries(lib.index) if e.kind == "artifact.put")
        assert sha256_hex(lib.read(put.subject)) == put.data["digest"]


def test_heads_signed_by_a_revoked_key_prove_nothing(home: Path) -> None:
    """Whoever stole it could sign a rewritten history. The head is signed again by another key."""
    with Library.open(home) as lib:
        validated(lib, 1)
        lib.sign_head(every=1)
        report = history.audit(lib)
        assert report.signed == report.entries and report.findings == ()
        for role in ("validator", "compiler"):
            old = lib.trust.document().roles[role].keyids[0]
            rotation.rotate_key(lib.trust, role)
            rotation.revoke_key(lib.trust, old)
        report = history.audit(lib)
        assert (report.signed, report.checkpoints, report.findings) == (0, 0, ())
    result = CliRunner().invoke(main, ["audit", "--sign", "--json"])
    document = json.loads(result.stdout)
    assert document["signed"] == document["entries"] and document["ok"]
