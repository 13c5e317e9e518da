"""Sources of logits: a tensor, a linear head whose logits are computed in tiles, and their common interface."""
