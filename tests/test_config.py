"""Config: presets, what papermill hands over, and what is refused by name."""

import builtins
import dataclasses
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from rlkit.algorithms import ALGORITHMS
from rlkit.jobs.config import Config


def test_presets_are_the_laptops_and_the_handouts():
    laptop, olmo = Config().resolved(), Config.preset("olmo").resolved()
    assert (laptop.n_prompts, laptop.group_size, laptop.lr, laptop.max_tokens, laptop.n_steps) == (
        16,
        8,
        3e-4,
        64,
        30,
    )
    assert (laptop.gradient_accumulation_steps, laptop.dtype, laptop.n_val) == (4, "float32", 256)
    assert laptop.n_val_final == 512
    assert (olmo.n_prompts, olmo.group_size, olmo.lr, olmo.max_tokens, olmo.n_steps) == (
        32,
        8,
        1e-5,
        512,
        200,
    )
    assert (olmo.gradient_accumulation_steps, olmo.dtype, olmo.n_train, olmo.n_val) == (
        32,
        "float32",
        6400,
        1024,
    )
    assert (olmo.n_val_final, olmo.eval_every, olmo.rollouts_every, olmo.sampler) == (1024, 10, 40, "vllm")
    assert (olmo.adam_beta1, olmo.adam_beta2, olmo.weight_decay, olmo.max_grad_norm) == (0.9, 0.95, 0.0, 1.0)
    assert Config().preset == "laptop" and Config.preset("olmo").preset == "olmo"
    assert dataclasses.replace(Config.preset("olmo"), seed=3).preset == "olmo"


def test_off_policy_makes_the_train_batch_8_and_the_constant_is_batch_times_tokens():
    off = Config.preset("olmo", algo="offpolicy_clip").resolved()
    assert (off.train_batch_size, off.gradient_accumulation_steps, off.cliprange) == (8, 1, 0.2)
    assert Config(algo="offpolicy_gspo").resolved().cliprange == 3e-4
    assert Config(algo="offpolicy_clip", cliprange=0.3).resolved().cliprange == 0.3
    assert Config(algo="drgrpo").resolved().normalization_constant == 128 * 64
    assert Config(algo="grpo").resolved().normalization_constant is None
    own = dataclasses.replace(ALGORITHMS["drgrpo"], name="own", off_policy=True)
    assert Config().resolved(own).normalization_constant == 8 * 64


# (what papermill hands over, field, the value wanted); measured with papermill 2.7's -p, -y and -r
READ = [
    ("1e-5", "lr", 1e-5),
    (3, "lr", 3.0),
    ("7", "seed", 7),
    (3.0, "seed", 3),
    ("1e2", "n_steps", 100),
    ("true", "autocast", True),
    ("false", "autocast", False),
    ("False", "eval_at_start", False),
    ("no", "resume", False),
    (0, "eval_at_start", False),
    (1, "autocast", True),
    ("null", "tis_cap", None),
    ("None", "tis_cap", None),
    ("2", "tis_cap", 2.0),
    ("None", "lr", 3e-4),
    (None, "n_val_final", 512),
    ("007", "run_dir", "007"),
    ("none", "sink", "none"),
    ("a=b", "run_dir", "a=b"),
]


@pytest.mark.parametrize("value, name, wanted", READ)
def test_from_parameters_reads(value, name, wanted):
    got = getattr(Config.from_parameters({name: value}), name)
    assert got == wanted and type(got) is type(wanted)


REFUSED = [
    ("1e-5 ", "lr", "is not a number"),
    (" 1e-5", "lr", "is not a number"),
    ("", "lr", "is not a number"),
    ("[1,2]", "seed", "not a whole number"),
    ([1, 2], "seed", "not a whole number"),
    ("1.5", "n_steps", "not a whole number"),
    (2.5, "n_steps", "not a whole number"),
    ("maybe", "autocast", "not true or false"),
    (2, "autocast", "not true or false"),
    (True, "n_steps", "not a whole number"),
    (True, "lr", "not a number"),
    (float("nan"), "lr", "a number >= 0"),
    (float("inf"), "max_grad_norm", "expected a number >= 1e-06 and <= 1e\\+09"),
    ("nan", "lr", "not a number"),
    (7, "model", "expected text"),
    (-1e-5, "lr", ">= 0"),
    (0, "group_size", ">= 1"),
    (1.0, "adam_beta1", ">= 0 and < 1"),
    ("vlm", "sampler", "did you mean 'vllm'"),
    ("drgpo", "algo", "did you mean 'drgrpo'"),
    ("ncl", "weight_sync", "did you mean 'nccl'"),
    ("olm", "preset", "did you mean 'olmo'"),
    ("float16", "dtype", "expected one of"),
    ("cuda:x", "device", "cuda:0"),
    (0.0, "temperature", ">= 0.01"),
    ("  ", "model", "empty text"),
]


@pytest.mark.parametrize("value, name, message", REFUSED)
def test_from_parameters_refuses_by_name(value, name, message):
    with pytest.raises(ValueError, match=f"(?s)^{name}: .*{message}"):
        Config.from_parameters({name: value})


# values that would hang, overflow or train on nothing; before, they passed
TOO_LARGE = [
    ("n_train", 10**12, "a whole number >= 1 and <= 1,000,000"),
    ("n_steps", 10**9, "<= 1,000,000"),
    ("rollout_batch_size", 2**40, "<= 1,000,000"),
    ("max_tokens", 10**9, "<= 1,000,000"),
    ("n_val_final", 10**9, "<= 1,000,000 or None"),
    ("lr", 1e300, "a number >= 0 and <= 10"),
    ("lr", "1e300", "a number >= 0 and <= 10"),
    ("threads", 100000, "<= 1,024"),
    ("max_grad_norm", 1e-300, "a number >= 1e-06"),
    ("tis_cap", 1e-300, "a number >= 0.001"),
    ("normalization_constant", 1e-300, "a number >= 0.001"),
    ("temperature", 1e-300, "a number >= 0.01"),
    ("temperature", 1e300, "<= 100"),
    ("weight_decay", 1e300, "<= 100"),
    ("advantage_eps", 1e300, "<= 1"),
    ("cliprange", 1e300, "<= 1,000 or None"),
]


@pytest.mark.parametrize("name, value, message", TOO_LARGE)
def test_bounds_that_keep_absurd_values_out(name, value, message):
    with pytest.raises(ValueError, match=f"^{name}: got .*expected .*{message}"):
        Config(**{name: value})


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_what_only_sampling_takes_is_refused_with_the_reason(name):
    reason = (
        f"^{name}: not a parameter of training, since it would bias the gradient; evaluate.ipynb takes it$"
    )
    for make in (Config.from_parameters, lambda values: Config(**values)):
        with pytest.raises(ValueError, match=reason):
            make({name: 1})


def test_the_constructor_opens_no_file(monkeypatch):
    def touched(*arguments, **options):
        raise AssertionError(f"touched {arguments}")

    Config()  # what is imported late is imported now
    for module, names in (
        (os, ("stat", "lstat", "scandir", "access")),
        (builtins, ("open",)),
        (io, ("open",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, touched)
    values = dict(model="./nowhere", dataset="/nowhere", prompt="/nowhere/p.txt", run_dir="/nowhere/run")
    config = Config(**values).resolved()
    monkeypatch.undo()
    assert config.model == "./nowhere"


def test_every_mistake_is_listed_with_a_hint():
    with pytest.raises(ValueError) as error:
        Config.from_parameters({"lrr": 1e-4, "lr": "fast", "n_step": 3, "seed": 1})
    lines = str(error.value).splitlines()
    assert lines == [
        "lrr: unknown parameter; did you mean 'lr'?",
        "lr: 'fast' is not a number",
        "n_step: unknown parameter; did you mean 'n_steps'?",
    ]
    with pytest.raises(ValueError, match="learning_rat"):
        Config.preset("laptop", learning_rat=1)


def test_none_only_where_it_means_something():
    with pytest.raises(ValueError, match="^lr: got None, expected a number"):
        Config(lr=None)
    assert Config(tis_cap=None, train_batch_size=None).tis_cap is None


# rows / group, rows / train batch, train batch / accumulation, prompts there at all
TOGETHER = [
    (dict(weight_sync="nccl"), "weight_sync: got 'nccl' with sampler 'transformers'"),
    (dict(rollout_batch_size=100), "rollout_batch_size: got 100, expected a multiple of group_size, 8"),
    (dict(train_batch_size=48), "train_batch_size: got 48, expected a divisor of rollout_batch_size, 128"),
    (dict(train_batch_size=256), "train_batch_size: got 256"),
    (dict(gradient_accumulation_steps=3), "gradient_accumulation_steps: got 3, expected a divisor"),
    (dict(n_train=8), "n_train: got 8, expected at least the 16 prompts"),
    (dict(group_size=1), "group_size: got 1 with algo 'grpo'"),
    (dict(group_size=1, algo="drgrpo"), "group_size: got 1 with algo 'drgrpo'"),
    (dict(autocast=True, dtype="bfloat16"), "autocast: got True with dtype bfloat16"),
    (dict(resume=True), "run_dir: got None with resume=True"),
]


@pytest.mark.parametrize("values, message", TOGETHER)
def test_fields_that_do_not_fit_together(values, message):
    with pytest.raises(ValueError, match=message):
        Config(**values)


def test_group_size_1_is_fine_without_a_baseline():
    assert Config(group_size=1, algo="rft").n_prompts == 128


def test_a_readers_algorithm_is_checked_too():
    clipped = dataclasses.replace(ALGORITHMS["grpo"], name="mine", importance_reweighting_method="grpo")
    with pytest.raises(ValueError, match="cliprange: got None"):
        Config().resolved(clipped)
    assert Config(cliprange=0.1).resolved(clipped).cliprange == 0.1
    by_hand = dataclasses.replace(clipped, importance_reweighting_method=lambda *a: None)
    assert Config().resolved(by_hand).cliprange is None


def test_every_field_has_one_line_and_goes_through_json():
    table = Config.field_table()
    assert [row["name"] for row in table] == [f.name for f in dataclasses.fields(Config)]
    assert all(row["doc"] and "\n" not in row["doc"] for row in table)
    values = json.loads(json.dumps(dataclasses.asdict(Config.preset("olmo"))))
    assert Config.from_parameters(values) == Config.preset("olmo")


def test_checking_a_config_loads_no_torch():
    code = (
        "import sys; from rlkit import Config; Config.from_parameters({'lr': '1e-5'}).resolved(); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'vllm', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# values that a file system, a float or a decoder would refuse later, with an error of its own
ABSURD = [
    ("prompt", "x" * 5000, "5000 characters"),
    ("prompt", "a\0b", "NUL"),
    ("model", "a\0b", "NUL"),
    ("model", "x" * 5000, "5000 characters"),
    ("dataset", "a\0b", "NUL"),
    ("dataset", "a/" * 3000, "6000 characters"),
    ("run_dir", "a\0b", "NUL"),
    ("run_dir", "x" * 5000, "5000 characters"),
    ("lr", 10**400, "a number >= 0"),
    ("lr", 10**5000, "bits"),
    ("lr", "1e999", "a number >= 0"),
    ("seed", 10**30, ">= 0 and < 9,223,372,036,854,775,808"),
    ("seed", "9" * 5000, "whole number"),
    ("n_steps", [0] * 500, "not a whole number"),
    ("preset", ["laptop"], "expected"),
]


@pytest.mark.parametrize("name, value, message", ABSURD, ids=range(len(ABSURD)))
def test_absurd_values_are_refused_by_name_and_shortened(name, value, message):
    with pytest.raises(ValueError, match=f"(?s)^{name}: .*{message}") as error:
        Config.from_parameters({name: value})
    assert len(str(error.value)) < 500
    with pytest.raises(ValueError, match=f"(?s)^{name}: "):
        Config.preset(value) if name == "preset" else Config(**{name: value})


def test_what_is_given_wins_over_the_preset_and_what_is_left_is_filled_in():
    assert (
        Config.preset("olmo", lr=3e-6).lr == Config.from_parameters(dict(preset="olmo", lr=3e-6)).lr == 3e-6
    )
    many = Config(rollout_batch_size=100, group_size=4).resolved()
    assert many.gradient_accumulation_steps == 2  # 100 // 32 is 3, which does not divide 100
    assert Config(n_val=0, n_val_final=9).resolved().n_val_final == 0
    given = Config(algo="drgrpo", normalization_constant=91.0, tis_cap=2.0).resolved()
    assert (given.normalization_constant, given.tis_cap) == (91.0, 2.0)


@pytest.mark.parametrize(
    "value",
    [np.array([1, 2]), np.True_, b"3", torch.tensor(True), [1], {"a": 1}, object()],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", ["n_steps", "lr", "run_dir"])
def test_what_is_no_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: "):
        Config.from_parameters({name: value})


def test_numbers_of_other_libraries_are_numbers():
    config = Config.from_parameters({"n_steps": np.int64(3), "lr": np.float32(0.5), "seed": torch.tensor(2)})
    assert (config.n_steps, config.lr, config.seed) == (3, 0.5, 2)
