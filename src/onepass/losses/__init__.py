"""Losses: a few lines of PyTorch each on the row vectors of `SoftmaxStatistics`."""
