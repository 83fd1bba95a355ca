"""Hugging Face Accelerate: gradient accumulation, metrics over all processes, saving and loading a checkpoint.

    torchrun --nproc-per-node 2 examples/interop/accelerate_digits.py
    photinus run --nproc-per-node 2 examples/interop/accelerate_digits.py --backend gloo

How to choose the backend: on GPUs by `InitProcessGroupKwargs(backend="photinus")`. With `cpu=True` Accelerate accepts
only the names gloo and mpi there ("Your assigned backend photinus is not available, please use gloo"), but it uses a
group that exists: create it first, as here. Without `cpu=True` each process would train its own model.
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from digits import Network, check_world_size, digits, options, report
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(args.backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    check_world_size(accelerator.num_processes)

    train_set, valid_set = digits()
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.5)
    set_seed(0)
    model, optimizer, schedule, train_loader, valid_loader = accelerator.prepare(
        model,
        optimizer,
        schedule,
        DataLoader(train_set, batch_size=16, shuffle=True),
        DataLoader(valid_set, batch_size=64),
    )

    for epoch in range(args.epochs):
        total = torch.zeros(())
        for images, targets in train_loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            total += loss.detach()
        report(epoch=epoch, loss=accelerator.reduce(total, "mean").item() / len(train_loader))

    with tempfile.TemporaryDirectory(prefix="accelerate-") as own_folder:
        folder = broadcast_object_list([own_folder])  # rank 0's
        accelerator.save_state(folder[0])
        accelerator.wait_for_everyone()  # rank 0 writes the model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(folder[0])
        accelerator.wait_for_everyone()

    right = []
    for images, targets in valid_loader:
        with torch.no_grad():
            # gives each sample once, though the last batch is padded to be equal on all ranks
            right.append(accelerator.gather_for_metrics(model(images).argmax(1) == targets))
    report(accuracy=torch.cat(right).float().mean().item(), samples=len(torch.cat(right)))
    accelerator.end_training()


if __name__ == "__main__":
    main()
