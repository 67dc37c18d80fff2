"""The policy as a checkpoint that a server can read: checks, writing, its folder in memory."""

import os
import shutil
import tempfile
from pathlib import Path
from stat import S_ISDIR, S_ISREG


def uncompiled(model):
    """The model itself, where torch.compile has wrapped it."""
    return getattr(model, "_orig_mod", model)


def checkpoint_tensors(model) -> dict:
    """{name in the checkpoint format: tensor} of the model's parameters, each once even if tied."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(uncompiled(model), dict(uncompiled(model).named_parameters()))


def check_servable(model) -> None:
    """ValueError for a model that a server would read from its checkpoint as another one."""
    dtype = str(getattr(model, "dtype", "unknown")).removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"model: got weights of type {dtype}, expected float32, bfloat16 or float16")
    names = [name for name, _ in uncompiled(model).named_modules() if "_orig_mod" in name.split(".")]
    if names:
        why = "is compiled by itself, which save_pretrained writes under other names"
        raise ValueError(f"model: {names[0]!r} {why}; expected the whole model compiled, or none of it")
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    said = bool(getattr(model.config, "tie_word_embeddings", False))
    if outputs is not None and said != (outputs.weight is inputs.weight):
        are = f"but input and output embedding are {'two tensors' if said else 'one tensor'}"
        raise ValueError(f"model: config.tie_word_embeddings is {said}, {are}; expected the two to agree")


def shapes_of(model) -> dict:
    """{name: shape} of the parameters."""
    return {name: tuple(p.shape) for name, p in uncompiled(model).named_parameters()}


def check_same(shapes: dict, model) -> None:
    """ValueError for a model whose parameters have other names or shapes than the served one's."""
    found = shapes_of(model)
    names = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
    if names:
        such = f"{names[0]}: {found.get(names[0])}, expected {shapes.get(names[0])}"
        got = f"got other parameters than the server was started with, {len(names)} of them"
        raise ValueError(f"model: {got}, such as {such}")


def write_weights(model, folder: Path, tokenizer=None) -> None:
    """The model as a checkpoint in ``folder``, a file there being replaced only by a complete one."""
    from rlkit.support.models import no_progress_bars

    incoming = folder / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    with no_progress_bars():
        uncompiled(model).save_pretrained(incoming, max_shard_size="1000GB")
    names = sorted(os.listdir(incoming))
    if not {"config.json", "model.safetensors"}.issubset(names):
        expected = "expected config.json and model.safetensors of a whole model (merge adapters first)"
        raise ValueError(f"model: {type(model).__name__} saves {', '.join(names)}, {expected}")
    for name in names:
        os.replace(incoming / name, folder / name)
    incoming.rmdir()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


_LOCKS: dict = {}  # folder -> (the process that made it, its open and locked file)


def memory_folder(model) -> Path:
    """A new folder with room for two copies of the model: in /dev/shm if it has that much, else on disk.

    It is this process's for as long as it lives. Folders that a dead process has left are removed.
    """
    import fcntl  # not at the top: Windows lacks it, where this module is imported but no server runs

    needed = 2.1 * sum(p.numel() * p.element_size() for p in model.parameters())
    shm, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    usable = shm.is_dir() and os.access(shm, os.W_OK)
    for lock in [lock for place in {shm, disk} for lock in place.glob("rlkit-weights-*/lock")]:
        try:
            folder, kind = lock.parent.lstat(), lock.lstat().st_mode
            if folder.st_uid != os.getuid() or not (S_ISDIR(folder.st_mode) and S_ISREG(kind)):
                continue  # another user's, or a link or pipe that one has put there
            with open(lock) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # held by its process, or another user's
            continue
    roomy = usable and shutil.disk_usage(shm).free > needed
    new = Path(tempfile.mkdtemp(prefix=".rlkit-", dir=shm if roomy else None))
    file = open(new / "lock", "w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = new.with_name(f"rlkit-weights-{new.name.removeprefix('.rlkit-')}")
    new.rename(folder)  # locked before others find it by this name
    _LOCKS[folder] = os.getpid(), file
    return folder


def release(folder: Path) -> None:
    """Remove a `memory_folder` of this process; nothing in a fork of the process that made it."""
    owner, file = _LOCKS.get(folder, (None, None))
    if owner == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        file.close()
        del _LOCKS[folder]
