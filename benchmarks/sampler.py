"""Tokens per second of the in-process sampler against ``model.generate`` on the same rollout batch.

    python benchmarks/sampler.py [--model laptop] [--prompts 32] [--copies 8] [--max-tokens 64] [--threads 1]
                                 [--repeats 5] [--prompt r1_zero] [--json]

Both sample with temperature 1, no truncation and the prompt's stop strings, in float32 where the model is.
They take turns, so that whatever else the machine does hits both; a row is the median over the repeats.
Useful tokens are those up to and with the one that ends the response. CPU seconds are given beside wall
seconds: on a busy machine their ratio is the steadier one.
"""

import argparse
import json
import os
import statistics
import sys
import time


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="laptop", help="'laptop', a folder or a hub id")
    parser.add_argument("--prompt", default="r1_zero")
    parser.add_argument("--prompts", type=int, default=32, help="different prompts")
    parser.add_argument("--copies", type=int, default=8, help="responses per prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args(argv)


def useful_tokens(row: list[int], eos: set[int], pad: int, met_stop) -> int:
    """Number of ids of a padded output row up to and with the one that ended it."""
    for k, token in enumerate(row, start=1):
        if token in eos:
            return k
    while row and row[-1] == pad:
        row = row[:-1]
    # a row that met a stop string is padded afterwards; where pad was itself sampled at its end, decode
    # decides
    return len(row) if not met_stop(row) else next(k for k in range(1, len(row) + 1) if met_stop(row[:k]))


def main(argv=None):
    args = arguments(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before torch is imported
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlkit.laptop import model_path
    from rlkit.laptop.problems import generate_problems
    from rlkit.samplers import SamplingParams, TransformersSampler
    from rlkit.tasks.prompts import load_prompt

    torch.set_num_threads(args.threads)
    path = model_path() if args.model == "laptop" else args.model
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompt = load_prompt(args.prompt)
    prompts = [prompt.fill(problem.question) for problem in generate_problems(args.prompts, seed=0)]
    sampler = TransformersSampler(model, tokenizer)
    eos = set(sampler.eos_token_ids)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos)
    batch = tokenizer(
        prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )

    def with_sampler(seed):
        params = SamplingParams(max_tokens=args.max_tokens, stop=prompt.stop, seed=seed)
        groups = sampler.generate(prompts, params, n=args.copies)
        return lambda: sum(len(completion.token_ids) for group in groups for completion in group)

    def with_generate(seed):
        torch.manual_seed(seed)
        stop = {"stop_strings": list(prompt.stop), "tokenizer": tokenizer} if prompt.stop else {}
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=args.max_tokens,
            pad_token_id=pad,
            num_return_sequences=args.copies,
            **stop,
        )[:, batch["input_ids"].shape[1] :]

        def met_stop(ids):
            text = tokenizer.decode(ids)
            return any(s in text for s in prompt.stop)

        return lambda: sum(useful_tokens(row, eos, pad, met_stop) for row in out.tolist())

    rows = {"model.generate": with_generate, "TransformersSampler": with_sampler}
    timings = {name: [] for name in rows}
    for seed in range(-1, args.repeats):  # the first round warms up and is not counted
        for name, run in rows.items():
            wall, cpu = time.perf_counter(), time.process_time()
            count = run(seed + 1)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if seed >= 0:
                timings[name].append((count(), wall, cpu))

    result = {
        "model": str(args.model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "prompt": args.prompt,
        "prompts": args.prompts,
        "copies": args.copies,
        "max_tokens": args.max_tokens,
        "threads": args.threads,
        "repeats": args.repeats,
        "torch": torch.__version__,
        "rows": {},
    }
    for name, runs in timings.items():
        result["rows"][name] = {
            "useful_tokens": statistics.median(tokens for tokens, _, _ in runs),
            "wall_s": statistics.median(wall for _, wall, _ in runs),
            "tokens_per_s": statistics.median(tokens / wall for tokens, wall, _ in runs),
            "tokens_per_cpu_s": statistics.median(tokens / cpu for tokens, _, cpu in runs),
        }
    ours, theirs = result["rows"]["TransformersSampler"], result["rows"]["model.generate"]
    result["ratio"] = ours["tokens_per_s"] / theirs["tokens_per_s"]
    result["ratio_cpu"] = ours["tokens_per_cpu_s"] / theirs["tokens_per_cpu_s"]

    if args.json:
        json.dump(result, sys.stdout, indent=1)
        print()
        return
    print(
        f"{args.prompts} prompts x {args.copies}, <= {args.max_tokens} tokens, {args.prompt}, "
        f"{result['parameters'] / 1e6:.2f} M parameters, {args.threads} thread(s), median of {args.repeats}"
    )
    print(f"{'':22}{'useful tokens':>14}{'wall s':>9}{'tokens/s':>10}{'tokens/CPU s':>14}")
    for name, row in result["rows"].items():
        print(
            f"{name:22}{row['useful_tokens']:>14.0f}{row['wall_s']:>9.2f}{row['tokens_per_s']:>10.0f}"
            f"{row['tokens_per_cpu_s']:>14.0f}"
        )
    print(f"{'ratio':22}{'':>14}{'':>9}{result['ratio']:>9.1f}x{result['ratio_cpu']:>13.1f}x")


if __name__ == "__main__":
    main()
