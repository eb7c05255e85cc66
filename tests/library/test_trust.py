"""Keys, roles, rotation, revocation, expiry and rollback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from esper_ir.diagnostics import EsperError
from library import rotation
from library.keys import key_path, load_signer, new_key
from library.store import Library
from library.trust import TrustStore
from tests.library.helpers import make_container, validated

ROOT = Path(__file__).resolve().parents[2]


def code_of(call: object, *args: object, **kwargs: object) -> str:
    assert callable(call)
    with pytest.raises(EsperError) as error:
        call(*args, **kwargs)
    return error.value.code


def test_first_use_makes_one_key_per_role_and_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Library.open(home, roles=("compiler",)) as lib:
        keys = lib.trust.home
    out, err = capsys.readouterr()
    assert out == "" and "root, compiler and validator key" in err
    for role in ("root", "compiler", "validator"):
        (file,) = (keys / "keys" / role).iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
    assert keys not in home.parents and home not in keys.parents
    Library.open(home).close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("inside", ["", "keys", "a/b", "objects"])
def test_keys_do_not_lie_in_the_library(home: Path, tmp_path: Path, inside: str) -> None:
    """Not by name, and not by a link."""
    (tmp_path / "link").symlink_to(home)
    for trust in (home / inside, tmp_path / "link" / inside):
        for readonly in (True, False):
            assert code_of(Library.open, home, trust=trust, readonly=readonly) == "E0704"
    assert not home.exists()


def test_a_stolen_compiler_key_validates_nothing(lib: Library) -> None:
    """A verdict signed with the compiler's key is refused wherever it is put."""
    artifact = lib.put_artifact(make_container()).id
    forger = lib.trust.signer("compiler")
    lib.trust._signers["validator"] = forger
    assert code_of(lib.record_verdict, artifact, {}, passed=True) == "E0744"
    assert code_of(lib.load, artifact) == "E0744"


def test_roles_do_not_share_keys(lib: Library) -> None:
    roles = lib.trust.document().roles
    ids = [k for role in roles.values() for k in role.keyids]
    assert len(ids) == len(set(ids)) == 3


def test_rotation_keeps_old_verdicts_and_signs_with_the_new_key(lib: Library) -> None:
    old = validated(lib, 1)
    before = lib.trust.document()
    keyid = rotation.rotate_key(lib.trust, "validator")
    new = validated(lib, 2)
    assert lib.load(old).verdict is not None
    verdict = lib.load(new).verdict
    assert verdict is not None and verdict.keyid == keyid
    assert lib.trust.document().version == before.version + 1


def test_revoking_a_key_voids_from_an_entry_on(lib: Library) -> None:
    early = validated(lib, 1)
    key = lib.trust.document().roles["validator"].keyids[0]
    late = validated(lib, 2)
    verdict = lib.verdict(late)
    assert verdict is not None
    rotation.rotate_key(lib.trust, "validator")
    rotation.revoke_key(lib.trust, key[:12], verdict.seq)
    assert lib.load(early).record.id == early
    assert code_of(lib.load, late) == "E0755"
    rotation.revoke_key(lib.trust, key)
    assert code_of(lib.load, early) == "E0755"
    third = validated(lib, 3)
    assert lib.load(third).record.id == third


def test_a_revoked_only_key_cannot_sign(lib: Library) -> None:
    artifact = lib.put_artifact(make_container()).id
    rotation.revoke_key(lib.trust, lib.trust.document().roles["validator"].keyids[0])
    assert code_of(lib.record_verdict, artifact, {}, passed=True) == "E0747"


def test_barred_artifacts_and_policies(lib: Library) -> None:
    one, two = validated(lib, 1, {"policy": "broken"}), validated(lib, 2, {"policy": "fine"})
    rotation.bar_policy(lib.trust, "broken")
    assert code_of(lib.load, one) == "E0742"
    rotation.bar_artifact(lib.trust, lib.record(two).digest)
    assert code_of(lib.load, two) == "E0742"
    assert code_of(lib.load, two, allow_unvalidated=True) == "E0742"


def test_an_edited_state_does_not_undo_a_bar(lib: Library) -> None:
    artifact = validated(lib)
    lib.revoke(artifact, "bad")
    rotation.bar_artifact(lib.trust, lib.record(artifact).digest)
    with lib.index.write():
        lib.index.run("UPDATE artifacts SET state = 'VALIDATED'")
    assert code_of(lib.load, artifact) == "E0742"


def test_expired_trust_refuses_and_renews(lib: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = validated(lib)
    expires = lib.trust.document().expires
    monkeypatch.setattr("library.trust.time.time", lambda: expires + 1)
    with pytest.raises(EsperError) as error:
        lib.load(artifact)
    assert (error.value.code, error.value.exit_code) == ("E0749", 13)
    lib.trust.amend()
    assert lib.load(artifact).record.id == artifact


def test_an_older_trust_store_put_back_is_refused(lib: Library) -> None:
    artifact = validated(lib)
    old = (lib.trust.home / "trust.json").read_bytes()
    rotation.revoke_key(lib.trust, lib.trust.document().roles["validator"].keyids[0])
    assert code_of(lib.load, artifact) == "E0755"
    (lib.trust.home / "trust.json").write_bytes(old)
    assert code_of(lib.load, artifact) == "E0750"


def test_versions_follow_one_another_with_both_roots(lib: Library, tmp_path: Path) -> None:
    """A root nobody here knows cannot continue our trust; neither can version N+2, nor N again."""
    ours = lib.trust
    first = ours.envelope()
    stranger = TrustStore(tmp_path / "stranger")
    stranger.bootstrap()
    stranger.amend()
    assert code_of(ours.install, stranger.envelope()) == "E0744"
    assert code_of(ours.install, first) == "E0750"
    follower = TrustStore(tmp_path / "follower")
    follower.install(first)
    rotation.rotate_key(ours, "root")
    second = ours.envelope()
    ours.amend()
    assert code_of(follower.install, ours.envelope()) in ("E0744", "E0751")
    follower.install(second)
    assert follower.install(ours.envelope()).version == 3


def test_root_threshold_of_two(lib: Library) -> None:
    trust = lib.trust
    keyid, raw = new_key(trust.home, "root")
    current = trust.document()
    both = (*current.roles["root"].keyids, keyid)
    role = type(current.roles["root"])(both, 2)
    trust.amend(keys={**current.keys, keyid: raw}, roles={**current.roles, "root": role})
    assert trust.amend().version == 3
    key_path(trust.home, "root", keyid).unlink()
    assert code_of(trust.amend) == "E0744"
    assert trust.document().version == 3


def test_flipped_trust_store_is_refused(lib: Library) -> None:
    artifact = validated(lib)
    file = lib.trust.home / "trust.json"
    sound = file.read_bytes()
    for at in range(0, len(sound), 17):
        data = bytearray(sound)
        data[at] ^= 1
        file.write_bytes(bytes(data))
        with pytest.raises(EsperError) as error:
            TrustStore(lib.trust.home).document()
        assert error.value.exit_code in (11, 12), (at, error.value)
    file.write_bytes(sound)
    assert lib.load(artifact).record.id == artifact


def test_missing_trust_store(lib: Library) -> None:
    artifact = validated(lib)
    (lib.trust.home / "trust.json").unlink()
    assert code_of(lib.load, artifact) == "E0748"


def test_unknown_signer(home: Path, tmp_path: Path) -> None:
    """A library proven under other keys is read but not believed."""
    with Library.open(home) as lib:
        artifact = validated(lib)
    with Library.open(home, trust=tmp_path / "other keys") as lib:
        assert code_of(lib.load, artifact) == "E0744"


def test_new_keys_beside_a_signed_library_are_warned_of(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys that were lost or left behind: the hint names them, and new ones are not made without a word."""
    with Library.open(home) as lib:
        artifact = validated(lib)
    assert "WARNING" not in capsys.readouterr().err
    other = tmp_path / "other keys"
    with Library.open(home, readonly=True, trust=other) as lib, pytest.raises(EsperError) as error:
        lib.load(artifact)
    assert error.value.code == "E0748" and "ESPER_KEYS" in str(error.value)
    with Library.open(home, trust=other) as lib, pytest.raises(EsperError) as error:
        lib.load(artifact)
    told = capsys.readouterr().err
    assert "WARNING" in told and str(home) in told and str(other) in told and "ESPER_KEYS" in told
    assert error.value.code == "E0744" and "ESPER_KEYS" in str(error.value)
    Library.open(home, trust=other).close()
    Library.open(tmp_path / "empty", trust=tmp_path / "third keys").close()
    assert "WARNING" not in capsys.readouterr().err


def test_key_files_must_be_private(lib: Library, tmp_path: Path) -> None:
    keyid = lib.trust.document().roles["compiler"].keyids[0]
    place = key_path(lib.trust.home, "compiler", keyid)
    place.chmod(0o640)
    assert code_of(load_signer, lib.trust.home, "compiler", keyid) == "E0753"
    place.chmod(0o600)
    kept = tmp_path / "kept.pem"
    shutil.move(place, kept)
    place.symlink_to(kept)
    assert code_of(load_signer, lib.trust.home, "compiler", keyid) == "E0753"
    place.unlink()
    assert code_of(load_signer, lib.trust.home, "compiler", keyid) == "E0747"
    other, _ = new_key(lib.trust.home, "compiler")
    shutil.copy(key_path(lib.trust.home, "compiler", other), place)
    place.chmod(0o600)
    assert code_of(load_signer, lib.trust.home, "compiler", keyid) == "E0753"


def test_passphrases(lib: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"correct horse\n")
    monkeypatch.setenv("ESPER_PASSPHRASE_FILE", str(secret))
    keyid = rotation.add_key(lib.trust, "validator", b"correct horse")
    assert b"ENCRYPTED" in key_path(lib.trust.home, "validator", keyid).read_bytes()
    assert load_signer(lib.trust.home, "validator", keyid).keyid == keyid
    secret.write_bytes(b"wrong\n")
    assert code_of(load_signer, lib.trust.home, "validator", keyid) == "E0754"
    monkeypatch.delenv("ESPER_PASSPHRASE_FILE")
    assert code_of(load_signer, lib.trust.home, "validator", keyid) == "E0754"
    read, write = os.pipe()
    os.write(write, b"correct horse\n")
    os.close(write)
    monkeypatch.setenv("ESPER_PASSPHRASE_FD", str(read))
    assert load_signer(lib.trust.home, "validator", keyid).keyid == keyid
    os.close(read)


def test_a_lost_trust_store_is_not_made_anew_in_silence(lib: Library, home: Path, tmp_path: Path) -> None:
    """New keys would make everything proven so far unknown."""
    artifact, place = validated(lib), lib.trust.home / "trust.json"
    lib.trust.amend()
    saved = lib.trust.envelope()
    place.unlink()
    with pytest.raises(EsperError) as error:
        Library.open(home)
    assert (
        error.value.code == "E0748"
        and "version 2" in error.value.message
        and "put it back" in str(error.value)
    )
    assert not place.exists() and (lib.trust.home / "highest").read_text() == "2\n"
    TrustStore(lib.trust.home).install(saved)
    with Library.open(home) as again:
        assert again.load(artifact).record.id == artifact


def test_the_highest_version_is_remembered_from_a_copied_store(lib: Library) -> None:
    """Put there by hand, or by a process that died right after: an older one is refused from then on."""
    first = lib.trust.envelope()
    lib.trust.amend()
    (lib.trust.home / "highest").write_text("1\n")
    assert TrustStore(lib.trust.home).document().version == 2
    (lib.trust.home / "trust.json").write_bytes(first)
    assert code_of(TrustStore(lib.trust.home).document) == "E0750"


def test_a_version_installed_while_one_reads_is_no_rollback(
    lib: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions come between the reading of the document and what follows: the reader has an older one."""
    reader, read = TrustStore(lib.trust.home), TrustStore._read

    def slow(store: TrustStore) -> bytes:
        found = read(store)
        if store is reader:
            lib.trust.amend()
            lib.trust.amend()
        return found

    monkeypatch.setattr(TrustStore, "_read", slow)
    assert reader.document().version == 1
    monkeypatch.setattr(TrustStore, "_read", read)
    assert reader.document().version == 3, "seen at the next look"


def test_changes_at_once_lose_none(lib: Library) -> None:
    """Keys added, a key revoked and artifacts barred by many processes: each one is in the last version."""
    home = lib.trust.home
    revoked = lib.trust.document().roles["validator"].keyids[0]
    rotation.add_key(lib.trust, "validator")
    program = (
        "import sys; from pathlib import Path; from library import rotation\n"
        "from library.trust import TrustStore\n"
        "store, number, revoked = TrustStore(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3]\n"
        "if number == 0: rotation.revoke_key(store, revoked)\n"
        "elif number % 2: rotation.add_key(store, 'compiler')\n"
        "else: rotation.bar_artifact(store, f'{number:064x}')\n"
    )
    commands = [[sys.executable, "-c", program, str(home), str(n), revoked] for n in range(8)]
    processes = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    assert [process.wait(120) for process in processes] == [0] * 8
    document = TrustStore(home).document()
    assert document.version == 10 and revoked in document.revoked_keys
    assert len(document.roles["compiler"].keyids) == 5
    assert document.revoked_artifacts == {f"{n:064x}" for n in (2, 4, 6)}
