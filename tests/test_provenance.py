"""What config.json says of the command: no secrets, and everything else as it was typed."""

import sys

import pytest

from rlkit.jobs.provenance import command_line, provenance

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "typed, kept",
    [
        ("--hf-token abc", "--hf-token ***"),
        ("--hf-token=abc -x 1", "--hf-token=*** -x 1"),
        ("-p wandb_api_key abc -p lr 1e-4", "-p wandb_api_key *** -p lr 1e-4"),
        ("HF_TOKEN=abc lr=1", "HF_TOKEN=*** lr=1"),
        ("--password p --client-secret s --auth a", "--password *** --client-secret *** --auth ***"),
        ("-x hf_abcdefghijklmnopqrstuv", "-x ***"),
        ("-x ghp_abcdefghijklmnopqrstuv", "-x ***"),
        (f"-x {KEY}", "-x ***"),
        ("--index https://me:pass@host/simple", "--index https://***@host/simple"),
        # no secrets
        ("-p max_tokens 64 -p seed 1", "-p max_tokens 64 -p seed 1"),
        ("max_tokens=64 tokenizer=a author=b", "max_tokens=64 tokenizer=a author=b"),
        (f"-p model owner/name@{KEY}", f"-p model owner/name@{KEY}"),
        (
            "-p run_dir runs/laptop-grpo-seed0-20260101-000000",
            "-p run_dir runs/laptop-grpo-seed0-20260101-000000",
        ),
    ],
)
def test_secrets_are_left_out_of_the_command(typed, kept):
    assert command_line(typed.split()) == kept


def test_a_yaml_argument_and_the_recorded_command(monkeypatch):
    assert command_line(["-y", "{hf_token: abc, lr: 1}"]) == "-y {hf_token: ***, lr: 1}"
    monkeypatch.setattr(sys, "argv", ["/x/train.py", "--hf-token", "abc", "lr=1"])
    assert provenance()["command"].endswith(" train.py --hf-token *** lr=1")
