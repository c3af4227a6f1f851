"""A small decoder-only transformer after one training step, for the demonstration."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional

_BYTES_A_PARAMETER = 2  # bfloat16


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        hidden = width * 11 // 4
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, dtype=torch.bfloat16)
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(4)
        )
        self.ffn_norm = nn.RMSNorm(width, dtype=torch.bfloat16)
        self.w1, self.w3 = (
            nn.Linear(width, hidden, bias=False, dtype=torch.bfloat16) for _ in range(2)
        )
        self.w2 = nn.Linear(hidden, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        batch, length, _ = x.shape
        q, k, v = (
            project(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        mixed = functional.scaled_dot_product_attention(
            _rotate(q, angles), _rotate(k, angles), v, is_causal=True
        )
        x = x + self.wo(mixed.transpose(1, 2).reshape(x.shape))
        normed = self.ffn_norm(x)
        gated = functional.silu(self.w1(normed)) * self.w3(normed)
        return cast(torch.Tensor, x + self.w2(gated))


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Transformer(nn.Module):
    """Embedding, blocks of rotary attention and gated feed-forward, and an untied output layer."""

    frequencies: torch.Tensor

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        heads = max(1, width // 64)
        vocabulary = 32 * width
        self.tok_embeddings = nn.Embedding(vocabulary, width, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, dtype=torch.bfloat16)
        self.output = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)
        pairs = width // heads // 2
        self.register_buffer(
            "frequencies",
            10000.0 ** -(torch.arange(pairs, device=torch.get_default_device()) / pairs),
        )

    @staticmethod
    def of_size(size_mb: int) -> Transformer:
        """Return the widest model of at least four blocks with about `size_mb` MB of weights."""
        parameters = size_mb * 1_000_000 / _BYTES_A_PARAMETER
        for width in (8192, 4096, 2048, 1024, 512, 256, 128, 64):
            square = width * width
            # 64: embedding and output, 32 each. 12.25: four projections and three of 11/4 widths.
            layers = round((parameters / square - 64) / 12.25)
            if layers >= 4:
                return Transformer(width, layers)
        return Transformer(64, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token for each of `tokens` (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.outer(positions, self.frequencies)
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, angles)
        return cast(torch.Tensor, self.output(self.norm(x)))


def training_state(size_mb: int, device: torch.device) -> dict[str, Any]:
    """Return the state of a model of about `size_mb` MB and its AdamW optimizer after one step."""
    torch.manual_seed(0)
    with device:
        model = Transformer.of_size(size_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    tokens = torch.randint(0, model.output.out_features, (1, 17), device=device)
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "trainer": {"step": 1, "lr": 3e-4, "loss": loss.item(), "seen": [int(tokens.numel())]},
        "rng": torch.get_rng_state(),
    }
