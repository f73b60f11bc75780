"""Recipes that make plans, one file each; `base.py` finds them by name."""

from rota.strategies.base import find, names, strategy
from rota.strategies.coshard import coshard
from rota.strategies.dap import dap
from rota.strategies.data import data
from rota.strategies.pipeline import pipeline
from rota.strategies.single import single
from rota.strategies.tensor import tensor
from rota.strategies.zero import zero

__all__ = ["coshard", "dap", "data", "find", "names", "pipeline", "single", "strategy", "tensor", "zero"]
