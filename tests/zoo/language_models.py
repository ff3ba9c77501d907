"""Language models as transformers writes them, from configurations: random weights, nothing is downloaded."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from tests.zoo.models import folder, torchvision_models

Architecture = Literal["llama", "qwen2", "gemma", "gpt2"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "gemma", "gpt2")


def language_model(
    architecture: Architecture, *, width: int = 64, blocks: int = 2, words: int = 256, positions: int = 64
) -> Any:
    """A decoder with random weights: 4 heads and, where the architecture shares keys and values, 2 groups of them.

    Args:
        architecture: whose forward it has.
        width: of the values between blocks; the MLP is three times as wide.
        blocks: decoder layers.
        words: size of the vocabulary.
        positions: the longest sequence.
    """
    folder("transformers")
    torchvision_models()  # transformers imports torchvision where it is installed
    import transformers

    torch.manual_seed(0)
    if architecture == "gpt2":
        gpt2 = transformers.GPT2Config(
            n_embd=width, n_layer=blocks, n_head=4, n_inner=3 * width, n_positions=positions, vocab_size=words
        )
        return transformers.GPT2LMHeadModel(gpt2).eval()
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
    }[architecture]
    return model(
        config(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=width // 4,
            vocab_size=words,
            max_position_embeddings=positions,
        )
    ).eval()


class Logits(nn.Module):
    """A language model as a function of its tokens: the logits of each position, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (prompts, length, words) for tokens of shape (prompts, length)."""
        return self.model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]


def with_static_cache(model: Any, length: int) -> nn.Module:
    """transformers' own form for ExecuTorch: one step of a prompt, keys and values kept in buffers.

    Its inputs are ``input_ids``, (1, tokens), and ``cache_position``, (tokens,).
    """
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model.generation_config.use_cache = True
    model.generation_config.cache_implementation = "static"
    return TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=length).eval()


def prompts(lengths: tuple[int, ...], words: int = 256) -> list[Tensor]:
    """Random token ids, a tensor of shape (1, length) for each length."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(words, (1, length), generator=generator) for length in lengths]
