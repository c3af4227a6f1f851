"""Lets every call that changes a file fail, one after the other, in saves (and conversions): ``python -m crash.faults``.

Runs with ``faults.c`` preloaded, which :func:`run` sees to.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from crash.preload import preloaded


@dataclass
class Tally:
    """What happened."""

    what: str
    faults: int = 0
    kept_old: int = 0
    became_new: int = 0  # the last sync failed, after the commit
    harmless: int = 0  # a file of the old checkpoint could not be removed
    calls: dict[str, int] = field(default_factory=dict)


def run(*arguments: str, timeout: float = 300) -> list[dict[str, Any]]:
    """The tallies of ``python -m crash.faults``, in a process that has the faults preloaded.

    Raises:
        FileNotFoundError: there is no C compiler.
    """
    return preloaded("faults", "faults.c", arguments, timeout)


class Faults:
    """The library that is preloaded."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.fault_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p]
        self._library.fault_last.restype = ctypes.c_char_p

    def arm(self, number: int, error: int, folder: Path) -> None:
        self._library.fault_arm(number, error, str(folder).encode())

    def disarm(self) -> str | None:
        """The call that failed, if it came to that."""
        self._library.fault_arm.restype = None
        fired = self._library.fault_fired()
        call = self._library.fault_last().decode() if fired else None
        self._library.fault_arm(-1, 0, b"")
        return call


def _failed_with(error: BaseException, number: int) -> bool:
    """Whether the error is an OSError of this number, or what DCP makes of one on several ranks."""
    failures = getattr(error, "failures", {0: (error, None)})
    return any(isinstance(e, OSError) and e.errno == number for e, _ in failures.values())


def _save_on_rank(
    faults: Faults, path: Path, number: int, rank: int, ranks: int, fault: tuple[int, int] | None
) -> Any:
    import dcp_rs
    from crash.states import rank_state

    if fault:
        faults.arm(fault[0], fault[1], path)
    error: BaseException | None = None
    try:
        dcp_rs.save(rank_state(number, rank), path, no_dist=ranks == 1)
    except BaseException as caught:  # noqa: BLE001 - CheckpointException is not an Exception
        error = caught
    return faults.disarm(), error


def _fork_ranks(
    faults: Faults, path: Path, number: int, ranks: int, victim: int, fault: tuple[int, int]
) -> list[Any]:
    """What :func:`_save_on_rank` returned on each of ``ranks`` forked ranks."""
    import torch.distributed as dist

    store = tempfile.mktemp(prefix="dcp-rs-store-")
    children = []
    for rank in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, ranks),
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=30),
                )
                result = _save_on_rank(
                    faults, path, number, rank, ranks, fault if rank == victim else None
                )
                os.write(write, pickle.dumps(result))
            finally:
                os._exit(0)
        os.close(write)
        children.append((pid, read))
    results = []
    for pid, read in children:
        with os.fdopen(read, "rb") as pipe:
            results.append(pickle.loads(pipe.read()))
        os.waitpid(pid, 0)
    Path(store).unlink(missing_ok=True)
    return results


def sweep_saves(  # noqa: PLR0912 - one scenario
    faults: Faults, folder: Path, ranks: int, error: int, step: int
) -> Tally:
    """Every ``step``-th call of a save over an older one fails, on one rank after the other."""
    import dcp_rs
    from crash.states import found_number, stray_files

    tally = Tally(f"save, {ranks} ranks, {errno.errorcode[error]}")
    path = folder / f"save-{ranks}-{error}"
    if ranks == 1:
        _save_on_rank(faults, path, 1, 0, 1, None)
    else:
        _fork_ranks(faults, path, 1, ranks, -1, (0, 0))
    number = 1
    for victim in range(ranks):
        at = victim % step
        while True:
            if ranks == 1:
                results = [_save_on_rank(faults, path, number + 1, 0, 1, (at, error))]
            else:
                results = _fork_ranks(faults, path, number + 1, ranks, victim, (at, error))
            call = results[victim][0]
            errors = [result[1] for result in results]
            found = found_number(path, ranks)
            assert dcp_rs.verify(path).ok
            if call is None:  # the save has fewer calls than that
                assert not any(errors), errors
                assert found == number + 1
                number = found
                break
            tally.faults += 1
            tally.calls[call] = tally.calls.get(call, 0) + 1
            if call == "unlink":
                # Of the checkpoint that was replaced: a warning.
                assert not any(errors), errors
                assert found == number + 1
                tally.harmless += 1
                for stray in stray_files(path):
                    stray.unlink()
            else:
                assert all(e is not None and _failed_with(e, error) for e in errors), errors
                assert found in (number, number + 1)
                assert found == number or call == "fsync", call
                tally.kept_old += found == number
                tally.became_new += found == number + 1
                if found == number:
                    # No rank keeps the disk full.
                    assert not stray_files(path), (call, stray_files(path))
                else:
                    for stray in stray_files(path):
                        stray.unlink()
            number = found
            at += step
    return tally


def _converted_number(path: Path, to: str) -> int:
    """The number of the save at ``path``, in whatever format."""
    import torch

    import dcp_rs
    from crash.states import found_number, rank_state

    if to == "dcp-rs":
        return found_number(path, 1)
    if to == "torch":
        state = torch.load(path, weights_only=True)
        number = int(state["common"][0])
        want = rank_state(number, 0)
        assert all(
            torch.equal(state[k], v) if isinstance(v, torch.Tensor) else state[k] == v
            for k, v in want.items()
        )
        return number
    with dcp_rs.open(path) as checkpoint:
        number = int(checkpoint["common"][0])
        for key, value in rank_state(number, 0).items():
            assert not isinstance(value, torch.Tensor) or torch.equal(checkpoint[key], value), key
    return number


def sweep_conversions(faults: Faults, folder: Path, error: int, step: int) -> list[Tally]:
    """The same for ``dcp_rs.convert`` over an older result, to every kind of checkpoint."""
    import dcp_rs
    from crash.states import rank_state

    work = folder / f"convert-{error}"
    sources = [work / "source-1", work / "source-2"]
    for number, source in enumerate(sources, 1):
        dcp_rs.save(rank_state(number, 0), source, no_dist=True)
    tallies = []
    for to in ("dcp-rs", "dcp", "safetensors", "torch"):
        tally = Tally(f"convert to {to}, {errno.errorcode[error]}")
        target = work / "out" / to
        target.parent.mkdir(exist_ok=True)
        options = {"to": to, "skip_unsupported": True, "overwrite": True}
        dcp_rs.convert(sources[0], target, **options)
        number, at = 1, 0
        while True:
            faults.arm(at, error, target.parent)
            failure: BaseException | None = None
            try:
                dcp_rs.convert(sources[number % 2], target, **options)
            except BaseException as caught:  # noqa: BLE001
                failure = caught
            call = faults.disarm()
            found = _converted_number(target, to)
            assert [p.name for p in target.parent.iterdir()] == [to], (
                call,
                list(target.parent.iterdir()),
            )
            if call is None:
                assert failure is None, failure
                assert found != number
                break
            tally.faults += 1
            tally.calls[call] = tally.calls.get(call, 0) + 1
            if not isinstance(failure, OSError | dcp_rs.errors.DcpRsError | None):
                raise AssertionError(f"{call}, number {at}") from failure  # noqa: TRY004 - a finding
            if failure is None:
                assert found != number, call
                tally.harmless += 1
            else:
                assert found == number or call == "fsync", (call, failure)
                tally.kept_old += found == number
                tally.became_new += found != number
            number = found
            at += step
        tallies.append(tally)
        shutil.rmtree(target.parent)
    return tallies


def main(arguments: list[str]) -> int:
    import torch

    torch.set_num_threads(1)
    library, *rest = arguments
    step = int(rest[0]) if rest else 1
    ranks = [int(n) for n in rest[1].split(",")] if rest[1:] else [1, 4]
    saves_only = rest[2:] == ["saves"]
    faults = Faults(library)
    tallies = []
    with tempfile.TemporaryDirectory(prefix="dcp-rs-faults-") as name:
        for error in (errno.ENOSPC,) if saves_only else (errno.EIO, errno.ENOSPC):
            tallies += [
                sweep_saves(faults, Path(name), n, error, step if n == 1 else 4 * step)
                for n in ranks
            ]
            if 1 in ranks and not saves_only:
                tallies += sweep_conversions(faults, Path(name), error, step)
    print(json.dumps([asdict(tally) for tally in tallies]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
