"""Write what all peers share: initial weights, and batches of tokens.

    python inputs.py FOLDER SETTINGS_JSON

Weights are GPT-2's initialisation (Radford et al. 2019), but biases and norms are drawn too, so
that a peer that maps one of them wrongly shows in the first loss. Tokens follow Zipf's law, as
words do: a uniform draw would leave nothing to learn and touch the embedding evenly.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor


def weights(layers: int, width: int, vocab: int, context: int, seed: int) -> dict[str, Tensor]:
    """GPT-2's parameters under Hugging Face's names; its matrices are ``[in, out]``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.02, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * std + mean

    residual = 0.02 / math.sqrt(2 * layers)
    found = {"wte.weight": normal(vocab, width), "wpe.weight": normal(context, width)}
    for layer in range(layers):
        block = {
            "ln_1.weight": normal(width, mean=1.0),
            "ln_1.bias": normal(width),
            "attn.c_attn.weight": normal(width, 3 * width),
            "attn.c_attn.bias": normal(3 * width),
            "attn.c_proj.weight": normal(width, width, std=residual),
            "attn.c_proj.bias": normal(width),
            "ln_2.weight": normal(width, mean=1.0),
            "ln_2.bias": normal(width),
            "mlp.c_fc.weight": normal(width, 4 * width),
            "mlp.c_fc.bias": normal(4 * width),
            "mlp.c_proj.weight": normal(4 * width, width, std=residual),
            "mlp.c_proj.bias": normal(width),
        }
        found |= {f"h.{layer}.{name}": value for name, value in block.items()}
    found |= {"ln_f.weight": normal(width, mean=1.0), "ln_f.bias": normal(width)}
    return {f"transformer.{name}": value for name, value in found.items()}


def config(layers: int, width: int, heads: int, vocab: int, context: int) -> dict[str, object]:
    """GPT-2's ``config.json``, dropout off."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": context,
        "vocab_size": vocab,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "use_cache": False,
        "tie_word_embeddings": True,
        "bos_token_id": vocab - 1,
        "eos_token_id": vocab - 1,
    }


def tokens(steps: int, batch: int, sequence: int, vocab: int, seed: int) -> np.ndarray:
    """int64 ``[steps, batch, sequence + 1]``; the n-th commonest token has weight 1 / (n + 2.7)."""
    random = np.random.default_rng(seed)
    chances = 1 / (np.arange(vocab) + 2.7)
    names = random.permutation(vocab)
    ranks = random.choice(vocab, size=(steps, batch, sequence + 1), p=chances / chances.sum())
    return names[ranks].astype(np.int64)


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    layers, width, vocab, context = (given[k] for k in ("layers", "width", "vocab", "context"))
    shared = weights(layers, width, vocab, context, seed=0)
    save_file(shared, folder / "model.safetensors", metadata={"format": "pt"})
    described = config(layers, width, given["heads"], vocab, context)
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    drawn = tokens(given["steps"], given["batch"], given["sequence"], vocab, seed=1)
    np.save(folder / "tokens.npy", drawn)


if __name__ == "__main__":
    main()
