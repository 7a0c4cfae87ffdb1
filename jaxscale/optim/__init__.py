"""Optimisers, one file each, whose `Config` has

`validate()` and `build(learning_rate) -> optax.GradientTransformation`;
`state_axes(state, params=)`: the logical axes of the state's arrays; and may have
`moved(gradients, state, params=, ...)`: both after an update in place (`adamw8bit.py`).
"""
