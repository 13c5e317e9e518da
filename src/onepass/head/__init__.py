"""Losses of ``hidden @ weight.T + bias``, whose logits are computed in tiles wherever they are read."""
