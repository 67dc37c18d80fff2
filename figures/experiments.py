"""The recorded experiments: python figures/experiments.py [name ...] [--quick] [--collect] [--workers 2]

Each experiment is a list of runs: parameters of notebooks/train.ipynb and a name.
Runs lie under runs/experiments/<experiment>/. What is finished is written to
figures/records/<experiment>.jsonl, with the trained model's answers to 256 validation problems, eight each,
where the experiment asks for it. A recorded run is not made again (delete its line to have it again), a
finished one is only recorded, a broken one goes on.
"""

import argparse
import json
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
RUNS = HERE.parent / "runs" / "experiments"
EIGHT = range(8)
RATES = (3e-5, 1e-4, 3e-4, 5e-4, 1e-3, 3e-3)
SHORT = {"n_steps": 30, "eval_every": 10, "lr": 3e-4}  # what the tuning sweep chose
QUICK = {"n_steps": 2, "eval_every": 0, "n_val": 64, "n_val_final": 64}
OFF = {"n_steps": 12, "eval_every": 4}
# name -> (algorithm, parameters): the off-policy family of section 6
OFF_POLICY = {
    "naive": {"algo": "offpolicy_naive"},
    "noclip": {"algo": "offpolicy_noclip"},
    "clip": {"algo": "offpolicy_clip"},
    "gspo3e-4": {"algo": "offpolicy_gspo"},
    "gspo1e-2": {"algo": "offpolicy_gspo", "cliprange": 0.01},
    "cispo": {"algo": "cispo"},
}


def seeds(name: str, parameters: dict, numbers=EIGHT) -> list[dict]:
    """One run of these parameters for each seed."""
    return [{"name": f"{name}-seed{seed}", "seed": seed, **parameters} for seed in numbers]


def _experiments() -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    tuning = SHORT | {"dataset": str(RUNS / "data" / "laptop-tuning")}
    found["tuning"] = [r for lr in RATES for r in seeds(f"lr{lr:g}", tuning | {"lr": lr}, range(4))]
    found["variants"] = [
        run
        for algo in ("grpo", "grpo_constant", "drgrpo", "rft", "maxrl")
        for run in seeds(algo, SHORT | {"algo": algo})
    ]
    found["learning_rate"] = [
        run
        for lr in RATES
        for name, more in (("on", SHORT), ("off16", OFF | {"algo": "offpolicy_clip"}))
        if (name, lr) != ("on", SHORT["lr"])  # those are variants/grpo
        for run in seeds(f"{name}-lr{lr:g}", more | {"lr": lr})
    ]
    found["prompts"] = [
        r for p in ("question_only", "r1_zero_three_shot") for r in seeds(p, SHORT | {"prompt": p})
    ]
    found["off_policy"] = [
        run
        for updates, lr in product((16, 4, 32), (5e-4, 1e-4))
        for name, more in OFF_POLICY.items()
        for run in seeds(
            f"{name}-u{updates}-lr{lr:g}", OFF | more | {"lr": lr, "train_batch_size": 128 // updates}
        )
    ]
    found["on_policy_beside"] = [r for lr in (5e-4, 1e-4) for r in seeds(f"on-lr{lr:g}", OFF | {"lr": lr})]
    found["group_size"] = [
        run for size in (4, 32) for run in seeds(f"group{size}", SHORT | {"group_size": size})
    ]
    return found


EXPERIMENTS = _experiments()
EVALUATED = {"variants"}  # whose trained models answer 256 validation problems, eight times each


def write_tuning_data() -> None:
    """Problems for choosing: the training split's questions after the 6,400 that are trained on."""
    from rlkit import generate_problems

    problems, folder = generate_problems(6400 + 512, "train"), RUNS / "data" / "laptop-tuning"
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", problems[:6400]), ("test", problems[6400:])):
        lines = [json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in part]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def final(run) -> dict:
    """The trained model on 256 validation problems, eight answers each; kept in the run's folder."""
    from rlkit import evaluate, load_model, load_problems, load_prompt, make_sampler
    from rlkit.jobs.records import final_record

    kept = run.path / "final.json"
    if not kept.is_file():
        config = run.config
        sampler = make_sampler("transformers", *load_model(str(run.model_path), "float32", "cpu"))
        problems, prompt = load_problems(config["dataset"], "validation", 256), load_prompt(config["prompt"])
        result = evaluate(
            sampler, problems, prompt, n_samples=8, max_tokens=config["max_tokens"], seed=config["seed"]
        )
        kept.write_text(json.dumps(final_record(result)), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def recorded(name: str) -> dict[str, dict]:
    """The lines of an experiment's record, by the runs' names."""
    from rlkit.support.files import read_jsonl

    path = HERE / "records" / f"{name}.jsonl"
    return {row["name"]: row for row in read_jsonl(path)} if path.is_file() else {}


def collect(name: str) -> int:
    """Add the finished runs to an experiment's record; returns how many it has."""
    from rlkit import load_run
    from rlkit.jobs.records import record_of, write_records

    rows = recorded(name)
    for run in EXPERIMENTS[name]:
        if run["name"] in rows:
            continue
        folder = RUNS / name / run["name"]
        if (folder / "metrics.jsonl").is_file() and load_run(folder).finished:
            loaded = load_run(folder)
            row = record_of(loaded, final(loaded) if name in EVALUATED else None)
            row["config"]["dataset"] = Path(row["config"]["dataset"]).name
            rows[run["name"]] = row
    (HERE / "records").mkdir(exist_ok=True)
    if rows:
        write_records(HERE / "records" / f"{name}.jsonl", rows.values())
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(EXPERIMENTS), help="experiments; all without")
    parser.add_argument(
        "--quick", action="store_true", help="seed 0 alone, two steps of each run; not recorded"
    )
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--collect", action="store_true", help="only write the records of what is finished")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"got {unknown[0]}, expected some of {', '.join(EXPERIMENTS)}")
    if "tuning" in args.names:
        write_tuning_data()
    for name in args.names:
        known, runs = recorded(name), EXPERIMENTS[name]
        if args.quick:
            runs = [run | QUICK for run in runs if run["seed"] == 0]
        else:
            runs = [run for run in runs if run["name"] not in known]
        if runs and not args.collect:
            from rlkit import sweep

            table = sweep(runs, RUNS / ("quick-" * args.quick + name), workers=args.workers)
            print(f"{name}: {table.status.value_counts().to_dict()}")
        if not args.quick:
            print(f"{name}: {collect(name)} of {len(EXPERIMENTS[name])} runs recorded")


if __name__ == "__main__":
    main()
