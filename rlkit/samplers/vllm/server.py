"""A vLLM server as a child process: started, asked, given new weights, stopped.

vLLM may run in a venv of its own, so the trainer needs neither vLLM nor its pins. Nothing is left when this
process ends, however it ends: a guard owns the server's processes (`guard.py`).
"""

import os
import secrets
import shutil
import tempfile
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import requests

from rlkit.samplers.base import WAYS, Completion
from rlkit.samplers.vllm import guard, log
from rlkit.samplers.vllm.client import ServerDied, completions_of, request, request_body, request_seed
from rlkit.samplers.vllm.find import find_vllm, gpu_count, vllm_importable, vllm_missing
from rlkit.samplers.vllm.weight_sync import choose_way, free_port, make_sync

IN_FLIGHT = 256  # prompts asked for at once
LONGEST_TMPDIR = 48  # characters: vLLM adds 37 for its sockets, whose paths may have 107, and we our 20


@dataclass
class VLLMServer:
    """One vLLM server on the loopback interface::

        with VLLMServer("laptop") as server:                    # or server.start() ... server.stop()
            server.generate_completions(["2+2="], {"max_tokens": 8, "n": 4, "temperature": 1.0})
            server.sync_policy_weights(policy)                  # after every optimizer step

    model_id: "laptop", a folder or a hub id. gpu: its index among those this process sees (not for a CPU
    build).
    gpu_memory_utilization: share of that GPU for weights and cache. seed: the engine's.
    dtype: "auto" (the checkpoint's), "float32", "bfloat16". weight_sync: one of `samplers.base.WAYS`,
    explained
        in `weight_sync.py`. sleep_mode: start it so that `sleep` can free the GPU.
    python: the one that runs vLLM, see `find.find_vllm`. port: None takes a free one.
    max_model_len: longest prompt and response together; None is the model's own.
    extra_arguments: more of vLLM's own, as on its command line. start_timeout: seconds until it must be
    healthy.
    log_path: where the server writes; None is a file that is deleted at the end.

    `start` raises ValueError for what cannot work (no vLLM, no such model, the port in use), RuntimeError
    with the server's own last lines if it dies.
    """

    model_id: str
    gpu: int = 0
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    _: KW_ONLY
    dtype: str = "auto"
    weight_sync: str = "auto"
    sleep_mode: bool = False
    python: str | None = None
    port: int | None = None
    max_model_len: int | None = None
    extra_arguments: tuple[str, ...] = ()
    start_timeout: float = 900
    log_path: str | Path | None = None

    def __post_init__(self):
        share = self.gpu_memory_utilization
        if self.weight_sync not in WAYS:
            raise ValueError(f"weight_sync: got {self.weight_sync!r}, expected one of {', '.join(WAYS)}")
        if not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization: got {share}, expected a share in (0, 1]")
        self.install: Any = None  # a `VLLMInstall` from the first start
        self.sync: Any = None
        self._process: Any = None
        self.folder: Any = None
        self.url = self.name = self.key = self.way = self.backend = self.start_seconds = self._log = None
        self._finalizer = None
        self._said, self._orphans, self._calls = log.Report(), [], 0

    def start(self) -> None:
        """Start the server and wait until it is healthy; nothing to do if it is."""
        if self._process is not None and self.alive():
            return
        self.stop()
        self.install = find_vllm(self.python)
        if self.install is None:
            raise ValueError(f"sampler: {vllm_missing()}")
        model, began = check_model(self.model_id), time.monotonic()
        for attempt in range(3):
            try:
                self._start_once(model)
                break
            except RuntimeError as error:  # another process took the port first
                if self.port is not None or attempt == 2 or "ddress already in use" not in str(error):
                    raise
        self.start_seconds = time.monotonic() - began

    def _start_once(self, model: str) -> None:
        try:
            port = free_port(self.port or 0)
        except OSError:
            expected = "expected a free one, or None to choose one"
            raise ValueError(f"port: {self.port} of 127.0.0.1 is in use; {expected}") from None
        self.url, self.name = f"http://127.0.0.1:{port}", f"rlkit-{secrets.token_hex(8)}"
        self.key = secrets.token_hex(32)
        short = None if len(tempfile.gettempdir()) <= LONGEST_TMPDIR else "/tmp"
        self.folder = Path(tempfile.mkdtemp(prefix="rlkit-vllm-", dir=short))
        for name in ("worker", "key"):
            shutil.copy(Path(__file__).with_name(f"{name}.py"), self.folder / f"rlkit_vllm_{name}.py")
        version = self.install.version
        if self.install.package != "vllm":  # the command looks for a package "vllm" with "cpu" in its version
            version += "" if "cpu" in version else "+cpu"
            info = self.folder / f"vllm-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        (self.folder / "also").write_text("".join(f"{orphan}\n" for orphan in self._orphans))
        self._log = Path(self.log_path) if self.log_path else self.folder / "server.log"
        self.backend = self._wanted_backend()
        command, environment = self.command(model, port), self.environment(model, str(self.folder))
        segments: set[Path] = set()  # of shared memory: a server that ends in disorder leaves them
        with open(self._log, "wb") as file:
            self._process = guard.start(command, self.folder, file, environment, segments)
        mine = (self._process, self.folder, os.getpid(), segments)
        self._finalizer = weakref.finalize(self, guard.end, *mine)
        try:
            self._wait_until_healthy()
            segments |= guard.shared_memory(self._process.pid)
        except BaseException:
            self.stop()
            raise

    def command(self, model: str, port: int) -> list[str]:
        """The server's command line."""
        words = [self.install.python, "-m", "vllm.entrypoints.cli.main", "serve", model]
        words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", str(self.name)]
        words += ["--dtype", self.dtype, "--seed", str(self.seed), "--generation-config", "vllm"]
        words += ["--logprobs-mode", "processed_logprobs"]
        words += ["--worker-extension-cls", "rlkit_vllm_worker.WorkerExtension"]
        words += ["--middleware", "rlkit_vllm_key.RequireKey"]
        if self.max_model_len is not None:
            words += ["--max-model-len", str(self.max_model_len)]
        if (backend := self._wanted_backend()) != "shm":
            words += ["--weight-transfer-config", f'{{"backend": "{backend}"}}']
        if self.install.on_cpu:
            # compiling costs small models more than it gains. A prompt cut in two by the token budget makes
            # vLLM 0.32 wind back the request's random generator, which ends the engine: a CPU's cannot do
            # that
            words += ["--enforce-eager", "--no-enable-chunked-prefill"]
        else:
            words += ["--gpu-memory-utilization", str(self.gpu_memory_utilization)]
            words += ["--enable-sleep-mode"] if self.sleep_mode else []
        return [*words, "--disable-uvicorn-access-log", *self.extra_arguments]

    def environment(self, model: str, folder: str) -> dict:
        """The server's environment: ours, less what steers the trainer's threads and Python, plus its own."""
        threads, not_its = ("OMP_", "KMP_", "GOMP_", "MKL_"), ("PYTHONHOME", "PYTHONPATH", "VLLM_API_KEY")
        found = {k: v for k, v in os.environ.items() if not k.startswith(threads) and k not in not_its}
        found |= {"PYTHONPATH": folder, "TMPDIR": folder}
        found |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "RLKIT_VLLM_KEY": str(self.key)}
        found["PYTHONSAFEPATH"] = "1"  # a folder called vllm where the job was started is not the package
        found["PYTHONFAULTHANDLER"] = "1"  # a process that crashes names its signal in the log
        if Path(model).is_dir():
            found["HF_HUB_OFFLINE"] = "1"
        if self.install.on_cpu:
            found.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; its own default is a share of the machine
            return found | {"TORCHDYNAMO_DISABLE": "1"}
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = [entry.strip() for entry in (setting or "").split(",") if entry.strip()]
        if setting is not None and self.gpu >= len(visible):
            raise ValueError(f"gpu: got {self.gpu}, but CUDA_VISIBLE_DEVICES names {len(visible)} device(s)")
        return found | {"CUDA_VISIBLE_DEVICES": visible[self.gpu] if visible else str(self.gpu)}

    def _wanted_backend(self) -> str:
        """The weight transfer that a server must be started for, before the policy's device is known."""
        return self._choose(self.gpu + 1 if self.weight_sync != "auto" or gpu_count() > 1 else None)[0]

    def _choose(self, policy_gpu: int | None) -> tuple[str, str]:
        here = {"server_on_cpu": self.install.on_cpu, "vllm_importable": vllm_importable()}
        return choose_way(self.weight_sync, policy_gpu=policy_gpu, server_gpu=self.gpu, **here)

    def _wait_until_healthy(self) -> None:
        deadline, build, what = time.monotonic() + self.start_timeout, self.install, ""
        while not (what or self._is_healthy()):
            if guard.ended(self._process):
                what = f"it ended while starting ({build.package} {build.version}){self.report().cause}"
            elif time.monotonic() > deadline:
                what = f"not healthy after {self.start_timeout:.0f} s"
            time.sleep(0.2)
        try:  # one token: some models load and fail at their first use
            if not what:
                self.post("v1/completions", {"model": self.name, "prompt": [0], "max_tokens": 1})
        except RuntimeError as error:
            what = f"it started and cannot generate ({str(error)[:600]})"
        if what:
            raise RuntimeError(f"vLLM server: {what}\n{self.report().last_words}")

    def _is_healthy(self) -> bool:
        try:
            if not self._request("get", "health", timeout=5).ok:
                return False
            served = [card["id"] for card in self.get("v1/models")["data"]]
        except (OSError, ServerDied):
            return False
        if self.name not in served:
            why = f"it is not ours (Address already in use): it serves {served}"
            raise RuntimeError(f"vLLM server: {self.url} answers, but {why}")
        return True

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped; it may have died since."""
        return self._process is not None

    def alive(self) -> bool:
        """Whether the process runs and its engine is healthy; one that is only slow to answer is alive."""
        for attempt in range(5):
            if self._process is None or guard.ended(self._process):
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
            self._said = self.report()
            self._finalizer()
        self._process = self._finalizer = None

    def remove_if_orphaned(self, folder) -> None:
        """Have this folder removed, too, should this process end without cleaning up."""
        self._orphans.append(str(folder))
        if self._process is not None:
            with open(self.folder / "also", "a") as file:
                file.write(f"{folder}\n")

    def report(self) -> log.Report:
        """What the log tells, also when the server is stopped: its last words, and what ended its engine."""
        return log.report(self._log, self._said)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def get(self, path: str) -> dict:
        return self.post(path, method="get")

    def post(self, path: str, body: dict | None = None, method: str = "post") -> dict:
        """The server's JSON answer. ServerDied if it is gone, RuntimeError with its message if it refuses."""
        self._check_running()
        try:
            answer = self._request(method, path, body)
        except requests.RequestException as error:
            if not self.alive():
                raise ServerDied(f"vLLM server: it is gone (at {path}){self.report().cause}") from error
            answer = self._request(method, path, body)
        if answer.ok:
            return answer.json() if answer.content else {}
        code = answer.status_code
        if code >= 500 and not self.alive():
            raise ServerDied(f"vLLM server: its engine is dead (at {path}: {code}){self.report().cause}")
        raise RuntimeError(f"vLLM server: {path} answered {code}: {answer.text[:2000]}")

    def _request(self, method: str, path: str, body: dict | None = None, timeout: float | None = None):
        return request(method, f"{self.url}/{path}", body, timeout, self.key)

    def _check_running(self) -> None:
        if self._process is None:
            raise RuntimeError("vLLM server: it is not running; expected start() first")

    def generate_completions(self, prompts, sampling_params: dict, batch_size=None) -> list[Completion]:
        """Responses from the weights the server has now: one flat list, n for each prompt, in order.

        prompts: strings (no special tokens are added), or lists of token ids.
        sampling_params: max_tokens, and any of `client.DEFAULTS` by vLLM's names; ``seed`` is one integer for
            the call (each prompt gets a seed of its own from it, so equal prompts differ) or None for any.
        batch_size: most prompts in flight at once, an integer or None.
        """
        wanted = dict(sampling_params)
        seed = wanted.pop("seed", None)
        body = request_body(wanted)
        if isinstance(prompts, str):
            raise ValueError(f"prompts: got {prompts!r:.80}, expected a list")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1 or None")
        self._check_running()
        self._calls += 1
        seed = f"{self.seed}/call {self._calls}" if seed is None else seed
        body["model"] = self.name
        bodies = [body | {"prompt": p, "seed": request_seed(seed, i)} for i, p in enumerate(prompts)]
        if not bodies:
            return []
        pool = ThreadPoolExecutor(min(len(bodies), batch_size or IN_FLIGHT), thread_name_prefix="vllm")
        try:
            answers = list(pool.map(lambda b: self.post("v1/completions", b), bodies))
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if not isinstance(error, ServerDied):  # the server may drop what this call asked for
                with suppress(OSError):
                    self._request("post", "abort_requests", {}, timeout=10)
            raise
        pool.shutdown()
        return [completion for answer in answers for completion in completions_of(answer, body["n"])]

    def init_weight_sync(self, policy_device: str = "cpu", folder: str | Path | None = None) -> str:
        """Prepare for weights from a policy on ``policy_device`` ("cpu", "cuda:0", ...); returns their way.

        `sync_policy_weights` does this the first time. A server that was started for another way is started
        again: until the next sync it has its model folder's weights.
        folder: for shm, where the checkpoint in memory lies (None makes one at the first sync).
        """
        self._check_running()
        device = str(policy_device)
        way, reason = self._choose(int(device.partition(":")[2] or 0) if device.startswith("cuda") else None)
        if reason:
            print(f"weight sync: shm in place of {self.weight_sync} ({reason})", flush=True)
        if way not in ("shm", self.backend):
            print(f"weight sync: server started for {self.backend}, now started again for {way}", flush=True)
            self.stop()
            self.start()
        if self.sync is not None:
            self.sync.close()
        self.way, self.sync = way, make_sync(way, self, device, folder)
        return way

    def sync_policy_weights(self, policy) -> None:
        """The server's weights become the policy's; everything it remembers of the old ones is dropped.

        If that fails, or is interrupted, the server is stopped: it may have a part of the new weights only.
        """
        if self.sync is None:
            self.init_weight_sync(str(next(policy.parameters()).device))
        try:
            self.post("pause?mode=wait")
            self.sync.send(policy)  # pyright: ignore[reportOptionalMemberAccess]
            if self.install.on_cpu and getattr(policy.config, "tie_word_embeddings", False):
                self.post("collective_rpc", {"method": "repack_tied_embeddings"})
            if not self.post("reset_prefix_cache").get("success"):
                raise RuntimeError("vLLM server: its prefix cache could not be reset")
            self.post("resume")
        except BaseException:  # it is paused, and perhaps waits for the rest of the weights
            self.stop()
            raise

    def sleep(self) -> None:
        """Free the GPU: weights go to the host, the cache is dropped. A CPU build only stops answering."""
        self.post("sleep?level=1&mode=wait")

    def wake_up(self) -> None:
        """The weights it fell asleep with, and an empty cache."""
        self.post("wake_up")


def check_model(model_id: str) -> str:
    """The folder or hub id to serve. ValueError if there is no such model, before any server is started."""
    if Path(model_id, "config.json").is_file() and not Path(model_id, "metrics.jsonl").exists():
        return model_id
    from transformers import AutoConfig

    from rlkit.support.models import model_location, revision_of

    location = model_location(model_id)
    try:
        if not Path(location).is_dir():
            AutoConfig.from_pretrained(**revision_of(location))
    except (OSError, ValueError) as error:
        why = f"could not find {model_id!r} ({str(error).strip().splitlines()[0]})"
        raise ValueError(f"model: {why}; expected 'laptop', a folder or a hub id") from error
    return location
