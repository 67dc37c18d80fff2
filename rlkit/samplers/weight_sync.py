"""Three ways to hand the policy's weights to a running vLLM server, one class each, all with ``send(model)``.

=====  =======================================================  ============================================
way    how the weights travel                                   for
=====  =======================================================  ============================================
shm    a file in /dev/shm, read by the server                   any device: the CPU, one GPU, and the fallback
nccl   broadcast from the trainer's GPU to the server's         two GPUs
gloo   the same dialogue over gloo                              seeing that protocol run without a GPU
ipc    the server maps the trainer's tensors (CUDA IPC)         one GPU
=====  =======================================================  ============================================

The server is paused around each of them and its prefix cache emptied: keys and values computed with old weights would
otherwise be used for prompts that were seen before. Names are those of the checkpoint format, so weights that vLLM
keeps fused (q, k and v in one matrix) are fused again by its own loader. nccl and ipc need vLLM in the trainer's
Python, gloo and shm do not.
"""
from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

WAYS = ("auto", "shm", "nccl", "gloo", "ipc")
PATIENCE = 300                                    # seconds for the other side to join or to receive


def choose_way(wanted: str, *, server_on_cpu: bool, policy_gpu: int | None, server_gpu: int,
               vllm_importable: bool) -> tuple[str, str]:
    """(way, why it is not the one that was wanted or ""). ``policy_gpu`` None: the policy is on the CPU.

    "auto" is nccl between two GPUs where the trainer can import vLLM, else shm.
    """
    if wanted not in WAYS:
        raise ValueError(f"weight_sync: got {wanted!r}, expected one of {', '.join(WAYS)}")
    two_gpus = not server_on_cpu and policy_gpu is not None and policy_gpu != server_gpu
    one_gpu = not server_on_cpu and policy_gpu is not None and policy_gpu == server_gpu
    if wanted == "auto":
        return ("nccl", "") if two_gpus and vllm_importable else ("shm", "")
    if wanted in ("nccl", "ipc") and not vllm_importable:
        return "shm", f"{wanted} needs vLLM in the trainer's Python"
    if wanted == "nccl" and not two_gpus:
        return "shm", "nccl needs the policy and the server on two different GPUs"
    if wanted == "ipc" and not one_gpu:
        return "shm", "ipc needs the policy and the server on the same GPU"
    if wanted == "gloo" and not server_on_cpu:
        return "shm", "gloo is for vLLM's CPU build"
    return wanted, ""


class SharedMemorySync:
    """A checkpoint in memory: written by the trainer, read by the server, replaced by the next one.

    folder: where it lies; the last weights that were sent stay there, so a server that is started anew on this folder
    has them.
    """

    def __init__(self, server, folder: str | Path | None = None):
        self.server, self.own = server, folder is None
        self.folder = Path(folder) if folder else None

    def send(self, model) -> None:
        if self.folder is None:
            self.folder = memory_folder(model)
            self.server.remove_if_orphaned(self.folder)
        write_weights(model, self.folder)
        self.server.post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}})

    def close(self) -> None:
        if self.own and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class BroadcastSync:
    """Trainer rank 0 broadcasts every parameter to the server's workers, over NCCL or gloo.

    The requests that make the workers join and receive return only when they have, so they run in a thread while
    this side does its part. device: the policy's.
    """

    def __init__(self, server, way: str, device: str = "cpu"):
        self.server, self.way, self.device = server, way, device
        world = 1 + server.get("get_world_size")["world_size"]
        address = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": world}
        joining = _Request(server, "init_weight_transfer_engine",
                           {"init_info": address | {"rank_offset": 1, "packed": False}})
        with _current(device):
            self.broadcast = _nccl(address) if way == "nccl" else _gloo(address)
        joining.result()

    def send(self, model) -> None:
        tensors = [(name, tensor.detach()) for name, tensor in checkpoint_tensors(model).items()]
        self.server.post("start_weight_update")
        receiving = _Request(self.server, "update_weights", {"update_info": {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors]}})
        try:
            with _current(self.device):
                for _, tensor in tensors:
                    receiving.check()
                    self.broadcast(tensor.contiguous())
        except RuntimeError:                      # of the transport, which knows the other side only by its silence
            receiving.check(patience=5)           # the request says what became of the server
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
        from vllm.distributed.weight_transfer import (HTTPVLLMWeightSyncClient, ModuleSource,
                                                      WeightTransferTrainerFactory)
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        client = HTTPVLLMWeightSyncClient(self.server.url)
        client._post = self.server.post             # no proxy in between, the server's own words, ServerDied
        with _current(self.device):
            if self.model is not model:
                self.engine = WeightTransferTrainerFactory.trainer_init(
                    IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=256 * 2 ** 20, rank=0),
                    client=client, source=ModuleSource(getattr(model, "_orig_mod", model)))
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


def _nccl(address: dict):
    """``broadcast(tensor)`` on the current CUDA device's stream; vLLM's communicator, as the workers use it."""
    import torch
    from vllm.distributed.weight_transfer.nccl_common import trainer_init
    group = trainer_init(address)

    def broadcast(tensor):
        group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
    broadcast.leave = group.destroy                # aborts what waits for a peer that is gone
    return broadcast


def _gloo(address: dict):
    from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
    patience = timedelta(seconds=PATIENCE)
    store = TCPStore(address["master_address"], address["master_port"], address["world_size"], True, patience,
                     wait_for_workers=False)
    group = ProcessGroupGloo(store, 0, address["world_size"], patience)
    return lambda tensor: group.broadcast([tensor.cpu()], BroadcastOptions()).wait()


class _Request:
    """A POST in a thread of its own."""

    def __init__(self, server, path: str, body: dict):
        self.error = None
        self.thread = threading.Thread(target=self._run, args=(server, path, body), daemon=True)
        self.thread.start()

    def _run(self, server, path, body):
        try:
            server.post(path, body)
        except Exception as error:
            self.error = error

    def check(self, patience: float = 0) -> None:
        """Raise what the request raised, if it has within ``patience`` seconds."""
        self.thread.join(patience)
        if self.error is not None:
            raise self.error

    def result(self) -> None:
        self.check(PATIENCE)
        if self.thread.is_alive():
            raise RuntimeError(f"weight sync: the server did not answer within {PATIENCE} s")


# ---- checkpoints

def checkpoint_tensors(model) -> dict:
    """{name in the checkpoint format: tensor} of the model's parameters, each once even if tied."""
    model = getattr(model, "_orig_mod", model)                       # as torch.compile wraps it
    parameters = dict(model.named_parameters())
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return parameters
    return revert_weight_conversion(model, parameters)


def write_weights(model, folder: Path, tokenizer=None) -> None:
    """The model as a checkpoint in ``folder``, a file there being replaced only by a complete one."""
    from rlkit.models import no_progress_bars
    folder = Path(folder)
    incoming = folder / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    with no_progress_bars():
        getattr(model, "_orig_mod", model).save_pretrained(incoming, max_shard_size="1000GB")
    for file in incoming.iterdir():
        os.replace(file, folder / file.name)
    incoming.rmdir()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def memory_folder(model) -> Path:
    """A new folder with room for two copies of the model: in /dev/shm if it has that much, else on disk."""
    needed = 2.1 * sum(p.numel() * p.element_size() for p in model.parameters())
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > needed
    return Path(tempfile.mkdtemp(prefix="rlkit-", dir=shm if roomy else None))


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
