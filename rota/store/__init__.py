"""The run folder: the journal of everything that happened, in SQLite, and who holds it."""
