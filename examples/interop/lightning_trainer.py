"""Lightning's Trainer: a LightningModule, metrics averaged over the processes, a checkpoint at the end.

    torchrun --nproc-per-node 2 examples/interop/lightning_trainer.py
    photinus run --nproc-per-node 2 examples/interop/lightning_trainer.py --backend gloo

The backend is an argument of the strategy: DDPStrategy(process_group_backend="photinus").
"""

import os
import tempfile

import lightning
import torch
from digits import Network, check_world_size, digits, options, report
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

Batch = tuple[torch.Tensor, torch.Tensor]


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def training_step(self, batch: Batch) -> torch.Tensor:
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        report(epoch=self.current_epoch, loss=self.trainer.callback_metrics["loss"].item())

    def validation_step(self, batch: Batch) -> None:
        right = self.network(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", right.float().mean(), on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.003)


def main() -> None:
    args = options(__doc__).parse_args()
    train_set, valid_set = digits()
    lightning.seed_everything(0)
    with tempfile.TemporaryDirectory(prefix="lightning-") as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy=DDPStrategy(process_group_backend=args.backend),
            max_epochs=args.epochs,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        check_world_size(trainer.world_size)
        trainer.fit(Digits(), DataLoader(train_set, batch_size=16, shuffle=True), DataLoader(valid_set, batch_size=60))
        report(**{name: value.item() for name, value in trainer.callback_metrics.items()})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
