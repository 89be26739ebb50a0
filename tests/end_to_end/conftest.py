"""A project for each test, and one warm Python for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.project import Project, WarmPython


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPython]:
    python = WarmPython()
    yield python
    python.close()


@pytest.fixture
def project(tmp_path: Path, warm: WarmPython) -> Iterator[Project]:
    made = Project(tmp_path, warm)
    yield made
    made.close()
