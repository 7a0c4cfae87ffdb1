"""Optimisers, one file each: `Config.validate()` and `Config.build(learning_rate) -> optax.GradientTransformation`."""
