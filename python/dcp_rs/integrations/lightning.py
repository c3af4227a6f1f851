"""Lightning: whole checkpoints by a ``CheckpointIO``, sharded ones by strategies. Of what is called ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import Future
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Unpack

import torch

from dcp_rs import _core
from dcp_rs._arguments import check_arguments
from dcp_rs.api import async_save, save
from dcp_rs.checkpoint.folders import local_path
from dcp_rs.checkpoint.open import open as open_checkpoint
from dcp_rs.conversion.output import new_output
from dcp_rs.integrations._needs import framework
from dcp_rs.integrations.install import installed
from dcp_rs.options import WriterArguments

__all__ = ["DcpRsCheckpointIO", "DcpRsFSDPStrategy", "DcpRsModelParallelStrategy", "DcpRsSharded"]

#: The one package has two names, with classes of their own.
_FABRIC = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_PYTORCH = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _names() -> list[str]:
    """The names under which Lightning is in use; where it is not yet, one that is installed."""
    used = [name for name in _FABRIC if name in sys.modules]
    if not used and find_spec("lightning") is None and find_spec("pytorch_lightning") is not None:
        used = ["pytorch_lightning"]
    return used or ["lightning"]


def _bases(modules: dict[str, str], inner: str, name: str) -> Any:
    """The class, under every name that is in use, as bases of ours."""
    for package in _names():
        framework(package, "lightning")
    found = [getattr(import_module(f"{modules[package]}.{inner}"), name) for package in _names()]
    return type(name, tuple(dict.fromkeys(found)), {})


class DcpRsCheckpointIO(_bases(_FABRIC, "plugins", "CheckpointIO")):  # type: ignore[misc]
    """Lightning's checkpoints as folders of dcp-rs: ``Trainer(plugins=[DcpRsCheckpointIO()])``.

    ``Fabric(plugins=...)`` takes it too. A checkpoint loads as it was saved, with its empty dicts,
    numbers for keys and hyper-parameters. Files that Lightning wrote before load too. The rank
    that Lightning asks writes everything; for sharded models there are strategies.

    Args:
        asynchronous: save in the background, from a copy in host memory. If a save fails, the next
            call raises, or the end of the trainer.
        write_options: arguments of :func:`dcp_rs.save`.
    """

    def __init__(
        self, *, asynchronous: bool = False, **write_options: Unpack[WriterArguments]
    ) -> None:
        super().__init__()
        check_arguments(save, write_options)
        self._asynchronous = asynchronous
        self._options = write_options
        self._saving: Future[Any] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves to the folder ``path``. A file that is there (of Lightning's own), or a link, gives way once the save is complete; what a link leads to stays.

        Raises:
            TypeError: there are ``storage_options``.
            CheckpointExistsError: what gives way was changed meanwhile; it is still there.
            Exception: as :func:`dcp_rs.save`.
        """
        if storage_options is not None:
            raise TypeError(
                "DcpRsCheckpointIO takes no storage_options: it takes the arguments of dcp_rs.save when it is made"
            )
        self.wait()
        target = local_path(path)
        if target.is_file() or target.is_symlink():
            with new_output(target, _core.fingerprint(os.fspath(target)), as_file=False) as place:
                save(checkpoint, place.result, no_dist=True, **self._options)
        elif self._asynchronous:
            self._saving = async_save(checkpoint, target, no_dist=True, **self._options)
        else:
            save(checkpoint, target, no_dist=True, **self._options)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The checkpoint at ``path``, its tensors in memory of their own.

        Args:
            path: a folder of this package, or a file of Lightning's own.
            map_location: a device, where tensors go. A mapping or a callable, which torch asks for
                each storage, leaves them on the CPU.
            weights_only: as for ``torch.load``; None is True.

        Raises:
            CheckpointNotFoundError: (a ``FileNotFoundError``) there is nothing.
            UnsafePickleError: a value that needs ``weights_only=False``.
        """
        self.wait()
        device = map_location if isinstance(map_location, str | int | torch.device) else "cpu"
        with open_checkpoint(
            path, device=device, weights_only=weights_only is not False
        ) as checkpoint:
            return checkpoint.state_dict(copy=True)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes what is at ``path``, once no save is under way."""
        self.wait()
        target = local_path(path)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def wait(self) -> None:
        """Returns when no save is under way; raises what the last one raised."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def teardown(self) -> None:
        """Waits for a save that is under way."""
        self.wait()


class DcpRsSharded:
    """A base before one of Lightning's strategies that save a folder by DCP, in ``lightning.pytorch`` and in ``lightning.fabric``.

    They save and load by this package then: every rank its own part. Folders that they wrote before
    load too.
    """

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As the strategy's own."""
        with installed():
            super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As the strategy's own."""
        with installed():
            return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]


class DcpRsFSDPStrategy(DcpRsSharded, _bases(_PYTORCH, "strategies", "FSDPStrategy")):  # type: ignore[misc]
    """``FSDPStrategy``, whose sharded checkpoints are of this package (``state_dict_type="sharded"``)."""


class DcpRsModelParallelStrategy(
    DcpRsSharded, _bases(_PYTORCH, "strategies", "ModelParallelStrategy")
):  # type: ignore[misc]
    """``ModelParallelStrategy``, whose distributed checkpoints are of this package."""
