"""What one rank calls where it is not the same call on smaller tensors; registered by importing this."""

from tensoropt.sharding.shards import experts, lookups, losses, norms, randomness, sizes

__all__ = ["experts", "lookups", "losses", "norms", "randomness", "sizes"]
