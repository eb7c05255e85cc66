"""Builds the optional native parts: the dispatcher, the sums of telemetry. All else is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

LIMITED_API = "0x030B0000"  # one binary for CPython 3.11 and newer
# Of runtime/NAME.c, what else it includes.
SOURCES: dict[str, list[str]] = {"_native": ["runtime/_bind.h", "runtime/_segment.h"], "_health": []}


def extensions() -> list[Extension]:
    """Marked optional: without a C compiler the runtime goes by ctypes, and telemetry by torch."""
    if not Path(__file__).with_name("runtime").joinpath("_native.c").exists():
        return []
    macros: list[tuple[str, str | None]] = [("Py_LIMITED_API", LIMITED_API)]
    return [
        Extension(f"runtime.{name}", [f"runtime/{name}.c"], depends=headers, define_macros=macros,
                  py_limited_api=True, optional=True)
        for name, headers in SOURCES.items()
    ]  # fmt: skip


setup(ext_modules=extensions(), options={"bdist_wheel": {"py_limited_api": "cp311"}} if extensions() else {})
