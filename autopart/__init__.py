"""autopart: a compiler from an unmodified PyTorch model to a running pipeline."""
