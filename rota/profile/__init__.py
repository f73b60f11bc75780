"""What it costs to run a task in some way: predicted, measured, and kept."""
