"""vLLM's server against the sampler in process: the same prompts, tokens per second, and how far log-probs
differ.

    python benchmarks/vllm_sampler.py [--model laptop] [--prompts 16] [--group 8] [--tokens 64] [--rounds 3]
                                      [--dtypes float32,bfloat16] [--ways shm,gloo] [--out result.json]

Both samplers answer the same r1_zero prompts (with its stop string, as in training) in one run, taking turns;
a round's rate is generated tokens over seconds. Per dtype also: seconds until the server answers, seconds per
weight sync and way, and the gap between the engine's log-probs and the trainer's model on the tokens the
engine drew, at temperature 1. The weights do not change.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported


def rate(sampler, prompts, params, group):
    """(tokens per second of wall time, completions)."""
    start = time.perf_counter()
    groups = sampler.generate(prompts, params, group)
    seconds = time.perf_counter() - start
    return sum(len(c.token_ids) for g in groups for c in g) / seconds, [c for g in groups for c in g]


def gaps(model, completions):
    """mean and largest |difference|, and the extremes of the ratio trainer / engine."""
    from rlkit import response_log_probs, rollout_batch

    batch = rollout_batch([completions])
    difference = response_log_probs(model, batch, microbatch_size=16) - batch.sampler_log_probs
    difference = difference[batch.response_mask]
    return {
        "tokens": difference.numel(),
        "gap_mean": difference.abs().mean().item(),
        "gap_max": difference.abs().max().item(),
        "ratio_min": difference.min().exp().item(),
        "ratio_max": difference.max().exp().item(),
    }


def measure(dtype, arguments):
    from rlkit import SamplingParams, load_model, load_problems, load_prompt
    from rlkit.samplers import TransformersSampler, VLLMSampler

    model, tokenizer = load_model(arguments.model, dtype)
    prompt = load_prompt("r1_zero")
    prompts = [prompt.fill(p.question) for p in load_problems("laptop", "train", arguments.prompts)]
    ways = arguments.ways.split(",")
    here = TransformersSampler(model, tokenizer)
    server = VLLMSampler(model, tokenizer, weight_sync="gloo" if "gloo" in ways else ways[0])
    if server.server.dtype != dtype:  # it fell back: this CPU cannot
        server.close()
        return None
    result = {"start_seconds": server.server.start_seconds, "sync_seconds": {}, "tokens_per_second": {}}
    try:
        for way in ways:
            server.server.weight_sync = way
            server.server.init_weight_sync(str(model.device), server.folder)
            times = []
            for _ in range(4):
                start = time.perf_counter()
                server.sync_weights(model)
                times.append(time.perf_counter() - start)
            result["sync_seconds"][way] = [min(times), statistics.median(times), max(times)]
        drawn = []
        for round_ in range(arguments.rounds + 1):
            params = SamplingParams(arguments.tokens, stop=prompt.stop, seed=round_)
            for name, sampler in (("vllm", server), ("transformers", here)):
                speed, completions = rate(sampler, prompts, params, arguments.group)
                if round_:  # the first round warms both up
                    result["tokens_per_second"].setdefault(name, []).append(speed)
                    drawn += completions if name == "vllm" else []
        result |= gaps(model, drawn)
    finally:
        server.close()
    return result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="laptop")
    for name, default in (("prompts", 16), ("group", 8), ("tokens", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--ways", default="shm,gloo")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    import torch

    from rlkit.samplers.vllm.find import find_vllm, vllm_missing

    if find_vllm() is None:
        print(f"skipped: {vllm_missing()}")
        return
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    results = {}
    for dtype in arguments.dtypes.split(","):
        r = results[dtype] = measure(dtype, arguments)
        if r is None:
            print(f"{dtype}: skipped, vLLM cannot compute in it on this CPU")
            continue
        rates = "; ".join(
            f"{name} {statistics.median(v):,.0f} ({min(v):,.0f}-{max(v):,.0f})"
            for name, v in r["tokens_per_second"].items()
        )
        syncs = ", ".join(f"{way} {v[1]:.2f} s" for way, v in r["sync_seconds"].items())
        print(
            f"{dtype}: server up in {r['start_seconds']:.0f} s; weight sync {syncs}; tokens/s {rates}; "
            f"log-prob gap mean {r['gap_mean']:.1e}, max {r['gap_max']:.1e}, ratio {r['ratio_min']:.4f} to "
            f"{r['ratio_max']:.4f} over {r['tokens']:,} tokens; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    if arguments.out:
        results |= {
            "model": arguments.model,
            "prompts": arguments.prompts,
            "group": arguments.group,
            "max_tokens": arguments.tokens,
            "vllm": f"{find_vllm().package} {find_vllm().version}",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
        }
        with open(arguments.out, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
