"""What only a card shows: graph capture, streams, the allocator, kernel names, two devices."""

from __future__ import annotations

import threading

import torch

from tests.runtime.matrix.cell import CLOSE, COMPILED, EAGER, WORKS, Bench, Row, eagerly, plain, same


def captured_inference(b: Bench) -> None:
    x, fn = b.x(), b.compiled(b.block)
    with torch.no_grad():
        fn(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fn(x)
        for _ in range(2):
            x.copy_(b.x())
            graph.replay()
            torch.testing.assert_close(y, plain(x, b.block), **CLOSE)


def captured_step(b: Bench) -> None:
    """A whole step, forward and backward, with gradients in the same memory each time."""
    x, fn = b.leaf(), b.compiled(b.block)
    leaves = [x, *b.block.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(fn(x).square().sum(), leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(fn(x).square().sum(), leaves)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(b.x())
        graph.replay()
        want = torch.autograd.grad(plain(x, b.block).square().sum(), leaves)
        torch.testing.assert_close(got, want, **CLOSE)


def captured_first_call(b: Bench) -> None:
    """Nothing is loaded lazily: the first call of a size may be inside a capture."""
    x = b.x(7)
    plain(x, b.block)  # torch's own handles exist
    torch.cuda.synchronize()
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = b.block(x)
        graph.replay()
        torch.testing.assert_close(y, plain(x, b.block), **CLOSE)


def graphed_callable(b: Bench) -> None:
    x = b.leaf()
    graphed = torch.cuda.make_graphed_callables(b.block, (b.leaf(),))
    want = torch.autograd.grad(plain(x, b.block).square().sum(), [x, *b.block.parameters()])
    got = torch.autograd.grad(graphed(x).square().sum(), [x, *b.block.parameters()])
    torch.testing.assert_close(got, want, **CLOSE)


def inductor(b: Bench) -> None:
    same(b, torch.compile(b.block, fullgraph=True), b.leaf())


def reduce_overhead(b: Bench) -> None:
    fn = torch.compile(b.block, fullgraph=True, mode="reduce-overhead")
    before = b.launches()
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        same(b, fn, b.leaf(), seen=False)  # a replay passes our counters by
    assert b.launches() > before, "nothing of ours was captured"


def streams(b: Bench) -> None:
    """Calls on two streams at once; each one's work stays on its own."""
    sides = [torch.cuda.Stream() for _ in range(2)]
    xs = [b.leaf(2048) for _ in sides]
    torch.cuda.synchronize()
    grads = []
    for _ in range(10):
        grads = []
        for side, x in zip(sides, xs, strict=True):
            with torch.cuda.stream(side):
                grads.append(torch.autograd.grad(b.block(x).square().sum(), x))
    torch.cuda.synchronize()
    for x, got in zip(xs, grads, strict=True):
        want = torch.autograd.grad(plain(x, b.block).square().sum(), x)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def allocator(b: Bench) -> None:
    """Every byte comes from torch: what a call leaves behind is its output."""
    x = b.x(1024)
    with torch.no_grad():
        b.block(x)
        torch.cuda.synchronize()
        before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        y = b.block(x)
        assert torch.cuda.memory_allocated() - before == y.numel() * 4
        assert torch.cuda.mem_get_info()[0] == free


def kernels(b: Bench) -> None:
    b.block(b.leaf())
    with torch.profiler.profile() as found:
        b.block(b.leaf()).sum().backward()
        torch.cuda.synchronize()
    entries = {k.entry for k in b.block.program.launch.kernels}
    seen = {event.name for event in found.events()}
    assert seen & entries, (sorted(entries), sorted(seen)[:40])


def nvtx(b: Bench) -> None:
    """Forward and backward push ranges of the names that the profiler shows."""
    pushed: list[str] = []
    real = torch.profiler.record_function.__enter__

    def entered(self: torch.profiler.record_function) -> torch.profiler.record_function:
        pushed.append(self.name)
        return real(self)

    torch.profiler.record_function.__enter__ = entered
    try:
        with torch.autograd.profiler.emit_nvtx():
            same(b, b.block, b.leaf())
    finally:
        torch.profiler.record_function.__enter__ = real
    assert "esper::model_mlp" in pushed


def two_devices(b: Bench) -> None:
    other = torch.device("cuda", 1)
    same(b, b.block, b.leaf())
    b.block.to(other)
    x = torch.randn(5, b.x().shape[1], device=other, requires_grad=True)
    b.block(x)  # counters are kept per card: from here those of the second
    same(b, b.compiled(b.block), x)
    with torch.cuda.device(1):
        same(b, b.block, x)
    b.block.to("cuda:0")
    b.block(b.leaf())
    same(b, b.block, b.leaf())


def threads_with_devices(b: Bench) -> None:
    blocks = [b.load().to(torch.device("cuda", i)) for i in range(2)]
    problems: list[BaseException] = []

    def work(index: int) -> None:
        try:
            torch.cuda.set_device(index)
            for _ in range(20):
                x = torch.randn(5, 64, device=f"cuda:{index}", requires_grad=True)
                (got,) = torch.autograd.grad(blocks[index](x).sum(), x)
                (want,) = torch.autograd.grad(plain(x, blocks[index]).sum(), x)
                torch.testing.assert_close(got, want, **CLOSE)
        except BaseException as error:
            problems.append(error)

    running = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not problems, problems


def mixed_devices(b: Bench) -> None:
    b.block(torch.randn(5, 64, device="cuda:1"))


TWO = {EAGER: WORKS, COMPILED: WORKS}
ROWS = (
    Row("CUDA graph, inference", captured_inference, TWO, place="card"),
    Row("CUDA graph, forward and backward", captured_step, TWO, place="card"),
    Row("CUDA graph around the first call", captured_first_call, eagerly(), place="card"),
    Row("`make_graphed_callables`", graphed_callable, eagerly(), place="card"),
    Row("Inductor", inductor, {COMPILED: WORKS}, place="card"),
    Row("`reduce-overhead`", reduce_overhead, {COMPILED: WORKS}, place="card"),
    Row("two streams", streams, eagerly(), place="card"),
    Row("memory from torch's allocator", allocator, eagerly(), place="card"),
    Row("kernels in the profiler", kernels, eagerly(), "under their entry names", place="card"),
    Row("NVTX ranges", nvtx, eagerly(), "under `emit_nvtx`", place="card"),
    Row("moved to a second card and back", two_devices, eagerly(), place="cards"),
    Row("a thread per card", threads_with_devices, eagerly(), place="cards"),
    Row("input on a card that the weights are not on", mixed_devices, eagerly("E0814"), place="cards"),
)
