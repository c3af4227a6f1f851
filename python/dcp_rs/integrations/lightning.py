"""Lightning: a ``CheckpointIO`` for whole checkpoints, and strategies for sharded ones."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any, Unpack

import torch

from dcp_rs import _core
from dcp_rs._arguments import check_arguments
from dcp_rs._url import StrPath
from dcp_rs.api import async_save, save
from dcp_rs.checkpoint.folders import local_path
from dcp_rs.checkpoint.open import open as open_checkpoint
from dcp_rs.conversion.output import new_output
from dcp_rs.integrations._needs import framework
from dcp_rs.integrations.install import installed
from dcp_rs.options import SaveArguments

#: Lightning is published under two names, with classes of their own: of Fabric, and of PyTorch.
_PACKAGES = {
    "lightning": ("lightning.fabric", "lightning.pytorch"),
    "pytorch_lightning": ("lightning_fabric", "pytorch_lightning"),
}


def _bases(part: int, inner: str, name: str) -> Any:
    """Return a base class that derives from the class of that name in each package in use.

    Args:
        part: 0 for a class of Fabric, 1 for one of PyTorch Lightning.
        inner: the module of the class.
        name: the name of the class.
    """
    used = [package for package in _PACKAGES if package in sys.modules]
    installed_one = next(filter(find_spec, _PACKAGES), "lightning")
    modules = [
        framework(f"{_PACKAGES[package][part]}.{inner}", "lightning")
        for package in used or [installed_one]
    ]
    return type(name, tuple(dict.fromkeys(getattr(module, name) for module in modules)), {})


class DcpRsCheckpointIO(_bases(0, "plugins", "CheckpointIO")):  # type: ignore[misc]
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
        self, *, asynchronous: bool = False, **write_options: Unpack[SaveArguments]
    ) -> None:
        super().__init__()
        check_arguments(save, write_options)
        self._asynchronous = asynchronous
        self._options = write_options
        self._saving: Future[Any] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: StrPath, storage_options: Any = None
    ) -> None:
        """Save to the folder ``path``.

        A file of Lightning's own, or a link, is replaced once the save is complete. The target of a
        link stays.

        Raises:
            TypeError: there are ``storage_options``.
            CheckpointExistsError: the file changed meanwhile. It is still there.
            Exception: as :func:`dcp_rs.save`.
        """
        if storage_options is not None:
            raise TypeError(
                "DcpRsCheckpointIO takes no storage_options: "
                "it takes the arguments of dcp_rs.save when it is made"
            )
        self.wait()
        target = local_path(path)
        if target.is_file() or target.is_symlink():
            with new_output(target, _core.fingerprint(target)) as made:
                save(checkpoint, made, no_dist=True, **self._options)
        elif self._asynchronous:
            self._saving = async_save(checkpoint, target, no_dist=True, **self._options)
        else:
            save(checkpoint, target, no_dist=True, **self._options)

    def load_checkpoint(
        self,
        path: StrPath,
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the checkpoint at ``path``, with tensors in memory of their own.

        Args:
            path: a folder of dcp-rs, or a file of Lightning's own.
            map_location: the device of the tensors. A mapping or a callable, which torch calls for
                each storage, leaves them on the CPU.
            weights_only: as for ``torch.load``. None is True.

        Raises:
            CheckpointNotFoundError: there is no checkpoint. It is a ``FileNotFoundError``.
            UnsafePickleError: a value needs ``weights_only=False``.
        """
        self.wait()
        device = map_location if isinstance(map_location, str | int | torch.device) else "cpu"
        with open_checkpoint(
            path, device=device, weights_only=weights_only is not False
        ) as checkpoint:
            return checkpoint.state_dict(copy=True)

    def remove_checkpoint(self, path: StrPath) -> None:
        """Remove the checkpoint at ``path``, after a save in flight is done."""
        self.wait()
        target = local_path(path)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def teardown(self) -> None:
        """Wait for the save in flight, and raise its error."""
        self.wait()


class DcpRsSharded:
    """A base class before a strategy of Lightning that saves a folder by DCP.

    The strategy then saves and loads with dcp-rs.
    Folders that it wrote before load too.
    """

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save as the strategy does, with dcp-rs."""
        with installed():
            super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load as the strategy does, with dcp-rs."""
        with installed():
            return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]


_FSDP: Any = _bases(1, "strategies", "FSDPStrategy")
_ModelParallel: Any = _bases(1, "strategies", "ModelParallelStrategy")


class DcpRsFSDPStrategy(DcpRsSharded, _FSDP):  # type: ignore[misc]
    """``FSDPStrategy`` with sharded checkpoints of dcp-rs (``state_dict_type="sharded"``)."""


class DcpRsModelParallelStrategy(DcpRsSharded, _ModelParallel):  # type: ignore[misc]
    """``ModelParallelStrategy`` with distributed checkpoints of dcp-rs."""
