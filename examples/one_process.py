"""An ordinary training script: one process, no Poseidon. own_script.py is the same on several workers."""

import torch
from sklearn.datasets import load_digits
from torch import nn

BATCH = 64

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16
labels = torch.tensor(labels)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
train, test = order[:1500], order[1500:]

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for _ in range(10):
    for batch in train[torch.randperm(len(train))].split(BATCH):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()

with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
print(f"loss {loss.item():.4f}, accuracy {accuracy:.3f}")
