"""What runs where, as a pure function of two values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from esper_ir.diagnostics import Accepted, Rejected
from library.platform import Platform
from tests.library.helpers import make_manifest

H100 = Platform(cuda_cc=(9, 0), driver=12040, cpu_level=4, externs={"cublas": "12.4.5"}, card="NVIDIA H100")
CPU = Platform(cpu_level=3)


@pytest.mark.parametrize(
    ("platform", "kind", "arch", "fits"),
    [
        (H100, "cuda", "sm_90", True),
        (H100, "cuda", "sm_90a", True),
        (H100, "cuda", "sm_80", False),
        (H100, "cuda", "sm_100", False),
        (replace(H100, cuda_cc=(8, 9)), "cuda", "sm_80", True),
        (replace(H100, cuda_cc=(8, 6)), "cuda", "sm_89", False),
        (replace(H100, cuda_cc=(9, 1)), "cuda", "sm_90a", False),
        (replace(H100, cuda_cc=(10, 0)), "cuda", "sm_100", True),
        (H100, "cpu", "x86-64-v4", True),
        (CPU, "cpu", "x86-64-v3", True),
        (CPU, "cpu", "x86-64-v4", False),
        (CPU, "cuda", "sm_90", False),
        (CPU, "cpu", "armv8", False),
        (replace(CPU, gfx="gfx942"), "hip", "gfx942", True),
        (CPU, "hip", "gfx942", False),
        (H100, "tpu", "v5", False),
        (H100, "cuda", "sm_90; rm", False),
    ],
)
def test_architectures(platform: Platform, kind: str, arch: str, fits: bool) -> None:
    found = platform.accepts(kind, arch)
    assert isinstance(found, Accepted) is fits
    assert fits or (isinstance(found, Rejected) and found.code == "E0781" and found.reason)


def test_drivers() -> None:
    assert isinstance(H100.accepts("cuda", "sm_90", min_driver=12040), Accepted)
    found = H100.accepts("cuda", "sm_90", min_driver=12080)
    assert isinstance(found, Rejected) and found.code == "E0782" and "12.8" in found.reason
    assert isinstance(replace(H100, driver=None).accepts("cuda", "sm_90", min_driver=12000), Rejected)


def test_extern_libraries() -> None:
    same, other = ({"name": "cublas", "version": v} for v in ("12.4.5", "12.6.0"))
    assert H100.accepts("cuda", "sm_90", externs=[same], strict=True) == Accepted(())
    tolerated = H100.accepts("cuda", "sm_90", externs=[other])
    assert tolerated == Accepted(("cublas 12.4.5 instead of 12.6.0",))
    refused = H100.accepts("cuda", "sm_90", externs=[other], strict=True)
    assert isinstance(refused, Rejected) and refused.code == "E0783"
    absent = H100.accepts("cuda", "sm_90", externs=[{"name": "cudnn", "version": "9"}])
    assert isinstance(absent, Rejected) and absent.code == "E0783"


def test_from_a_manifest() -> None:
    manifest = make_manifest(target={"name": "h100", "kind": "cuda", "arch": "sm_90", "min_driver": 12050})
    found = H100.accepts_manifest(manifest)
    assert isinstance(found, Rejected) and found.code == "E0782"
    assert isinstance(replace(H100, driver=13000).accepts_manifest(manifest), Accepted)
