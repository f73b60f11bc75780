"""rota trains many large PyTorch models on the devices you have."""

from rota.cluster import Cluster, Device, local
from rota.errors import InputError, RotaError
from rota.execute.run import run
from rota.result import Result, TaskResult, open_run
from rota.sweep import Sweep, grid
from rota.task import Data, Task

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Data",
    "Device",
    "InputError",
    "Result",
    "RotaError",
    "Sweep",
    "Task",
    "TaskResult",
    "grid",
    "local",
    "open_run",
    "run",
]
