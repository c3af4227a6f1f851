"""Replace torch's ``FileSystemReader`` and ``FileSystemWriter`` with those of dcp-rs."""

from __future__ import annotations

import functools
import threading
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint import filesystem

from dcp_rs import _torch
from dcp_rs._log import log as _log
from dcp_rs.dcp.reader import RsReader
from dcp_rs.dcp.writer import RsWriter

_OURS = {"FileSystemReader": RsReader, "FileSystemWriter": RsWriter}

_lock = threading.Lock()
#: Calls of :func:`install` that were not undone.
_count = 0
#: Replaced attributes: (module or class, name, old value).
_replaced: list[tuple[Any, str, Any]] = []


class _StandIn(ABCMeta):
    """The metaclass of a stand-in for one of torch's classes.

    A call makes an instance of the class of dcp-rs. A class that derives from the stand-in derives
    from torch's class, since it relies on its internals.
    """

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any
    ) -> Any:
        if not any(isinstance(base, _StandIn) for base in bases):
            return super().__new__(mcs, name, bases, namespace, **keywords)
        stock = tuple(base.stock if isinstance(base, _StandIn) else base for base in bases)
        return type(stock[0])(name, stock, namespace, **keywords)

    stock: type
    ours: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.ours(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.stock, cls.ours))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or issubclass(subclass, (cls.stock, cls.ours))

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.ours, name)


def install() -> None:
    """Replace torch's ``FileSystemReader`` and ``FileSystemWriter`` with those of dcp-rs.

    Code of this process that looks them up then uses :class:`RsReader` and :class:`RsWriter`:
    ``dcp.save(state_dict, checkpoint_id=path)``, ``dcp.load``, ``dcp.async_save``, and frameworks
    that name torch's classes. Stock checkpoints load as before. Calls are counted: what you
    install twice, you uninstall twice.

    It does not change classes that derive from torch's (its Hugging Face and fsspec classes, or
    your own), URLs, and names that a module imported before with ``from
    torch.distributed.checkpoint import FileSystemWriter``.

    Example:
        ```python
        dcp_rs.install()
        dcp.save({"model": model.state_dict()}, checkpoint_id="ckpt")  # written by dcp-rs
        dcp_rs.uninstall()
        ```
    """
    global _count  # noqa: PLW0603
    with _lock:
        new = list(_stand_ins()) if _count == 0 else []
        _count += 1
        for where, name, stand_in in new:
            _replaced.append((where, name, getattr(where, name)))
            setattr(where, name, stand_in)
    if new:
        names = ", ".join(f"{where.__name__}.{name}" for where, name, _ in new)
        _log.info("torch's file system storage is that of dcp-rs now: %s", names)


def uninstall() -> None:
    """Undo one :func:`install`.

    Raises:
        RuntimeError: there is none to undo.

    Example:
        ```python
        dcp_rs.install()
        dcp_rs.uninstall()
        ```
    """
    global _count  # noqa: PLW0603
    with _lock:
        if _count == 0:
            raise RuntimeError("dcp_rs is not installed: there is nothing to undo")
        _count -= 1
        if _count == 0:
            while _replaced:
                setattr(*_replaced.pop())
            _log.info("torch's file system storage is its own again")


@contextmanager
def installed() -> Iterator[None]:
    """Call :func:`install` for the duration of a ``with`` block.

    Saves that began within it are written by dcp-rs, even if they go on after it.

    Returns:
        A context manager.

    Example:
        ```python
        with dcp_rs.installed():
            dcp.save({"model": model.state_dict()}, checkpoint_id="ckpt")
        ```
    """
    install()
    try:
        yield
    finally:
        uninstall()


def _stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Yield what to replace: the module or class, the name, and the new value."""
    for name, ours in _OURS.items():
        stock = getattr(filesystem, name)
        attributes = {
            "stock": stock,
            "ours": ours,
            "__doc__": ours.__doc__,
            "__module__": stock.__module__,
        }
        stand_in = _StandIn(name, (), attributes)
        for module in _torch.modules_that_name(stock):
            yield module, name, stand_in
    for executor in _torch.async_executors():
        yield executor, "execute_save", _with_writer(executor.execute_save)


def _with_writer(execute_save: Any) -> Any:
    """Wrap a function of torch so that the writer is made in the thread that asks for the save.

    A background thread may run after ``uninstall``, and another process without ``install``.
    """

    @functools.wraps(execute_save)
    def execute(
        executor: Any,
        staged: Any,
        *,
        checkpoint_id: Any = None,
        storage_writer: Any = None,
        **keywords: Any,
    ) -> Any:
        if storage_writer is None and checkpoint_id is not None:
            storage_writer = _torch.storage_writer_for(checkpoint_id)
        return execute_save(
            executor, staged, checkpoint_id=checkpoint_id, storage_writer=storage_writer, **keywords
        )

    return execute
