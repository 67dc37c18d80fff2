"""A vLLM server as a child process: started, asked, given new weights, stopped; and a sampler on top of it.

vLLM runs in its own processes and may run in its own venv, so the trainer needs neither vLLM nor its pins
(see `rlkit.samplers.vllm.find`). Nothing is left behind when this process ends, however it ends: the
server's process group belongs to a small guard (`guard.py`) that outlives us by a moment.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from rlkit.samplers.base import Completion, SamplingParams, encode_prompts, end_of_text_ids
from rlkit.samplers.vllm.find import VLLMInstall, find_vllm, vllm_missing, vllm_of
from rlkit.samplers.vllm.guard import others, shared_memory
from rlkit.samplers.vllm.weight_sync import (
    WAYS,
    check_same,
    check_servable,
    choose_way,
    free_port,
    make_sync,
    memory_folder,
    release,
    shapes_of,
    write_weights,
)

IN_FLIGHT = 256  # prompts asked for at once
STOP_SECONDS = 25  # for the guard to end the server in order
GUARDLESS_SECONDS = 5  # for a server whose guard was killed, which sends it SIGTERM
LONGEST_TMPDIR = 48  # characters: vLLM adds 37 for its sockets, whose paths may have 107, and we our 20
LEAST_TEMPERATURE = 0.01  # vLLM silently samples at this one below it
ONE_GPU_SHARE = 0.3  # of a GPU's memory for vLLM where the trainer uses the same one
OWN_GPU_SHARE = 0.9  # and where it has one of its own

# what a request says, always all of it: a server's defaults may come from a model's files and change between
# versions
DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop": [],
    "stop_token_ids": [],
    "include_stop_str_in_output": True,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "logit_bias": None,
}


class ServerDied(RuntimeError):
    """The server's process is gone or its engine is dead."""


@dataclass
class VLLMCompletion(Completion):
    """A `Completion` by vLLM; text, token ids, finish reason and log-probs as it sent them."""


@dataclass
class VLLMServer:
    """One vLLM server on the loopback interface::

        with VLLMServer("laptop") as server:                    # or server.start() ... server.stop()
            server.generate_completions(["2+2="], {"max_tokens": 8, "n": 4, "temperature": 1.0})
            server.sync_policy_weights(policy)                  # after every optimizer step
            server.generate_completions(["2+2="], {"max_tokens": 8})        # from the new weights

    `VLLMSampler` wraps one in the `Sampler` protocol and starts it again if it dies.

    model_id: "laptop", a folder or a hub id.
    gpu: index of the server's GPU among those this process sees; nothing to vLLM's CPU build.
    seed: the engine's. gpu_memory_utilization: share of the GPU's memory that vLLM takes for weights and
        cache.
    dtype: "auto" (the checkpoint's), "float32", "bfloat16".
    weight_sync: "auto", "shm", "nccl", "ipc" or "gloo", see `rlkit.samplers.vllm.weight_sync`.
    sleep_mode: start a GPU server so that `sleep` can free its memory.
    python: the Python to run vLLM with, see `rlkit.samplers.vllm.find`. port: None takes a free one.
    max_model_len: longest prompt and response together; None is the model's own.
    extra_arguments: more of vLLM's own, as on its command line. start_timeout: seconds until it must be
        healthy.
    log_path: where the server writes; None is a file that is deleted at the end.

    Works as a context manager. ``start`` raises ValueError for what cannot work (no vLLM, no such model, the
    port in use), RuntimeError with the server's own last lines if it dies.
    """

    model_id: str
    gpu: int = 0
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    dtype: str = field(default="auto", kw_only=True)
    weight_sync: str = field(default="auto", kw_only=True)
    sleep_mode: bool = field(default=False, kw_only=True)
    python: str | None = field(default=None, kw_only=True)
    port: int | None = field(default=None, kw_only=True)
    max_model_len: int | None = field(default=None, kw_only=True)
    extra_arguments: tuple[str, ...] = field(default=(), kw_only=True)
    start_timeout: float = field(default=900, kw_only=True)
    log_path: str | Path | None = field(default=None, kw_only=True)

    def __post_init__(self):
        if self.weight_sync not in WAYS:
            raise ValueError(f"weight_sync: got {self.weight_sync!r}, expected one of {', '.join(WAYS)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization: got {self.gpu_memory_utilization}, expected a share in (0, 1]"
            )
        self.install: VLLMInstall | None = None
        self.url = self.name = self.sync = self.way = self.start_seconds = None
        self._process, self._finalizer, self._calls = None, None, 0
        self._log = self.folder = None
        self._orphans: list[str] = []
        self._said = "(its log is gone)"  # its last words, once it is stopped

    # ---- life

    def start(self) -> None:
        """Start the server and wait until it is healthy; nothing to do if it is."""
        if self._process is not None and self.alive():
            return
        self.stop()
        self.install = find_vllm(self.python)
        if self.install is None:
            raise ValueError(f"sampler: {vllm_missing()}")
        model = check_model(self.model_id)
        if self.port is not None and not port_is_free(self.port):
            raise ValueError(
                f"port: {self.port} of 127.0.0.1 is in use; expected a free one, or None to choose one"
            )
        began = time.monotonic()
        for attempt in range(3):
            try:
                self._start_once(model)
                break
            except RuntimeError as error:  # somebody was faster to take the port that was free
                if self.port is not None or attempt == 2 or "ddress already in use" not in str(error):
                    raise
        self.start_seconds = time.monotonic() - began

    def _start_once(self, model: str) -> None:
        port = self.port or free_port()
        self.url, self.name = f"http://127.0.0.1:{port}", f"rlkit-{secrets.token_hex(8)}"
        short = None if len(tempfile.gettempdir()) <= LONGEST_TMPDIR else "/tmp"
        self.folder = Path(tempfile.mkdtemp(prefix="rlkit-vllm-", dir=short))
        shutil.copy(Path(__file__).with_name("worker.py"), self.folder / "rlkit_vllm_worker.py")
        if self.install.package != "vllm":
            name_as_vllm(self.install.version, self.folder)
        (self.folder / "also").write_text("".join(f"{orphan}\n" for orphan in self._orphans))
        self._log = Path(self.log_path) if self.log_path else self.folder / "server.log"
        guard = [
            sys.executable,
            "-I",
            str(Path(__file__).with_name("guard.py")),
            str(os.getpid()),
            str(self.folder),
            "--",
        ]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                guard + self.command(model, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(model, str(self.folder)),
                start_new_session=True,
            )
        segments: set[Path] = set()  # of shared memory: a server that ends in disorder leaves them
        threading.Thread(
            target=_watch, args=(self._process, segments), daemon=True, name="vllm-watch"
        ).start()
        self._finalizer = weakref.finalize(self, _end, self._process, self.folder, os.getpid(), segments)
        try:
            self._wait_until_healthy()
            segments |= shared_memory(self._process.pid)
        except BaseException:
            self.stop()
            raise

    def command(self, model: str, port: int) -> list[str]:
        """The server's command line."""
        start = [self.install.python, "-m", "vllm.entrypoints.cli.main", "serve", model]
        options = {
            "host": "127.0.0.1",
            "port": port,
            "served-model-name": self.name,
            "dtype": self.dtype,
            "seed": self.seed,
            "generation-config": "vllm",
            "logprobs-mode": "processed_logprobs",
            "worker-extension-cls": "rlkit_vllm_worker.WorkerExtension",
        }
        if self.max_model_len is not None:
            options["max-model-len"] = self.max_model_len
        backend = self._backend()
        if backend != "shm":
            options["weight-transfer-config"] = json.dumps({"backend": backend})
        flags = ["--disable-uvicorn-access-log"]
        if self.install.on_cpu:
            flags.append("--enforce-eager")  # compiling takes longer than small models gain by it
            # a prompt cut in two by the token budget makes vLLM 0.32 wind back the request's random
            # generator, which a
            # CPU generator cannot do: the engine dies ("CPU Generator does not use offset")
            flags.append("--no-enable-chunked-prefill")
        else:
            options["gpu-memory-utilization"] = self.gpu_memory_utilization
            flags += ["--enable-sleep-mode"] if self.sleep_mode else []
        return [
            *start,
            *(part for name, value in options.items() for part in (f"--{name}", str(value))),
            *flags,
            *self.extra_arguments,
        ]

    def environment(self, model: str, folder: str) -> dict:
        """The server's environment: ours, less what steers the trainer's threads and Python, plus its own."""
        not_its = ("PYTHONHOME", "PYTHONPATH", "VLLM_API_KEY")
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OMP_", "KMP_", "GOMP_", "MKL_")) and name not in not_its
        }
        ours |= {
            "PYTHONPATH": folder,
            "TMPDIR": folder,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONSAFEPATH": "1",
        }  # a folder called vllm where the job was started is not the package
        if Path(model).is_dir():
            ours["HF_HUB_OFFLINE"] = "1"
        if self.install.on_cpu:
            ours.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; its own default is a share of the machine
            ours["TORCHDYNAMO_DISABLE"] = "1"
        else:
            setting = os.environ.get("CUDA_VISIBLE_DEVICES")
            visible = [entry for entry in (setting or "").split(",") if entry.strip()]
            if setting is not None and self.gpu >= len(visible):
                raise ValueError(
                    f"gpu: got {self.gpu}, but CUDA_VISIBLE_DEVICES names {len(visible)} device(s)"
                )
            ours["CUDA_VISIBLE_DEVICES"] = visible[self.gpu].strip() if visible else str(self.gpu)
            if self._backend() == "ipc":
                ours["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the handles are pickled
        return ours

    def _backend(self) -> str:
        """The transfer backend the server must be started with; it is asked before the policy's device is known."""
        if self.weight_sync == "auto":
            return "nccl" if not self.install.on_cpu and vllm_importable() and _gpu_count() > 1 else "shm"
        return choose_way(
            self.weight_sync,
            server_on_cpu=self.install.on_cpu,
            server_gpu=self.gpu,
            policy_gpu=self.gpu if self.weight_sync == "ipc" else self.gpu + 1,
            vllm_importable=vllm_importable(),
        )[0]

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        while time.monotonic() < deadline:
            if self._exited():
                raise RuntimeError(
                    f"vLLM server: it ended while starting ({self.install.package} "
                    f"{self.install.version})\n{self.last_words()}"
                )
            try:
                if self._request("get", "health", timeout=5).ok:
                    served = [card["id"] for card in self.get("v1/models")["data"]]
                    if self.name not in served:
                        raise RuntimeError(
                            f"vLLM server: {self.url} answers, but it is not ours (Address already "
                            f"in use): it serves {served}"
                        )
                    break
            except (OSError, ServerDied):
                pass
            time.sleep(0.2)
        else:
            raise RuntimeError(
                f"vLLM server: not healthy after {self.start_timeout:.0f} s\n{self.last_words()}"
            )
        try:  # one token: some models load and fail at their first use
            self.post("v1/completions", {"model": self.name, "prompt": [0], "max_tokens": 1})
        except RuntimeError as error:
            raise RuntimeError(
                f"vLLM server: it started and cannot generate ({str(error)[:300]})\n{self.last_words()}"
            ) from error

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped; it may have died since."""
        return self._process is not None

    def alive(self) -> bool:
        """Whether the process runs and its engine is healthy; one that is only slow to answer counts as alive."""
        import requests

        for attempt in range(5):
            if self._process is None or self._exited():
                return False
            try:
                return self._request("get", "health", timeout=30).ok
            except requests.Timeout:
                return True
            except requests.RequestException:  # refused or cut off: is it going down?
                time.sleep(0.2 * (attempt + 1))
        return False

    def stop(self) -> None:
        """End the server and everything it started; nothing to do if it was not started."""
        if self.sync is not None:
            self.sync.close()
            self.sync = None
        if self._finalizer is not None:
            self._said = self.last_words()
            self._finalizer()
        self._process = self._finalizer = None

    def remove_if_orphaned(self, folder) -> None:
        """Have this folder removed, too, should this process end without cleaning up."""
        self._orphans.append(str(folder))
        if self._process is not None:
            with open(self.folder / "also", "a") as file:
                file.write(f"{folder}\n")

    def last_words(self, lines: int = 12) -> str:
        """The errors the server reported first, and its last lines."""
        try:
            with open(self._log, errors="replace") as file:
                text = [re.sub(r"^\([^)]{1,80}\) ?|\x1b\[[0-9;]*m", "", line[:400]).rstrip() for line in file]
        except OSError:
            return self._said
        errors = [
            line
            for line in text
            if re.search(r"(Error|Exception): \S", line) and not re.match("INFO|WARNING", line)
        ]
        first = list(dict.fromkeys(errors))[:3]
        return "\n".join(["Its errors:", *first] * bool(first) + ["Its last lines:", *text[-lines:]])

    def _exited(self) -> bool:
        """Whether the guard has; it is reaped last, so that its process group's number stays its own."""
        return _ended(self._process)

    def __enter__(self) -> VLLMServer:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    # ---- requests

    def get(self, path: str) -> dict:
        return self._answer("get", path, None)

    def post(self, path: str, body: dict | None = None) -> dict:
        """The server's JSON answer. Raises ServerDied if it is gone, RuntimeError with its message if it refuses."""
        return self._answer("post", path, body)

    def _request(self, method: str, path: str, body: dict | None = None, timeout: float | None = None):
        import requests

        with requests.Session() as session:
            session.trust_env = False  # no proxy between us and the loopback interface
            return session.request(method, f"{self.url}/{path}", json=body, timeout=timeout)

    def _answer(self, method, path, body):
        if self.url is None or self._process is None:
            raise RuntimeError("vLLM server: it is not running; expected start() first")
        import requests

        try:
            answer = self._request(method, path, body)
        except requests.RequestException as error:
            if not self.alive():
                raise ServerDied(f"vLLM server: it is gone (at {path})") from error
            answer = self._request(method, path, body)
        if answer.ok:
            return answer.json() if answer.content else {}
        if answer.status_code >= 500 and not self.alive():
            raise ServerDied(f"vLLM server: its engine is dead (at {path}: {answer.status_code})")
        raise RuntimeError(f"vLLM server: {path} answered {answer.status_code}: {answer.text[:2000]}")

    def generate_completions(
        self, prompts, sampling_params: dict, batch_size: int | None = None
    ) -> list[VLLMCompletion]:
        """Responses from the weights the server has now: one flat list of n x len(prompts), a prompt's n
        together.

        prompts: strings (no special tokens are added), or lists of token ids.
        sampling_params: max_tokens, and any of `DEFAULTS` by vLLM's names; ``seed`` is one integer for the
            call (from it every prompt gets a seed of its own, so equal prompts get different responses) or
            None, which differs from call to call.
        batch_size: most prompts in flight at once.
        """
        wanted = dict(sampling_params)
        seed = wanted.pop("seed", None)
        body = request_body(wanted)
        if isinstance(prompts, str):
            raise ValueError(f"prompts: got {prompts!r:.80}, expected a list")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1 or None")
        if self._process is None:
            raise RuntimeError("vLLM server: it is not running; expected start() first")
        self._calls += 1
        seed = f"{self.seed}/call {self._calls}" if seed is None else seed
        bodies = [
            body | {"model": self.name, "prompt": prompt, "seed": request_seed(seed, i)}
            for i, prompt in enumerate(prompts)
        ]
        if not bodies:
            return []
        pool = ThreadPoolExecutor(min(len(bodies), batch_size or IN_FLIGHT), thread_name_prefix="vllm")
        try:
            answers = list(pool.map(lambda b: self.post("v1/completions", b), bodies))
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if not isinstance(error, ServerDied):
                self._abort()
            raise
        pool.shutdown()
        return [completion for answer in answers for completion in completions_of(answer, body["n"])]

    def _abort(self) -> None:
        """Let the server drop what an interrupted call asked for."""
        try:
            self._request("post", "abort_requests", {}, timeout=10)
        except OSError:
            pass

    # ---- weights

    def init_weight_sync(self, policy_device: str = "cpu", folder: str | Path | None = None) -> str:
        """Prepare for weights from a policy on ``policy_device`` ("cpu", "cuda:0", ...); returns the way they
        go.

        `sync_policy_weights` does it by itself the first time; called early it says which way it will be.
        folder: for shm, where the checkpoint in memory lies (None makes one at the first sync).
        """
        device = str(policy_device)
        policy_gpu = int(device.partition(":")[2] or 0) if device.startswith("cuda") else None
        way, reason = choose_way(
            self.weight_sync,
            server_on_cpu=self.install.on_cpu,
            policy_gpu=policy_gpu,
            server_gpu=self.gpu,
            vllm_importable=vllm_importable(),
        )
        if way != "shm" and way != self._backend():
            way, reason = "shm", f"the server was started for {self._backend()}"
        if reason:
            print(f"weight sync: shm in place of {self.weight_sync} ({reason})", flush=True)
        if self.sync is not None:
            self.sync.close()
        self.way, self.sync = way, make_sync(way, self, device, folder)
        return way

    def sync_policy_weights(self, policy) -> None:
        """The server's weights become the policy's; everything it remembers of the old ones is dropped.

        If that fails, or is interrupted, the server is stopped: it has neither the old weights nor the new
        ones.
        """
        if self.sync is None:
            self.init_weight_sync(str(next(policy.parameters()).device))
        try:
            self.post("pause?mode=wait")
            self.sync.send(policy)
            if self.install.on_cpu and getattr(policy.config, "tie_word_embeddings", False):
                self.post("collective_rpc", {"method": "repack_tied_embeddings"})
            if not self.post("reset_prefix_cache").get("success"):
                raise RuntimeError("vLLM server: its prefix cache could not be reset")
            self.post("resume")
        except (
            BaseException
        ):  # paused, perhaps with half of the weights, perhaps waiting for the rest: of no use
            self.stop()
            raise

    def sleep(self) -> None:
        """Free the GPU's memory: weights go to the host, the cache is dropped. The CPU build only stops answering."""
        self.post("sleep?level=1&mode=wait")

    def wake_up(self) -> None:
        """The weights it fell asleep with, and an empty cache."""
        self.post("wake_up")


class VLLMSampler:
    """The `Sampler` protocol on a `VLLMServer` of its own, which is started here and stopped by `close`.

    The model is written once into memory (/dev/shm) and served from there, so any model works, also one that
    exists only as an object; the checkpoint there always holds the weights of the last sync. A server that
    dies is started anew from it, at most ``max_restarts`` times in a row, and the interrupted call is asked
    again.

    gpu, gpu_memory_utilization: None chooses a second GPU if there is one (0.9 of it); where trainer and
        server share one, vLLM gets 0.3 of it and sleeps (``sleep``) whenever it is not generating.
    weight_sync: see `rlkit.samplers.vllm.weight_sync`. dtype: None is the model's. batch_size: most prompts
        in flight at once. eos_token_ids: in place of the model's and the tokenizer's. The rest is
        `VLLMServer`'s.

    Per-token log-probs are those of the distribution sampled from, temperature and truncations included; at
    temperature 0 they are at temperature 1.
    """

    def __init__(
        self,
        model,
        tokenizer,
        *,
        gpu: int | None = None,
        gpu_memory_utilization: float | None = None,
        weight_sync: str = "auto",
        sleep: bool | None = None,
        dtype: str | None = None,
        batch_size: int | None = None,
        max_restarts: int = 2,
        eos_token_ids: list[int] | None = None,
        **server_options,
    ):
        if find_vllm(server_options.get("python")) is None:
            raise ValueError(f"sampler: {vllm_missing()}")
        self.model, self.tokenizer, self.batch_size, self.max_restarts = (
            model,
            tokenizer,
            batch_size,
            max_restarts,
        )
        check_servable(model)
        self._own_ends, self._closed = eos_token_ids is not None, False
        ends = set(eos_token_ids) if self._own_ends else set(end_of_text_ids(model, tokenizer))
        self.eos_token_ids = sorted(i for i in ends if i < model.get_input_embeddings().num_embeddings)
        self._visible_ends = set(self.eos_token_ids) - set(tokenizer.all_special_ids)
        gpu, shared = place(next(model.parameters()).device, gpu)
        self.sleeps, self._asleep, self._synced, self.restarts = (
            (shared if sleep is None else sleep),
            False,
            False,
            0,
        )
        self.shapes = shapes_of(model)
        self.folder = memory_folder(model)
        self._remove = weakref.finalize(self, _remove_folder, self.folder, os.getpid())
        self.server = VLLMServer(
            str(self.folder),
            gpu,
            gpu_memory_utilization=gpu_memory_utilization or (ONE_GPU_SHARE if shared else OWN_GPU_SHARE),
            dtype=dtype or str(model.dtype).removeprefix("torch."),
            weight_sync=weight_sync,
            sleep_mode=self.sleeps,
            **server_options,
        )
        self.server.remove_if_orphaned(self.folder)
        try:
            write_weights(model, self.folder, tokenizer)
            self._start()
        except BaseException:
            self.close()
            raise
        print(
            f"vLLM server: {self.server.install.package} {self.server.install.version}, ready in "
            f"{self.server.start_seconds:.0f} s; weights by {self.server.way}",
            flush=True,
        )

    def _start(self) -> None:
        self._asleep = False
        self._free_gpu()
        self.server.start()
        device = str(next(self.model.parameters()).device)
        self.server.init_weight_sync(device, self.folder)
        if self.server.way != "shm" and self._synced:  # its checkpoint is of the start, the weights are newer
            self.server.sync_policy_weights(self.model)

    def generate(self, prompts: list[str], params: SamplingParams, n: int = 1) -> list[list[Completion]]:
        """``n`` completions per prompt, in order. No special tokens are added to the prompts."""
        if n < 1:
            raise ValueError(f"n: got {n!r}, expected at least 1")
        if 0 < params.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature: got {params.temperature}, expected 0 (greedy) or at least "
                f"{LEAST_TEMPERATURE}, below which vLLM does not go"
            )
        room = self.server.max_model_len or getattr(self.model.config, "max_position_embeddings", None)
        ids = encode_prompts(self.tokenizer, prompts, params.max_tokens, room)
        if not prompts:
            return []
        wanted = {
            "n": n,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "stop": list(params.stop),
            "stop_token_ids": self.eos_token_ids,
            "seed": params.seed,
            "ignore_eos": self._own_ends,
        }
        found = self._with_restarts(lambda: self._generate(ids, wanted))
        for c in found:  # an end-of-text id that the tokenizer does not call special
            if c.token_ids and c.token_ids[-1] in self._visible_ends:
                c.text = self.tokenizer.decode(
                    c.token_ids[:-1], skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
        return [found[i * n : (i + 1) * n] for i in range(len(prompts))]

    def _generate(self, ids, wanted):
        self._wake()
        found = self.server.generate_completions(ids, wanted, self.batch_size)
        if self.sleeps:
            self._asleep = True  # before it is: an interrupt may come in between
            self.server.sleep()
        return found

    def sync_weights(self, model, step: int | None = None) -> None:
        """The server's weights become the model's, which must have the names and shapes of the one it started with."""
        check_same(self.shapes, model)
        self.model, self._synced = model, True

        def send():
            self._wake()
            self.server.sync_policy_weights(model)

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
            import torch

            torch.cuda.empty_cache()

    def _with_restarts(self, action):
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
                        f"{error}\n{self.server.last_words()}"
                    ) from error
                print(f"{error}; starting it again ({failures + 1} of {self.max_restarts})", flush=True)
                self.restarts += 1
                self.server.stop()  # and around again, where a start counts as a try


# ---- what goes over the wire


def request_body(sampling_params: dict) -> dict:
    """A request with every sampling parameter in it. ValueError for unknown names, which vLLM would ignore."""
    unknown = [name for name in sampling_params if name not in DEFAULTS and name != "max_tokens"]
    if unknown:
        near = difflib.get_close_matches(unknown[0], ["max_tokens", "seed", *DEFAULTS], 1)
        raise ValueError(
            f"sampling_params: got {unknown[0]!r}, expected one of max_tokens, seed, "
            f"{', '.join(DEFAULTS)}" + (f" (did you mean {near[0]!r}?)" if near else "")
        )
    if "max_tokens" not in sampling_params:
        raise ValueError(
            "sampling_params: max_tokens is missing, expected an integer (vLLM's own default is 16)"
        )
    body = DEFAULTS | sampling_params
    return body | {"logprobs": 0, "return_token_ids": True, "add_special_tokens": False}


def request_seed(seed, index: int) -> int:
    """A 48-bit seed for one prompt of one call; vLLM adds the copy's index to it."""
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=6).digest(), "little")


def completions_of(answer: dict, n: int) -> list[VLLMCompletion]:
    """The n completions in the answer to one prompt's request."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != n or any(choice["finish_reason"] not in ("stop", "length") for choice in choices):
        raise RuntimeError(
            f"vLLM server: expected {n} finished responses, got "
            f"{[choice['finish_reason'] for choice in choices]}"
        )
    prompt = next((c["prompt_token_ids"] for c in choices if c.get("prompt_token_ids")), [])
    found = [
        VLLMCompletion(
            c["text"],
            list(c["token_ids"]),
            c["finish_reason"],
            list(c["logprobs"]["token_logprobs"]),
            list(prompt),
        )
        for c in choices
    ]
    for completion in found:
        if len(completion.log_probs) != len(completion.token_ids):
            raise RuntimeError(
                f"vLLM server: {len(completion.log_probs)} log-probs for {len(completion.token_ids)} tokens"
            )
    return found


# ---- checks and ends


def check_model(model_id: str) -> str:
    """The folder or hub id to serve. ValueError if there is no such model, before any server is started."""
    if Path(model_id, "config.json").is_file() and not Path(model_id, "metrics.jsonl").exists():
        return str(model_id)
    from rlkit.support.models import model_location

    location = model_location(model_id)
    if not Path(location).is_dir():
        from transformers import AutoConfig

        try:
            AutoConfig.from_pretrained(location)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model: could not find {model_id!r} ({str(error).strip().splitlines()[0]}); expected "
                "'laptop', a folder or a hub id"
            ) from error
    return location


def place(device, gpu: int | None = None) -> tuple[int, bool]:
    """(the server's GPU, whether the policy on ``device`` is on the same one): another GPU than the policy's if any."""
    policy_gpu = (device.index or 0) if device.type == "cuda" else None
    if gpu is None:
        gpu = next((i for i in range(_gpu_count()) if i != policy_gpu), policy_gpu or 0)
    return gpu, gpu == policy_gpu


def name_as_vllm(version: str, folder: Path) -> None:
    """Let a Python with ``folder`` on its path find vllm-cpu's metadata under the name that vLLM's command
    looks for.

    vLLM recognises its CPU build by "cpu" in its version.
    """
    version = version if "cpu" in version else f"{version}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _ended(process) -> bool:
    """Whether it has, without reaping it (which `Popen.poll`, `wait` and `terminate` would)."""
    try:
        return (
            process.returncode is not None
            or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )
    except ChildProcessError:  # reaped by somebody else, or another process's child
        return True


def _end(process, folder: Path, owner: int, segments: set[Path]) -> None:
    """Ask the guard to end the server; the group it leads is ours alone, so what does not end is killed."""
    if os.getpid() != owner:  # a fork of ours: not its server
        return
    try:
        if not _ended(process):
            os.kill(process.pid, signal.SIGTERM)
            _wait(lambda: _ended(process), STOP_SECONDS)
        _wait(lambda: not others(process.pid), GUARDLESS_SECONDS)
        _kill_group(process, segments)
        with _REAPING:
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_REAPING = (
    threading.Lock()
)  # an unreaped guard keeps its group's number from being reused: it is killed before


def _kill_group(process, segments: set[Path]) -> None:
    segments = segments | shared_memory(process.pid)
    with _REAPING:
        if process.returncode is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
    for segment in segments:
        segment.unlink(missing_ok=True)


def _watch(process, segments: set[Path]) -> None:
    """In place of a guard that was killed: its server got SIGTERM, and would wait for the requests that wait for it."""
    while process.returncode is None:
        if _ended(process):
            _wait(lambda: not others(process.pid), GUARDLESS_SECONDS)
            _kill_group(process, segments)
            return
        time.sleep(1)


def _wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _remove_folder(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        release(folder)


def vllm_importable() -> bool:
    """Whether this very Python has vLLM."""
    return find_spec("vllm") is not None and vllm_of(sys.executable) is not None


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()
