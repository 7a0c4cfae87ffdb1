"""Ways to split a model besides sharding its arrays: layers over stages of a pipeline."""
