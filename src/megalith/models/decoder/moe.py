"""A mixture of experts in place of the feed-forward part: few of many experts see each token.

Nothing here knows a rank. Tokens are sorted by expert and computed group by group;
``Experts.exchange`` is the one place where a layout may send them elsewhere and fetch them back,
``MoE.over_sequence`` the one where it adds up counts of a sequence that several ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalith.models.grouped import grouped, grouped_after
from megalith.models.layers import FeedForward
from megalith.recipe.families import DecoderConfig

Compute = Callable[[Tensor, Tensor], Tensor]
"""``f(rows [n, width], counts [experts held]) -> [n, width]``."""
Exchange = Callable[[Tensor, Tensor, Compute], Tensor]
"""``f(rows, counts [all experts], compute)``: send, compute where the experts are, fetch."""


class Experts(nn.Module):
    """All experts' matrices, stacked: ``up`` and ``gate`` are ``[experts, hidden, width]``,
    ``down`` is ``[experts, width, hidden]``. Biases they have none.

    Attributes:
        exchange: where the experts are shared out: sends rows to them and back; ``None``: all here.
        tail: whether rows that belong to no expert may stand behind the others.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        experts, width, hidden = config.experts, config.width, config.expert_hidden
        self.activation = config.activation
        self.tail = config.capacity is not None
        gated = config.activation == "swiglu"
        self.gate = nn.Parameter(torch.empty(experts, hidden, width)) if gated else None
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.exchange: Exchange | None = None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each row through its expert.

        Args:
            rows: ``[n, width]``, those of expert 0 first, then those of expert 1, and so on.
            counts: int64 ``[experts]``, how many each has; rows behind their sum have no expert.

        Returns:
            ``[n, width]``, zero where a row has no expert.
        """
        if self.exchange is not None:
            return self.exchange(rows, counts, self.compute)
        return self.compute(rows, counts)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """:meth:`forward` with the experts that this module holds."""
        valid = None
        if self.tail:
            # A grouped product leaves what lies behind its last group undefined, in backward too.
            valid = (torch.arange(len(rows), device=rows.device) < counts.sum())[:, None]
            rows = rows.where(valid, 0)
        inner = tuple(
            grouped(rows, weight, counts) for weight in (self.gate, self.up) if weight is not None
        )
        # As in the dense feed-forward part, what lies between the matrices is not kept.
        mixed = grouped_after(self._act, inner, self.down, counts)
        return mixed if valid is None else mixed.where(valid, 0)

    def _act(self, inner: Tensor, factor: Tensor | None = None) -> Tensor:
        if factor is not None:
            return F.silu(inner) * factor
        if self.activation == "relu":
            return F.relu(inner)
        return F.gelu(inner, approximate="tanh" if self.activation == "gelu_tanh" else "none")


class MoE(nn.Module):
    """``sum of w_e(x) expert_e(x)`` over the best experts, plus the shared expert if there is one.

    The router is a softmax over the experts (Shazeer et al. 2017, Fedus et al. 2021). Experts are
    kept equally busy by a loss (Fedus et al. 2021, Switch Transformer, equation 4) or by a bias on
    the choice alone, not on the weights (Wang et al. 2024, auxiliary-loss-free balancing).

    Attributes:
        bias: ``[experts]``, added to the probabilities for the choice; or ``None``.
        load: int64 ``[experts]``, choices since the last :func:`update_bias`; or ``None``.
        over_sequence: adds up ``[batch, experts]`` counts, in place or not, over the ranks that
            hold parts of the same sequences; ``None``: sequences are whole.
    """

    bias: Tensor | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.normalise = config.router_normalise
        self.balance = config.balance
        self.bias_rate = config.bias_rate
        self.capacity = config.capacity
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared = None
        if config.shared_hidden:
            self.shared = FeedForward(config.width, config.shared_hidden, config.activation, False)
        by_bias = config.balance_by == "bias"
        self.register_buffer("bias", torch.zeros(config.experts) if by_bias else None)
        self.load: Tensor | None = None
        self.over_sequence: Callable[[Tensor], Tensor] | None = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Route, compute and combine.

        Args:
            hidden: ``[batch, seq, width]``; a row of the batch is a sequence.

        Returns:
            ``[batch, seq, width]``; the balance loss as a sum over tokens, float32 or float64, or
            ``None`` where there is none; how often each expert was chosen, int64 ``[experts]``.
        """
        batch, seq, width = hidden.shape
        probabilities = self._probabilities(hidden)
        with torch.no_grad():
            scores = probabilities if self.bias is None else probabilities + self.bias
            chosen = scores.topk(self.experts_per_token, dim=-1).indices  # [batch, seq, k]
            choices = chosen.flatten(1)
            per_sequence = count(choices, self.router.out_features)
            if self.training and self.capacity is not None:
                destination = self._within_capacity(choices, per_sequence, seq)
                counts = count(destination.view(1, -1), self.router.out_features)[0]
            else:
                destination, counts = choices, per_sequence.sum(0)
            order = destination.flatten().argsort(stable=True)
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=order.device)
        weights = probabilities.gather(-1, chosen)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        rows = hidden.reshape(-1, width)[order // self.experts_per_token]
        found = self.experts(rows, counts)[back].view(-1, self.experts_per_token, width)
        weights = weights.to(found.dtype).view(-1, 1, self.experts_per_token)
        mixed = (weights @ found).view(batch, seq, width)
        if self.shared is not None:
            mixed = mixed + self.shared(hidden)
        balance = None
        if self.training and self.balance:
            balance = self._balance(probabilities, per_sequence)
        return mixed, balance, per_sequence.sum(0)

    def observe(self, load: Tensor) -> None:
        """Keep one forward's choices for :func:`update_bias`.

        Called from outside what is recomputed in backward, so that nothing is counted twice.
        """
        if self.bias is not None:
            self.load = load if self.load is None else self.load + load

    def _probabilities(self, hidden: Tensor) -> Tensor:
        """``[batch, seq, experts]`` in float32 at least, whatever the model's precision: a rounded
        score changes which expert is chosen."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(wide), self.router.weight.to(wide)).softmax(-1)

    def _within_capacity(self, choices: Tensor, per_sequence: Tensor, seq: int) -> Tensor:
        """``choices`` with those beyond an expert's capacity sent to no expert.

        Places are given in the order of the text and within one sequence, so that neither a later
        token nor another sample decides what becomes of a token.
        """
        assert self.capacity is not None
        experts = self.router.out_features
        room = -int(-self.capacity * seq * self.experts_per_token // experts)  # rounded up
        order = choices.argsort(dim=1, stable=True)
        first = per_sequence.cumsum(1) - per_sequence
        ranked = torch.arange(choices.shape[1], device=choices.device).expand_as(choices)
        ranked = ranked - first.gather(1, choices.gather(1, order))
        place = torch.empty_like(choices).scatter_(1, order, ranked)
        return choices.where(place < room, experts)

    def _balance(self, probabilities: Tensor, per_sequence: Tensor) -> Tensor:
        """``balance * experts * sum_e f_e P_e`` of each sequence, times its number of tokens.

        ``f_e`` is the share of the choices that fell on ``e``, ``P_e`` its mean probability. Being
        a sum over the tokens of single sequences, it adds up like the task's loss: over
        micro-batches and ranks, and (``f_e`` has no gradient) over parts of a sequence.
        """
        if self.over_sequence is not None:
            per_sequence = self.over_sequence(per_sequence)
        share = per_sequence / per_sequence.sum(1, keepdim=True).to(probabilities.dtype)
        experts = self.router.out_features
        return self.balance * experts * (share * probabilities.sum(1)).sum()


def mixtures(model: nn.Module) -> Iterator[MoE]:
    """The mixtures of experts in ``model``, in order."""
    return (part for part in model.modules() if isinstance(part, MoE))


@torch.no_grad()
def update_bias(model: nn.Module, sum_: Callable[[Tensor], Tensor] = lambda load: load) -> None:
    """After an update: make experts with less than the mean load likelier, the others less likely.

    Each bias moves by ``bias_rate`` (Wang et al. 2024, algorithm 1). Nothing happens in a model
    that is balanced otherwise.

    Args:
        sum_: adds up an int64 tensor over all ranks that saw other tokens; not called, on any
            rank that holds the same layers, if they have no bias.
    """
    counted = [(part, part.load) for part in mixtures(model) if part.load is not None]
    if not counted:
        return
    loads = sum_(torch.stack([load for _, load in counted]))  # [layers, experts]
    for (part, _), load in zip(counted, loads, strict=True):
        assert part.bias is not None
        below = (load.sum() - len(load) * load).sign()  # in whole numbers: the same on every rank
        part.bias.add_(below, alpha=part.bias_rate)
    forget_load(model)


def forget_load(model: nn.Module) -> None:
    """Drop the counts of an update that is skipped."""
    for part in mixtures(model):
        part.load = None


def total(balances: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of what there is, or ``None``."""
    found = [balance for balance in balances if balance is not None]
    return torch.stack(found).sum() if found else None


def count(choices: Tensor, experts: int) -> Tensor:
    """How often each expert is in each row of ``[rows, n]``: int64 ``[rows, experts]``.

    By sorting: of fixed size, without atomics, and read by nobody on the host.
    """
    ordered = choices.sort(dim=1).values
    ids = torch.arange(experts, device=choices.device).expand(len(choices), experts)
    ends = torch.searchsorted(ordered, ids.contiguous(), right=True)
    return ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
