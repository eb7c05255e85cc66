"""Bad input at the command line: each refusal has its code, exit code and what to do, and changes nothing."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from library.cli import main
from library.index import Index
from library.store import Library
from library.trust import TrustStore
from tests.library.helpers import contents, make_container, validated


class Scene:
    """A library with two proven artifacts and a pending one, and what a case did to it."""

    def __init__(self, home: Path, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
        self.home, self.stack, self.patch = home, stack, patch
        with Library.open(home) as lib:
            self.one, self.two = validated(lib, 1), validated(lib, 2)
            self.pending = lib.put_artifact(make_container(3, blueprint=1)).id
            self.trust = lib.trust.home
            self.validator = lib.trust.document().roles["validator"].keyids[0]
            self.root = lib.trust.document().roles["root"].keyids[0]

    def locked(self) -> None:
        """Another process holds the writer's place."""
        lib = self.stack.enter_context(Library.open(self.home, roles=()))
        self.stack.enter_context(lib.index.write())
        init = Index.__init__

        def hurried(self: Index, home: Path, *, readonly: bool, wait_s: float = 30.0) -> None:
            init(self, home, readonly=readonly, wait_s=min(wait_s, 0.05))

        self.patch.setattr(Index, "__init__", hurried)

    def expired(self) -> None:
        later = time.time() + 10 * 365 * 86400
        self.patch.setattr("library.trust.time.time", lambda: later)

    def newer(self) -> None:
        (self.home / "FORMAT").write_text('{"format":"esper-library","version":7}\n')

    def no_trust(self) -> None:
        self.patch.setenv("ESPER_KEYS", str(self.home.parent / "nobody"))

    def strangers(self) -> None:
        """Keys of one's own, which are not those that proved these artifacts."""
        place = self.home.parent / "stranger"
        TrustStore(place).bootstrap()
        self.patch.setenv("ESPER_KEYS", str(place))

    def rolled_back(self) -> None:
        old = (self.trust / "trust.json").read_bytes()
        TrustStore(self.trust).amend()
        (self.trust / "trust.json").write_bytes(old)

    def revoked(self) -> None:
        with Library.open(self.home) as lib:
            lib.revoke(self.one, "wrong results")


ROOT = Path(__file__).resolve().parents[2]
Command = Callable[[Scene], list[str]]
CASES: dict[str, tuple[Callable[[Scene], object] | None, Command, str, int, str]] = {
    "wrong id": (None, lambda s: ["show", s.one[:-1] + "0x"], "E0721", 10, r"nearest: \S+"),
    "an id that is none": (None, lambda s: ["show", "../../etc/passwd"], "E0720", 2, "4 or more of"),
    "ambiguous prefix": (None, lambda s: ["show", s.one[:12]], "E0722", 14, "longer prefix"),
    "ambiguous blueprint": (None, lambda s: ["revoke", s.one[:12], "--reason", "x"], "E0722", 14, "longer"),
    "unknown blueprint": (None, lambda s: ["lineage", "f" * 64], "E0721", 10, "esper-library ls|nearest"),
    "unknown state": (None, lambda s: ["ls", "--state", "happy"], "E0720", 2, "VALIDATED"),
    "locked": (
        Scene.locked,
        lambda s: ["revoke", s.one, "--reason", "x"],
        "E0708",
        15,
        r"process \d+ on \S+ since",
    ),
    "unknown key": (None, lambda s: ["keys", "revoke", "f" * 16], "E0721", 10, "8 digits or more"),
    "short key": (None, lambda s: ["keys", "revoke", s.validator[:4]], "E0721", 10, "8 digits or more"),
    "root key": (None, lambda s: ["keys", "revoke", s.root], "E0720", 2, "keys rotate root"),
    "malformed key": (
        None,
        lambda s: ["trust", "add", "validator", "ssh AAAA"],
        "E0720",
        2,
        "esper-ed25519:",
    ),
    "expired": (Scene.expired, lambda s: ["verify", s.one], "E0749", 13, "trust renew"),
    "no trust store": (Scene.no_trust, lambda s: ["trust", "show"], "E0748", 12, "trust import"),
    "unknown signer": (Scene.strangers, lambda s: ["verify", s.one], "E0744", 12, "trust show"),
    "rolled back": (
        Scene.rolled_back,
        lambda s: ["trust", "show"],
        "E0750",
        12,
        "put the newer trust.json back",
    ),
    "newer format": (Scene.newer, lambda s: ["ls"], "E0706", 16, "a newer one"),
    "no library": (None, lambda s: ["--library", str(s.home) + "x", "ls"], "E0701", 10, "ESPER_LIBRARY"),
    "no bundle": (None, lambda s: ["import", str(s.home.parent / "none")], "E0721", 10, "no file"),
    "no bundle at all": (None, lambda s: ["import", str(s.home / "FORMAT")], "E0770", 11, "not a bundle"),
    "a device": (None, lambda s: ["import", "/dev/zero"], "E0704", 12, "not a regular file"),
    "revoked": (
        Scene.revoked,
        lambda s: ["archive", s.one, "--to", str(s.home.parent / "b")],
        "E0724",
        14,
        "REVOKED",
    ),
    "revoked, exported": (
        Scene.revoked,
        lambda s: ["export", str(s.home.parent / "b"), s.one],
        "E0742",
        13,
        "revoked",
    ),
    "pending, as a kernel": (
        None,
        lambda s: ["export", "--hf-kernel", str(s.home.parent / "k"), s.pending],
        "E0740",
        12,
        "gauntlet",
    ),
    "superseded by another blueprint": (
        None,
        lambda s: ["supersede", s.one, s.pending],
        "E0724",
        14,
        "VALIDATED",
    ),
    "unsigned entry": (None, lambda s: ["audit", "--prove", "999"], "E0721", 10, "newest covers"),
    "nonsense bound": (None, lambda s: ["query", "--max-risk", "-1"], "E0720", 2, "at least 0"),
}


@pytest.fixture
def scene(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(home, stack, monkeypatch)


def state_of(scene: Scene) -> dict[str, bytes]:
    """Everything on disk but the note of the last writer, which is a courtesy, and SQLite's bookkeeping."""
    found = contents(scene.home.parent)
    return {name: data for name, data in found.items() if not name.endswith(("writer", "-wal", ".lock"))}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(scene: Scene, case: str) -> None:
    prepare, command, code, exit_code, told = CASES[case]
    if prepare is not None:
        prepare(scene)
    before = state_of(scene)
    result = CliRunner().invoke(main, command(scene))
    text = result.stdout + result.stderr
    assert result.exit_code == exit_code, (result.output, result.exception)
    assert code in text and re.search(told, text), text
    assert state_of(scene) == before, "nothing changed"


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("expired", "unknown signer")])
def test_the_same_as_a_document(scene: Scene, case: str) -> None:
    """--json: one document on stdout, the text on stderr."""
    prepare, command, code, exit_code, _ = CASES[case]
    if prepare is not None:
        prepare(scene)
    result = CliRunner().invoke(main, [*command(scene), "--json"])
    assert result.exit_code == exit_code
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["error"]["code"] == code and document["error"]["exit_code"] == exit_code
    assert result.stderr.startswith(code)


def test_candidates_of_an_ambiguous_prefix(scene: Scene) -> None:
    result = CliRunner().invoke(main, ["show", scene.one[:12], "--json"])
    assert set(json.loads(result.stdout)["error"]["details"]["candidates"]) == {scene.one, scene.two}
    assert scene.one in result.stderr and scene.two in result.stderr


def test_no_handler_swallows_everything() -> None:
    """Handlers name what they expect; one that takes all cleans up and raises it again."""
    swallowed = []
    for path in sorted((ROOT / "library").glob("*.py")):
        handlers = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ExceptHandler)]
        for handler in handlers:
            names = (
                {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)} if handler.type else {"all"}
            )
            again = isinstance(handler.body[-1], ast.Raise)
            if names & {"all", "Exception", "BaseException"} and not again:
                swallowed.append(f"{path.name}:{handler.lineno}")
    assert not swallowed, swallowed
