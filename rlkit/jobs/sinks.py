"""Where metrics go besides the run's folder: W&B, TensorBoard or trackio, each imported when asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

NAMES = ("wandb", "tensorboard", "trackio")  # the packages' names, too


@dataclass(frozen=True)
class Sink:
    """``log(row, step)`` a dict of numbers, ``close()`` at the end. As it stands it keeps nothing."""

    log: Callable[[dict, int], object] = lambda row, step: None
    close: Callable[[], None] = lambda: None


def check_sink(name: str) -> None:
    """ValueError if the sink's package is not installed."""
    if name in NAMES and find_spec(name) is None:
        expected = f"expected 'none' or `pip install {name}` first"
        raise ValueError(f"sink: got {name!r}, but {name} is not installed; {expected}")


def open_sink(name: str, run_dir: Path, config: dict) -> Sink:
    """The sink called ``name``: "none", "wandb", "tensorboard" or "trackio"."""
    check_sink(name)
    if name == "none":
        return Sink()
    if name not in NAMES:
        raise ValueError(f"sink: got {name!r}, expected one of none, {', '.join(NAMES)}")
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(run_dir / "tensorboard"))
        return Sink(lambda row, step: [writer.add_scalar(k, v, step) for k, v in row.items()], writer.close)
    module = import_module(name)  # trackio has the functions of wandb
    options = {"dir": str(run_dir), "id": run_dir.name, "resume": "allow"} if name == "wandb" else {}
    module.init(project="rlkit", name=run_dir.name, config=config, **options)
    return Sink(lambda row, step: module.log(row, step=step), module.finish)
