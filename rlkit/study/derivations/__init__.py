"""The handout's derivations, worked out by sympy from the definitions and checked by enumeration.

Symbolic functions start from a definition (an expectation over all outcomes, a derivative) and let sympy find
the closed form; nothing is typed in that should be derived. Numeric ones (``enumeration``) send every outcome
of a tiny policy through the library's own components.
"""
# ruff: noqa: F403

from rlkit.study.derivations.baselines import *
from rlkit.study.derivations.difficulty import *
from rlkit.study.derivations.enumeration import *
from rlkit.study.derivations.importance import *
from rlkit.study.derivations.policies import *
