"""What one model computes on one device: ops and tensors, captured once."""
