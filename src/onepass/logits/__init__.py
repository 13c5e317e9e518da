"""Sources of logits, through which losses read them: a tensor, a linear head in tiles, or a sharded vocabulary."""
