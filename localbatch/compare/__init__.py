"""What batching is worth on this machine: the same rows run in several ways, and measured."""
