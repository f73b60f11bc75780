"""Placeholder."""

from rota.plan.program import Program


def check(program: Program) -> None: ...
def check_fits(program: Program, memory_bytes: int) -> None: ...
