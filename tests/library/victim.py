"""One operation on a prepared library in a process of its own: `python -m tests.library.victim OPERATION
ROOT`.

Two look-ups of files that do not exist mark in a trace where the operation begins and ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from esper_ir.diagnostics import EsperError
from tests.library.world import OPERATIONS, World

BEGIN, END = "/esper-operation-begins", "/esper-operation-ends"


def main() -> int:
    operation, root = sys.argv[1], Path(sys.argv[2])
    lib = World(root).open()
    lib.warm()
    lib.signer("compiler")
    lib.signer("validator")
    os.path.exists(BEGIN)
    try:
        OPERATIONS[operation](lib, root)
    except EsperError as error:
        print(error.code, file=sys.stderr)
        return error.exit_code
    os.path.exists(END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
