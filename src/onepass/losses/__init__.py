"""Losses as functions of the row statistics of any source of logits: a tensor, or a linear head."""
