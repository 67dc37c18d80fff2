"""Where metrics go besides the run's folder: W&B, TensorBoard or trackio, each imported when asked for."""

from __future__ import annotations

from importlib.util import find_spec

_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}


class Sink:
    """``log(row, step)`` a dict of numbers, ``close()`` at the end. This one keeps nothing."""

    def log(self, row: dict, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class _TensorBoard(Sink):
    def __init__(self, run_dir, config):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, row, step):
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)

    def close(self):
        self.writer.close()


class _Tracker(Sink):
    """W&B, and trackio, which speaks the same language."""

    def __init__(self, module, run_dir, config):
        self.module = module
        options = (
            {"dir": str(run_dir), "id": run_dir.name, "resume": "allow"} if module.__name__ == "wandb" else {}
        )
        module.init(project="rlkit", name=run_dir.name, config=config, **options)

    def log(self, row, step):
        self.module.log(row, step=step)

    def close(self):
        self.module.finish()


def check_sink(name: str) -> None:
    """ValueError if the sink's package is not installed."""
    package = _PACKAGES.get(name)
    if package and find_spec(package) is None:
        raise ValueError(
            f"sink: got {name!r}, but {package} is not installed; expected 'none' or "
            f"`pip install {package}` first"
        )


def open_sink(name: str, run_dir, config: dict) -> Sink:
    """The sink called ``name``: "none", "wandb", "tensorboard" or "trackio"."""
    check_sink(name)
    if name == "tensorboard":
        return _TensorBoard(run_dir, config)
    if name in ("wandb", "trackio"):
        from importlib import import_module

        return _Tracker(import_module(name), run_dir, config)
    if name != "none":
        raise ValueError(f"sink: got {name!r}, expected one of none, {', '.join(_PACKAGES)}")
    return Sink()
