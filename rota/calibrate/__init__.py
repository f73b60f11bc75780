"""Measures what ops, optimizers and links cost on this machine, and keeps it."""
