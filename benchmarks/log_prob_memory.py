"""Peak memory of scoring at OLMo-2's vocabulary (100,352 tokens): get_response_log_probs against full logits.

    python benchmarks/log_prob_memory.py [--rows 8] [--length 256] [--hidden 256] [--out result.json]

A one-layer Olmo2 with that vocabulary scores rows x length positions (the last half of each row is the
response) and runs the backward pass. Each way runs in a process of its own, because a process's peak only
ever grows; reported is the peak resident size minus the size right before scoring, as the kernel counts it.
"full logits" is log_softmax of model(input_ids).logits in float32. The log-probabilities and the gradients of
all ways are compared as well.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

VOCABULARY = 100_352
WAYS = ("full logits", "ours, every position", "ours, response positions")


def score(way, model, input_ids, labels, mask):
    from rlkit import get_response_log_probs

    if way == "full logits":
        log_p = model(input_ids).logits.float().log_softmax(dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        return log_p.gather(2, labels[..., None])[..., 0], entropy
    result = get_response_log_probs(
        model, input_ids, labels, True, response_mask=mask if way == "ours, response positions" else None
    )
    return result["log_probs"], result["token_entropy"]


def run(way, rows, length, hidden):
    """In its own process: the peak in MiB and a few numbers to compare."""
    import torch
    from transformers import Olmo2Config, Olmo2ForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    model = Olmo2ForCausalLM(
        Olmo2Config(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # gradients are part of the start, not of the scoring
    tokens = torch.randint(2, VOCABULARY, (rows, length + 1))
    mask = torch.zeros(rows, length, dtype=torch.bool)
    mask[:, length // 2 :] = True
    score(way, model, tokens[:1, :8], tokens[:1, 1:9], mask[:1, :8] | True)  # the first call loads code
    before = peak_mib()
    start = time.process_time()
    log_probs, entropy = score(way, model, tokens[:, :-1], tokens[:, 1:], mask)
    (log_probs * mask).sum().backward()
    return {
        "way": way,
        "peak_mib": round(peak_mib() - before, 1),
        "cpu_seconds": round(time.process_time() - start, 2),
        "log_prob_sum": (log_probs * mask).sum().item(),
        "entropy_sum": (entropy * mask).sum().item(),
        "grad_norm": torch.stack([p.grad.norm() for p in model.parameters()]).norm().item(),
    }


def peak_mib():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rows", 8), ("length", 256), ("hidden", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--out")
    args = parser.parse_args()
    sizes = (args.rows, args.length, args.hidden)
    if args.way:
        print(json.dumps(run(args.way, *sizes)))
        return
    command = [
        sys.executable,
        __file__,
        "--rows",
        str(args.rows),
        "--length",
        str(args.length),
        "--hidden",
        str(args.hidden),
        "--way",
    ]
    report = [
        json.loads(subprocess.run([*command, way], check=True, capture_output=True, text=True).stdout)
        for way in WAYS
    ]
    one_copy = args.rows * args.length * VOCABULARY * 4 / 2**20
    print(
        f"{args.rows} x {args.length} positions x {VOCABULARY:,} tokens: one float32 copy of the logits is "
        f"{one_copy:,.0f} MiB"
    )
    for row in report:
        row["times_less"] = round(report[0]["peak_mib"] / row["peak_mib"], 1)
        print(
            f"  {row['way']:26s} peak +{row['peak_mib']:8,.0f} MiB  {row['times_less']:5.1f}x less   "
            f"{row['cpu_seconds']:6.2f} CPU s   log-probs {row['log_prob_sum']:.2f}  entropy "
            f"{row['entropy_sum']:.2f}  gradient {row['grad_norm']:.4f}"
        )
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"one_copy_mib": one_copy, "ways": report}, file, indent=1)


if __name__ == "__main__":
    main()
