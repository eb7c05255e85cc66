"""Artifacts made to harm or to fool: each is refused by name, the judge goes on, and nothing outlives its
worker."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest

from gauntlet.isolate import ForkServer, Limits
from gauntlet.runner import judge
from library.launch import Plan
from library.manifest import pack, unpack
from tests.faults import handmade, toys

OPEN = "extern int {0};\n"


def _hostile(body: str, before: str = "") -> handmade.Toy:
    """The affine kernel with something else at its start."""
    start = "const float *x = PTR(float, 0), *w = PTR(float, 1), *b = PTR(float, 2);"
    toy = toys.affine()
    return replace(
        toy, source=before + toy.source.replace(start, body + start, 1), name=f"hostile{abs(hash(body))}"
    )


def _refused(toy: handmade.Toy, server: ForkServer, **options: object) -> str:
    found = judge(handmade.build(toy), "cpu", server, quick=True, **options)  # type: ignore[arg-type]
    assert found.passed is False, found
    return found.reason


@pytest.mark.parametrize(
    ("body", "before"),
    [
        ("fork();", "extern int fork(void);\n"),
        ('system("id");', "extern int system(const char *);\n"),
        ("exit(0);", "extern void exit(int);\n"),
        ("socket(2, 1, 0);", "extern int socket(int, int, int);\n"),
        ('open("/etc/passwd", 0);', "extern int open(const char *, int);\n"),
    ],
)
def test_calls_into_the_system_are_not_linked(body: str, before: str, server: ForkServer) -> None:
    assert "it asks for" in _refused(_hostile(body, before), server)


SYSCALL = """
static long call(long n, long a, long b, long c) {
  long r;
  __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  return r;
}
"""


@pytest.mark.skipif(handmade.ARCH != "x86-64-v1", reason="the register of another processor")
@pytest.mark.parametrize("bits", ["0x2000", "0x4000", "0x6000", "0x8000", "0x0040"])
def test_the_processors_arithmetic_is_left_as_it_was(bits: str, server: ForkServer) -> None:
    """Rounded down, up, to zero; subnormal results, or operands, taken for zero: in all that comes after."""
    body = '{ unsigned r; __asm__ volatile("stmxcsr %0" : "=m"(r)); r |= BITS;'
    body += ' __asm__ volatile("ldmxcsr %0" :: "m"(r)); }'
    reason = _refused(_hostile(body.replace("BITS", bits)), server, stages=("memory",))
    assert "leaves the processor" in reason


THREAD = """
static void linger(void) {
  const long at = 1l << 44;  /* memory that is there from the first call on */
  long r; register long p __asm__("r10") = 0x100022; register long q __asm__("r8") = -1;
  register long s __asm__("r9") = 0;
  __asm__ volatile("syscall" : "=a"(r) : "a"(9), "D"(at), "S"(4096), "d"(3), "r"(p), "r"(q), "r"(s)
    : "rcx", "r11", "memory");
  if (r != at) return;
  p = q = 0;
  __asm__ volatile("syscall; test %%rax, %%rax; jnz 1f; 2: pause; jmp 2b; 1:" : "=a"(r)
    : "a"(56), "D"(0x50f00), "S"(at + 4096), "d"(0), "r"(p), "r"(q) : "rcx", "r11", "memory");
}
"""


@pytest.mark.skipif(handmade.ARCH != "x86-64-v1", reason="the system calls of another processor")
def test_no_thread_goes_on_after_a_call(server: ForkServer) -> None:
    reason = _refused(_hostile("linger();", THREAD), server)
    assert "memory: threads that it began go on computing" in reason


@pytest.mark.parametrize("body", ["v[0] = v[0];", "const float was = v[0]; v[0] = was + 1; v[0] = was;"])
def test_inputs_are_not_written_whatever_is_written(body: str, server: ForkServer) -> None:
    """Another thread reads them meanwhile, and they may be a file's pages."""
    found = _refused(_hostile("{ volatile float *v = PTR(volatile float, 0); " + body + " }"), server)
    assert "memory" in found and "SIGSEGV" in found


WHERE = {
    "((uintptr_t)x & 31) == 16": "from 16 bytes on",
    "((uintptr_t)x & 15) == 8": "from 8 bytes on",
    "omp_get_num_threads() > 4": "9 threads",
}


@pytest.mark.parametrize("condition", WHERE)
def test_wrong_at_some_addresses_or_with_more_threads(condition: str, server: ForkServer) -> None:
    right = "float v = x[r * C + c] * w[c];"
    more = "extern int omp_get_num_threads(void);"
    wrong = f"{more} {right} if ({condition}) v = 1;"
    made = handmade.edit(toys.affine(), (right, wrong))
    assert WHERE[condition] in _refused(made, server)


def test_an_exit_without_a_word_is_no_pass(server: ForkServer) -> None:
    assert "exit code 0" in _refused(_hostile("call(231, 0, 0, 0);", SYSCALL), server)


@pytest.mark.parametrize("start", ["", '{\\"event\\":\\"landed\\"}\\n'])
def test_a_candidate_does_not_speak_for_the_judge(server: ForkServer, start: str) -> None:
    """What it writes to every descriptor that it may have inherited: that all is done and well."""
    said = f'static const char m[] = "{start}{{\\"event\\":\\"done\\"}}\\n";'
    body = f"{said} for (int f = 3; f < 64; f++) call(1, f, (long)m, sizeof m - 1); call(231, 0, 0, 0);"
    assert "spoke in the judge's name" in _refused(_hostile(body, SYSCALL), server)


def test_children_of_a_candidate_do_not_outlive_it(server: ForkServer) -> None:
    marker = 12345
    _refused(
        _hostile(
            f"if (call(57, 0, 0, 0) == 0) {{ for (;;) call(34, 0, 0, 0); }} call(231, {marker % 7}, 0, 0);",
            SYSCALL,
        ),
        server,
    )
    deadline = time.monotonic() + 60
    while (left := _children(server.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def _children(pid: int | None) -> list[int]:
    return [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(p) == pid]


@pytest.mark.parametrize(
    "body",
    [
        "for (;;) call(57, 0, 0, 0);",  # fork
        "for (;;) call(56, 17, 0, 0);",  # clone, not a thread
        "call(112, 0, 0, 0);",  # setsid: out of the reach of the judge's kill
        "call(62, -1, 9, 0);",  # kill everybody
    ],
)
def test_a_candidate_starts_and_signals_no_process(body: str, server: ForkServer) -> None:
    """Where the kernel has seccomp the worker is killed for trying; else nothing is tried here."""
    clean = judge(handmade.build(toys.affine()), "cpu", server, quick=True, stages=("loads",))
    if clean.context["sandbox"] != "full":
        pytest.skip("this kernel has no seccomp for us")
    assert "SIGSYS" in _refused(_hostile(body, SYSCALL), server)
    assert server.pid and os.path.exists(f"/proc/{server.pid}")


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_a_candidate_cannot_open_files(server: ForkServer) -> None:
    """Under Landlock; where the kernel has none, the level in the verdict says so."""
    body = 'if (call(2, (long)"/etc/esper-probe", 0101, 0600) >= 0) { for (;;) call(34, 0, 0, 0); }'
    found = judge(
        handmade.build(_hostile(body, SYSCALL)), "cpu", server, quick=True, stages=("integrity", "loads")
    )
    if found.context["sandbox"] == "limits":
        assert found.passed is False
        os.unlink("/etc/esper-probe")
    else:
        assert found.passed and not os.path.exists("/etc/esper-probe")


def test_output_floods_are_cut_off(server: ForkServer) -> None:
    body = "for (int i = 0; i < 4000; i++) call(1, 1, (long)x, 160);"
    after = _hostile("").source.replace("float *y = PTR(float, 3);", f"float *y = PTR(float, 3); {body}", 1)
    toy = replace(toys.affine(), source=SYSCALL + after)
    found = judge(
        handmade.build(toy), "cpu", server, quick=True, stages=("loads",), limits=Limits(output_bytes=1 << 16)
    )
    assert found.passed


def test_memory_hogs_are_refused(server: ForkServer) -> None:
    toy = _hostile(
        "for (long i = 0; i < 64; i++) { char *p = malloc(64l << 20); if (p) memset(p, 1, 64l << 20); }",
        "extern void *malloc(unsigned long);\n",
    )
    reason = _refused(toy, server, limits=Limits(memory_bytes=512 << 20))
    assert "memory" in reason


def _with_manifest(toy: handmade.Toy, **changes: object) -> bytes:
    made = unpack(handmade.build(toy))
    manifest = json.loads(json.dumps(made.manifest))
    manifest.update(changes)
    manifest.pop("artifact_id")
    manifest.pop("blobs")
    return pack(manifest, [("code.so", "cpu", bytes(made.blobs["code.so"]))])


def test_lies_about_range_and_identity(server: ForkServer) -> None:
    affine = unpack(handmade.build(toys.affine())).manifest
    narrow = json.loads(json.dumps(affine["launch"]))
    narrow["interface"]["dims"][0]["max"] = 64
    other = {**affine["blueprint"], "id": "0" * 64}
    assert "dims" in judge(_with_manifest(toys.affine(), launch=narrow), "cpu", server).reason
    assert "id" in judge(_with_manifest(toys.affine(), blueprint=other), "cpu", server).reason
    wrong = {**affine["target"], "arch": "aarch64"}
    assert "aarch64" in judge(_with_manifest(toys.affine(), target=wrong), "cpu", server).reason
    empty = {**affine["launch"], "plans": []}
    assert "no backward" in judge(_with_manifest(toys.affine(), launch=empty), "cpu", server).reason


def test_corrupted_code_is_refused(server: ForkServer) -> None:
    made = unpack(handmade.build(toys.affine()))
    manifest = {k: v for k, v in made.manifest.items() if k not in ("artifact_id", "blobs")}
    code = bytearray(made.blobs["code.so"])
    for at in (16, 0x20, 0x40):
        broken = bytearray(code)
        broken[at] ^= 0xFF
        found = judge(pack(manifest, [("code.so", "cpu", bytes(broken))]), "cpu", server, quick=True)
        assert found.passed is not True
    found = judge(pack(manifest, [("code.so", "cpu", bytes(code[:200]))]), "cpu", server, quick=True)
    assert found.passed is False and "machine code" in found.reason


def test_huge_grids_and_wrong_arguments_are_refused_before_anything_runs(server: ForkServer) -> None:
    def grown(plan: Plan) -> Plan:
        return replace(
            plan, steps=tuple(replace(s, grid=(("mul", "rows", 1 << 30), 1, 1)) for s in plan.steps)
        )

    toy = toys.affine()
    assert "grid" in _refused(replace(toy, plans=tuple(grown(p) for p in toy.plans)), server)
    fewer = replace(toy, params={**toy.params, "affine_fwd": "pppi"})
    assert "which takes" in _refused(fewer, server)
    nowhere = unpack(handmade.build(toy)).manifest["launch"]
    nowhere = json.loads(json.dumps(nowhere))
    nowhere["kernels"][0]["blob"] = "elsewhere"
    assert "elsewhere" in judge(_with_manifest(toy, launch=nowhere), "cpu", server).reason


def test_huge_buffers_are_refused_before_anything_runs(server: ForkServer) -> None:
    def grow(plan: Plan) -> Plan:
        huge = replace(plan.buffers[-1], shape=(1 << 45,))
        return replace(plan, buffers=(*plan.buffers, huge))

    toy = toys.affine()
    assert "elements" in _refused(replace(toy, plans=tuple(grow(p) for p in toy.plans)), server)
