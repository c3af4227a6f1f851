"""Options, markers, profiles and the fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from programs import start_server, stop_server

# The process that only deals out the tests imports no torch, so that the others start at once.
if TYPE_CHECKING:
    import torch

    from support.object_server import ObjectServer
    from support.simulated import Simulated
    from support.threads import HeldSaves

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
    start_server()  # for this process and for those that share the tests, which inherit its address


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests, too")
    parser.addoption("--only-slow", action="store_true", help="run the slow tests alone")


def _mark_what_repeats(items: list[pytest.Item]) -> None:
    """Mark as slow what of a product of parameters is not needed to meet each value once."""
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and len(callspec.params) > 1:
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for product in products.values():
        seen: set[tuple[str, int]] = set()
        size = len(product)
        # Neighbours differ in one value only. So go by steps without a divisor of most sizes.
        for at in sorted(range(size), key=lambda at, size=size: at * 7919 % size):
            item = product[at]
            if item.get_closest_marker("slow"):
                continue
            values = {(name, id(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
            if values <= seen:
                item.add_marker("slow")
            seen |= values


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


def pytest_collection() -> None:
    import torch

    # Several processes share the cores, and torch's threads wait by spinning.
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # a collection in a test looks at what tests made, and not at all of torch


def pytest_sessionfinish() -> None:
    if "support.ranks" in sys.modules:
        sys.modules["support.ranks"].close_shared_pool()


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
    from support.simulated import UnavailableError, install

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
    import torch

    return torch.device("sim", 0)


@pytest.fixture
def other_device(sim: Simulated) -> torch.device:
    """The second."""
    import torch

    return torch.device("sim", 1)


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> torch.device:
    """A real one, if this machine has one, else the first of the simulated devices."""
    import torch

    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or kind.type == "sim":
        return request.getfixturevalue("device")
    return torch.device(kind.type, torch.accelerator.current_device_index())


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A folder for a checkpoint, not there yet."""
    return tmp_path / "ckpt"


@pytest.fixture
def held_saves() -> Iterator[HeldSaves]:
    """Saves in the background that wait until the test lets them go."""
    from support.threads import saves_held_up

    with saves_held_up() as held:
        yield held


@pytest.fixture
def no_store_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the environment says of stores, and of proxies."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    """An object server, for one test."""
    from support.object_server import object_server

    with object_server() as store:
        yield store
