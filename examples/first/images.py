"""Learn to read handwritten digits, shifted at random: a recurrent network, on one device or many.

python images.py runs/one
photinus run --nproc-per-node 2 images.py runs/two

The 1797 digits come inside scikit-learn, and are enlarged to 32x32 pixels. The network takes one row after the other:
many small operations, which a second thread hardly makes faster. Two processes compute half of the images each.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import photinus


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Each image is shifted by up to 4 pixels, otherwise in each epoch, and alike on any number of processes."""

    def __init__(self, images: Tensor, digits: Tensor) -> None:
        self.images, self.digits = images, digits

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-4, 5, (2,)).tolist()
        return self.images[index].roll((down, right), (1, 2)), self.digits[index]


class Rows(nn.Module):
    """Reads an image row by row, from above."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(32, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.gru(images.squeeze(1))  # [n, 32 rows, 128]
        scores: Tensor = self.head(states[:, -1])
        return scores


photinus.init(seed=0)
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
images, digits = nn.functional.interpolate(images, scale_factor=4), torch.tensor(data.target)  # [1797, 1, 32, 32]
order = torch.randperm(len(images))
train, valid = order[:1437], order[1437:]

model = Rows()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

model, optimizer = photinus.wrap(model, optimizer)
train_set, valid_set = Shifted(images[train], digits[train]), TensorDataset(images[valid], digits[valid])
loop = photinus.Loop(model, optimizer, train_set, batch_size=128, epochs=20, out=sys.argv[1])
for inputs, targets in loop:
    loop.backward(nn.functional.cross_entropy(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
    if loop.epoch_ended:
        loop.log(accuracy=photinus.evaluate(model, valid_set, lambda scores, targets: scores.argmax(1) == targets))
