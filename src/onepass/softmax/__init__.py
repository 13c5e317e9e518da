"""Softmax statistics of rows of logits and the divergence between two rows, with autograd and registered with torch."""
