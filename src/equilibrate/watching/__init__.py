"""One way to watch the steps of any optimizer: hooks, buckets of parameters, sums, shards, state."""
