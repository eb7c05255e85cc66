"""Every refusal of the runtime: code, exit code, title. docs/errors.d/runtime.md has one entry for each."""

from __future__ import annotations

from collections.abc import Mapping

from esper_ir.diagnostics import (
    EXIT_BACKEND,
    EXIT_CONFLICT,
    EXIT_FAILURE,
    EXIT_INTEGRITY,
    EXIT_LIMIT,
    EXIT_NOT_FOUND,
    EXIT_UNTRUSTED,
    EXIT_USAGE,
    Refusals,
)

CODES: Mapping[str, tuple[int, str]] = {
    "E0801": (EXIT_BACKEND, "no CUDA here"),
    "E0802": (EXIT_BACKEND, "artifact for other hardware"),
    "E0803": (EXIT_BACKEND, "the driver refused a call"),
    "E0804": (EXIT_BACKEND, "driver too old"),
    "E0805": (EXIT_BACKEND, "machine code cannot be mapped"),
    "E0806": (EXIT_UNTRUSTED, "unvalidated artifact under ESPER_STRICT"),
    "E0807": (EXIT_NOT_FOUND, "no artifact of this blueprint suits"),
    "E0808": (EXIT_BACKEND, "other library version under ESPER_STRICT"),
    "E0809": (EXIT_INTEGRITY, "launch manifest cannot be run"),
    "E0810": (EXIT_USAGE, "shape does not fit"),
    "E0811": (EXIT_USAGE, "dtype does not fit"),
    "E0812": (EXIT_USAGE, "no kernel for the general case"),
    "E0813": (EXIT_USAGE, "size outside the declared range"),
    "E0814": (EXIT_USAGE, "tensor on another device"),
    "E0815": (EXIT_USAGE, "no plan for this call"),
    "E0816": (EXIT_USAGE, "double backward"),
    "E0817": (EXIT_USAGE, "torch.func transform"),
    "E0818": (EXIT_USAGE, "tensor type not supported"),
    "E0819": (EXIT_USAGE, "argument of runtime.load"),
    "E0820": (EXIT_FAILURE, "launch failed"),
    "E0821": (EXIT_USAGE, "layout not supported"),
    "E0822": (EXIT_FAILURE, "a kernel wrote NaN"),
    "E0823": (EXIT_FAILURE, "a kernel wrote outside its memory"),
    "E0827": (EXIT_BACKEND, "the autograd node cannot be built"),
    "E0830": (EXIT_FAILURE, "worker died"),
    "E0831": (EXIT_LIMIT, "worker ran out of time"),
    "E0832": (EXIT_LIMIT, "worker ran out of memory"),
    "E0833": (EXIT_BACKEND, "sandbox level not reached"),
    "E0834": (EXIT_FAILURE, "worker raised"),
    "E0840": (EXIT_CONFLICT, "ranks run different plans"),
    "E0850": (EXIT_NOT_FOUND, "no module to replace"),
    "E0851": (EXIT_USAGE, "artifact does not fit the module"),
    "E0852": (EXIT_CONFLICT, "artifact and module give other results"),
    "E0853": (EXIT_CONFLICT, "module replaced already, or wrapped since"),
    "E0854": (EXIT_USAGE, "call that the block has no place for"),
}

fail = Refusals(CODES)
