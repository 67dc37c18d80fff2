"""A model over several ranks: FSDP2, its whole copy on the first rank, checkpoints by every rank.

Source: Zhao et al. 2023, arXiv:2304.11277; torch.distributed.fsdp.fully_shard; torch.distributed.checkpoint.
"""

import copy
import warnings
from dataclasses import replace

import torch

from rlkit.log_probs import get_response_log_probs
from rlkit.support.adapters import merged
from rlkit.support.probes import output_head


def spread(model, ranks, device, sampler: str) -> tuple:
    """(the whole model where rollouts are sampled from it, None on the other ranks; the model to train).

    One rank alone: the model itself, twice. Else the first rank keeps a whole copy, on the CPU for a server.
    """
    if ranks.size == 1:
        return model, model
    place = "cpu" if sampler == "vllm" or device is None else device
    whole = copy.deepcopy(model).to(place) if ranks.first else None
    return whole, shard(model, ranks.size, device)


def shard(model, size: int, device: str | None = None):
    """The model with its weights spread over all ranks, in place, a decoder layer at a time.

    Scoring becomes one forward pass of the whole model (``model.score_rows``), since it reads the output head
    beside the decoder; prompts are not shared in it. Gradients are summed over ranks, not averaged: each loss
    is already divided by the whole batch's count.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    output_head(model)  # found out by a forward pass, while the model is whole
    mesh = init_device_mesh("cpu" if device in (None, "cpu") else "cuda", (size,))
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in [m for m in model.modules() if type(m).__name__ in layers]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # also after a pass without gradients
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    type(model).score_rows = get_response_log_probs
    register_fsdp_forward_method(model, "score_rows")
    return model


@torch.no_grad()
def gather_into(whole, model) -> None:
    """Copy a sharded model's trained weights into ``whole`` (None on the other ranks), tensor by tensor."""
    targets = {} if whole is None else dict(whole.named_parameters())
    for name, parameter in trained_parameters(model):
        full = parameter.full_tensor()  # all ranks take part
        if whole is not None:
            targets[name].copy_(full)


def trained_parameters(model) -> list:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def sync(ranks, sampler, model, whole, step: int) -> None:
    """The first rank's sampler gets the weights."""
    if ranks.size > 1:
        gather_into(whole, model)
    if ranks.first:
        with merged(whole):
            sampler.sync_weights(whole, step)


def save(folder, step: int, model, optimizer) -> None:
    """Every rank writes its part."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    trained = StateDictOptions(ignore_frozen_params=True)
    weights, moments = get_state_dict(model, optimizer, options=trained)
    dcp.save({"step": step, "model": weights, "optimizer": moments}, checkpoint_id=folder)


def load(folder, model, optimizer) -> int:
    """A checkpoint of any number of ranks into this number of them; returns its step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    weights, moments = get_state_dict(model, optimizer, options=options)
    state = {"step": -1, "model": weights, "optimizer": moments}
    whole = (folder / "state.pt").is_file()
    if whole:
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        state["optimizer"] = by_name(state["optimizer"], [name for name, _ in trained_parameters(model)])
    else:
        with warnings.catch_warnings():  # one process alone reads a checkpoint of several: so it is meant
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **parts, options=replace(options, full_state_dict=whole))
    return state["step"]


def by_name(optimizer_state: dict, names: list[str]) -> dict:
    """An optimizer's state, whose parameters are counted, with their names in place of the numbers."""
    groups = [g | {"params": [names[i] for i in g["params"]]} for g in optimizer_state["param_groups"]]
    return {"state": {names[i]: v for i, v in optimizer_state["state"].items()}, "param_groups": groups}
