"""torchtitan: a checkpoint manager that saves, finds and loads checkpoints of this package."""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from dcp_rs._log import log as _log
from dcp_rs.api import async_save, load, save
from dcp_rs.conversion import convert
from dcp_rs.engine.ranks import RankGroup
from dcp_rs.errors import UnsupportedError
from dcp_rs.integrations._needs import framework
from dcp_rs.steps.folder_store import FolderStepStore
from dcp_rs.steps.step_store import MAY_BE_WHOLE, Step
from dcp_rs.transfer.buffers import shared_blocks

_checkpointer: Any = framework("torchtitan.components.checkpointer", "torchtitan")
_tools: Any = framework("torchtitan.tools.utils", "torchtitan")

_MODEL: str = _checkpointer.MODEL
_Mode: Any = _checkpointer.AsyncMode
#: The files by which torchtitan recognizes a step that can be loaded.
_STOCK_FILES = (".metadata", "model.safetensors.index.json")


class DcpRsCheckpointManager(_checkpointer.CheckpointManager):  # type: ignore[misc]
    """torchtitan's ``CheckpointManager`` with checkpoints of dcp-rs.

    Set ``config.checkpoint = DcpRsCheckpointManager.Config(enable=True)``. Steps of torchtitan's
    own manager load too, and so do Hugging Face folders, without torchtitan's reader. A step
    counts once it is committed and whole. The log ``dcp_rs`` says why others are not used. If
    nothing tells whether a newer step is whole, that is an error. A failed save leaves committed
    steps as they are. A step is renamed before it is removed, so a kill leaves no half of one.

    ``"async"`` copies the state to host memory before it returns, and writes in a thread.
    ``"async_with_pinned_mem"`` also writes in a thread, from memory that is pinned and kept for
    the next save. The copy then goes on after the call returns, and torchtitan waits for it before
    the optimizer steps (``maybe_wait_for_staging``).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_checkpointer.CheckpointManager.Config):  # type: ignore[misc]
        """The fields of torchtitan's, and some of those of readers and writers."""

        threads: int | None = None
        """Threads that copy in a load, and writes in flight of a save. Default: chosen for each."""

        fsync: bool = True
        """Make a step durable before it counts as saved."""

        verify: Literal["auto"] | bool = "auto"
        """Check loaded data against its digests; "auto": blocks that are read whole from a disk."""

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if not self.enable:
            return
        self._write_options: Any = {"threads": config.threads, "fsync": config.fsync}
        self._read_options: Any = {"threads": config.threads, "verify": config.verify}
        self._root = FolderStepStore(self.folder)
        self._saved_last = ""
        self.stager: Any
        if self.async_mode == _Mode.ASYNC_WITH_PINNED_MEM:
            self.stager = shared_blocks  # without one, torchtitan makes one of torch's

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,  # torchtitan's signature
        to_hf: bool = False,
    ) -> Any:
        """Save as torchtitan's manager does, with its result for each mode.

        Raises:
            Exception: as :func:`dcp_rs.save` and :func:`dcp_rs.async_save`.
        """
        self._saved_last = Path(checkpoint_id).name
        result: Any = None
        if to_hf:
            self._export(state_dict, checkpoint_id)
        elif async_mode == _Mode.ASYNC:
            result = async_save(
                state_dict, checkpoint_id, process_group=self.pg, **self._write_options
            )
        elif async_mode == _Mode.ASYNC_WITH_PINNED_MEM:
            # Not at the top: torch 2.8 has none, on which torchtitan does not run.
            from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

            saving: Any = async_save(
                state_dict,
                checkpoint_id,
                process_group=self.pg,
                async_staging=True,  # torchtitan waits before the optimizer steps
                max_copies=1,
                **self._write_options,
            )
            result = AsyncSaveResponse(staging_completion=saving.staged, upload_completion=saving)
        else:
            save(state_dict, checkpoint_id, **self._write_options)
        if enable_garbage_collection:
            _tools.GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def _export(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        """Save on all ranks, then write a Hugging Face folder on the first, in bounded memory."""
        target, ranks = Path(checkpoint_id), RankGroup()
        # dcp_rs.clean removes a folder of this name, if this process is killed.
        sharded = ranks.broadcast(
            lambda: target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        )
        try:
            hf_state_dict = ranks.run(lambda: self.sd_adapter.to_hf(state_dict))
            save(hf_state_dict, sharded, **(self._write_options | {"fsync": False}))
            files = max((self.sd_adapter.fqn_to_index_mapping or {}).values(), default=1)
            ranks.broadcast(
                lambda: (
                    convert(
                        sharded,
                        target,
                        to="safetensors",
                        shards=files,
                        overwrite=True,
                        **self._write_options,
                    ).bytes
                )
            )
        finally:
            if ranks.is_coordinator:
                shutil.rmtree(sharded, ignore_errors=True)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load into the state dict and the model, as torchtitan's manager does.

        Raises:
            Exception: as :func:`dcp_rs.load`.
        """
        if from_hf:
            hf_state_dict = self.sd_adapter.to_hf(state_dict)
            # torchtitan's readers of quantized weights decode to float32, too.
            dequantize = torch.float32 if from_quantized else False
            load(hf_state_dict, checkpoint_id, dequantize=dequantize, **self._read_options)
            self.states[_MODEL].load_state_dict(self.sd_adapter.from_hf(hf_state_dict))
            return
        load(state_dict, checkpoint_id, **self._read_options)
        if _MODEL in self.states:
            self.states[_MODEL].load_state_dict(state_dict)

    # Releases of torchtitan after 0.3.0 pass the arguments of the next two that have defaults.

    def _find_load_step(self, folder: str = "", max_step: int | None = None) -> int:
        """Find the newest step that can be loaded, of dcp-rs or of torchtitan's own manager.

        Returns:
            Its number; -1 if there is none.

        Raises:
            UnsupportedError: a newer step may be whole, and nothing shows whether it is.
            OSError: a newer step cannot be read, and may be whole.
        """
        root = FolderStepStore(folder) if folder else self._root
        for found in root.newest():
            if max_step is not None and found.number > max_step:
                continue
            is_stock = any((found.path / name).is_file() for name in _STOCK_FILES)
            if isinstance(found, Step) or is_stock:
                return found.number
            # torch's own save stores .metadata last.
            is_unfinished_stock = any(found.path.glob("*.distcp"))
            if found.kind in MAY_BE_WHOLE and not is_unfinished_stock:
                msg = (
                    f"{root.path} cannot be resumed: {found}. Nothing tells whether "
                    f"{found.path.name} is whole. To resume from another step, "
                    "set checkpoint.load_step, or remove that folder"
                )
                raise UnsupportedError(msg, path=found.path)
            _log.warning("skipped %s", found)
        return -1

    def _purge_stale_checkpoints(self, *, saving_step: int | None = None, **_: Any) -> None:
        """Remove old steps, but the newest ``keep_latest_k`` and those of ``purge_exempt``.

        The step that is being saved counts as one of the newest, even without a folder. If none of
        the newest is whole yet, the newest whole step stays, too.
        """
        if not self._should_purge():
            return
        found = list(self._root.newest())
        saving = self._saved_last if saving_step is None else f"step-{saving_step}"
        kept = self.keep_latest_k - (saving not in {"", *(step.path.name for step in found)})
        keep, old = found[:kept], found[kept:]
        if not any(isinstance(step, Step) for step in keep):
            last = next((step for step in old if isinstance(step, Step)), None)
            old = [step for step in old if step is not last]
        is_exempt = getattr(self, "_is_purge_exempt", lambda _: False)
        for step in old:
            if not is_exempt(step.number):
                self._root.set_aside(step.number)
        for path in self._root.aside(self._root.names()):  # also those that a killed process left
            self.purge_queue.put(os.fspath(path))

    def _close(self) -> None:
        stager, self.stager = getattr(self, "stager", None), None
        super()._close()
        if stager is not None:
            stager.clear()
