"""Floating-point operations that training a model needs, by formula."""

from __future__ import annotations

from megalith.recipe.families import DecoderConfig


def matrices(config: DecoderConfig) -> tuple[float, float]:
    """Matrix elements that a token meets: in all layers, and in the head."""
    heads = config.width * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    factors = 3 if config.activation == "swiglu" else 2
    dense = factors * config.width * config.hidden
    layers = config.layers * heads
    if not config.experts:
        return layers + config.layers * dense, config.width * (config.vocab or 0)
    chosen = config.experts_per_token * config.expert_hidden + config.shared_hidden
    sparse = factors * config.width * chosen + config.width * config.experts
    layers += config.dense_layers * dense + (config.layers - config.dense_layers) * sparse
    return layers, config.width * (config.vocab or 0)


def parameters(config: DecoderConfig) -> float:
    """Weights of the model, biases and norms left out."""
    layers, head = matrices(config)
    factors = 3 if config.activation == "swiglu" else 2
    sparse = config.layers - config.dense_layers if config.experts else 0
    idle = config.experts - config.experts_per_token
    layers += sparse * idle * factors * config.width * config.expert_hidden
    positions = config.context * config.width if config.positions == "learned" else 0
    return layers + head * (1 if config.tied else 2) + positions


def per_sample(config: DecoderConfig, sequence: int) -> float:
    """FLOPs of forward and backward over one sequence: 6 N per token, and attention.

    Attention counts in full, its masked half too, and recomputation does not (Chowdhery et al.
    2022, appendix B).
    """
    attention = 12 * config.layers * config.heads * config.head_dim * sequence**2
    return 6 * sum(matrices(config)) * sequence + attention
