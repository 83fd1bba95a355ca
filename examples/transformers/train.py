"""Train a Llama made from a configuration on Python code: Hugging Face datasets, W&B offline, nothing is downloaded."""
# pip install transformers datasets wandb; photinus run --nproc-per-node 2 examples/transformers/train.py runs/llama

import sys
from pathlib import Path

import torch
from datasets import load_dataset
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import photinus

CONTEXT, tokenizer = 64, ByT5Tokenizer()  # its tokens are bytes


def windows(rows):
    tokens = tokenizer("\n".join(rows["text"]))["input_ids"]
    cut = [tokens[i : i + CONTEXT] for i in range(0, len(tokens) - CONTEXT + 1, CONTEXT)]
    return {"input_ids": cut, "labels": cut}


def read(files):
    lines = load_dataset("text", data_files=files, split="train", streaming=True)
    return lines.map(windows, batched=True, remove_columns=["text"]).with_format("torch")


photinus.init(seed=0)
*files, last = sorted(map(str, Path(torch.__path__[0], "nn", "modules").glob("[a-l]*.py")))
batches = photinus.loader(read(files), batch_size=8, shards=4, shuffle=500)
sizes = {"vocab_size": 384, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
average = photinus.Average(model, get_ema_multi_avg_fn(0.9))
stopping = photinus.EarlyStopping("-valid_loss", patience=2, min_delta=0.2)
report = photinus.Reporting(loggers=[photinus.Wandb(project="llama", mode="offline")])
save, out = photinus.Saving(best="-valid_loss"), sys.argv[1]
options = {"accumulate": 4, "precision": "bfloat16", "callbacks": [average, stopping], "save": save, "report": report}
trainer = photinus.Trainer(model, optimizer, steps=500, validate_every_steps=10, out=out, **options)
trainer.fit(batches, list(read([last]).take(200)))
