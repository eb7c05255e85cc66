"""A command that is interrupted ends with 130, whatever it was at."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

import forge.cli
import gauntlet.cli
import library.cli
import runtime.cli
from esper_ir.diagnostics import EXIT_INTERRUPTED


@pytest.mark.parametrize("tool", [forge.cli.main, gauntlet.cli.main, library.cli.main, runtime.cli.main])
def test_it_says_so_and_ends_with_130(tool: click.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also outside of what a command guards itself: while it imports, before its first file."""

    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(tool.commands, "interrupted", interrupted)
    done = CliRunner().invoke(tool, ["interrupted"])
    assert done.exit_code == EXIT_INTERRUPTED
    assert "interrupted" in done.output and "Aborted" not in done.output
