"""Data of an ensemble: examples on the device, mini-batches of an epoch, chunks of a data set."""
