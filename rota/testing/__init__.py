"""What rota's own tests, and the authors of plug-ins, test with."""

from rota.testing.rules import check_op, check_rule
from rota.testing.techniques import check_technique

__all__ = ["check_op", "check_rule", "check_technique"]
