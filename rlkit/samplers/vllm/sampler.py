"""The `Sampler` protocol on a vLLM server: weights, restarts, sleep."""

import weakref
from typing import Any

import torch

from rlkit.samplers.base import Completion, SamplingParams, end_of_text_ids, prompt_ids
from rlkit.samplers.vllm import checkpoint
from rlkit.samplers.vllm.client import ServerDied
from rlkit.samplers.vllm.find import ONE_GPU_SHARE, OWN_GPU_SHARE, find_vllm, place, vllm_missing
from rlkit.samplers.vllm.server import VLLMServer
from rlkit.support.adapters import merged
from rlkit.support.probes import positions
from rlkit.tokenization import cut_at_stop, hidden_ids

LEAST_TEMPERATURE = 0.01  # below it vLLM silently samples at this one


class VLLMSampler:
    """The `Sampler` protocol on a `VLLMServer` of its own, which is started here and stopped by `close`.

    The model is written into memory (/dev/shm) and served from there, so any model works, also one that
    exists only as an object. A server that dies is started again with the last weights and asked again, at
    most ``max_restarts`` times in a row. One that bfloat16 ends by SIGILL at its start, as on some CPUs, is
    started in float32, with one printed line.

    batch_size: most prompts in flight at once. eos_token_ids: in place of the model's and the tokenizer's.
    options: `VLLMServer`'s. Without ``gpu`` a second GPU is used if there is one. Where trainer and server
    share
        one, vLLM gets 0.3 of it (else 0.9; ``gpu_memory_utilization``) and sleeps whenever it is not asked
        (``sleep``). ``dtype`` is the model's if not given.

    Log-probs are those of the distribution sampled from, temperature and truncations included; those of
    temperature 0 are at temperature 1. Completions come without entropies.
    """

    def __init__(
        self, model, tokenizer, *, sleep=None, max_restarts=2, batch_size=None, eos_token_ids=None, **options
    ):
        if find_vllm(options.get("python")) is None:
            raise ValueError(f"sampler: {vllm_missing()}")
        checkpoint.check_servable(model)
        self.model, self.tokenizer, self.shapes = model, tokenizer, checkpoint.shapes_of(model)
        self.batch_size, self.max_restarts, self.restarts = batch_size, max_restarts, 0
        self._own_ends = eos_token_ids is not None
        ends = set(end_of_text_ids(model, tokenizer) if eos_token_ids is None else eos_token_ids)
        self.eos_token_ids = sorted(i for i in ends if i < model.get_input_embeddings().num_embeddings)
        options = {name: value for name, value in options.items() if value is not None}
        gpu, shared = place(next(model.parameters()).device, options.pop("gpu", None))
        options.setdefault("gpu_memory_utilization", ONE_GPU_SHARE if shared else OWN_GPU_SHARE)
        options.setdefault("dtype", str(model.dtype).removeprefix("torch."))
        self.sleeps = shared if sleep is None else sleep
        self._asleep = self._synced = self._closed = False
        self.folder = checkpoint.memory_folder(model)
        self._remove = weakref.finalize(self, checkpoint.release, self.folder)
        self.server = server = VLLMServer(str(self.folder), gpu, sleep_mode=self.sleeps, **options)
        server.remove_if_orphaned(self.folder)
        try:
            checkpoint.write_weights(model, self.folder, tokenizer)
            self._start()
        except BaseException:
            self.close()
            raise
        what, ready = f"{server.install.package} {server.install.version}", f"{server.start_seconds:.0f} s"
        print(f"vLLM server: {what}, ready in {ready}; weights by {server.way}", flush=True)

    def _start(self) -> None:
        self._asleep, server = False, self.server
        self._free_gpu()
        try:
            server.start()
        except RuntimeError:
            illegal = server.report().ended_by == "SIGILL" and server.dtype == "bfloat16"
            if not (illegal and server.install.on_cpu):
                raise
            why = "the engine's process ended by SIGILL (illegal instruction) in bfloat16"
            print(f"vLLM server: {why}, which it cannot compute on this CPU; sampling in float32", flush=True)
            server.dtype = "float32"
            server.start()
        server.init_weight_sync(str(next(self.model.parameters()).device), self.folder)
        if server.way != "shm" and self._synced:  # its checkpoint is of the start, the weights are newer
            with merged(self.model):
                server.sync_policy_weights(self.model)

    def generate(self, prompts: list[str], params: SamplingParams, n: int = 1) -> list[list[Completion]]:
        """``n`` completions per prompt, in order. Prompts are encoded by ``encode_prompts``."""
        if n < 1:
            raise ValueError(f"n: got {n!r}, expected at least 1")
        if 0 < params.temperature < LEAST_TEMPERATURE:
            expected = f"expected 0 (greedy) or at least {LEAST_TEMPERATURE}, below which vLLM does not go"
            raise ValueError(f"temperature: got {params.temperature}, {expected}")
        room = self.server.max_model_len or positions(self.model.config)
        ids = prompt_ids(self.tokenizer, prompts, params.max_tokens, room)
        how = {"stop_token_ids": self.eos_token_ids, "ignore_eos": self._own_ends}
        how |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        wanted = vars(params) | {"n": n, "stop": list(params.stop)} | how
        found = self._with_restarts(lambda: self._generate(ids, wanted)) if prompts else []
        hidden = hidden_ids(self.tokenizer, self.eos_token_ids, params.stop)
        for c in found:  # as the in-process sampler says it: vLLM's own text would hold the end-of-text token
            c.text, _ = cut_at_stop(self.tokenizer, c.token_ids, params.stop, hidden)
        return [found[i * n : (i + 1) * n] for i in range(len(prompts))]

    def _generate(self, ids: list[list[int]], wanted: dict) -> list[Completion]:
        self._wake()
        found = self.server.generate_completions(ids, wanted, self.batch_size)
        if self.sleeps:
            self._asleep = True  # before it is: an interrupt may come in between
            self.server.sleep()
        return found

    def sync_weights(self, model, step: int | None = None) -> None:
        """The server's weights become the model's, whose names and shapes must be those of the start."""

        def send():
            self._wake()
            self.server.sync_policy_weights(model)

        with merged(model):
            checkpoint.check_same(self.shapes, model)
            self.model, self._synced = model, True
            self._with_restarts(send)

    def close(self) -> None:
        """Stop the server; nothing of it is left."""
        self._closed = True
        self.server.stop()
        self._remove()

    def _wake(self) -> None:
        if self._asleep:
            self._free_gpu()
            self.server.wake_up()
            self._asleep = False

    def _free_gpu(self) -> None:
        """What the trainer holds of a shared GPU but does not use."""
        if self.sleeps and next(self.model.parameters()).is_cuda:
            torch.cuda.empty_cache()

    def _with_restarts(self, action) -> Any:
        for failures in range(self.max_restarts + 1):
            try:
                if self._closed:
                    raise RuntimeError("sampler: it is closed, expected a new one")
                if not self.server.running:  # an earlier call failed half way, or was interrupted
                    self._start()
                return action()
            except ServerDied as error:
                if failures == self.max_restarts:
                    raise RuntimeError(
                        f"sampler: the vLLM server died {failures + 1} times in a row; what the run has "
                        "saved is complete, resume=True goes on from its last checkpoint\n"
                        f"{error}\n{self.server.report().last_words}"
                    ) from error
                print(f"{error}; starting it again ({failures + 1} of {self.max_restarts})", flush=True)
                self.restarts += 1
                self.server.stop()  # and around again, where a start counts as a try
