"""Losses: mathematics on the fields that a source of logits leaves behind, whatever the source."""
