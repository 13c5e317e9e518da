"""Integrations into torch, torchtitan, Megatron, verl, TRL, transformers, PEFT and axolotl.

Importing this package imports none of them.
"""
