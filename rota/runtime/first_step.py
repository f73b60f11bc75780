"""The first step of a task, with its model and batch made as a worker makes them."""

from __future__ import annotations

import torch

from rota.errors import CaptureError
from rota.graph.graph import Graph
from rota.runtime.choose import graph_of
from rota.runtime.training import Training
from rota.runtime.user_code import calling
from rota.task import Task


def first_graph(task: Task) -> Graph:
    """The graph of the task's first step."""
    try:
        return first_step(task)[1]
    except CaptureError as error:
        raise CaptureError(f"{error}; rota can still train it on one device, as it is") from error


def first_step(task: Task) -> tuple[Training, Graph]:
    """The task and the graph of its first step, with its model and batch made as a worker makes them."""
    training = Training(task, device=torch.device("cpu"))
    with calling("reading the training data"):
        batch, _ = training.cursor.next()
    return training, graph_of(training.parts, batch)
