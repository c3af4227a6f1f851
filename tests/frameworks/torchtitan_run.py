"""torchtitan's trainer and its smallest Llama: `torchtitan_run.py HOW FOLDER STEPS [OPTIONS OF TORCHTITAN...]`. What it ends with goes to FOLDER.

torchtitan asks for an accelerator. What is made up here: the CPU counts as one, with a name and
memory of its own, and attention, which torch's ``flex_attention`` cannot train on a CPU, is dense
under the same mask. Text and tokenizer are small ones.
"""

import json
import os
import sys
import types
from pathlib import Path

os.environ["TORCH_COMPILE_DISABLE"] = "1"

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *_: "CPU"
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34)
torch.cpu.memory_stats, torch.cpu.current_device = (lambda *_: {}), (lambda: 0)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None

from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import ConfigManager
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from dcp_rs.integrations.torchtitan import DcpRsCheckpointManager

WORDS = 64


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: object
) -> tuple[torch.Tensor, None]:
    mask = create_mask(
        given["block_mask"].mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu"
    )
    out = scaled_dot_product_attention(
        q, k, v, mask, scale=given["scale"], enable_gqa=given["enable_gqa"]
    )
    return out, None


FlexAttention._compiled_flex_attn = staticmethod(attend)


def assets(folder: Path) -> Path:
    """A tokenizer, and text."""
    if not folder.exists():
        (folder / "text").mkdir(parents=True)
        vocabulary = {f"w{i}": i for i in range(WORDS)} | {
            "[UNK]": WORDS,
            "<s>": WORDS + 1,
            "</s>": WORDS + 2,
        }
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["<s>", "</s>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
        )
        lines = [
            {"text": " ".join(f"w{(i * i + 7 * j) % WORDS}" for j in range(100))}
            for i in range(200)
        ]
        (folder / "text" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def llama(how: str) -> Trainer.Config:
    """The configuration of a run: the three lines that change are the manager's."""
    config = llama3_debugmodel()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
    config.training.seq_len, config.training.local_batch_size = 32, 2
    config.training.mixed_precision_param = "float32"
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = None
    config.debug.seed = 0
    config.validator.enable = False
    manager = CheckpointManager if how == "stock" else DcpRsCheckpointManager
    config.checkpoint = manager.Config(
        enable=True, interval=2, keep_latest_k=2, last_save_model_only=False
    )
    return config


stock, rs = (lambda: llama("stock")), (lambda: llama("rs"))


def main(how: str, folder: Path, steps: int, *options: str) -> None:
    here = assets(folder / f"assets-{os.environ['RANK']}")
    arguments = [
        "--module",
        "torchtitan_run",
        "--config",
        how,
        "--dump_folder",
        str(folder),
        *options,
    ]
    arguments += ["--hf_assets_path", str(here), "--dataloader.dataset_path", str(here / "text")]
    config = ConfigManager().parse_args([*arguments, "--training.steps", "8"])
    losses: list[float] = []

    class Watched(Trainer):
        def should_continue_training(self) -> bool:
            return self.step < steps

        def forward_backward_step(self, **given: object) -> torch.Tensor:
            loss = super().forward_backward_step(**given)
            losses.append(loss.item())
            return loss

    trainer = Watched(config)
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    trainer.train()
    model = trainer.model_parts[0].state_dict()
    model = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.items()
    }
    trainer.checkpointer.maybe_wait_for_saving()
    trainer.close()
    rank = torch.distributed.get_rank()
    torch.save({"losses": losses, "model": model, "step": trainer.step}, folder / f"end-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
