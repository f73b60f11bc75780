"""What a run amounts to, for people: the ranking of its tasks and a page with curves and a timeline."""
