"""Recipes that make plans, one file each; `base.py` finds them by name."""
