"""Learn to read handwritten digits, shifted at random: a convolutional network, on one device or many.

python images.py runs/one
photinus run --nproc-per-node 2 images.py runs/two

The 1797 digits come inside scikit-learn. They are enlarged to 32x32 pixels: enough work for two processes.
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


photinus.init(seed=0)
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
images, digits = nn.functional.interpolate(images, scale_factor=4), torch.tensor(data.target)  # [1797, 1, 32, 32]
order = torch.randperm(len(images))
train, valid = order[:1437], order[1437:]

model = nn.Sequential(
    *(nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # [n, 16, 16, 16]
    *(nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # [n, 32, 8, 8]
    *(nn.Flatten(), nn.Linear(32 * 8 * 8, 10)),
)
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
