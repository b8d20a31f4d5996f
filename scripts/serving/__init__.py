"""What scripts/check-serve does beside its checks of clients: a soak and a comparison under load."""
