"""Numbers to log: of groups of rewards, of microbatches, of train batches, of the whole rollout batch."""

from math import comb

from rlkit.support.shapes import Rewards


def group_statistics(rewards: Rewards, advantages: Rewards) -> dict:
    """The groups in plain numbers.

    reward_mean, reward_std (over the batch, 0 for one row), reward_min, reward_max; the counts
    groups_all_right (every reward >= 1), groups_all_wrong (every reward <= 0) and groups_mixed (rewards that
    differ, the only groups with a signal under a mean baseline; graded rewards may be equal and neither);
    zero_advantage_share; pass_at_k, whose entry k - 1 is the unbiased estimate of the chance that one of k
    responses has a reward >= 1.
    """
    n_groups, group_size = rewards.shape
    all_right = int((rewards >= 1).all(dim=1).sum())
    all_wrong = int((rewards <= 0).all(dim=1).sum())
    wrong = (rewards < 1).sum(dim=1).tolist()
    return {
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std().item() if rewards.numel() > 1 else 0.0,
        "reward_min": rewards.min().item(),
        "reward_max": rewards.max().item(),
        "groups_all_right": all_right,
        "groups_all_wrong": all_wrong,
        "groups_mixed": int((rewards != rewards[:, :1]).any(dim=1).sum()),
        "zero_advantage_share": (advantages == 0).double().mean().item(),
        "pass_at_k": [
            1 - sum(comb(w, k) for w in wrong) / (n_groups * comb(group_size, k))
            for k in range(1, group_size + 1)
        ],
    }


def combine(reports: list[dict], weights: list) -> dict:
    """n_* add up, *_min and *_max are extremes, the rest are means by these weights (0 / 0 is left out)."""
    result = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        pairs = [(report[name], w) for report, w in zip(reports, weights) if name in report]
        values, total = [value for value, _ in pairs], sum(w for _, w in pairs)
        if name.startswith("n_"):
            result[name] = sum(values)
        elif name.endswith(("_min", "_max")):
            result[name] = (min if name.endswith("_min") else max)(values)
        elif total:
            result[name] = sum(value * w for value, w in pairs) / total
    return result


def with_clip_fractions(row: dict) -> dict:
    """The row with clip_fraction and its two sides, from n_clipped_low, n_clipped_high and n_ratios.

    A loss of one's own that counts no clipped tokens keeps a clip_fraction that it gives, and else has 0.
    """
    low, high = row.get("n_clipped_low", 0), row.get("n_clipped_high", 0)
    shares = {"clip_fraction": low + high, "clip_fraction_low": low, "clip_fraction_high": high}
    shares = {name: count / max(1, row["n_ratios"]) for name, count in shares.items()}
    return row | shares if "n_clipped_low" in row else shares | row


def microbatch_statistics(stats: dict, scored: dict, part) -> dict:
    """The loss's statistics, and the entropy and the gap to the sampler of a microbatch's response tokens."""
    mask = part.response_mask
    stats = dict(stats, n_tokens=mask.sum())
    if "token_entropy" in scored:
        stats["token_entropy"] = scored["token_entropy"][mask].mean()
    if part.sampler_log_probs is not None:
        gap = (scored["log_probs"].detach() - part.sampler_log_probs).abs()[mask]
        stats |= {"logprob_gap_mean": gap.mean(), "logprob_gap_max": gap.max()}
    return {name: value.item() if hasattr(value, "item") else value for name, value in stats.items()}


def batch_statistics(statistics: list[dict], batch, per_sequence: bool) -> dict:
    """The same of a train batch; rows that were not used count as not clipped."""
    mask = batch.response_mask
    result = combine(statistics, [stats["n_tokens"] for stats in statistics])
    result["n_ratios"] = int((mask.any(dim=1) if per_sequence else mask).sum())
    result = with_clip_fractions(result)
    result["response_length"] = mask.sum().item() / len(mask)
    if batch.entropies is not None:
        result["token_entropy"] = batch.entropies[mask].mean().item()
    return result


def train_step_metrics(reports: list[dict], over_all_rows: bool) -> dict:
    """The metrics of a rollout batch's optimizer steps from the metadata of each.

    Means are weighted by the tokens they are over: of all rows, or of the rows used. The gap to the sampler
    is that before the first update.
    """
    row = combine(reports, [r["response_length"] if over_all_rows else r.get("n_tokens", 0) for r in reports])
    row = with_clip_fractions(row)
    for name in ("loss", "grad_norm"):  # one number per optimizer step
        row |= combine([{name: r[name]} for r in reports if name in r], [1.0] * len(reports))
    gaps = {name: reports[0].get(name) for name in ("logprob_gap_mean", "logprob_gap_max")}
    row |= gaps | {"rows_used": sum(r["rows_used"] for r in reports), "optimizer_steps": len(reports)}
    if skipped := sum("grad_norm" not in r for r in reports):  # it was not finite
        row["skipped_steps"] = skipped
    known = ("lr", "response_length")  # the whole rollout batch's
    return {k: v for k, v in row.items() if v is not None and not k.startswith("n_") and k not in known}
