"""Carries a sweep out: who runs what, what happened, and what to do about it."""
