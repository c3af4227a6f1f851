"""FSDP2 by accelerate, or by the Trainer of transformers: `accelerate_run.py HOW FOLDER STEPS [CHECKPOINT]`. Losses and weights go to FOLDER.

accelerate has FSDP for accelerators alone. That ranks of CPUs have one is the one thing that is
made up here; the process group is gloo.
"""

import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, set_seed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import dcp_rs

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.2}
SAVE_EVERY = 2


def count_as_accelerators() -> PartialState:
    ranks = PartialState(cpu=True)
    ranks.distributed_type = DistributedType.MULTI_GPU
    return ranks


def make_model() -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **HEADS, attn_implementation="eager")
    )


class Text(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.ids = torch.randint(
            SIZES["vocab_size"], (32, 8), generator=torch.Generator().manual_seed(1)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict:
        return {"input_ids": self.ids[at], "labels": self.ids[at]}


def by_hand(folder: Path, steps: int, checkpoint: str | None) -> tuple[object, list[float]]:
    wrap = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"],
    }
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrap)
    count_as_accelerators()
    accelerator = Accelerator(fsdp_plugin=plugin)
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    loader = torch.utils.data.DataLoader(Text(), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    begin = 0 if checkpoint is None else int(Path(checkpoint).name.removeprefix("step-"))
    # Before the random state is restored, from which a loader draws when it is begun.
    batches = list(islice(accelerator.skip_first_batches(loader, begin), steps - begin))
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
    losses = []
    model.train()
    for step, batch in enumerate(batches, begin + 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % SAVE_EVERY == 0:
            accelerator.save_state(str(folder / f"step-{step}"))
    return model, losses


def by_trainer(folder: Path, steps: int, checkpoint: str | None) -> tuple[object, list[float]]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        fsdp=True,
        fsdp_config={
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
        max_steps=8,
        save_steps=SAVE_EVERY,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    count_as_accelerators()  # the arguments began the state anew
    transformers.set_seed(0)

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            if state.global_step == steps:
                control.should_training_stop = True

    trainer = transformers.Trainer(
        make_model(), arguments, train_dataset=Text(), callbacks=[Stop()]
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(how: str, folder: Path, steps: int, checkpoint: str | None = None) -> None:
    run = by_trainer if how.startswith("trainer") else by_hand
    with dcp_rs.installed() if how.endswith("rs") else nullcontext():
        model, losses = run(folder, steps, checkpoint)
    weights = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    ranks = PartialState()
    if ranks.is_main_process:
        torch.save({"losses": losses, "model": weights}, folder / "end.pt")
    ranks.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
