"""Recipes that make plans, one file each; `base.py` finds them by name."""

from rota.strategies.auto import auto
from rota.strategies.base import find, names, strategy
from rota.strategies.coshard import coshard
from rota.strategies.dap import dap
from rota.strategies.data import data
from rota.strategies.interlaced import interlaced
from rota.strategies.pipeline import pipeline
from rota.strategies.pool import pool
from rota.strategies.recycled import recycled
from rota.strategies.single import single
from rota.strategies.spill import spill
from rota.strategies.tensor import tensor
from rota.strategies.wrapper import torch_ddp, torch_fsdp2
from rota.strategies.zero import zero

__all__ = [
    "auto",
    "coshard",
    "dap",
    "data",
    "find",
    "interlaced",
    "names",
    "pipeline",
    "pool",
    "recycled",
    "single",
    "spill",
    "strategy",
    "tensor",
    "torch_ddp",
    "torch_fsdp2",
    "zero",
]
