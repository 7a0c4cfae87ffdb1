"""The training run: state, step, loop."""
