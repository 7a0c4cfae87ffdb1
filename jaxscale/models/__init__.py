"""Model families, one file each; what they share is decoder.py.

A family's file offers `Config`, a dataclass of sizes and options, with
  `num_layers`, `vocab_size`, `max_seq_len`;
  `validate()`, and `validate_on(mesh_sizes)`: ValueErrors that name key, value and fix;
  `rules(mesh_sizes) -> dict`: sharding rules of logical axes that depend on the model;
  `num_params()`, `num_layer_params()`, `flops_per_token(seq_len, causal=)`;
  `build(rngs)`: the model, a flax NNX module with
    `embed(tokens_BS, execution) -> x_BSD`;
    `stacks() -> (ops.layers.Stack, ...)`: the layers, in order; a block is
      `(x_BSD, weights, shared, execution) -> (x_BSD, aux)`;
    `output(x_BSD) -> (x_BSD, head_DV, cap)`: the last hidden states, the output table
      as stored (float32, "embed vocab"), and the soft cap of the logits, or None.
Arrays that are trained are `nnx.Param`s made by `sharding.param`. Any other `nnx.Variable` is
carried and not trained; its metadata names its `axes` too. aux may hold
  "loss": a scalar that is added to the mean loss of a microbatch (a router's, say);
  "extra": new values of such variables of the layer, by attribute.
`hugging_face_names(config)` and `from_hugging_face(settings) -> Config` say how the family's
checkpoints are named and described there.
"""
