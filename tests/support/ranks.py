"""Functions run in real rank processes, each a member of a gloo process group.

The processes are forked from the server of `programs`. They stay alive between calls; each
call makes a new process group among the first `n` of them. A function is sent by name, so it must
be at the top level of its module.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import programs

if TYPE_CHECKING:
    from collections.abc import Callable

CALL_TIMEOUT = 90.0  # seconds


class RankTimeoutError(Exception):
    """A rank did not finish in time; the message holds the stacks of its threads."""


class RankDiedError(Exception):
    """A rank's process ended: killed by a signal (a negative exit code) or by an exit."""


class UnpicklableError(Exception):
    """Stands for a result or an exception that pickle cannot carry to the test."""


class RanksFailedError(Exception):
    """Some ranks failed; `outcomes` holds what each rank did."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        parts = [f"{len(failed)} of {len(outcomes)} ranks failed"]
        parts += [f"--- rank {o.rank}: {o.error!r}\n{o.traceback}" for o in failed]
        super().__init__("\n".join(parts))


@dataclass
class Outcome:
    """What a function did on one rank: its value, or its error and where that came from."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    # False where torch may be left half way: a group begun on some ranks only counts differently
    # there.
    reusable: bool = True


@dataclass
class _Call:
    function: bytes  # pickled: (function, args)
    path: list[str]  # the test modules may have been imported after the process began
    rank: int
    size: int
    store: str
    timeout: float


# --- in the rank process


def _portable(error: BaseException) -> BaseException:
    """The error itself where it survives pickling, else one that says what it was."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception as reason:  # noqa: BLE001 - any failure to pickle means the same
        return UnpicklableError(f"{type(error).__qualname__}: {error} (pickling: {reason!r})")
    return error if isinstance(copy, BaseException) else UnpicklableError(repr(error))


def _forget_groups() -> None:
    """DTensor remembers how it sharded, and with it the groups of meshes that are equal to later ones."""
    import torch
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # torch 2.8 has no fast path
        torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()


def _perform(call: _Call) -> Outcome:
    from datetime import timedelta

    import torch.distributed as dist

    sys.path.extend(entry for entry in call.path if entry not in sys.path)
    environment = dict(os.environ)
    # What torchrun sets; the process group itself meets at the file.
    os.environ.update(
        RANK=str(call.rank),
        LOCAL_RANK=str(call.rank),
        WORLD_SIZE=str(call.size),
        LOCAL_WORLD_SIZE=str(call.size),
    )
    outcome = Outcome(call.rank, reusable=False)
    try:
        function, args = pickle.loads(call.function)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(call.store, call.size),
            rank=call.rank,
            world_size=call.size,
            timeout=timedelta(seconds=call.timeout),
        )
        # torch lets a rank go on while others still connect: one that was done at once would fail
        # theirs.
        dist.barrier()
        value = function(*args)
        try:
            pickle.dumps(value)
        except Exception as reason:
            raise UnpicklableError(
                f"the result, a {type(value).__qualname__}: {reason!r}"
            ) from reason
        outcome.value = value
    except BaseException as error:  # noqa: BLE001 - CheckpointException is not an Exception
        outcome.error = _portable(error)
        outcome.traceback = traceback.format_exc()  # as text: tracebacks do not pickle
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # a group whose other ranks are gone
                dist.destroy_process_group()
                _forget_groups()
                outcome.reusable = True
        os.environ.clear()
        os.environ.update(environment)
    return outcome


def _serve(stacks: str, pipe_number: int) -> None:
    import faulthandler

    import torch

    torch.set_num_threads(1)  # several ranks share few cores
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    pipe = connection.Connection(pipe_number)
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        pipe.send_bytes(b"ready")
        while True:
            try:
                call = pickle.loads(pipe.recv_bytes())
            except EOFError:  # the test run is over
                return
            # By value: multiprocessing's own way would share tensors through file descriptors.
            pipe.send_bytes(pickle.dumps(_perform(call)))


# --- in the test process


class _Rank:
    """One rank process, started when it is first needed."""

    def __init__(self, folder: Path, number: int) -> None:
        self.stacks = folder / f"stacks-{number}-{time.monotonic_ns()}"
        self.pipe, theirs = connection.Pipe()
        self.process = programs.call(_serve, str(self.stacks), descriptors=[theirs.fileno()])
        theirs.close()
        # Until it has a handler of its own, the signal that asks for stacks would end it.
        self.pipe.recv_bytes()

    def alive(self) -> bool:
        return self.process.wait(0) is None

    def stack_dump(self) -> str:
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(self.process.pid, signal.SIGUSR1)
        found, end = "", time.monotonic() + 10
        while time.monotonic() < end:  # until it is written, and no more comes
            time.sleep(0.3)
            before, found = found, self.stacks.read_text() if self.stacks.exists() else ""
            if found and found == before:
                break
        return found

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        self.pipe.close()
        if self.process.wait(10) is None:
            self.process.kill()


class RankPool:
    """Rank processes that live until `close`, and are replaced when they die or hang."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="dcp-rs-ranks-")
        self._calls = 0

    def _ensure(self, size: int) -> list[_Rank]:
        folder = Path(self._folder.name)
        for number in range(size):
            if number < len(self._ranks) and self._ranks[number].alive():
                continue
            self._ranks[number : number + 1] = [_Rank(folder, number)]
        return self._ranks[:size]

    def outcomes(
        self, size: int, function: Callable[..., Any], *args: Any, timeout: float = CALL_TIMEOUT
    ) -> list[Outcome]:
        """Run `function(*args)` on `size` ranks; what each did, by rank. Does not raise for them."""
        payload = pickle.dumps((function, args))
        ranks = self._ensure(size)
        self._calls += 1
        store = str(Path(self._folder.name) / f"store-{self._calls}")
        for number, rank in enumerate(ranks):
            call = _Call(payload, sys.path, number, size, store, timeout)
            rank.pipe.send_bytes(pickle.dumps(call))
        outcomes = self._collect(ranks, timeout)
        Path(store).unlink(missing_ok=True)
        return outcomes

    @staticmethod
    def _collect(ranks: list[_Rank], timeout: float) -> list[Outcome]:
        # The ranks' own collectives give up first, with a better message.
        deadline = time.monotonic() + timeout + 3
        waiting: dict[Any, int] = {rank.pipe: number for number, rank in enumerate(ranks)}
        outcomes: dict[int, Outcome] = {}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                number = waiting.pop(pipe)
                try:
                    outcomes[number] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    code = ranks[number].process.wait(10)
                    died = RankDiedError(f"rank {number} ended with exit code {code}")
                    outcomes[number] = Outcome(number, error=died)
        for number in waiting.values():
            hung = RankTimeoutError(
                f"rank {number} did not finish in {timeout} s\n{ranks[number].stack_dump()}"
            )
            outcomes[number] = Outcome(number, error=hung)
        for number, outcome in outcomes.items():
            if number in waiting.values() or not outcome.reusable:
                ranks[number].kill()
        return [outcomes[number] for number in range(len(ranks))]

    def close(self) -> None:
        """End the processes."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.pipe.close()  # they leave when they read the end of it
        for rank in ranks:
            rank.close()
        self._folder.cleanup()


_shared: RankPool | None = None


def shared_pool() -> RankPool:
    """The pool of this test run."""
    global _shared  # noqa: PLW0603 - one a process, by design
    if _shared is None:
        _shared = RankPool()
    return _shared


def close_shared_pool() -> None:
    global _shared  # noqa: PLW0603
    if _shared is not None:
        _shared.close()
        _shared = None


atexit.register(close_shared_pool)


def rank_outcomes(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = CALL_TIMEOUT,
    fresh: bool = False,
) -> list[Outcome]:
    """What `function(*args)` did on each of `size` ranks: for tests of failures.

    `fresh` starts processes for this call alone, for what leaves traces in a process.
    """
    if not fresh:
        return shared_pool().outcomes(size, function, *args, timeout=timeout)
    pool = RankPool()
    try:
        return pool.outcomes(size, function, *args, timeout=timeout)
    finally:
        pool.close()


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = CALL_TIMEOUT,
    fresh: bool = False,
) -> list[Any]:
    """The values of `function(*args)` on `size` ranks, by rank.

    Raises:
        RanksFailedError: with the error and traceback of every rank that failed.
    """
    outcomes = rank_outcomes(size, function, *args, timeout=timeout, fresh=fresh)
    if any(outcome.error is not None for outcome in outcomes):
        raise RanksFailedError(outcomes)
    return [outcome.value for outcome in outcomes]
