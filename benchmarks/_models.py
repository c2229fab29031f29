"""Data and models that more than one benchmark or study uses."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DATA = Path(os.environ.get("PYRO_SYM_DATA", Path(__file__).parents[1] / ".." / "shared" / "data"))
Model = Callable[..., Any]


def data_file(name: str) -> Path:
    """A file of data, or an end that says where it is looked for."""
    path = DATA / name
    if not path.exists():
        raise SystemExit(f"{path} is missing: set PYRO_SYM_DATA to the folder that has it")
    return path


def pima_table() -> Tensor:
    """Rows of eight columns and a label, of shape (768, 9)."""
    return torch.tensor(np.loadtxt(data_file("pima-indians-diabetes.csv"), delimiter=",", dtype=np.float32))


def pima_data() -> tuple[Tensor, Tensor]:
    """Columns, standardised, of shape (768, 8), and labels."""
    table = pima_table()
    columns = table[:, :8]
    return (columns - columns.mean(0)) / columns.std(0), table[:, 8]


def pima_model(batch: int | None = 32) -> Model:
    """Logistic regression, on minibatches or on all rows."""
    x, y = pima_data()

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(8), 1.0).to_event(1))
        with pyro.plate("rows", len(x), subsample_size=batch) as rows:
            pyro.sample("y", dist.Bernoulli(logits=x[rows] @ w), obs=y[rows])

    return model


def mnist() -> tuple[Tensor, Tensor]:
    """Images, of shape (10000, 784), and digits."""
    with gzip.open(data_file("mnist-10k-images-idx3-ubyte.gz")) as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(data_file("mnist-10k-labels-idx1-ubyte.gz")) as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return torch.tensor(images / 255.0, dtype=torch.float), torch.tensor(labels, dtype=torch.long)


def network(width: int = 128) -> nn.Sequential:
    """784-width-10 units, for those that take a module."""
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def network_model(width: int = 128, data: tuple[Tensor, Tensor] | None = None) -> Model:
    """The same network as a plain Pyro model, 128 rows of MNIST, or of other data, a step."""
    x, y = mnist() if data is None else data
    shapes = {"w1": (width, 784), "b1": (width,), "w2": (10, width), "b2": (10,)}

    def model() -> None:
        w1, b1, w2, b2 = (
            pyro.sample(name, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
            for name, shape in shapes.items()
        )
        with pyro.plate("rows", len(x), subsample_size=128) as rows:
            logits = F.linear(torch.relu(F.linear(x[rows], w1, b1)), w2, b2)
            pyro.sample("y", dist.Categorical(logits=logits), obs=y[rows])

    return model
