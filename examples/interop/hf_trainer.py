"""Hugging Face's Trainer: a small GPT-2, made from a configuration (nothing is downloaded), learns to spell numbers.

    torchrun --nproc-per-node 2 examples/interop/hf_trainer.py
    photinus run --nproc-per-node 2 examples/interop/hf_trainer.py --backend gloo

How to choose the backend: on GPUs by TrainingArguments(ddp_backend="photinus"). With `use_cpu=True` Accelerate gets the
name, and accepts only gloo and mpi there. But it uses a group that exists: create it first, as here. Without
`use_cpu=True` on a machine without GPUs each process would train its own model.
"""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from digits import check_world_size, options, report
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class Spelling(Dataset):
    """Lines like "407 is four zero seven.", as bytes."""

    length = 32

    def __init__(self, numbers: range) -> None:
        self.lines = [f"{n} is {' '.join(WORDS[int(digit)] for digit in str(n))}." for n in numbers]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        text = self.lines[i].encode()[: self.length]
        ids = torch.tensor([*text, *bytes(self.length - len(text))])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.where(ids != 0, -100)}


class Report(TrainerCallback):
    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        report(**{name: value for name, value in logs.items() if name.endswith(("loss", "grad_norm"))})


def main() -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(args.backend)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128,
            n_positions=Spelling.length,
            n_embd=32,
            n_layer=2,
            n_head=2,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    with tempfile.TemporaryDirectory(prefix="hf-trainer-") as own_folder:
        folder = [own_folder]
        dist.broadcast_object_list(folder, 0)
        arguments = TrainingArguments(
            folder[0],
            use_cpu=True,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=0.005,
            logging_steps=5,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            seed=0,
        )
        check_world_size(arguments.world_size)
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Spelling(range(0, 1000, 2)),
            eval_dataset=Spelling(range(1, 301, 2)),
            callbacks=[Report()],
        )
        trainer.train()
        dist.barrier()  # before rank 0's folder goes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
