"""Three ways to hand the policy's weights to a running vLLM server, one class each, all with ``send(model)``.

=====  =======================================================  ============================================
way    how the weights travel                                   for
=====  =======================================================  ============================================
shm    a file in /dev/shm, read by the server                   any device: the CPU, one GPU, and the fallback
nccl   broadcast from the trainer's GPU to the server's         two GPUs
gloo   the same dialogue over gloo                              seeing that protocol run without a GPU
ipc    the server maps the trainer's tensors (CUDA IPC)         one GPU
=====  =======================================================  ============================================

The server is paused around each of them and its prefix cache emptied: keys and values computed with old
weights would otherwise be used for prompts that were seen before. Names are those of the checkpoint format,
so weights that vLLM keeps fused (q, k and v in one matrix) are fused again by its own loader. nccl and ipc
need vLLM in the trainer's Python, gloo and shm do not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

WAYS = ("auto", "shm", "nccl", "gloo", "ipc")
PATIENCE = 300  # seconds for the other side to join or to receive
IPC_BUFFER = 256 * 2**20  # bytes handed over at once, at least


def choose_way(
    wanted: str, *, server_on_cpu: bool, policy_gpu: int | None, server_gpu: int, vllm_importable: bool
) -> tuple[str, str]:
    """(way, why it is not the one that was wanted or ""). ``policy_gpu`` None: the policy is on the CPU.

    "auto" is nccl between two GPUs where the trainer can import vLLM, else shm.
    """
    if wanted not in WAYS:
        raise ValueError(f"weight_sync: got {wanted!r}, expected one of {', '.join(WAYS)}")
    two_gpus = not server_on_cpu and policy_gpu is not None and policy_gpu != server_gpu
    one_gpu = not server_on_cpu and policy_gpu is not None and policy_gpu == server_gpu
    if wanted == "auto":
        return ("nccl", "") if two_gpus and vllm_importable else ("shm", "")
    if wanted == "nccl" and not two_gpus:
        return "shm", "nccl needs the policy and the server on two different GPUs"
    if wanted == "ipc" and not one_gpu:
        return "shm", "ipc needs the policy and the server on the same GPU"
    if wanted in ("nccl", "ipc") and not vllm_importable:
        return "shm", f"{wanted} needs vLLM in the trainer's Python"
    if wanted == "gloo" and not server_on_cpu:
        return "shm", "gloo is for vLLM's CPU build"
    return wanted, ""


class SharedMemorySync:
    """A checkpoint in memory: written by the trainer, read by the server, replaced by the next one.

    folder: where it lies; the last weights that were sent stay there, so a server that is started anew on
    this folder has them.
    """

    def __init__(self, server, folder: str | Path | None = None):
        self.server, self.own = server, folder is None
        self.folder = Path(folder) if folder else None

    def send(self, model) -> None:
        if self.folder is None:
            self.folder = memory_folder(model)
            self.server.remove_if_orphaned(self.folder)
        write_weights(model, self.folder)
        self.server.post(
            "collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
        )

    def close(self) -> None:
        if self.own and self.folder is not None:
            release(self.folder)


class BroadcastSync:
    """Trainer rank 0 broadcasts every parameter to the server's workers, over NCCL or gloo.

    The requests that make the workers join and receive return only when they have, so they run in a thread
    while this side does its part. device: the policy's.
    """

    def __init__(self, server, way: str, device: str = "cpu"):
        self.server, self.way, self.device = server, way, device
        world = 1 + server.get("get_world_size")["world_size"]
        address = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": world}
        joining = _Task(
            server.post,
            "init_weight_transfer_engine",
            {"init_info": address | {"rank_offset": 1, "packed": False}},
        )
        group = _Task(_nccl if way == "nccl" else _gloo, address, device)
        while group.running:
            joining.check(0.05)  # if the server refuses, nobody will come
        self.broadcast = group.result()
        joining.result()

    def send(self, model) -> None:
        tensors = [(name, tensor.detach()) for name, tensor in checkpoint_tensors(model).items()]
        self.server.post("start_weight_update")
        receiving = _Task(
            self.server.post,
            "update_weights",
            {
                "update_info": {
                    "names": [name for name, _ in tensors],
                    "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                    "shapes": [list(tensor.shape) for _, tensor in tensors],
                }
            },
        )
        try:
            with _current(self.device):
                for _, tensor in tensors:
                    receiving.check()
                    self.broadcast(tensor.contiguous())
        except Exception:  # of the transport, which knows the other side only by its silence
            receiving.check(patience=5)  # the request says what became of the server
            raise
        receiving.result()
        self.server.post("finish_weight_update")

    def close(self) -> None:
        """Leave the group, also when the other side is gone and a broadcast waits for it."""
        leave, self.broadcast = getattr(self.broadcast, "leave", None), None
        if leave is not None:
            leave()


class IPCSync:
    """vLLM's own CUDA IPC transfer: handles of the trainer's tensors, which the server copies on the same GPU."""

    def __init__(self, server, device: str):
        self.server, self.device, self.engine, self.model = server, device, None, None

    def send(self, model) -> None:
        from vllm.distributed.weight_transfer import (
            HTTPVLLMWeightSyncClient,
            ModuleSource,
            WeightTransferTrainerFactory,
        )
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        client = HTTPVLLMWeightSyncClient(self.server.url)
        client._post = self.server.post  # no proxy in between, the server's own words, ServerDied
        with _current(self.device):
            if self.model is not model:
                largest = max(p.numel() * p.element_size() for p in model.parameters())  # no tensor is split
                self.engine = WeightTransferTrainerFactory.trainer_init(
                    IPCTrainerInitInfo(
                        packed=True, packed_buffer_size_bytes=max(IPC_BUFFER, largest), rank=0
                    ),
                    client=client,
                    source=ModuleSource(uncompiled(model)),
                )
                self.model = model
            self.engine.send_weights()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()


def make_sync(way: str, server, device: str = "cpu", folder=None):
    """The object behind a way's name, for a policy on ``device``."""
    if way == "shm":
        return SharedMemorySync(server, folder)
    return IPCSync(server, device) if way == "ipc" else BroadcastSync(server, way, device)


# ---- the trainer's end of the broadcasts


def _current(device: str):
    """The policy's GPU as the current one, which is the one vLLM's transfers use."""
    import torch

    return torch.cuda.device(device) if str(device).startswith("cuda") else nullcontext()


def _nccl(address: dict, device: str):
    """``broadcast(tensor)`` on the current CUDA device's stream; vLLM's communicator, as the workers use it."""
    import torch
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    with _current(device):
        group = trainer_init(address)
    if getattr(group, "disabled", False):
        raise RuntimeError(
            "weight sync: vLLM's NCCL is off here (VLLM_DISABLE_PYNCCL?), it would send nothing"
        )

    def broadcast(tensor):
        group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())

    broadcast.leave = group.destroy  # aborts what waits for a peer that is gone
    return broadcast


def _gloo(address: dict, device: str):
    from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

    patience = timedelta(seconds=PATIENCE)
    store = TCPStore(
        address["master_address"],
        address["master_port"],
        address["world_size"],
        True,
        patience,
        wait_for_workers=False,
    )
    group = ProcessGroupGloo(store, 0, address["world_size"], patience)
    return lambda tensor: group.broadcast([tensor.cpu()], BroadcastOptions()).wait()


class _Task:
    """A call in a thread of its own, which does not keep the interpreter from ending."""

    def __init__(self, function, *arguments):
        self.error = self.value = None
        self.thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self.thread.start()

    def _run(self, function, arguments):
        try:
            self.value = function(*arguments)
        except Exception as error:
            self.error = error

    @property
    def running(self) -> bool:
        return self.thread.is_alive()

    def check(self, patience: float = 0) -> None:
        """Raise what the call raised, if it has within ``patience`` seconds."""
        self.thread.join(patience)
        if self.error is not None:
            raise self.error

    def result(self):
        self.check(PATIENCE)
        if self.running:
            raise RuntimeError(f"weight sync: no answer within {PATIENCE} s")
        return self.value


# ---- checkpoints


def uncompiled(model):
    """The model itself, where torch.compile has wrapped it."""
    return getattr(model, "_orig_mod", model)


def checkpoint_tensors(model) -> dict:
    """{name in the checkpoint format: tensor} of the model's parameters, each once even if tied."""
    model = uncompiled(model)
    parameters = dict(model.named_parameters())
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return parameters
    return revert_weight_conversion(model, parameters)


def check_servable(model) -> None:
    """ValueError for a model that a server would read from its checkpoint as another one."""
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"model: got weights of type {dtype or 'unknown'}, expected float32, bfloat16 or float16"
        )
    names = [name for name, _ in uncompiled(model).named_modules() if "_orig_mod" in name.split(".")]
    if names:
        raise ValueError(
            f"model: {names[0]!r} is compiled by itself, which save_pretrained writes under other names; "
            "expected the whole model compiled, or none of it"
        )
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    if outputs is not None:
        tied, said = (
            outputs.weight is inputs.weight,
            bool(getattr(model.config, "tie_word_embeddings", False)),
        )
        if tied != said:
            raise ValueError(
                f"model: config.tie_word_embeddings is {said}, but input and output embedding are "
                f"{'one tensor' if tied else 'two tensors'}; expected the config to say what is"
            )


def shapes_of(model) -> dict:
    """{name: shape} of the parameters."""
    return {name: tuple(p.shape) for name, p in uncompiled(model).named_parameters()}


def check_same(shapes: dict, model) -> None:
    """ValueError for a model whose parameters have other names or shapes than the served one's."""
    found = shapes_of(model)
    if found != shapes:
        names = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
        raise ValueError(
            f"model: got other parameters than the server was started with, {len(names)} of them, such as "
            f"{names[0]}: {found.get(names[0])}, expected {shapes.get(names[0])}"
        )


def write_weights(model, folder: Path, tokenizer=None) -> None:
    """The model as a checkpoint in ``folder``, a file there being replaced only by a complete one."""
    from rlkit.support.models import no_progress_bars

    folder = Path(folder)
    incoming = folder / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    with no_progress_bars():
        uncompiled(model).save_pretrained(incoming, max_shard_size="1000GB")
    if not (incoming / "model.safetensors").is_file() or not (incoming / "config.json").is_file():
        raise ValueError(
            f"model: {type(model).__name__} saves {', '.join(sorted(os.listdir(incoming)))}, expected "
            "config.json and model.safetensors of a whole model (merge adapters first)"
        )
    for file in incoming.iterdir():
        os.replace(file, folder / file.name)
    incoming.rmdir()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


_LOCKS: dict = {}  # folder -> its open, locked file


def memory_folder(model) -> Path:
    """A new folder with room for two copies of the model: in /dev/shm if it has that much, else on disk.

    It is this process's for as long as it lives; folders whose process is gone without removing them are
    removed.
    """
    needed = 2.1 * sum(p.numel() * p.element_size() for p in model.parameters())
    shm = Path("/dev/shm")
    usable = shm.is_dir() and os.access(shm, os.W_OK)
    for place in {shm if usable else Path(tempfile.gettempdir()), Path(tempfile.gettempdir())}:
        _remove_stale(place)
    roomy = usable and shutil.disk_usage(shm).free > needed
    new = Path(tempfile.mkdtemp(prefix=".rlkit-", dir=shm if roomy else None))
    lock = open(new / "lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = new.with_name(
        f"rlkit-weights-{new.name.removeprefix('.rlkit-')}"
    )  # found by others only when locked
    new.rename(folder)
    _LOCKS[folder] = lock
    return folder


def release(folder: Path) -> None:
    """Remove a `memory_folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _LOCKS:
        _LOCKS.pop(folder).close()


def _remove_stale(place: Path) -> None:
    for lock in place.glob("rlkit-weights-*/lock"):
        try:
            with open(lock) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # held, or somebody else's
            continue


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
