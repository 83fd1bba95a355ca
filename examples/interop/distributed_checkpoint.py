"""torch.distributed.checkpoint: sharded saving, loading at another number of processes, saving in the background.

    torchrun --nproc-per-node 2 examples/interop/distributed_checkpoint.py --folder runs/dcp save
    torchrun --nproc-per-node 2 examples/interop/distributed_checkpoint.py --folder runs/dcp save --in-background
    torchrun --nproc-per-node 3 examples/interop/distributed_checkpoint.py --folder runs/dcp load

`save` trains a model that fully_shard has split, saves model and optimizer, and prints the loss on the held-out set;
`load` prints the same loss, with any number of processes, and continues training.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digits import Network, check_world_size, digits, options, report
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset


def train(model: nn.Module, optimizer: torch.optim.Optimizer, train_set: TensorDataset, steps: int) -> None:
    images, targets = (t.tensor_split(dist.get_world_size())[dist.get_rank()] for t in train_set.tensors)
    for _ in range(steps):
        cross_entropy(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def held_out_loss(model: nn.Module, valid_set: TensorDataset) -> float:
    images, targets = valid_set.tensors
    with torch.no_grad():
        return cross_entropy(model(images), targets).item()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("what", choices=["save", "load"])
    parser.add_argument("--folder", required=True, help="the checkpoint")
    parser.add_argument("--in-background", action="store_true", help="go on training while the checkpoint is written")
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    check_world_size(dist.get_world_size())

    train_set, valid_set = digits()
    model = Network(seed=0 if args.what == "save" else 1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    if args.what == "save":
        train(model, optimizer, train_set, steps=20 * args.epochs)
        report(held_out_loss=held_out_loss(model, valid_set))
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        if args.in_background:
            # a group of its own: the thread that writes must not call collectives between those of the training
            writing = dcp.async_save(state, checkpoint_id=args.folder, process_group=dist.new_group())
            train(model, optimizer, train_set, steps=20)  # must not reach the checkpoint any more
            writing.result()
        else:
            dcp.save(state, checkpoint_id=args.folder)
    else:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=args.folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        report(held_out_loss=held_out_loss(model, valid_set))
        train(model, optimizer, train_set, steps=20)
        report(later_loss=held_out_loss(model, valid_set))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
