"""One way to watch the steps of any optimizer: hooks, parameters in buckets, sums, shards."""
