"""one_process.py made data-parallel: the five lines marked (+). Run it with

torchrun --nproc-per-node 4 examples/own_script.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import poseidon  # (+)

BATCH = 64

session = poseidon.init()  # (+)
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16
labels = torch.tensor(labels)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
train, test = order[:1500], order[1500:]

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session.distribute(model, optimizer, comm="hybrid")  # (+)

for _ in range(10):
    for batch in train[torch.randperm(len(train))].split(BATCH):
        batch = batch.tensor_split(session.world_size)[session.rank]  # (+) this rank's rows of the global batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()

with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
print(f"rank {session.rank}: loss of its rows {loss.item():.4f}, accuracy {accuracy:.3f}")  # (+)
