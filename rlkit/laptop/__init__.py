"""The laptop's two testbeds: base models (``model/``, ``model_long/``), and the recipes that rebuild them."""

from pathlib import Path

MODELS = {"laptop": "model", "laptop_long": "model_long"}


def model_path(name: str = "laptop") -> Path:
    """Folder of a testbed's shipped base model, for ``AutoModelForCausalLM`` and ``AutoTokenizer``."""
    return Path(__file__).parent / MODELS[name]
