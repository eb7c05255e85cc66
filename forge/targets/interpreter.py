"""Triton's interpreter on the cpu: for the forge and its tests, never stored."""

from forge.target import Target

TARGET = Target(
    name="interpreter",
    kind="interpreter",
    arch="triton-interpreter",
    stored=False,
    shared_bytes=232448,
    multiprocessors=1,
    summary="Triton's interpreter (tests only)",
)
