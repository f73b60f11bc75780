"""What rota's own tests, and the authors of plug-ins, test with."""

from rota.testing.rules import check_op, check_rule

__all__ = ["check_op", "check_rule"]
