"""The model and the text that `onepass demo` trains."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Size:
    """What is trained: a minute on two CPU cores, or a real vocabulary on a GPU."""

    vocab: int
    hidden: int
    layers: int
    batch: int
    length: int


def load_text() -> str:
    """English that every Python ships: the topics of its `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def train_tokenizer(text: str, vocab: int) -> Any:
    """Byte-level BPE; stops short of ``vocab`` where the text holds no more pairs to merge."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=vocab, show_progress=False)
    return tokenizer


def sample_windows(tokens: Tensor, steps: int, size: Size, seed: int) -> Tensor:
    """The batches of all steps, ``(steps, batch, length + 1)``: inputs, and labels shifted by one."""
    windows = tokens.unfold(0, size.length + 1, 1)
    starts = torch.randint(len(windows), (steps, size.batch), generator=torch.Generator().manual_seed(seed))
    return windows[starts]


def build_model(size: Size, seed: int, tied: bool = True) -> Any:
    """A Llama decoder with random weights, whose head has the weight of the embedding if it is ``tied``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    heads = size.hidden // 64
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=size.length,
        tie_word_embeddings=tied,
        attn_implementation="eager",  # its backward is deterministic on every device
    )
    return LlamaForCausalLM(config)
