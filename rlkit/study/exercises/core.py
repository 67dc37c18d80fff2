"""How an exercise is checked: the attempt beside a plain loop, case by case, and a diagnosis when they part.

Readers do not need this file. An author writes, in one of the modules beside it::

    @exercise(title="...", difficulty=2, minutes=10, problem="...", notebook="03", cases=my_cases,
              reveals="rlkit.losses:loss_noclip", door="rlkit.losses:compute_policy_gradient_loss",
              solution=lambda ...: ..., hints=(...))
    def loss_noclip(advantages, log_probs, old_log_probs):
        '''What to write, with shapes.'''
        ... a plain-Python loop, the independent reference ...

    loss_noclip.mistake("the ratio is upside down")(lambda a, new, old: ...)

The function's name becomes the exercise's; the reference is never shown to the reader. A diagnosis is a main
clause: the reader sees it after "This is what a known mistake gives –".
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter

import sympy as sp
import torch


class OpenExercise(Exception):
    """Raise it in a stub, or leave the body at ``...``: the exercise counts as not attempted yet."""


class ChangedArguments(Exception):
    """The attempt wrote into a tensor or list it was given."""


@dataclass(frozen=True)
class Mistake:
    name: str
    function: Callable
    diagnosis: str


@dataclass(frozen=True)
class Result:
    """status: "right", "wrong" or "open". message: one line. diagnosis: a known mistake's name, or None."""

    status: str
    message: str
    diagnosis: str | None = None


@dataclass
class Exercise:
    """One exercise. ``cases()`` gives fresh (label, arguments); ``observe`` gives what is compared."""

    name: str
    title: str
    difficulty: int  # 1 to 5
    minutes: int
    problem: str  # the handout's name for it
    notebook: str  # "02" to "08"
    reference: Callable
    cases: Callable[[], list[tuple[str, tuple]]]
    reveals: tuple[str, ...]  # "module:name" of the library's code that does the work, see ``source_of``
    solution: Callable  # the library's function with the reader's signature
    hints: tuple[str, ...] = ()
    door: str = ""  # "module:name" of the public function that calls what ``reveals`` names
    observe: Callable | None = None  # observe(attempt, *arguments) -> plain value; None: call it
    symbols: tuple[str, ...] = ()  # for an exercise whose answer may be a sympy expression
    axes: tuple[str, ...] = ("row", "token")
    may_return_none: bool = False
    mistakes: list[Mistake] = field(default_factory=list)

    def mistake(self, diagnosis: str, name: str | None = None):
        """Register a wrong variant: the checker recognises whoever returns the same values."""

        def register(function):
            unnamed = f"mistake_{len(self.mistakes) + 1}"
            label = name or (unnamed if function.__name__ == "<lambda>" else function.__name__)
            self.mistakes.append(Mistake(label, function, diagnosis))
            return function

        return register

    @property
    def signature(self) -> str:
        return f"{self.name}{inspect.signature(self.reference, eval_str=True)}"

    def stub(self) -> str:
        """The cell a notebook starts from."""
        doc = inspect.getdoc(self.reference) or ""
        opening = 'r"""' if "\\" in doc else '"""'
        body = "\n".join(f"    {line}".rstrip() for line in f"{opening}{doc}".splitlines())
        closing = '"""' if "\n" not in doc else '\n    """'
        return f"def {self.signature}:\n{body}{closing}\n    ..."

    # ---- checking

    def check(self, attempt) -> Result:
        """Run every case. Never raises for what the attempt does."""
        if attempt is None or attempt is Ellipsis:
            return self._open()
        outcomes = [self._outcome(attempt, arguments) for _, arguments in self.cases()]
        if all(isinstance(outcome, OpenExercise) or outcome is None for outcome in outcomes):
            return self._open()
        expected = [self._outcome(self.reference, arguments, reference=True) for _, arguments in self.cases()]
        labels = [label for label, _ in self.cases()]
        wrong = [i for i in range(len(labels)) if difference(expected[i], outcomes[i], self.axes)]
        if not wrong:
            return Result("right", f"✓ {self.name}: right on all {len(labels)} cases, edge cases included.")
        first = wrong[0]
        what = difference(expected[first], outcomes[first], self.axes)
        found = self._diagnose(outcomes, wrong)
        because = f" This is what a known mistake gives – {found.diagnosis}." if found else ""
        message = f"✗ {self.name}, case '{labels[first]}': {what}.{because}"
        return Result("wrong", message, found.name if found else None)

    def _open(self) -> Result:
        stars = "★" * self.difficulty + "☆" * (5 - self.difficulty)
        return Result(
            "open",
            f"○ {self.name} is open ({stars}, about {self.minutes} minutes). "
            f"hint('{self.name}') helps; the notebook goes on without it.",
        )

    def _outcome(self, attempt, arguments, reference=False):
        """What the attempt gives for these arguments: a plain value, or the exception it raised."""
        before = copy.deepcopy([a for a in arguments if isinstance(a, (torch.Tensor, list))])
        watched = [a for a in arguments if isinstance(a, (torch.Tensor, list))]
        try:
            if self.symbols and not reference:
                value = evaluate(attempt, dict(zip(self.symbols, arguments)))
            elif self.observe and not reference:
                value = self.observe(self._guarded(attempt), *arguments)
            else:
                value = attempt(*arguments)
        except OpenExercise as marker:
            return marker
        except Exception as error:  # whatever the reader's function does is a result to talk about
            return error
        if not all(same_input(x, y) for x, y in zip(before, watched)):
            return ChangedArguments()
        return None if value is Ellipsis else plain(value)

    def _guarded(self, attempt):
        def call(*arguments, **options):
            value = attempt(*arguments, **options)
            if (value is None and not self.may_return_none) or value is Ellipsis:
                raise OpenExercise
            return value

        return call

    def _diagnose(self, outcomes, wrong) -> Mistake | None:
        """The mistake that gives the attempt's values in every case, else in every case that went wrong.

        Cases where the attempt raised (a second slip) may differ, unless the first wrong case is one of them.
        """
        partial = besides = None
        values = [i for i in wrong if i == wrong[0] or not isinstance(outcomes[i], Exception)]
        for mistake in self.mistakes:
            theirs = [self._outcome(mistake.function, arguments) for _, arguments in self.cases()]
            same = [alike(mine, their, self.axes) for mine, their in zip(outcomes, theirs)]
            if all(same):
                return mistake
            if partial is None and all(same[i] for i in wrong):
                partial = mistake
            if besides is None and all(same[i] for i in values):
                besides = mistake
        return partial or besides

    def source(self) -> str:
        """The library's own source for this exercise, and the public function that calls it."""
        parts = [source_of(path) for path in self.reveals]
        parts += [f"# called by {self.door.replace(':', '.')}"] if self.door else []
        return "\n\n".join(parts)


def source_of(path: str) -> str:
    """The source of "module:name" under a line that says where it stands.

    "module:name:for row in" is the first statement inside that function which starts with these words.
    """
    module, name, *start = path.split(":", 2)
    source = inspect.getsource(inspect.unwrap(attrgetter(name)(import_module(module))))
    source, inside = textwrap.dedent(source).rstrip(), name.rpartition(".")[0]
    if start:
        statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
        texts = (ast.get_source_segment(source, node, padded=True) for node in statements)
        source, inside = next(text for text in texts if text.lstrip().startswith(start[0])), name
    return f"# {module}{inside and f', in {inside}'}\n{textwrap.dedent(source)}"


EXERCISES: dict[str, Exercise] = {}


def exercise(*, title, difficulty, minutes, problem, notebook, cases, reveals, solution, hints=(), **options):
    """Make the decorated plain-Python reference an Exercise and put it into the registry."""

    def register(reference):
        entry = Exercise(
            reference.__name__,
            title,
            difficulty,
            minutes,
            problem,
            notebook,
            reference,
            cases,
            (reveals,) if isinstance(reveals, str) else tuple(reveals),
            solution,
            (hints,) if isinstance(hints, str) else tuple(hints),
            **options,
        )
        EXERCISES[entry.name] = entry
        return entry

    return register


# ---- inputs of the cases


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def closed_form(expression, **symbols):
    """A closed form, the sympy expression ``expression()``, as a function of its symbols' values."""

    def function(*values):
        return float(expression().subs(dict(zip(symbols.values(), values))))

    return function


# ---- values and their differences


def plain(value):
    """Tensors, arrays, tuples and any library's numbers as lists, dicts, bools, ints, floats and strings."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, sp.MatrixBase)):
        return [plain(item) for item in value]
    if isinstance(value, (sp.Basic,)):
        return float(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # numpy
        return value.tolist()
    return value


def evaluate(attempt, values):
    """An answer: a number, a sympy expression in the symbols, a tuple of them, or a function of them."""
    if isinstance(attempt, (tuple, list, sp.MatrixBase)):
        return [evaluate(item, values) for item in attempt]
    if isinstance(attempt, sp.Basic):
        unknown = sorted(str(s) for s in attempt.free_symbols if s.name not in values)
        if unknown:
            raise ValueError(f"your expression holds {', '.join(unknown)}, expected only {', '.join(values)}")
        return float(attempt.subs({s: values[s.name] for s in attempt.free_symbols}))
    if callable(attempt):
        return evaluate(attempt(*values.values()), values)
    if attempt is None or attempt is Ellipsis:
        raise OpenExercise
    return float(attempt)


def same_input(before, after) -> bool:
    if isinstance(before, torch.Tensor):
        return before.shape == after.shape and bool(
            torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))
            if before.is_floating_point()
            else torch.equal(before, after)
        )
    return len(before) == len(after) and plain(before) == plain(after) if _simple(before) else True


def _simple(value) -> bool:
    return all(
        isinstance(item, (int, float, str, bool)) or isinstance(item, (list, tuple)) and _simple(item)
        for item in value
    )


def _shape(value) -> str:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _show(value) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, (int, float)):
        return f"{value + 0:.6g}"  # + 0: no "-0"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def difference(expected, seen, axes=("row", "token"), place="") -> str:
    """ "" when they agree, else where they first differ: "row 2, token 0: expected 0, yours is nan"."""
    where = f"{place}: " if place else ""
    if isinstance(seen, OpenExercise):
        return f"{where}nothing came back, expected {_show(expected)}"
    if isinstance(seen, ChangedArguments):
        return f"{where}your function changes the arguments it was given (work on a copy)"
    if isinstance(seen, Exception):
        return f"{where}your function raised {type(seen).__name__} ({_first_line(seen)})"
    if isinstance(expected, dict):
        if not isinstance(seen, dict):
            return f"{where}expected a dict with {', '.join(map(repr, expected))}, yours is {_show(seen)}"
        for key, item in expected.items():
            inner = f"{place}, {key}" if place else str(key)
            if key not in seen:
                return f"{where}the key {key!r} is missing"
            if found := difference(item, seen[key], axes, inner):
                return found
        return ""
    if isinstance(expected, list):
        if not isinstance(seen, list) or len(seen) != len(expected):
            ours, yours = _shape(expected), _shape(seen) if isinstance(seen, list) else _show(seen)
            return f"{where}expected shape {ours}, yours is {yours}"
        axis, rest = (axes[0], axes[1:]) if axes else ("entry", ())
        for i, (x, y) in enumerate(zip(expected, seen)):
            if found := difference(x, y, rest, f"{place}, {axis} {i}" if place else f"{axis} {i}"):
                return found
        return ""
    if _agree(expected, seen):
        return ""
    return f"{where}expected {_show(expected)}, yours is {_show(seen)}"


def _agree(expected, seen) -> bool:
    if isinstance(expected, (bool, str)) or expected is None:
        return type(seen) is type(expected) and seen == expected
    if isinstance(seen, bool) or not isinstance(seen, (int, float)):
        return False
    if isinstance(expected, int):
        return seen == expected
    if math.isnan(expected) or math.isnan(seen) or math.isinf(expected) or math.isinf(seen):
        return expected == seen
    return math.isclose(expected, seen, rel_tol=1e-5, abs_tol=1e-6)


def alike(mine, their, axes=()) -> bool:
    """Two outcomes are the same mistake: equal values (two NaNs are equal here), or the same exception."""
    if isinstance(mine, Exception) or isinstance(their, Exception):
        return type(mine) is type(their) and _first_line(mine)[:40] == _first_line(their)[:40]
    return not difference(_nan_as_text(mine), _nan_as_text(their), axes)


def _nan_as_text(value):
    if isinstance(value, dict):
        return {key: _nan_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nan_as_text(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return "nan" if math.isnan(value) else float(value)


def _first_line(error) -> str:
    text = str(error).strip().splitlines()
    return text[0][:160] if text else "no message"
