"""``dcp_rs.latest``: the newest step of a run, by whatever saved it."""

from __future__ import annotations

from pathlib import Path

from dcp_rs._arguments import suggest_option
from dcp_rs._url import StoreArguments, StrPath
from dcp_rs._warnings import warn_caller
from dcp_rs.checkpoint.locate import exists
from dcp_rs.errors import CheckpointNotFoundError, UnsupportedError
from dcp_rs.steps.object_store import step_store_at
from dcp_rs.steps.step_store import SkippedStep, Step

#: Kinds of steps that are more than the rest of a save that was killed.
_SAVED = ("foreign", "unreadable", "damaged")


@suggest_option
def latest(
    root: StrPath,
    *,
    step_name: str = "step-{}",
    storage_options: StoreArguments = None,
) -> Path | None:
    """Return the path of the newest step of a run that is committed and whole.

    The steps may be those of a :class:`dcp_rs.CheckpointManager`, of your own loop, or of torch. In
    a job of several ranks, each rank looks for itself.

    Args:
        root: the folder of the run, or its URL.
        step_name: the name of the folder of a step, with ``{}`` for its number.
        storage_options: see :class:`dcp_rs.RsReader`.

    Returns:
        The folder of the step, or its URL; None if nothing was saved yet. A newer step that is
        damaged is skipped, with a warning.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none is a step: all are damaged, they
            have other names, or ``root`` is a checkpoint itself.
        UnsupportedError: a newer step may be whole, but lost its index.
        ValueError: ``step_name`` is invalid.
        OSError, StorageError: the root or a newer step cannot be read.

    Example:
        ```python
        state = {"model": model, "step": 0}
        if (path := dcp_rs.latest("run")) is not None:
            dcp_rs.load(state, path)
        ```
    """
    store = step_store_at(root, storage_options, step_name)
    skipped: list[SkippedStep] = []
    names = store.names()
    strangers = store.strangers(names)
    for found in store.newest(names):
        if isinstance(found, Step) or (
            found.kind == "foreign" and exists(found.path, storage_options=storage_options)
        ):
            if strangers:
                warn_caller(f"{store.path}: {strangers}")
            for step in skipped:
                warn_caller(f"{found.path} is the latest step, not {step}")
            return found.path
        if found.kind == "no index":
            msg = f"{store.path} has no latest step, as no older one takes the place of {found}"
            raise UnsupportedError(msg, path=found.path)
        if found.kind in _SAVED:
            skipped.append(found)
    if skipped:
        msg = f"{store.path}: none of its steps is whole: {'; '.join(map(str, skipped))}"
    elif strangers:
        msg = f"{store.path} has no step {step_name}, and {strangers}"
    else:
        return None
    raise CheckpointNotFoundError(msg, path=store.path)
