"""Compare a small ViT with a small ResNet on scikit-learn's digits: ``rota run examples/vision.py``."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import rota
from rota.testing.models import ResNet, ViT

MODELS = {"vit": lambda: ViT(width=64, depth=3), "resnet": lambda: ResNet(width=24, depth=3)}


def data() -> rota.Data:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, valid = order[:-360], order[-360:]
    return rota.Data(
        train=TensorDataset(images[train], labels[train]),
        valid=TensorDataset(images[valid], labels[valid]),
        batch_size=32,
        valid_batch_size=120,
    )


def loss(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    images, labels = batch
    logits = model(images)
    return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}


def task(model: str, lr: float) -> rota.Task:
    return rota.Task(
        name=f"{model}-lr{lr:g}",
        model=MODELS[model],
        data=data,
        loss=loss,
        optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=lr),
        epochs=8,
        valid_every=45,
    )


sweep = rota.grid(task, model=["vit", "resnet"], lr=[3e-3, 1e-3])

if __name__ == "__main__":
    result = rota.run(sweep)
    print(result.table())
    best = result.best("valid/accuracy", mode="max")
    print(f"\nbest  {best.name}: {best.metrics['valid/accuracy']:.1%} of the validation digits are right")
    print(f"report  {result.report_path}")
