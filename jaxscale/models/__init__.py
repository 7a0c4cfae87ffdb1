"""Model families, one file each.

A file offers `Config` with `num_layers`, `vocab_size`, `max_seq_len`, `validate()`, `validate_on(mesh_sizes)`,
`num_params()`, `num_layer_params()`, `flops_per_token(seq_len, causal=)` and `build(rngs)`; the module built offers
`__call__(tokens, segments, positions, execution) -> [B, S, D]` and `head() -> Param [V, D]`.
"""
