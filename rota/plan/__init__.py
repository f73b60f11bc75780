"""How a graph runs on devices: how each op is cut, where each part runs, in which order."""
