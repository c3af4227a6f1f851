"""Options, markers, profiles and the fixtures that all tests share."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from support.programs import start_server, stop_server
from support.ranks import close_shared_pool
from support.simulated import Simulated, UnavailableError, install

# No deadline: the machine may be busy. Derandomized: a red run is red again; `thorough` explores.
settings.register_profile(
    "bounded",
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "thorough", settings.get_profile("bounded"), max_examples=1000, derandomize=False
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "bounded"))


def pytest_configure() -> None:
    torch.set_num_threads(
        1
    )  # several processes share the cores, and torch's threads wait by spinning
    start_server()  # for this process and for those that share the tests, which inherit its address


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests, too")
    parser.addoption("--only-slow", action="store_true", help="run the slow tests alone")


def _mark_what_repeats(items: list[pytest.Item]) -> None:
    """Mark as slow what tests marked `each` or `pairs` need not run to meet each value, or each pair."""
    products: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        for together, marker in enumerate(("each", "pairs"), 1):
            if item.get_closest_marker(marker):
                products.setdefault((item.nodeid.partition("[")[0], together), []).append(item)
    for (_, together), product in products.items():
        seen: set[tuple[tuple[str, int], ...]] = set()
        # By steps that have no divisor in common with most sizes: neighbours differ in one value
        # only.
        size = len(product)
        for at in sorted(range(size), key=lambda at, size=size: at * 7919 % size):
            item = product[at]
            parameters = item.callspec.params  # type: ignore[attr-defined]
            values = [(name, id(value)) for name, value in sorted(parameters.items())]
            pairs = set(combinations(values, min(together, len(values))))
            if pairs <= seen:
                item.add_marker("slow")
            seen |= pairs


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if addressed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        msg = f"processes that share the tests have to call them by the same names: {addressed[0]}"
        raise pytest.UsageError(msg)
    # A process that has the simulated device keeps it, and torch then takes it for the accelerator.
    # No file has tests of both kinds, as several processes share the tests by files, in this order.
    items.sort(
        key=lambda item: [
            name in getattr(item, "fixturenames", ()) for name in ("sim", "accelerator")
        ]
    )
    _mark_what_repeats(items)
    slow, only = config.getoption("--slow"), config.getoption("--only-slow")
    left_out = [
        item
        for item in items
        if (only if not item.get_closest_marker("slow") else not (slow or only))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # a collection in a test looks at what tests made, and not at all of torch


def pytest_sessionfinish() -> None:
    close_shared_pool()


def pytest_unconfigure() -> None:
    stop_server()


@pytest.fixture
def dcp_rs_cli(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: (status, what it printed, its errors)."""
    from dcp_rs.cli import main

    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        return ended.value.code, printed.out, printed.err  # type: ignore[return-value]  # a number here

    return run


@pytest.fixture
def sim() -> Iterator[Simulated]:
    """The simulated accelerator, with nothing set and nothing under way."""
    import dcp_rs

    try:
        simulated = install()
    except UnavailableError as why:
        pytest.skip(str(why))
    simulated.reset()
    yield simulated
    simulated.reset()
    gc.collect()  # errors hold the frames that hold memory
    dcp_rs.release_pinned_memory()


@pytest.fixture
def device(sim: Simulated) -> torch.device:
    """The first of the simulated devices."""
    return torch.device("sim", 0)


@pytest.fixture
def other_device(sim: Simulated) -> torch.device:
    """The second."""
    return torch.device("sim", 1)


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> torch.device:
    """A real one, if this machine has one, else the first of the simulated devices."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "sim":
        return request.getfixturevalue("device")
    return torch.device(kind.type, torch.accelerator.current_device_index())


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A folder for a checkpoint, not there yet."""
    return tmp_path / "ckpt"
