"""Requests to a vLLM server, with every sampling parameter spelled out, and its answers as `Completion`s."""

from hashlib import blake2b

import requests

from rlkit.samplers.base import Completion
from rlkit.support.checks import hint

# every request carries all of them: a server's own defaults depend on the model's files and vLLM's version
DEFAULTS = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
DEFAULTS |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None, "min_tokens": 0}
DEFAULTS |= {"stop": [], "include_stop_str_in_output": True, "stop_token_ids": [], "ignore_eos": False}
DEFAULTS |= {"skip_special_tokens": True, "spaces_between_special_tokens": False}


class ServerDied(RuntimeError):
    """The server's process is gone or its engine is dead."""


def request(
    method: str, url: str, body: dict | None = None, timeout: float | None = None, key: str | None = None
):
    """The response to one HTTP request, which no proxy sees."""
    with requests.Session() as session:
        session.trust_env = False
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return session.request(method, url, json=body, timeout=timeout, headers=headers)


def request_body(sampling_params: dict) -> dict:
    """A request with every sampling parameter. ValueError for unknown names, which vLLM would ignore."""
    known = ["max_tokens", "seed", *DEFAULTS]
    for name in sampling_params.keys() - set(known):
        expected = f"expected one of {', '.join(known)}{hint(name, known)}"
        raise ValueError(f"sampling_params: got {name!r}, {expected}")
    if "max_tokens" not in sampling_params:
        raise ValueError("sampling_params: max_tokens is missing, expected an integer (vLLM's default is 16)")
    asked = {"logprobs": 0, "return_token_ids": True, "add_special_tokens": False}
    return DEFAULTS | sampling_params | asked


def request_seed(seed, index: int) -> int:
    """A 48-bit seed for one prompt of one call; vLLM adds the copy's index to it."""
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=6).digest(), "little")


def completions_of(answer: dict, n: int) -> list[Completion]:
    """The n completions in the answer to one prompt's request, without entropies."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    reasons = [choice["finish_reason"] for choice in choices]
    if len(choices) != n or not {"stop", "length"}.issuperset(reasons):
        raise RuntimeError(f"vLLM server: expected {n} finished responses, got {reasons}")
    prompt = next((c["prompt_token_ids"] for c in choices if c.get("prompt_token_ids")), [])
    found = []
    for choice, reason in zip(choices, reasons):
        ids, log_probs = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
        if len(log_probs) != len(ids):
            raise RuntimeError(f"vLLM server: {len(log_probs)} log-probs for {len(ids)} tokens")
        found.append(Completion(choice["text"], ids, reason, log_probs, list(prompt)))
    return found
