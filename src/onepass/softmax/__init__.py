"""What rows of logits leave behind: the primitive and the divergence of two rows, with autograd and operations
registered with torch."""
