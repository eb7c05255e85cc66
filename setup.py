"""Builds the optional native dispatcher. Everything else is declared in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

SOURCE = "runtime/_native.c"
LIMITED_API = "0x030B0000"  # one binary for CPython 3.11 and newer


def extensions() -> list[Extension]:
    """The dispatcher, marked optional: without a C compiler the runtime takes its ctypes path."""
    if not Path(__file__).with_name("runtime").joinpath("_native.c").exists():
        return []
    macros: list[tuple[str, str | None]] = [("Py_LIMITED_API", LIMITED_API)]
    module = Extension("runtime._native", [SOURCE], depends=["runtime/_segment.h"], define_macros=macros,
                       py_limited_api=True, optional=True)  # fmt: skip
    return [module]


setup(ext_modules=extensions(), options={"bdist_wheel": {"py_limited_api": "cp311"}} if extensions() else {})
