"""Options, markers, profiles and the fixtures that all tests share."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.ranks import close_shared_pool

# No deadline: the machine may be busy. Derandomized: a red run is red again; `thorough` explores.
settings.register_profile(
    "bounded",
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", settings.get_profile("bounded"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "bounded"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = config.getoption("--slow")
    for item in items:
        if item.get_closest_marker("slow") and not slow:
            item.add_marker(pytest.mark.skip(reason="slow: runs with --slow"))
        if item.get_closest_marker("gpu") and not _has_accelerator():
            item.add_marker(pytest.mark.skip(reason="no accelerator"))


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def pytest_sessionfinish() -> None:
    close_shared_pool()


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A folder for a checkpoint, not there yet."""
    return tmp_path / "ckpt"
