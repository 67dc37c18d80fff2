"""Several processes that train one model, and what they tell each other.

Each rank holds a part of every weight (see jobs.sharding) and scores a part of the rows. ``ALONE`` is one
process: the same calls then do nothing, so the code around them is one path. A model that was sharded knows
its own ranks.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(hours=24)  # ranks wait while the first one samples; a dead one is torchrun's to notice


@dataclass(frozen=True)
class Ranks:
    """This process is ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, pieces) -> list[tuple]:
        """This rank's pieces, dealt in turn, as (piece, True); ranks with fewer get (the first piece, False).

        A sharded model's passes are common ones: every rank makes equally many.
        """
        rounds = -(-len(pieces) // self.size)
        mine = [(piece, True) for piece in pieces[self.rank :: self.size]]
        return mine + [(piece, False) for piece in pieces[:1]] * (rounds - len(mine))

    def pieces(self, n: int) -> int:
        """``n`` microbatches, rounded up to a multiple of the ranks."""
        return -(-n // self.size) * self.size

    def gather(self, value) -> list:
        """Every rank's value, in order, on every rank."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, function) -> Any:
        """What ``function()`` gives on the first rank, which alone calls it; other ranks get it, pickled."""
        if self.size == 1:
            return function()
        box = [function() if self.first else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def total(self, tensor):
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


ALONE = Ranks()


def ranks_of(model) -> Ranks:
    """The ranks that a model's weights are spread over."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    return ALONE if mesh is None else Ranks(mesh.get_local_rank(), mesh.size())


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def join(device: str | None) -> tuple[Ranks, str | None]:
    """(the ranks that torchrun started, this one's device); one alone without torchrun.

    On GPUs each rank has its own and they talk by NCCL; on CPUs by gloo.
    """
    if not launched() or int(os.environ["WORLD_SIZE"]) == 1:
        return ALONE, device
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
    return Ranks(dist.get_rank(), dist.get_world_size()), device


def leave() -> None:
    """End the conversation, all together."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
