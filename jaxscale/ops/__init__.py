"""Operations of the models: each chooses a kernel and holds its one shard_map site."""
