"""rota trains many large PyTorch models on the devices you have."""

from typing import TYPE_CHECKING, Any

from rota.cluster import Cluster, Device, local
from rota.errors import InputError, RotaError
from rota.execute.clusters import ray
from rota.execute.run import run
from rota.result import Result, TaskResult, open_run
from rota.sweep import Sweep, grid
from rota.task import Data, Task

if TYPE_CHECKING:
    from rota import strategies
    from rota.graph.capture import capture
    from rota.graph.rules import register_rule
    from rota.plan.plan import Plan
    from rota.strategies import strategy

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Data",
    "Device",
    "InputError",
    "Plan",
    "Result",
    "RotaError",
    "Sweep",
    "Task",
    "TaskResult",
    "capture",
    "grid",
    "local",
    "open_run",
    "ray",
    "register_rule",
    "run",
    "strategies",
    "strategy",
]

_NEEDS_TORCH = {
    "Plan": "rota.plan.plan",
    "capture": "rota.graph.capture",
    "register_rule": "rota.graph.rules",
    "strategies": "rota.strategies",
    "strategy": "rota.strategies",
    "testing": "rota.testing",
}


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: importing torch takes seconds."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'rota' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_NEEDS_TORCH[name])
    return module if name in ("strategies", "testing") else getattr(module, name)
