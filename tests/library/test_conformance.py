"""One suite for every backend: bytes by digest, rows by transaction.
A new backend adds a factory to the lists."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from esper_ir.diagnostics import EsperError
from library.backends import BlobStore, RowStore
from library.blobs import DIRECTORIES, Blobs, place_of
from library.canon import sha256_hex
from library.errors import fail
from library.index import Index
from library.schema import MIGRATIONS
from tests.library.helpers import flip, object_path

Damage = Callable[[str, bytes | None], None]


class MemoryBlobs:
    """The smallest backend that conforms: what the suite demands, and nothing else."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.aside: list[str] = []

    def put(self, data: bytes) -> str:
        return self.put_many([data])[0]

    def put_many(self, items: Iterable[bytes]) -> list[str]:
        digests = []
        for data in items:
            digests.append(sha256_hex(data))
            self.kept[digests[-1]] = bytes(data)
        return digests

    def read_raw(self, digest: str) -> bytes:
        if place_of(digest) and digest not in self.kept:
            raise fail("E0731", f"object {digest} is not here")
        return self.kept[digest]

    def read(self, digest: str) -> bytes:
        data = self.read_raw(digest)
        if sha256_hex(data) != digest:
            raise self.quarantine(digest, "wrong bytes")
        return data

    def quarantine(self, digest: str, reason: str) -> Exception:
        place_of(digest)
        self.aside.append(digest)
        self.kept.pop(digest, None)
        return fail("E0730", f"object {digest}: {reason}")

    def has(self, digest: str) -> bool:
        return bool(place_of(digest)) and digest in self.kept

    def size(self, digest: str) -> int:
        place_of(digest)
        return len(self.kept.get(digest, b""))

    def remove(self, digest: str) -> int:
        place_of(digest)
        return len(self.kept.pop(digest, b""))

    def digests(self) -> list[str]:
        return list(self.kept)

    def staged(self) -> list[tuple[str, float]]:
        return []

    def drop_staged(self, name: str) -> None:
        return

    def close(self) -> None:
        return


def local(place: Path) -> tuple[BlobStore, Damage]:
    for name in DIRECTORIES:
        (place / name).mkdir(mode=0o700)

    def damage(digest: str, data: bytes | None) -> None:
        file = object_path(place, digest)
        file.chmod(0o600)
        file.write_bytes(data) if data is not None else flip(file, 0)

    return Blobs(place), damage


def memory(place: Path) -> tuple[BlobStore, Damage]:
    blobs = MemoryBlobs()

    def damage(digest: str, data: bytes | None) -> None:
        blobs.kept[digest] = data if data is not None else b"?" + blobs.kept[digest][1:]

    return blobs, damage


@pytest.fixture(params=[local, memory], ids=lambda make: make.__name__)
def backend(request: pytest.FixtureRequest, fast_tmp: Path) -> tuple[BlobStore, Damage]:
    return request.param(fast_tmp)


def code_of(call: object, *args: object) -> str:
    assert callable(call)
    with pytest.raises(EsperError) as error:
        call(*args)
    return error.value.code


def test_bytes_come_back(backend: tuple[BlobStore, Damage]) -> None:
    blobs, _ = backend
    for data in (b"", b"x", os.urandom(100_000), b"\0" * 70_000):
        digest = blobs.put(data)
        assert digest == sha256_hex(data) and blobs.read(digest) == data == blobs.read_raw(digest)
        assert blobs.has(digest) and blobs.size(digest) == len(data)
    assert len(blobs.digests()) == 4 and blobs.staged() == []


def test_absent(backend: tuple[BlobStore, Damage]) -> None:
    blobs, _ = backend
    nothing = "0" * 64
    assert code_of(blobs.read, nothing) == "E0731" and code_of(blobs.read_raw, nothing) == "E0731"
    assert not blobs.has(nothing) and blobs.size(nothing) == 0 and blobs.remove(nothing) == 0


@pytest.mark.parametrize("name", ["", "..", "../../x", "/etc/hostname", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_what_is_no_digest(backend: tuple[BlobStore, Damage], name: str) -> None:
    blobs, _ = backend
    kept = blobs.put(b"kept")
    for call in (blobs.read, blobs.read_raw, blobs.has, blobs.size, blobs.remove):
        assert code_of(call, name) == "E0709"
    assert code_of(blobs.quarantine, name, "odd") == "E0709"
    assert blobs.digests() == [kept] and blobs.read(kept) == b"kept"


def test_putting_again_is_harmless(backend: tuple[BlobStore, Damage]) -> None:
    blobs, _ = backend
    assert len({blobs.put(b"same") for _ in range(3)}) == 1
    assert blobs.put_many([b"same", b"other", b"same"])[0] == sha256_hex(b"same")
    assert sorted(blobs.digests()) == sorted(sha256_hex(d) for d in (b"same", b"other"))


@pytest.mark.parametrize(
    "data", [None, b"", b"shorter", b"x" * 1000], ids=["flipped", "empty", "short", "long"]
)
def test_wrong_bytes_are_never_returned(backend: tuple[BlobStore, Damage], data: bytes | None) -> None:
    blobs, damage = backend
    digest = blobs.put(b"the right bytes")
    damage(digest, data)
    assert code_of(blobs.read, digest) == "E0730"
    assert code_of(blobs.read, digest) == "E0731" and not blobs.has(digest)
    assert blobs.put(b"the right bytes") == digest and blobs.read(digest) == b"the right bytes"


def test_putting_over_torn_bytes_mends_them(backend: tuple[BlobStore, Damage]) -> None:
    blobs, damage = backend
    digest = blobs.put(b"the right bytes")
    damage(digest, b"the ri")
    assert blobs.put(b"the right bytes") == digest and blobs.read(digest) == b"the right bytes"


def test_removal(backend: tuple[BlobStore, Damage]) -> None:
    blobs, _ = backend
    digest = blobs.put(b"12345")
    assert blobs.remove(digest) == 5 and not blobs.has(digest) and digest not in blobs.digests()


def test_many_at_once(backend: tuple[BlobStore, Damage]) -> None:
    """Eight writers of overlapping sets: every byte there at the end, every put successful."""
    blobs, _ = backend
    pool = [b"%d" % i * 100 for i in range(40)]
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for data in random.Random(seed).sample(pool, 30):
                assert blobs.read(blobs.put(data)) == data
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and all(blobs.read(d) for d in blobs.digests()) and blobs.staged() == []


def test_closing_twice(backend: tuple[BlobStore, Damage], tmp_path: Path) -> None:
    """The second time nothing is closed: by then its descriptors' numbers are somebody else's."""
    backend[0].close()
    others = [os.open(tmp_path, os.O_RDONLY) for _ in range(8)]
    backend[0].close()
    try:
        assert all(os.path.isdir(f"/proc/self/fd/{fd}") for fd in others)
    finally:
        for fd in others:
            os.close(fd)


# -- rows ------------------------------------------------------------------------------------------


def sqlite(place: Path, readonly: bool = False) -> RowStore:
    index = Index(place, readonly=readonly, wait_s=5)
    if not readonly:
        index.migrate(MIGRATIONS)
    return index


@pytest.fixture(params=[sqlite], ids=["sqlite"])
def open_rows(request: pytest.FixtureRequest, fast_tmp: Path) -> Callable[..., RowStore]:
    return lambda **named: request.param(fast_tmp, **named)


INSERT = "INSERT INTO tombstones VALUES (?, ?)"
ALL = "SELECT digest FROM tombstones ORDER BY digest"


def test_a_transaction_is_all_or_nothing(open_rows: Callable[..., RowStore]) -> None:
    store, other = open_rows(), open_rows()
    with store.write():
        store.run(INSERT, ("a", 1.0))
        assert other.rows(ALL) == [], "readers see committed rows only"
    assert other.rows(ALL) == [("a",)] and other.row(ALL) == ("a",)
    with pytest.raises(RuntimeError), store.write():
        store.run(INSERT, ("b", 1.0))
        raise RuntimeError
    assert store.rows(ALL) == [("a",)] and store.row("SELECT 1 WHERE 0") is None


def test_nested_transactions_join(open_rows: Callable[..., RowStore]) -> None:
    store = open_rows()
    with pytest.raises(RuntimeError), store.write():
        with store.write():
            store.run(INSERT, ("inner", 1.0))
        raise RuntimeError
    assert store.rows(ALL) == []


def test_writers_wait_for_one_another(open_rows: Callable[..., RowStore]) -> None:
    stores = [open_rows() for _ in range(4)]

    def work(number: int) -> None:
        for i in range(20):
            with stores[number].write():
                stores[number].run(INSERT, (f"{number}-{i:02}", 1.0))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores[0].rows(ALL)) == 80


def test_readonly_rows(open_rows: Callable[..., RowStore]) -> None:
    open_rows().close()
    store = open_rows(readonly=True)
    with pytest.raises(EsperError) as error, store.write():
        pass
    assert error.value.code == "E0712" and store.version() == len(MIGRATIONS)


def test_use_after_close(open_rows: Callable[..., RowStore]) -> None:
    store = open_rows()
    store.close()
    store.close()
    assert code_of(store.rows, ALL) == "E0711"
