"""One fork server for all tests, the one that the tests of the judge use."""

from __future__ import annotations

from tests.gauntlet.conftest import server as server
