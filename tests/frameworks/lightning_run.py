"""A training run with Lightning: `lightning_run.py HOW FOLDER EPOCHS [CHECKPOINT]`. Its checkpoints and its end state go to FOLDER."""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from dcp_rs.integrations.lightning import (
    DcpRsCheckpointIO,
    DcpRsFSDPStrategy,
    DcpRsModelParallelStrategy,
)


class Net(lightning.LightningModule):
    def __init__(
        self, width: int = 16, names: tuple[str, ...] = ("a", "b"), nothing: dict | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        self.layers = torch.nn.Sequential(
            *(torch.nn.Linear(width, width) for _ in range(3)), torch.nn.Dropout(0.2)
        )

    def configure_model(self) -> None:
        if "ModelParallel" in type(self.trainer.strategy).__name__:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean()
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        }

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        # The order of batches and of dropout is drawn from it.
        checkpoint["odd"] = {
            "empty": {},
            3: {(1, 2): [], None: 1.5},
            "list": [{}, 1],
            "rng": torch.get_rng_state(),
        }

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        odd = dict(checkpoint["odd"])
        self.rng = odd.pop("rng")
        assert odd == {"empty": {}, 3: {(1, 2): [], None: 1.5}, "list": [{}, 1]}, odd
        assert checkpoint["hyper_parameters"] == {
            "width": 16,
            "names": ("a", "b"),
            "nothing": {},
        }, checkpoint

    def on_train_batch_start(self, *_: object) -> None:
        if hasattr(self, "rng"):
            torch.set_rng_state(self.rng)
            del self.rng


def main(how: str, folder: Path, epochs: int, checkpoint: str | None = None) -> None:
    lightning.seed_everything(0)
    plugins: list = []
    strategy: object = "auto"
    devices = 1
    if how.startswith("ddp"):
        strategy, devices = "ddp", 2
    if how.endswith("io"):
        plugins = [DcpRsCheckpointIO()]
    elif how.endswith("background"):
        plugins = [DcpRsCheckpointIO(asynchronous=True)]
    elif how.endswith("wrapped"):
        plugins = [AsyncCheckpointIO(DcpRsCheckpointIO())]
    elif how == "parallel-stock":
        strategy, devices = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), 2
    elif how == "parallel":
        strategy, devices = (
            DcpRsModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            2,
        )
    elif how == "fsdp":
        strategy, devices = DcpRsFSDPStrategy(state_dict_type="sharded"), 2
    net = Net(nothing={})
    kept = ModelCheckpoint(
        dirpath=folder / "kept",
        save_top_k=2,
        monitor="epoch",
        mode="max",
        save_last=True,
        filename="{epoch}",
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        plugins=plugins,
        max_epochs=epochs,
        callbacks=[kept],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, generator=torch.Generator())
    trainer.fit(net, loader, ckpt_path=checkpoint)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = get_model_state_dict(trainer.strategy.model, options=options)
    optimizer = get_optimizer_state_dict(
        trainer.strategy.model, trainer.optimizers[0], options=options
    )
    if trainer.is_global_zero:
        result = {
            "model": model,
            "optimizer": optimizer,
            "losses": net.losses,
            "best": kept.best_model_path,
        }
        torch.save(result, folder / "end.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
