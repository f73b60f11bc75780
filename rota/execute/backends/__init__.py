"""Where processes live: this machine, or a virtual clock."""
