"""Integrations into TRL, transformers, PEFT and axolotl. Importing this package imports none of them."""
