"""Learn which points lie inside a circle: like `one_device.py`, on one device or many.

python train.py runs/one
photinus run --nproc-per-node 2 train.py runs/two
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import photinus

photinus.init(seed=0)
points = torch.rand(5000, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.7).long()
train_set = TensorDataset(points[:4000], inside[:4000])
valid_set = TensorDataset(points[4000:], inside[4000:])

model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

model, optimizer = photinus.wrap(model, optimizer)
out = sys.argv[1]
loop = photinus.Loop(model, optimizer, train_set, batch_size=64, epochs=15, out=out)
for inputs, targets in loop:
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loop.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if loop.epoch_ended:
        accuracy = photinus.evaluate(model, valid_set, lambda y, t: y.argmax(1) == t)
        loop.log(accuracy=accuracy)
