"""How a question becomes a prompt: one record of its text, its reward and its stop strings.

A prompt file is plain text with ``{question}`` where the question goes. One line break at the very end of the
file (which editors add) is not part of the prompt.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlkit.support.checks import hint, shown

SLOT = "{question}"
REWARDS = ("r1_zero", "question_only")
_FOLDER = Path(__file__).parent


class Filled(str):
    """A prompt's text that remembers which of it is the question: a tokenizer trusts only the rest."""

    parts: list[str]
    question: str

    def __new__(cls, text: str, parts: list[str], question: str):
        filled = super().__new__(cls, text)
        filled.parts, filled.question = parts, question
        return filled

    def __getnewargs__(self):  # for copies and pickles
        return str(self), self.parts, self.question


@dataclass(frozen=True)
class Prompt:
    r"""A prompt template with the reward that reads its responses.

    name: what logs call it.
    template: text with ``{question}`` in it. Written literally (``\boxed{}``); a text in which every other
        brace is doubled (``\boxed{{}}``, as for ``str.format``) means the same.
    reward: "r1_zero" (answer inside answer tags) or "question_only" (answer inside a box).
    stop: strings that end a response; the sampler keeps them in the text.
    chat: the text before ``{question}`` is a system text and the question a user's turn, in the tokenizer's
        own chat template, which ``for_tokenizer`` puts in; the assistant's turn is opened with ``<think>``.

    >>> Prompt("demo", r"{question} Use \boxed{}.", "question_only").fill("What is {x}?")
    'What is {x}? Use \\boxed{}.'
    """

    name: str
    template: str
    reward: str
    stop: tuple[str, ...] = ()
    chat: bool = False

    def __post_init__(self):
        if SLOT not in self.template:
            raise ValueError(f"template: {self.name!r} has no {SLOT}; put {SLOT} where the question goes")
        if self.reward not in REWARDS:
            raise ValueError(f"reward: got {self.reward!r}, expected one of {REWARDS}")

    def fill(self, question: str) -> str:
        """The template with ``question`` in it, whose own braces and ``{question}`` stay as they are."""
        if not isinstance(question, str):
            raise ValueError(f"question: got {type(question).__name__} {question!r}, expected a str")
        if self.chat:
            raise ValueError(
                f"prompt: {self.name!r} is a chat, expected .for_tokenizer(tokenizer) before .fill"
            )
        parts = self.template.split(SLOT)
        if all(_only_doubled_braces(part) for part in parts):
            parts = [part.replace("{{", "{").replace("}}", "}") for part in parts]
        return Filled(question.join(parts), parts, question)

    def for_tokenizer(self, tokenizer) -> "Prompt":
        """This prompt, a chat's with the tokenizer's chat template around it. ValueError if it has none."""
        if not self.chat:
            return self
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"prompt: {self.name!r} needs a tokenizer with a chat template; try r1_zero")
        system, user = self.template.split(SLOT)[0].strip(), {"role": "user", "content": SLOT}
        how = {"tokenize": False, "add_generation_prompt": True}
        try:
            text = tokenizer.apply_chat_template([{"role": "system", "content": system}, user], **how)
        except Exception:  # templates without a system's turn raise what they like
            text = tokenizer.apply_chat_template([user | {"content": f"{system}\n\n{SLOT}"}], **how)
        opened = text.rstrip().endswith("<think>")
        return replace(self, template=text if opened else text + "<think>", chat=False)

    @property
    def reward_fn(self) -> Callable[..., dict[str, float]]:
        """``fn(response, ground_truth, fast=True)`` -> {"reward", "format_reward", "answer_reward"}."""
        from rlkit.tasks import grading

        grading.warm()
        return getattr(grading, f"{self.reward}_reward_fn")


def _only_doubled_braces(text: str) -> bool:
    rest = text.replace("{{", "").replace("}}", "")
    return "{" not in rest and "}" not in rest


def prompt_names() -> list[str]:
    """Names of the prompts that ship with the library."""
    return sorted(path.stem for path in _FOLDER.glob("*.prompt"))


def _meant(name: str) -> str:
    """What may have been meant by this name, which is neither a prompt's nor a file's."""
    if SLOT in name:
        return "; a template of your own goes into a file"
    return "; that is a folder" if name and os.path.isdir(name) else hint(name, prompt_names())


def load_prompt(name_or_path: str | Path | Prompt, *, reward: str | None = None) -> Prompt:
    """The shipped prompt of that name, or the one in a text file.

    reward: "r1_zero" or "question_only". By default a template that speaks of ``<answer>`` is read by
        r1_zero, which stops at ``</answer>``, and any other template by question_only, which has no stop
        string.
    Raises ValueError for an unknown name, a file that is missing or not text, or a template without a slot.
    """
    if isinstance(name_or_path, Prompt):
        return name_or_path
    name = os.fspath(name_or_path) if isinstance(name_or_path, (str, os.PathLike)) else None
    if name in prompt_names():
        path = _FOLDER / f"{name}.prompt"
    elif name is not None and os.path.isfile(name):
        path = Path(name)
    else:
        known, got = prompt_names(), shown(name_or_path if name is None else name)
        raise ValueError(f"prompt: got {got}, expected one of {known} or a text file{_meant(name or '')}")
    try:
        template = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is not UTF-8 text"
        line = f"prompt: got {shown(name)}, which {reason}; expected a text file with {SLOT}"
        raise ValueError(line) from error
    if reward is None:
        reward = "r1_zero" if "<answer>" in template else "question_only"
    stop = ("</answer>",) if reward == "r1_zero" else ()
    return Prompt(path.stem, template, reward, stop, chat=path == _FOLDER / "chat.prompt")
