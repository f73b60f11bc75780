"""What happens inside a training process."""
