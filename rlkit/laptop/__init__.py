"""The laptop's base model: its weights and tokenizer (``model/``), and the recipe that rebuilds them."""

from pathlib import Path


def model_path() -> Path:
    """Folder of the shipped base model, for ``AutoModelForCausalLM`` and ``AutoTokenizer``."""
    return Path(__file__).parent / "model"
