"""Models that are larger than the memory they get: what is there when, and how it comes and goes."""
