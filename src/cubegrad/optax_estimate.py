"""Where JAX states that were pickled by older versions look for their class."""

from cubegrad.optax.auto import Estimate

__all__ = ["Estimate"]
