"""How a graph runs on devices: boxes, plans, and the programs that are derived from them."""
