"""Learn which points lie inside a circle: plain PyTorch, on one device. `train.py` does it on many devices."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
points = torch.rand(5000, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.7).long()
train_set = TensorDataset(points[:4000], inside[:4000])
valid_set = TensorDataset(points[4000:], inside[4000:])

model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for epoch in range(15):
    for inputs, targets in DataLoader(train_set, batch_size=64, shuffle=True):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(epoch, (model(points[4000:]).argmax(1) == inside[4000:]).float().mean())
