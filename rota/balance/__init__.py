"""Keeps a task's pace when its devices are unequal or turn slow."""
