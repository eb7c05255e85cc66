"""From an id to a block: verdict, integrity, choice, cache, processes."""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import runtime
from esper_ir.diagnostics import EsperError
from library.store import Library
from runtime import loader, timing
from runtime.code import Code
from runtime.dispatch import native_available
from runtime.executor import Program, Ready
from tests.runtime import artifacts as a
from tests.runtime.conftest import Put
from tests.source import ROOT

ORIGIN = b"backward"


def refusal(code: str, call, *values, **named) -> EsperError:
    with pytest.raises(EsperError) as caught:
        call(*values, **named)
    assert caught.value.code == code, caught.value
    return caught.value


@pytest.fixture(autouse=True)
def forget() -> None:
    """Each test starts with nothing loaded: the same id stands for another file in the next library."""
    gc.collect()  # blocks of earlier tests that a cycle still holds
    loader.cache().release()
    loader._meant.clear()
    loader._libraries.clear()


def test_a_block_trains(put: Put) -> None:
    block = runtime.load(put())
    x = torch.randn(6, a.N, requires_grad=True)
    y = block(x)
    assert torch.equal(y, x * block.w)
    y.sum().backward()
    torch.testing.assert_close(x.grad, block.w.detach().expand(6, -1))
    torch.testing.assert_close(block.w.grad, x.detach().sum(0))
    counters = block.report()["counters"]
    assert counters["launches"] == 3 and counters["eager_fallbacks"] == 0 and counters["loads"] == 1
    assert counters["copies"] == 1  # the cotangent of a sum has stride 0


def test_tags_come_from_the_signed_annotation(put: Put) -> None:
    block = runtime.load(put())
    assert block.report()["tags"] == []
    with Library.open() as library:
        library.annotate(block.artifact_id, {"generated_tags": ["high_speed"]})
    assert block.report()["tags"] == ["high_speed"]


def test_unvalidated_is_refused_then_warned_about(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    name = put(validated=False)
    error = refusal("E0740", runtime.load, name)
    assert error.exit_code == 12
    with pytest.warns(runtime.UnvalidatedWarning, match="unvalidated"):
        assert runtime.load(name, allow_unvalidated=True).report()["verdict"] is None
    monkeypatch.setenv("ESPER_STRICT", "1")
    assert refusal("E0806", runtime.load, name, allow_unvalidated=True).exit_code == 12


def test_one_flipped_byte_never_reaches_the_linker(
    put: Put, esper_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put()
    stored = [p for p in (esper_library / "objects").rglob("*") if p.is_file() and ORIGIN in p.read_bytes()]
    for path in stored:
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.chmod(0o644)
        path.write_bytes(bytes(data))
    monkeypatch.setattr(loader, "load_code", lambda *_, **__: pytest.fail("unverified bytes were used"))
    assert refusal("E0730", runtime.load, name).exit_code == 11


def test_refused_hardware(put: Put) -> None:
    other = put(target={"name": "h100", "kind": "cuda", "arch": "sm_90a", "match": "exact"})
    assert refusal("E0801", runtime.load, other).exit_code == 16
    assert refusal("E0802", runtime.load, other, device="cpu").exit_code == 16
    amd = put(target={"name": "mi300x", "kind": "hip", "arch": "gfx942", "match": "exact"})
    assert refusal("E0802", runtime.load, amd).exit_code == 16
    arm = put(target={"name": "cpu-arm", "kind": "cpu", "arch": "armv9", "match": "exact"})
    refusal("E0802", runtime.load, arm)
    assert refusal("E0721", runtime.load, "ffffffffffff-cpu-v2-fast-00000000").exit_code == 10
    refusal("E0819", runtime.load, arm, fallback="maybe")


def test_prefixes_and_blueprints(put: Put) -> None:
    fast, standard = put(), put(pipeline="standard")
    pending = put(pipeline="aggressive", validated=False)
    assert refusal("E0722", runtime.load, "abababababab-cpu-v2").exit_code == 14
    assert runtime.load(fast[:-3]).artifact_id == fast
    assert runtime.load("abababababab").artifact_id == standard
    found = runtime.doctor("abababababab")
    assert found["choice"]["chosen"] == [standard, fast] and not found["problems"]
    assert found["choice"]["refused"][pending]["code"] == "E0740"
    error = refusal("E0801", runtime.load, "abababababab", device="cuda")
    assert fast in str(error)


def test_cached_once_and_counted(put: Put) -> None:
    gc.collect()  # what tests before have dropped is no user any more
    name, before = put(), runtime.cache_info()
    first, second = runtime.load(name), runtime.load(name)
    assert first.program is second.program
    after = runtime.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)
    loader.cache().release()
    assert after.pinned == before.pinned + 1 and loader.cache().release() == 0
    del first, second
    assert loader.cache().release() > 0 and runtime.cache_info().pinned == before.pinned


def test_cache_is_bounded_and_keeps_what_is_in_use(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [put(version=f"{i:02x}" * 32) for i in range(4)]
    gc.collect()
    loader.cache().release()
    others = runtime.cache_info()  # of users that tests before have left
    size = loader.load_entry(names[0]).nbytes
    monkeypatch.setattr(loader.cache(), "limit", others.bytes + 2 * size + 10)
    held = runtime.load(names[0])
    before = runtime.cache_info().evictions
    for name in names[1:]:
        runtime.load(name)
    info = runtime.cache_info()
    assert info.entries == others.entries + 2 and info.bytes <= info.limit and info.evictions - before == 2
    assert runtime.load(names[0]).program is held.program


def test_concurrent_loads_do_the_work_once(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    name, real, made = put(), loader._load, []

    def slow(*values):
        made.append(1)
        threading.Event().wait(0.05)
        return real(*values)

    monkeypatch.setattr(loader, "_load", slow)
    blocks: list[runtime.Block] = []
    threads = [threading.Thread(target=lambda: blocks.append(runtime.load(name))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len({id(b.program) for b in blocks}) == 1 and len(blocks) == 8


def test_names_pickles_copies(put: Put) -> None:
    block = runtime.load(put())
    assert list(block.state_dict()) == ["w"]
    with torch.no_grad():
        block.w.fill_(3.0)
    x = torch.randn(2, a.N)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert other.w is not block.w and torch.equal(other(x), x * 3)
        other.load_state_dict({"w": torch.ones(a.N)})
        assert torch.equal(other(x), x) and torch.equal(block(x), x * 3)
    host = torch.nn.Sequential(torch.nn.Linear(a.N, a.N), block)
    file = io.BytesIO()
    torch.save(host, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), host(x))


def test_meta_and_functional(put: Put) -> None:
    name = put()
    with torch.device("meta"):
        block = runtime.load(name)
    assert block.w.is_meta and block(torch.empty(4, a.N, device="meta")).shape == (4, a.N)
    block.to_empty(device="cpu").load_state_dict({"w": torch.ones(a.N)})
    x = torch.randn(4, a.N)
    assert torch.equal(block(x), x)
    fn = runtime.load(name, functional=True)
    w = torch.randn(a.N, requires_grad=True)
    assert torch.equal(fn(x, w), x * w) and not list(fn.parameters())
    assert torch.equal(fn(w=w, x=x), x * w) and torch.equal(fn(x, w=w), x * w)
    assert "takes 2 tensors (x, w), got 1" in str(refusal("E0810", fn, x))
    assert "takes 1 tensor (x), got 2" in str(refusal("E0810", block, x, w))
    assert "got 1 in order and w by name" in str(refusal("E0810", block, x, w=w))
    refusal("E0818", block, x.numpy())
    refusal("E0720", runtime.load, None)
    assert torch.equal(torch.autograd.grad(fn(x, w).sum(), w)[0], x.sum(0))


def test_code_stays_mapped_while_a_plan_is_held_and_no_longer(put: Put) -> None:
    block = runtime.load(put())
    mapped, x, w = block.program.code.objects[0], torch.randn(2, a.N), block.w.detach()
    ready = block.program.ready("inference", (2,))
    del block
    loader.cache().release()
    gc.collect()
    assert torch.equal(ready([x, w])[2], x * w)
    del ready
    gc.collect()
    with pytest.raises(EsperError, match="unmapped"):
        mapped.address("backward")


def _child(name: str, queue) -> None:
    queue.put(runtime.load(name)(torch.ones(2, a.N)).shape)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(put: Put, method: str) -> None:
    name = put()
    runtime.load(name)(torch.ones(2, a.N))
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_child, args=(name, queue))
    process.start()
    assert queue.get(timeout=60) == (2, a.N)
    process.join(10)
    assert process.exitcode == 0


def _child_with_block(block: runtime.Block, queue) -> None:
    y = block(torch.ones(2, a.N))
    y.sum().backward()
    queue.put((y.tolist(), block.w.grad.tolist(), block.report()["counters"]["launches"]))


def test_a_block_travels_to_a_spawned_worker(put: Put) -> None:
    """By its id: the worker loads it with every check; the weights travel as they are."""
    block = runtime.load(put())
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_child_with_block, args=(block, queue))
    process.start()
    y, gradient, launches = queue.get(timeout=60)
    process.join(10)
    assert y == block.w.expand(2, -1).tolist() and gradient == [2.0] * a.N and launches == 3


def test_loading_costs_what_its_checks_cost(put: Put) -> None:
    """The part without the dynamic linker, beside the hash and the signature that must be looked at."""
    name = put()
    library = loader.open_library()
    container = library.load(name).container
    key = Ed25519PrivateKey.generate()
    signature, public = key.sign(bytes(container.text)), key.public_key()
    code = a.cpu_code(a.scale())

    def least() -> None:
        hashlib.sha256(container.data).digest()
        public.verify(signature, container.text)

    found = timing.cpu_times(
        {"least": least, "ours": lambda: bind_anew(library, name, code)}, rounds=40, at_least_us=1.0
    )
    assert min(found["ours"].samples) < 4 * min(found["least"].samples), found


def bind_anew(library: Library, name: str, code: Code) -> Ready:
    launch = loader.launch_of(library.load(name))
    return Program(name, launch, code).ready("inference", (16,))


def test_loading_calls_little(put: Put) -> None:
    """Functions called, of Python and of C, from id to a plan bound to sizes, whatever the machine is doing:
    272 with the native dispatcher and 429 without; 840 and 825 before there was a sealed form."""
    library, code, counts = loader.open_library(), a.cpu_code(a.scale()), []
    name = put()
    bind_anew(library, name, code)
    called = ("call", "c_call")
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: counts.append(event) if event in called else None)
    try:
        bind_anew(library, name, code)
    finally:
        sys.setprofile(before)
    assert len(counts) < (288 if native_available() else 445), len(counts)


def test_extern_versions_are_counted_or_refused(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    other = put(externs=[{"op": "mm", "versions": {"torch": "0.1"}}], version="34" * 32)
    block = runtime.load(other)
    assert len(block.report()["mismatches"]) == 1 and "0.1" in block.report()["mismatches"][0]
    assert runtime.load(put()).report()["mismatches"] == []
    monkeypatch.setenv("ESPER_STRICT", "1")
    assert refusal("E0808", runtime.load, other).exit_code == 16
    absent = put(externs=[{"op": "mm", "versions": {"nolib": "1"}}], version="56" * 32)
    refusal("E0808", runtime.load, absent)


def test_ranks_can_compare_digests(put: Put) -> None:
    one, two = put(), put(version="34" * 32)
    assert (
        runtime.load(one).plan_digest() == runtime.load(one).plan_digest() != runtime.load(two).plan_digest()
    )
    faked = runtime.load(one).program
    before = faked.plan_digest()
    faked.code.versions = {"cublas": "13.0.1"}
    assert faked.plan_digest() != before


def test_libraries_that_nobody_holds_are_closed(tmp_path: Path, esper_library: Path) -> None:
    def held() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    homes = [tmp_path / str(n) for n in range(loader.OPEN_LIBRARIES + 4)]
    for home in homes:
        Library.open(home).close()
    before = held()
    kept = loader.open_library(homes[0])
    each = held() - before
    for home in homes[1:]:
        loader.open_library(home)
    assert held() - before <= each * (loader.OPEN_LIBRARIES + 1)
    assert kept.blueprints() == [] and loader.open_library(homes[0]) is not kept


def test_reading_changes_nothing(put: Put, esper_library: Path) -> None:
    """Every file and folder read-only, HOME unwritable, no compiler and no Triton in reach."""
    name = put()
    script = f"""
import sys
class Closed:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('triton', 'forge', 'gauntlet', 'networkx'): raise ImportError(name)
sys.meta_path.insert(0, Closed())
import torch, runtime
block = runtime.load({name!r})
block(torch.ones(3, {a.N})).sum().backward()
assert block.report()['counters']['launches'] == 3
"""
    before = {p: p.stat().st_mtime_ns for p in esper_library.rglob("*")}
    env = {**os.environ, "PATH": "/nonexistent", "HOME": "/nonexistent", "TRITON_CACHE_DIR": "/nonexistent"}
    with Library.open():
        pass
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    after = {
        p: p.stat().st_mtime_ns for p in esper_library.rglob("*") if p.is_file() and "objects" in p.parts
    }
    assert all(before[p] == t for p, t in after.items())


def test_import_is_cheap(tmp_path: Path) -> None:
    """Processor time, compiled files at hand, beside torch's own import in the same process."""
    script = """
import time
start = time.process_time()
import torch
middle = time.process_time()
import runtime
first = time.process_time()
runtime.load, runtime.Block
lazy = time.process_time() - first
from tests.pace import slowness
print((first - middle) / slowness(), lazy / (middle - start))
"""
    for package in ("esper_ir", "library", "runtime"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"
    }
    figures = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        figures.append([float(word) for word in done.stdout.split()])
    assert min(f[0] for f in figures) < 0.010, figures
    assert min(f[1] for f in figures) < 0.08, figures
