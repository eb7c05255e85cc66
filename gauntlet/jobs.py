"""The message that starts a worker: a job as JSON, a stored case, and the artifact's bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any


def encode_job(job: Mapping[str, Any], container: bytes, case: bytes = b"") -> bytes:
    """`job`: device, quick, seed, stages (names or None), recipe (None, or the one case to replay)."""
    text = json.dumps({**job, "case_bytes": len(case)}).encode()
    return struct.pack("<Q", len(text)) + text + case + container


def decode_job(data: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    """(job, case, container)."""
    (length,) = struct.unpack_from("<Q", data)
    job = json.loads(data[8 : 8 + length])
    start = 8 + length + job["case_bytes"]
    return job, data[8 + length : start], data[start:]
