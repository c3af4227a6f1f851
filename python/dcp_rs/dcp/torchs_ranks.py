"""The ranks of a load that torch's own driver runs: one that fails before it comes to read is at torch's next step."""

from __future__ import annotations

from traceback import StackSummary
from typing import Any, NoReturn

from torch.distributed.checkpoint.api import CheckpointException

from dcp_rs.engine.ranks import Ranks, failures_among

__all__ = ["TorchsRanks"]


class TorchsRanks(Ranks):
    """Ranks that take steps within the work of a step of torch's ``DistWrapper.all_gather``.

    There a rank whose planner has failed already tells its error in a gather of objects, as the others tell each other something in the first step
    that they take here: the two are one. All know then what failed, and the step of torch is over.
    """

    def _all_gather(self, value: Any) -> list[Any]:
        values = super()._all_gather(value)
        failures = {rank: said for rank, said in enumerate(values) if _is_of_torch(said)}
        if failures:
            failures |= {rank: (failure.error(), StackSummary()) for rank, failure in failures_among(values).items()}
            raise _KnownToAll(CheckpointException("read", failures))
        return values


def _is_of_torch(said: Any) -> bool:
    """Whether it is the error of a rank as torch tells it: a pair, the error and the stack, as in ``CheckpointException.failures``."""
    return (
        isinstance(said, tuple) and tuple(map(type, said[1:])) == (StackSummary,) and isinstance(said[0], BaseException)
    )


class _KnownToAll(Exception):  # noqa: N818  # never raised to a caller
    """Ends the step of torch that it is raised in: torch means to tell the others, and to pickle it raises what they all raise."""

    def __init__(self, error: CheckpointException) -> None:
        super().__init__(str(error))
        self._error = error

    def __reduce__(self) -> NoReturn:
        raise self._error
