"""Loading for a card beside a stub of its driver: what is measured is a proven artifact's way."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import stubbed
from bench.whole import HOST_PIECES
from library.store import Library


def test_every_piece_of_a_load_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    tmp_path.chmod(0o700)
    found = stubbed.measure(tmp_path, rounds=5)
    pieces = found["details"]["pieces"]
    assert set(HOST_PIECES) - {"machine"} <= set(pieces) and all(p["p50"] > 0 for p in pieces.values())
    with Library.open(tmp_path / "library", trust=tmp_path / "trust", roles=(), readonly=True) as library:
        assert library.record(found["details"]["artifact"]).state == "VALIDATED"
    whole = found["figures"]["load_without_driver_us_p50"]["value"]
    assert 0 < whole < 1e5
