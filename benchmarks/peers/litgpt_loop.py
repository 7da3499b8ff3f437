"""litgpt: its ``GPT`` and ``chunked_cross_entropy`` under Fabric, as its ``pretrain.fit`` does.

litgpt has no learned positions: its token embedding is replaced by one that adds them, and the
rotary part is set to nothing.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from common import Clock, Job, peak_rss, report
from gpt2 import linear_weights
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from torch import Tensor, nn
from torch.utils.data import DataLoader

_NAMES = {
    "ln_1": "norm_1",
    "ln_2": "norm_2",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "mlp.c_fc": "mlp.fc",
    "mlp.c_proj": "mlp.proj",
}


class TokensAndPositions(nn.Embedding):
    def __init__(self, job: Job) -> None:
        super().__init__(job.vocab, job.width)
        self.positions = nn.Embedding(job.context, job.width)

    def forward(self, input: Tensor) -> Tensor:
        places = torch.arange(input.shape[1], device=input.device)
        return super().forward(input) + self.positions(places)


def build(job: Job) -> GPT:
    """litgpt's model with the shared weights."""
    config = Config(
        block_size=job.context,
        n_layer=job.layers,
        n_embd=job.width,
        n_head=job.heads,
        vocab_size=job.vocab,
        padded_vocab_size=job.vocab,
        parallel_residual=False,
        rotary_percentage=0.0,
        gelu_approximate="tanh",
    )
    model = GPT(config)
    parts: Any = model.transformer
    parts["wte"] = TokensAndPositions(job)
    parts["wte"].weight = model.lm_head.weight
    weights = {_litgpt_name(name): value for name, value in linear_weights(job).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing != ["lm_head.weight"] or unexpected:
        raise RuntimeError(f"weights do not fit: {missing=} {unexpected=}")
    return model


def _litgpt_name(name: str) -> str:
    if name == "wpe.weight":
        return "transformer.wte.positions.weight"
    for theirs, ours in _NAMES.items():
        name = name.replace(f".{theirs}.", f".{ours}.")
    return f"transformer.{name}"


def main() -> None:
    job = Job.given()
    loader = DataLoader(torch.from_numpy(job.batches()).flatten(0, 1), batch_size=job.batch)  # pyright: ignore[reportArgumentType]
    precision = "bf16-mixed" if job.precision == "bf16" else "32-true"
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    network = build(job)
    model: Any = torch.compile(network) if job.compile else network
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(network.parameters(), **job.optimizer))
    batches = fabric.setup_dataloaders(loader)
    losses: list[Tensor] = []
    clock = Clock()
    clock.start()
    for batch in batches:
        inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        loss = chunked_cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=job.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        clock.tick()
    report(job, clock.seconds, losses, peak_rss(), ["litgpt", "lightning"])


if __name__ == "__main__":
    main()
