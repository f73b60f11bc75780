"""Training state that outlives the process: what it is made of, and how it is kept on disk."""
