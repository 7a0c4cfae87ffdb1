"""What XLA and JAX are told before and around a run."""
