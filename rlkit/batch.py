"""One rollout batch as tensors, from the sampler to the optimizer."""

from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlkit.support.arguments import as_tensor
from rlkit.support.checks import shown
from rlkit.support.shapes import Mask, PerToken, Rows, Tokens
from rlkit.tokenization import join_and_shift


@dataclass
class RolloutBatch:
    """B rows of prompt and response, padded on the right; what is None is not known or not needed.

    input_ids, labels, response_mask: as ``tokenize_prompt_and_output`` gives them.
    groups: the prompt that each row answers, counted from 0. Rows of a group may stand anywhere.
    advantages: one per row. A row of advantage 0 teaches nothing and is not passed through the model.
    old_log_probs, sampler_log_probs: of the policy before the first update, by the trainer (0 in rows that
        teach nothing, which it does not score) and by the sampler.
    ref_log_probs: of the reference policy of a KL penalty.
    tis_weights: detached factors of the loss (truncated importance sampling, trainer / sampler).
    entropies: of the distributions that the tokens were drawn from, by the sampler, in nats.
    """

    input_ids: Tokens
    labels: Tokens
    response_mask: Mask
    groups: Int[Tensor, " batch"] | None = None
    advantages: Float[Tensor, " batch"] | None = None
    old_log_probs: PerToken | None = None
    ref_log_probs: PerToken | None = None
    sampler_log_probs: PerToken | None = None
    tis_weights: PerToken | None = None
    entropies: PerToken | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def apply(self, function) -> "RolloutBatch":
        """The same function of every tensor that is there."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: function(t) for name, t in tensors.items() if t is not None})

    def to(self, device) -> "RolloutBatch":
        """The same on another device; float64 becomes float32 on MPS, which has none."""
        short = {torch.float64: torch.float32} if torch.device(device).type == "mps" else {}
        return self.apply(lambda tensor: tensor.to(device, short.get(tensor.dtype, tensor.dtype)))

    def select(self, rows: Int[Tensor, " rows"]) -> "RolloutBatch":
        """These rows, in this order, right padding cut: one permutation for ids, masks and weights."""
        width = int(self.row_ends()[rows].max())
        return self.apply(lambda tensor: tensor[rows][:, :width] if tensor.ndim == 2 else tensor[rows])

    def split(self, chosen: Rows, size: int) -> tuple[Int[Tensor, " rows"], ...]:
        """The chosen rows in pieces of at most ``size``, responses of like length together (less padding)."""
        rows = chosen.nonzero().squeeze(1)
        return rows[self.response_lengths()[rows].argsort(stable=True)].split(size) if len(rows) else ()

    def row_ends(self) -> Int[Tensor, " batch"]:
        """One past the last position at which a row has a response token; 0 without any."""
        places = torch.arange(1, self.labels.shape[1] + 1, device=self.labels.device)
        return (self.response_mask * places).amax(dim=1)

    def response_lengths(self) -> Int[Tensor, " batch"]:
        return self.response_mask.sum(dim=1)


def rollout_batch(groups, filler: int = 0) -> RolloutBatch:
    """The batch of what ``Sampler.generate`` gave: a list of completions per prompt, by their own token ids.

    Log-probs and entropies are there if the completions have them. ValueError for a completion without the
    ids of its prompt, or with another number of log-probs than of tokens.
    """
    rows = [(group, completion) for group, completions in enumerate(groups) for completion in completions]
    if not rows:
        raise ValueError("groups: got no completions, expected at least one")
    for i, (_, completion) in enumerate(rows):
        if not completion.prompt_token_ids:
            raise ValueError(
                f"groups: completion {i} has no prompt_token_ids, expected the ids of its prompt"
            )
    batch = RolloutBatch(
        **join_and_shift([c.prompt_token_ids for _, c in rows], [c.token_ids for _, c in rows], filler),
        groups=torch.tensor([group for group, _ in rows]),
    )
    for name, attribute in (("sampler_log_probs", "log_probs"), ("entropies", "entropies")):
        values = [getattr(c, attribute) for _, c in rows]
        if any(values):  # a sampler gives them all, or none
            setattr(batch, name, beside_labels(name, values, batch.response_mask))
    return batch


def beside_labels(name: str, values, mask: Mask) -> PerToken:
    """Float32 values beside the labels, from a (B, T) tensor or B rows of one value per response token."""
    n_rows, width = mask.shape
    if not hasattr(values, "__len__") or isinstance(values, str):
        raise ValueError(f"{name}: got {shown(values)}, expected {n_rows} rows, one per response")
    if len(values) != n_rows:
        raise ValueError(f"{name}: got {len(values)} rows, expected {n_rows}, one per response")
    if getattr(values, "ndim", 0) == 2:  # a tensor, or numpy's
        values = as_tensor(name, values, "numbers")
        if values.shape[1] < width:
            shape = tuple(values.shape)
            raise ValueError(f"{name}: got shape {shape}, expected ({n_rows}, {width}) beside the labels")
        values = values[:, :width].detach().float()
        rows = [row[m] for row, m in zip(values, mask.to(values.device))]
    else:
        rows = [as_tensor(name, row, "numbers", dtype=torch.float32).detach() for row in values]
    for i, (row, n_tokens) in enumerate(zip(rows, mask.sum(dim=1).tolist())):
        if row.shape != (n_tokens,) or not bool(row.isfinite().all()):
            raise ValueError(
                f"{name}: got shape {tuple(row.shape)} in row {i}, expected ({n_tokens},), one finite value "
                "per response token"
            )
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, torch.cat(rows).to(mask.device))
