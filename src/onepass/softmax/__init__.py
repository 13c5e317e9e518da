"""Softmax statistics of rows of logits and the divergence of two rows, differentiable; sources of logits use them."""
